r"""A stored convolutional network on a torus: its linear maps frequency by frequency, with error bounds.

**Zero padding.** A convolution with zero padding on a window of ``h`` points is one on a ring of ``N ≥ h + max(padding
below, over-reading above)`` points, whose outputs outside of the window are set to zero by the activation that reads
them: there it has slope 0, so its sector is widened to contain 0. Hence a certificate for the torus, with one
multiplier per channel, is one for the network. By induction every value of the torus equals that of the network inside
its window, provided that a map that reads outside of the window of a value finds zeros there. The input, activations
and what single pixels of these make are zero there. A sum or a convolution that spills over is masked first, by a
virtual activation of slopes [0, 1] (identity inside, zero outside) with multipliers of its own. Without padding ``N ≥
h`` will do, with circular padding it is ``h``.

**Grids.** A value with total stride ``s`` lives on ``N/s`` points; the strides of a network must divide one another.
With ``V(f) = Σ_p v(p) e^{-2πi fp/N}``, a map ``v(i) = Σ_t K_t z(si + o_t)`` is ``V(f) = \frac1{s}\sum_a C(f_a)
Z(f_a)`` with :math:`C(f) = \sum_t K_t e^{2πi f o_t/N}`, over the aliases ``f_a`` of ``f`` on the finer grid.
Frequencies are kept in nested order: those of the coarsest grid (one of each pair ``±f``), and on finer grids the
aliases of each in a row, so that all changes of grids are reshapes.

**Values** are linear functions of blocks (the input and the activations): images, with one matrix per frequency of the
finer of the two grids; vectors, with one row per neuron, where what reads an image is a matrix per frequency, to be
averaged over all frequencies. A maximum over windows, overlapping ones included, is an activation ``‖u‖² ≤ n‖v‖²`` of
every channel on the grid it reads, ``n`` the largest number of windows that a pixel is in, and ``w`` some points of
``u``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldlt.certificates.ball import UNIT, Ball
from ldlt.certificates.enclose import Maps, Slopes, inverse
from ldlt.certificates.near import ROOT, Near, raised, roots
from ldlt.errors import GraphError
from ldlt.graph import Activation, Affine, Convolution, Graph, Input, Wire, fold, resolve
from ldlt.graph.convolution import Spec
from ldlt.graph.operations import TABLE

__all__ = ["LARGEST_MEMORY", "Site", "Step", "Torus", "TorusNetwork", "Untreated", "lift", "refined"]

LARGEST_MEMORY = 4 * 2**30
"""Bytes that the search may need."""

Array = NDArray[Any]
_LARGEST_TAPS = 2**26

Stride = tuple[int, ...]
Rows = dict[str, Near | None]  # None while sizes are planned


class Untreated(GraphError):
    """A network that has no torus, or is too large on it."""


@dataclass(frozen=True, eq=False)
class Torus:
    """The grids.

    Attributes:
        sizes: Points per axis of the finest one.
        strides: Total strides of all grids, from the finest to the coarsest.
    """

    sizes: tuple[int, ...]
    strides: tuple[Stride, ...]

    def points(self, stride: Stride) -> int:
        """Number of points."""
        return math.prod(self.sizes) // math.prod(stride)

    def ratio(self, fine: Stride, coarse: Stride) -> int:
        """Number of aliases."""
        return math.prod(coarse) // math.prod(fine)

    def frequencies(self, stride: Stride) -> Tensor:
        """Whole numbers (F, axes), in nested order; on a grid of n points they count modulo n."""
        last = self.strides[-1]
        counts = [n // s for n, s in zip(self.sizes, last, strict=True)]
        found = []
        for f in itertools.product(*(range(n) for n in counts)):
            if f <= tuple(-k % n for k, n in zip(f, counts, strict=True)):
                found.append(f)
        result = torch.tensor(found)
        for fine, coarse in zip(reversed(self.strides[:-1]), reversed(self.strides[1:]), strict=True):
            if math.prod(coarse) == math.prod(stride):
                break
            steps = [n // s for n, s in zip(self.sizes, coarse, strict=True)]
            each = [range(0, c // f * n, n) for n, c, f in zip(steps, coarse, fine, strict=True)]
            aliases = torch.tensor(list(itertools.product(*each)))
            result = (result[:, None] + aliases).reshape(-1, len(counts))
        return result

    def weights(self, stride: Stride) -> Tensor:
        """How many frequencies of the whole grid each stands for, (F,)."""
        counts = torch.tensor([n // s for n, s in zip(self.sizes, self.strides[-1], strict=True)])
        coarse = self.frequencies(self.strides[-1])
        own = 2.0 - ((2 * coarse) % counts == 0).all(1).double()
        return own.repeat_interleave(self.ratio(stride, self.strides[-1]))

    def transfer(self, taps: Ball, offsets: Array, stride: Stride) -> Near:
        """``C`` of taps (o, i, t) with offsets (t, axes) on the grid of their input."""
        counts = [n // s for n, s in zip(self.sizes, stride, strict=True)]
        frequencies, places = self.frequencies(stride), torch.from_numpy(np.asarray(offsets, dtype=np.int64))
        wave = torch.ones(len(frequencies), len(places), dtype=torch.complex128)
        for axis, n in enumerate(counts):
            wave = wave * roots(n)[(frequencies[:, axis, None] * places[:, axis]) % n]
        o, i, t = taps.shape
        kernel = torch.from_numpy(taps.mid).reshape(o * i, t).T
        mid = (wave @ kernel.to(torch.complex128)).reshape(-1, o, i)
        total = raised(torch.linalg.vector_norm(kernel, dim=0).norm() + kernel.abs().sum(0).norm())
        error = (len(counts) * (ROOT + 16 * UNIT) + 8 * (t + 4) * UNIT) * total
        if taps.rad is not None:
            error = error + float(taps.rad.sum(2).max() * math.sqrt(o * i)) * (1 + 2.0**-20)
        return Near(mid, raised(error).expand(len(mid)))


def lift(matrix: Near, torus: Torus, value: Stride, block: Stride, grid: Stride) -> Near:
    """A map between values of finer grids as one between their aliases, per frequency of a coarser grid."""
    a, b = torus.ratio(value, grid), torus.ratio(block, grid)
    both, inner = min(a, b), (max(a, b) // a, max(a, b) // b)  # aliases in common; of the block, of the value
    mid = matrix.mid
    n, c = mid.shape[1:]
    split = mid.reshape(-1, both, inner[1], inner[0], n, c).permute(0, 1, 2, 4, 3, 5)
    split = split.reshape(-1, both, inner[1] * n, inner[0] * c)
    rad = raised(matrix.rad.reshape(len(split), -1).sum(1))
    return Near(_diagonal(split), rad).times(1 / inner[0]) if inner[0] > 1 else Near(_diagonal(split), rad)


def _diagonal(blocks: Tensor) -> Tensor:
    """Blocks (F, a, m, n) on the diagonal of (F, a m, a n)."""
    f, a, m, n = blocks.shape
    if a == 1:
        return blocks[:, 0]
    eye = torch.eye(a, dtype=blocks.dtype)
    return (blocks[:, :, :, None, :] * eye[:, None, :, None]).reshape(f, a * m, a * n)


def refined(matrix: Tensor, sizes: dict[str, int], ratio: int) -> tuple[Tensor, dict[str, int]]:
    """The covariance (F a, N, N) of blocks as that of all aliases of a coarser grid, (F, a N, a N)."""
    parts = {n: slice(e - s, e) for (n, s), e in zip(sizes.items(), itertools.accumulate(sizes.values()), strict=True)}
    split = matrix.reshape(-1, ratio, *matrix.shape[1:])
    rows = [torch.cat([_diagonal(split[:, :, p, q]) for q in parts.values()], -1) for p in parts.values()]
    return ratio * torch.cat(rows, -2), {n: ratio * s for n, s in sizes.items()}


@dataclass(frozen=True, eq=False)
class Step:
    """How an activation, or the output, is reached when the covariance of what is live is carried along.

    Attributes:
        site: The activation; None for the output.
        before: Grid of the covariance until then.
        grid: Grid to which it is refined; all of it is read and forgotten if that is finer than the value's grid.
        rows: Maps from the blocks that are live, on ``grid``.
        keep: Blocks that are read later.
    """

    site: Site | None
    before: Stride
    grid: Stride
    rows: dict[str, Near]
    keep: frozenset[str]


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Image:
    """Channels on a grid; ``clean``: zero outside of the window."""

    name: str
    stride: Stride
    channels: int
    window: tuple[int, ...]
    clean: bool
    rows: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, *self.window)


@dataclass(frozen=True, eq=False)
class _Vector:
    rows: Rows


@dataclass(frozen=True, eq=False)
class _Gathered:
    """Entries of an image, for a maximum: ``source`` (features,)."""

    image: _Image
    source: Array


@dataclass(frozen=True, eq=False)
class _Sorted:
    """Entries of what an activation made of gathered ones: the channel of each, and the window it comes from."""

    image: _Image
    channel: Array
    window: Array


Value = _Image | _Vector | _Gathered | _Sorted


@dataclass(frozen=True, eq=False)
class Site:
    """One activation, of images with one multiplier per channel, or of a vector.

    Attributes:
        name: Its node, or that of the value that it masks with ``~mask``.
        stride: Its grid; empty for a vector.
        center: c, (channels,).
        radius: r, (channels,).
        shared: Which multiplier belongs to which channel.
        count: Number of multipliers.
        inputs: Maps from blocks to its pre-activation.
        features: Number of entries that a multiplier of the node has; their channels are ``channel``.
        channel: (features,).
    """

    name: str
    stride: Stride
    center: Tensor
    radius: Tensor
    shared: Tensor
    count: int
    inputs: dict[str, Near]
    channel: Tensor

    @property
    def size(self) -> int:
        """Number of channels."""
        return len(self.center)


@dataclass(eq=False)
class TorusNetwork(Maps):
    """The network.

    Args:
        graph: A traced graph.
        module: The module it was traced from.

    Attributes:
        torus: The grids.
        sites: Activations, in topological order.
        output: Maps from blocks to the output.
        stride: Grid of the output; empty for a vector.
        channels: Channels of every block, the input first.
        strides: Grids of the blocks.
        memory: About how many bytes a search needs.

    Raises:
        Untreated: It has no torus, or needs more than :data:`LARGEST_MEMORY`.
        GraphError: An operation whose rounding is not known.
    """

    graph: Graph
    module: nn.Module
    torus: Torus | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__init__(self.graph, self.module)
        first = self.graph.input
        if len(first.shape) < 2:
            raise Untreated("its input is no image")
        self.axes = len(first.shape) - 1
        self.circular = any(isinstance(n, Convolution) and getattr(n.spec, "border", ()) for n in self.graph.nodes)
        self.needs: list[Callable[[Sequence[int], int], bool]] = []
        self.used = {(1,) * self.axes}
        self._walk()
        self.torus = self._plan(first.shape[1:])
        self.memory = self._memory()
        if self.memory > LARGEST_MEMORY:
            raise Untreated(
                f"per frequency it needs about {self.memory / 2**30:.1f} GiB, above {LARGEST_MEMORY / 2**30:g}"
            )
        self._walk()

    def _walk(self) -> None:
        self.sites: list[Site] = []
        self.channels: dict[str, int] = {}
        self.strides: dict[str, Stride] = {}
        self._masked: dict[str, _Image] = {}
        out = fold(self.graph, self)[self.graph.output]
        if not isinstance(out, (_Image, _Vector)):
            raise Untreated("its output is not an image or a vector")
        self.output: Rows = out.rows
        self.stride = out.stride if isinstance(out, _Image) else ()
        self.outputs = out.channels if isinstance(out, _Image) else self.graph[self.graph.output].features
        if self.torus is not None:
            read: list[Mapping[str, Near | None]] = [self.output, *(s.inputs for s in self.sites)]
            for rows in read:
                if not any(bool(r.mid.any()) for r in rows.values() if r is not None):
                    raise Untreated("a part of it does not depend on its input")
        last = {b: i for i, s in enumerate(self.sites) for b in s.inputs} | dict.fromkeys(self.output, len(self.sites))
        self.last = last
        begin = next((i for i, s in enumerate(self.sites) if not s.stride), len(self.sites))
        if any(self.strides[b] and self.strides[s.name] == () for s in self.sites[:begin] for b in s.inputs):
            raise Untreated("a vector is computed before an image")
        images = [b for b, s in self.strides.items() if s]
        if any(last.get(b, -1) > begin for b in images) or (self.stride and begin < len(self.sites)):
            raise Untreated("an image is read again behind a vector")

    def _plan(self, window: tuple[int, ...]) -> Torus:
        """The smallest sizes that every map needs."""
        strides = sorted(self.used, key=math.prod)
        if any(b % a for s, t in itertools.pairwise(strides) for a, b in zip(s, t, strict=True)):
            raise Untreated("its strides do not divide one another")
        sizes = []
        for axis, (h, step) in enumerate(zip(window, strides[-1], strict=True)):
            tried = [h] if self.circular else range(-(-h // step) * step, 4 * h + 64 * step, step)
            fits = [n for n in tried if n % step == 0 and all(need([n] * (axis + 1), axis) for need in self.needs)]
            if not fits:
                raise Untreated("no torus fits its paddings")
            sizes.append(fits[0])
        return Torus(tuple(sizes), tuple(strides))

    def _memory(self) -> float:
        """Maps, and a few covariances of what is live, kept for the gradient."""
        assert self.torus is not None
        total, frequencies = 0.0, {s: len(self.torus.weights(s)) for s in self.torus.strides}
        for i, site in enumerate(self.sites):
            fine = [
                frequencies[self.strides[b]] * self.channels[b] if self.strides[b] else self.channels[b]
                for b in site.inputs
            ]
            total += 48.0 * site.size * sum(fine)
            if not site.stride:
                total += 40.0 * site.size**2
                continue
            live = {
                b for b, at in self.last.items() if at >= i and b in list(self.channels)[: i + 1] and self.strides[b]
            }
            grid = max((self.strides[b] for b in live if self.last[b] > i), key=math.prod, default=site.stride)
            grid = max((grid, site.stride) if live else (site.stride,), key=math.prod)
            width = sum(self.channels[b] * max(1, self.torus.ratio(self.strides[b], grid)) for b in live) + site.size
            total += 16.0 * frequencies[grid] * (2 * site.size * width + 5 * width**2)
        return total

    def steps(self) -> list[Step]:
        """The order of elimination."""
        torus, found, live = self.torus, [], [self.graph.input.name]
        assert torus is not None
        grid = (1,) * self.axes
        for i, site in enumerate([*self.sites, None]):
            inputs, own = (self.output, self.stride) if site is None else (site.inputs, site.stride)
            keep = {b for b in (*live, *([site.name] if site else [])) if self.last.get(b, -1) > i}
            before = grid
            if grid and own and (keep & set(live) or site is None):
                grid = max(grid, own, key=math.prod)
            fold = bool(grid) and (not own or math.prod(own) > math.prod(grid))
            rows = {}
            for b, r in inputs.items():
                assert r is not None
                rows[b] = (
                    lift(r, torus, grid if fold else own, self.strides[b], grid) if grid and self.strides[b] else r
                )
            found.append(Step(site, before, grid, rows, frozenset(keep)))
            grid = own if fold else grid
            live = [b for b in (*live, *([site.name] if site else [])) if b in keep]
        return found

    # -- making values -----------------------------------------------------------------------------------------------

    def _near(self, make: Callable[[], Near]) -> Any:
        return None if self.torus is None else make()

    def input(self, node: Input) -> Value:
        """The input."""
        return self._block(node.name, (1,) * self.axes, node.shape[0], node.shape[1:])

    def _block(self, name: str, stride: Stride, channels: int, window: tuple[int, ...]) -> _Image:
        self.channels[name], self.strides[name] = channels, stride

        def unit() -> Near:
            assert self.torus is not None
            count = len(self.torus.weights(stride))
            return Near(
                torch.eye(channels, dtype=torch.complex128).expand(count, -1, -1),
                torch.zeros(count, dtype=torch.float64),
            )

        self.needs.append(lambda n, axis: n[axis] // stride[axis] >= window[axis])
        return _Image(name, stride, channels, window, True, {name: self._near(unit)})

    def wire(self, node: Wire, parents: Sequence[Value]) -> Value:
        """A linear operation."""
        if node.role == "order":
            return self._ordered(node, parents[0])
        if node.role == "rearrange":
            return self._rearranged(node, parents)
        if all(isinstance(p, _Vector) for p in parents):
            return self._of_vectors(node, [p.rows for p in parents])  # type: ignore[union-attr]
        images = [self._image(p, node) for p in parents]
        if node.role == "sum":
            first = images[0]
            if any(p.shape != first.shape or p.stride != first.stride for p in images):
                raise Untreated(f"node '{node.name}' adds images of different grids")
            rows: Rows = {}
            for image, scale in zip(images, node.scales, strict=True):
                factor = Near.of(_one(self.scale(node, scale)))
                for b, r in image.rows.items():
                    _add(rows, b, None if r is None else _multiple(r, factor))
            return replace(first, name=node.name, clean=all(p.clean for p in images), rows=rows)
        return self._linear(node, images[0])

    def affine(self, node: Affine, parent: Value) -> Value:
        """A free map."""
        if isinstance(node, Convolution):
            if not isinstance(node.spec, Spec):
                raise Untreated(f"node '{node.name}' is a convolution with a kernel as large as the image")
            return self._convolution(node, self._image(parent, node), node.spec, self.enclosed.exact(node.weight))
        matrix = self.free(node)
        if isinstance(parent, _Vector):
            return _Vector(_each(parent.rows, Near.of(matrix)))
        return self._functional(self._image(parent, node), matrix)

    def activation(self, node: Activation, parent: Value) -> Value:
        """New blocks."""
        slopes = Slopes.of(node, self.module)
        if isinstance(parent, _Gathered):
            return self._maximum(node, parent, slopes)
        if isinstance(parent, _Vector):
            low, high = (torch.from_numpy(np.array(t)) for t in (slopes.low, slopes.high))
            mixed = torch.arange(node.features) if slopes.mixed is None else torch.from_numpy(slopes.mixed)
            self._site(node.name, (), low, high, mixed, parent.rows, torch.arange(node.features))
            self.channels[node.name], self.strides[node.name] = node.features, ()
            return _Vector({node.name: self._near(lambda: Near.of(Ball.eye(node.features)))})
        image = self._image(parent, node)
        shape, channel = (image.channels, -1), torch.arange(image.channels).repeat_interleave(math.prod(image.window))
        low, high = slopes.low.reshape(shape).min(1), slopes.high.reshape(shape).max(1)
        classes = torch.arange(image.channels)
        if slopes.mixed is not None:
            owner = torch.from_numpy(slopes.mixed)
            if node.shape != image.shape:
                raise Untreated(f"node '{node.name}' mixes entries of an image that was flattened")
            classes = _joined(owner, channel, image.channels)
        if not self._whole(image):  # outside of the window its slope is 0
            low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        self._site(
            node.name,
            image.stride,
            torch.from_numpy(low.copy()),
            torch.from_numpy(high.copy()),
            classes,
            image.rows,
            channel,
        )
        return self._block(node.name, image.stride, image.channels, image.window)

    def _whole(self, image: _Image) -> bool:
        """Whether the window is the torus."""
        if not self.circular:
            return False
        return all(w * s == n for w, s, n in zip(image.window, image.stride, self.graph.input.shape[1:], strict=True))

    def _site(
        self, name: str, stride: Stride, low: Tensor, high: Tensor, shared: Tensor, rows: Rows, channel: Tensor
    ) -> None:
        center = low / 2 + high / 2
        radius = torch.maximum(high - center, center - low)
        radius = torch.where((center + radius == high) & (center - radius == low), radius, radius * (1 + 4 * UNIT))
        if not bool((radius > 0).all()):
            raise Untreated(f"'{name}' has neurons of one slope only")
        names, shared = shared.unique(return_inverse=True)
        self.sites.append(Site(name, stride, center, radius, shared, len(names), rows, channel))  # type: ignore[arg-type]

    def _masked_image(self, image: _Image) -> _Image:
        """Zero outside of its window."""
        if image.clean or self._whole(image):
            return image
        if image.name not in self._masked:
            name, ones = f"{image.name}~mask", torch.ones(image.channels, dtype=torch.float64)
            channel = torch.arange(image.channels).repeat_interleave(math.prod(image.window))
            self._site(name, image.stride, 0 * ones, ones, torch.arange(image.channels), image.rows, channel)
            self._masked[image.name] = self._block(name, image.stride, image.channels, image.window)
        return self._masked[image.name]

    def _image(self, value: Value, node: Any) -> _Image:
        if isinstance(value, _Sorted):
            raise Untreated(f"node '{node.name}' reads a maximum in parts")
        if not isinstance(value, _Image):
            raise Untreated(f"node '{node.name}' makes an image of a vector")
        return value

    # -- stationary maps ---------------------------------------------------------------------------------------------

    def _apply(
        self,
        node: Any,
        image: _Image,
        taps: Ball,
        offsets: Array,
        step: Stride,
        window: tuple[int, ...],
        wraps: bool = False,
    ) -> Value:
        """``v(i) = Σ_t K_t z(step·i + o_t)`` for i in the window; with a single position, rows of a vector."""
        if math.prod(window) == 1 and math.prod(image.window) > 1 and not wraps:
            return self._functional(image, _placed(taps, offsets, image.window))
        low, high = offsets.min(0), offsets.max(0)
        ends = [s * (m - 1) + int(b) for s, m, b in zip(step, window, high, strict=True)]
        outside = any(a < 0 or e > h - 1 for a, e, h in zip(low, ends, image.window, strict=True))
        if outside and not wraps:
            image = self._masked_image(image)
            for axis, (a, e, h) in enumerate(zip(low, ends, image.window, strict=True)):

                def need(n: Sequence[int], at: int, axis: int = axis, a: int = int(a), e: int = e, h: int = h) -> bool:
                    size = n[at] // image.stride[at]
                    return at != axis or (size >= h + max(0, -a) and size >= e + 1 and (e < h or size > h))

                self.needs.append(need)
        elif outside and not (
            self._whole(image) and all(s * m == h for s, m, h in zip(step, window, image.window, strict=True))
        ):
            raise Untreated(f"node '{node.name}' pads in circles and does not divide the image")
        stride = tuple(a * b for a, b in zip(image.stride, step, strict=True))
        self.used.add(stride)
        self.needs.append(lambda n, axis: n[axis] // stride[axis] >= window[axis] and n[axis] % stride[axis] == 0)
        single = len(offsets) == 1 and all(
            a == 0 and m == -(-h // s) if s > 1 else a <= 0 and h - a <= m
            for a, s, m, h in zip(low, step, window, image.window, strict=True)
        )
        rows: Rows = dict.fromkeys(image.rows)
        if self.torus is not None:
            rows = self._after(self.torus.transfer(taps, offsets, image.stride), image)
        return _Image(node.name, stride, taps.shape[0], window, image.clean and single, rows)

    def _functional(self, image: _Image, matrix: Ball) -> _Vector:
        """A matrix (outputs, features) that reads an image."""
        torus, rows = self.torus, dict.fromkeys(image.rows, cast(Any, None))
        if torus is None:
            return _Vector(rows)
        places = _positions(image.window)
        shape = (len(matrix.mid), image.channels, len(places))
        taps = Ball(matrix.mid.reshape(shape), None if matrix.rad is None else matrix.rad.reshape(shape))
        return _Vector(self._after(torus.transfer(taps, places, image.stride), image))

    def _after(self, found: Near, image: _Image) -> Rows:
        """A map of an image as maps of blocks."""
        assert self.torus is not None
        rows: Rows = {}
        for b, r in image.rows.items():
            assert r is not None
            q = self.torus.ratio(self.strides[b], image.stride)
            if len(r.mid) != q * len(found.mid):
                raise Untreated(f"'{image.name}' was made larger")
            rows[b] = Near(found.mid.repeat_interleave(q, 0), found.rad.repeat_interleave(q)) @ r
        return rows

    def _convolution(self, node: Any, image: _Image, spec: Spec, weight: Ball) -> Value:
        if spec.transposed or len(spec.stride) != self.axes or image.shape != self.graph[node.parents[0]].shape:
            raise Untreated(f"node '{node.name}' is a transposed convolution, or one of other axes")
        if spec.border and spec.mode != "circular":
            raise Untreated(f"node '{node.name}' pads by '{spec.mode}'")
        kernel = weight.shape[2:]
        if spec.border:
            before = list(spec.border[::2][::-1])
        elif spec.padding == "same":
            before = [d * (k - 1) // 2 for d, k in zip(spec.dilation, kernel, strict=True)]
        else:
            before = [0] * self.axes if isinstance(spec.padding, str) else list(spec.padding)
        index = _positions(kernel)
        offsets = index * np.array(spec.dilation) - np.array(before)
        taps = _parts(weight, lambda t: spec.taps(torch.from_numpy(t.copy())).numpy())
        return self._apply(node, image, taps, offsets, spec.stride, node.shape[1:], bool(spec.border))

    def _linear(self, node: Wire, image: _Image) -> Value:
        """What the table calls linear, of one image."""
        name = node.operation
        schema = resolve(node.target)._schema.arguments  # type: ignore[attr-defined]
        given: dict[str, Any] = {a.name: a.default_value for a in schema}
        given |= dict(zip(given, node.args, strict=False)) | dict(node.kwargs)
        if name.startswith("conv") and "transpose" not in name:
            padding = given["padding"]
            wide = [_wide(given[n], self.axes) for n in ("stride", "dilation")]
            spec = Spec(
                self.axes,
                wide[0],
                padding if isinstance(padding, str) else _wide(padding, self.axes),
                wide[1],
                given["groups"],
            )
            return self._convolution(node, image, spec, self.enclosed.exact(given["weight"].path))
        if name in ("pad", "constant_pad_nd"):
            border = list(given["pad"])
            border += [0] * (2 * len(image.window) - len(border))
            if len(border) != 2 * self.axes or image.shape != self.graph[node.parents[0]].shape:
                raise Untreated(f"node '{node.name}' pads channels")
            offset = -np.array(border[::2][::-1])[None]
            return self._apply(node, image, _eye(image.channels), offset, (1,) * self.axes, node.shape[1:])
        if name in ("mul", "div"):
            return self._multiplied(node, image)
        pools = name.startswith(("avg_pool", "adaptive_avg_pool", "_adaptive_avg_pool"))
        if pools or (name == "mean" and image.shape == self.graph[node.parents[0]].shape):
            return self._average(node, image, given)
        if name in ("linear", "addmm", "matmul", "mm") and node.shape == (node.features,):
            matrices = self.matrices(node)
            return self._functional(image, matrices[0])
        raise Untreated(f"node '{node.name}' ({name}) has no form per frequency")

    def _multiplied(self, node: Wire, image: _Image) -> Value:
        """A product with one number per channel."""
        factor = self.enclosed.exact(node.constants[0])
        factor = factor if TABLE[node.operation].rule is TABLE["mul"].rule else inverse(factor)
        whole = factor * Ball.exact(np.ones((1, *self.graph[node.parents[0]].shape)))
        each = _parts(whole, lambda t: t.reshape(image.channels, -1))
        if self.graph[node.parents[0]].shape != node.shape or (each.mid != each.mid[:, :1]).any():
            raise Untreated(f"node '{node.name}' is a product with an image")
        taps = np.diag(each.mid[:, 0])[..., None]
        rad = None if each.rad is None else np.diag(each.rad.max(1))[..., None]
        return self._pointwise(node, image, Ball(taps, rad))

    def _pointwise(self, node: Any, image: _Image, taps: Ball) -> Value:
        zero = np.zeros((1, self.axes), dtype=np.int64)
        return self._apply(node, image, taps, zero, (1,) * self.axes, image.window)

    def _average(self, node: Wire, image: _Image, given: dict[str, Any]) -> Value:
        before = (0,) * self.axes
        if "kernel_size" in given:
            kernel = _wide(given["kernel_size"], self.axes)
            step = _wide(given["stride"] or kernel, self.axes)
            before = _wide(given["padding"], self.axes)
            plain = given.get("divisor_override") is None and (given["count_include_pad"] or not any(before))
            reach = [s * (m - 1) + k for s, m, k in zip(step, node.shape[1:], kernel, strict=True)]
            plain &= all(r <= h + 2 * p for r, h, p in zip(reach, image.window, before, strict=True))
        elif "output_size" in given:
            goal = _wide(given["output_size"], self.axes)
            plain = all(h % m == 0 for h, m in zip(image.window, goal, strict=True))
            kernel = step = tuple(h // m for h, m in zip(image.window, goal, strict=True))
        else:
            plain = sorted(d % (self.axes + 2) for d in given["dim"]) == list(range(2, self.axes + 2))
            kernel = step = image.window
        if not plain:
            raise Untreated(f"node '{node.name}' treats the border in a way of its own")
        index = _positions(kernel)
        if image.channels**2 * len(index) > _LARGEST_TAPS:
            raise Untreated(f"node '{node.name}' averages too many entries")
        share = inverse(Ball.exact(float(len(index))))
        taps = Ball.exact(np.eye(image.channels)[..., None] * np.ones(len(index))) * share
        window = node.shape[1:] if len(node.shape) == self.axes + 1 else (1,) * self.axes
        return self._apply(node, image, taps, index - np.array(before), step, window)

    # -- entries that are moved --------------------------------------------------------------------------------------

    def _of_vectors(self, node: Wire, parents: list[Rows]) -> _Vector:
        if node.features * max(self.graph[p].features for p in node.parents) > _LARGEST_TAPS:
            raise Untreated(f"node '{node.name}' has too large a matrix")
        if node.role == "sum":
            one = np.ones(node.features)
            matrices = [Ball.exact(np.diag(one)) * _one(self.scale(node, s)) for s in node.scales]
        else:
            matrices = [m if m.mid.ndim == 2 else _diag(m) for m in self.matrices(node)]
        rows: Rows = {}
        for matrix, parent in zip(matrices, parents, strict=True):
            for b, r in _each(parent, Near.of(matrix)).items():
                _add(rows, b, r)
        return _Vector(rows)

    def _ordered(self, node: Wire, value: Value) -> Value:
        if isinstance(value, _Sorted):
            return self._picked(node, value)
        return value

    def _rearranged(self, node: Wire, parents: Sequence[Value]) -> Value:
        source = self.source(node)
        counts = [self.graph[p].features for p in node.parents]
        if all(isinstance(p, _Vector) for p in parents):
            rows: Rows = {}
            starts = [0, *itertools.accumulate(counts)]
            for p, begin, end in zip(parents, starts, starts[1:], strict=False):
                pick = np.zeros((len(source), end - begin))
                inside = (source >= begin) & (source < end)
                pick[np.flatnonzero(inside), source[inside] - begin] = 1.0
                for b, r in _each(p.rows, Near.of(Ball.exact(pick))).items():  # type: ignore[union-attr]
                    _add(rows, b, r)
            return _Vector(rows)
        if len(parents) == 1 and isinstance(parents[0], _Sorted):
            value = parents[0]
            return self._picked(node, _Sorted(value.image, value.channel[source], value.window[source]))
        if len(node.shape) != self.axes + 1 or not all(isinstance(p, _Image) for p in parents):
            if len(parents) == 1 and isinstance(parents[0], _Image):
                return _Gathered(parents[0], source)
            raise Untreated(f"node '{node.name}' moves entries of images")
        return self._selected(node, [self._image(p, node) for p in parents], source, counts)

    def _selected(self, node: Wire, images: list[_Image], source: Array, counts: list[int]) -> Value:
        """Channels are picked, and every s-th pixel from some place on."""
        table = source.reshape(node.shape[0], -1)
        starts = np.array([0, *itertools.accumulate(counts)])
        owner = np.searchsorted(starts, table[:, 0], side="right") - 1
        found: _Image | None = None
        for k, image in enumerate(images):
            rows = np.flatnonzero(owner == k)
            pixels = math.prod(image.window)
            if not len(rows):
                continue
            local = table[rows] - starts[k]
            place = np.stack(np.unravel_index(local % pixels, image.window), -1)
            first = place[0, 0]
            grid = np.stack(np.unravel_index(np.arange(table.shape[1]), node.shape[1:]), -1)
            last = grid[-1]
            step = tuple(
                int((place[0, -1][d] - first[d]) // last[d]) if last[d] else image.window[d] for d in range(self.axes)
            )
            step = tuple(max(s, 1) for s in step)
            wanted = first + grid * np.array(step)
            if (local // pixels != (local // pixels)[:, :1]).any() or (place != wanted).any() or (local < 0).any():
                if len(images) == 1:
                    return _Gathered(image, source)
                raise Untreated(f"node '{node.name}' moves pixels")
            taps = np.zeros((node.shape[0], image.channels, 1))
            taps[rows, local[:, 0] // pixels] = 1.0
            part = self._apply(node, image, Ball.exact(taps), first[None], step, node.shape[1:])
            if not isinstance(part, _Image):
                raise Untreated(f"node '{node.name}' picks a pixel")
            if found is None:
                found = part
                continue
            if part.stride != found.stride:
                raise Untreated(f"node '{node.name}' joins images of different grids")
            both = dict(found.rows)
            for b, r in part.rows.items():
                _add(both, b, r)
            found = replace(found, clean=found.clean and part.clean, rows=both)
        assert found is not None
        return found

    def _maximum(self, node: Activation, value: _Gathered, slopes: Slopes) -> Value:
        """Sorted windows of the entries of an image: ``‖u‖² ≤ n‖v‖²``, channel by channel."""
        image, source = value.image, value.source
        channel = source // math.prod(image.window)
        if slopes.mixed is None or slopes.low[0] != -1 or slopes.high[0] != 1:
            raise Untreated(f"node '{node.name}' reads entries of an image that were moved")
        order = np.argsort(slopes.mixed, kind="stable")
        edges = np.flatnonzero(np.diff(slopes.mixed[order])) + 1
        for group in np.split(channel[order], edges):
            if (group != group[0]).any():
                raise Untreated(f"node '{node.name}' mixes channels")
        # An order statistic moves no further than some entry of its window, however often that is repeated there.
        count = float(np.bincount(np.unique(slopes.mixed * (1 + source.max()) + source) % (1 + source.max())).max())
        root = torch.full(
            (image.channels,), math.nextafter(math.sqrt(count), math.inf) if count > 1 else 1.0, dtype=torch.float64
        )
        self._site(
            node.name,
            image.stride,
            -root,
            root,
            torch.arange(image.channels),
            image.rows,
            torch.from_numpy(channel.copy()),
        )
        block = self._block(node.name, image.stride, image.channels, image.window)
        return _Sorted(block, channel, slopes.mixed)

    def _picked(self, node: Wire, value: _Sorted) -> Value:
        """Entries of sorted windows as an image or a vector again."""
        image, table = value.image, value.channel.reshape(node.shape[0], -1)
        if (
            len(np.unique(value.window)) != len(value.window)
            or (table != table[:, :1]).any()
            or len(np.unique(table[:, 0])) != len(table)
        ):
            return value
        taps = np.zeros((len(table), image.channels, 1))
        taps[np.arange(len(table)), table[:, 0]] = 1.0
        zero = np.zeros((1, self.axes), dtype=np.int64)
        if table.shape[1] == 1:
            return self._functional(image, _placed(Ball.exact(taps), zero, image.window))
        if len(node.shape) != self.axes + 1:
            return value
        window = node.shape[1:]
        step = tuple(max(1, round(h / m)) for h, m in zip(image.window, window, strict=True))
        while any(-(-h // s) < m for h, s, m in zip(image.window, step, window, strict=True)):
            step = tuple(max(1, s - 1) for s in step)
        found = self._apply(node, image, Ball.exact(taps), zero, step, window)
        return replace(found, clean=True) if isinstance(found, _Image) else found


def _add(rows: Rows, block: str, term: Near | None) -> None:
    before = rows.get(block)
    rows[block] = term if before is None or term is None else before + term


def _each(rows: Rows, matrix: Near) -> Rows:
    return {b: None if r is None else matrix @ r for b, r in rows.items()}


def _positions(window: Sequence[int]) -> Array:
    """All places of a window, (points, axes)."""
    return np.stack(np.meshgrid(*(np.arange(n) for n in window), indexing="ij"), -1).reshape(-1, len(window))


def _parts(ball: Ball, function: Callable[[Array], Array]) -> Ball:
    """What only moves entries, of midpoints and radii."""
    return Ball(function(ball.mid), None if ball.rad is None else function(ball.rad))


def _one(scale: Ball) -> Ball:
    """A number as a matrix of one entry."""
    return _parts(scale, lambda t: t.reshape(1, 1))


def _multiple(matrix: Near, factor: Near) -> Near:
    value = float(factor.mid)
    if abs(value) == 1 and not float(factor.rad):
        return Near(value * matrix.mid, matrix.rad)
    return Near(
        value * matrix.mid, raised(matrix.rad * abs(value) + (float(factor.rad) + 4 * UNIT * abs(value)) * matrix.size)
    )


def _eye(size: int) -> Ball:
    return Ball.exact(np.eye(size)[..., None])


def _diag(ball: Ball) -> Ball:
    return _parts(ball, np.diag)


def _wide(value: Any, count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _placed(taps: Ball, offsets: Array, window: tuple[int, ...]) -> Ball:
    """The matrix (o, features) of taps at pixels of a window; those outside of it read zeros."""
    o, i, _ = taps.shape
    inside = ((offsets >= 0) & (offsets < np.array(window))).all(1)
    index = np.ravel_multi_index(tuple(offsets[inside].T), window)

    def spread(source: Array) -> Array:
        whole = np.zeros((o, i, math.prod(window)))
        for place, tap in zip(index, np.flatnonzero(inside), strict=True):
            whole[..., place] += source[..., tap]
        return whole.reshape(o, -1)

    return _parts(taps, spread)


def _joined(owner: Tensor, channel: Tensor, count: int) -> Tensor:
    """Classes of channels that share a group."""
    classes = torch.arange(count)
    pairs = torch.stack([owner, channel]).unique(dim=1)
    while True:
        least = torch.full((int(owner.max()) + 1,), count).scatter_reduce(0, pairs[0], classes[pairs[1]], "amin")
        found = classes.scatter_reduce(0, pairs[1], least[pairs[0]], "amin")
        if bool((found == classes).all()):
            return classes
        classes = found
