r"""Zero-padded convolutional networks as circular ones on a torus that is larger than the image.

**Lemma.** A zero-padded convolution on an image is a circular one on a larger torus whose outputs outside of the
image, the *window*, are set to zero by the activation that follows. That activation has slope 0 there, so it is in
every sector that contains 0, and a certificate of the circular network on the torus, with one multiplier per channel,
is one of the zero-padded network.

The condition is that an operation that looks around itself only reads values that are zero outside of their window
(*clean*): the input, activations, what keeps pixels apart. Any other value that such an operation reads is masked
first, by a virtual activation that is the identity inside and zero outside: slopes [0, 1], with multipliers of its own.

What an operation does on the torus is not believed but tried, on random numbers, for every node of the graph: on an
embedded image it gives the embedded result; whether it spills over the window, and whether it looks outside of it, are
seen the same way; and it commutes with shifts of its grid. The side of the torus is the smallest for which all this
holds.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt.errors import GraphError
from ldlt.graph import Activation, Affine, Convolution, Graph, Input, Node, Wire, lookup
from ldlt.graph.convolution import Cells, Spec, meet
from ldlt.graph.nodes import Attr, Tensors, resolve
from ldlt.images.convolutions import Taps
from ldlt.images.grids import Layout, cell_rows

__all__ = ["Map", "Operator", "Sheet", "Torus", "on_torus"]

_LONGEST = 4  # a torus is at most so many times as long as the image
_PROBE = 2**8 * 3**3 * 5 * 7


@dataclass(frozen=True)
class Sheet:
    """A value on the torus: ``lead`` features at each of ``sides`` pixels; ``window`` is the image."""

    lead: tuple[int, ...]
    window: tuple[int, ...]
    sides: tuple[int, ...]
    clean: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, *sides)."""
        return (math.prod(self.lead), *self.sides)

    def embed(self, x: Tensor) -> Tensor:
        """An image (batch, *lead, *window) on the torus."""
        return F.pad(x, [n for s, w in zip(self.sides[::-1], self.window[::-1], strict=True) for n in (0, s - w)])

    def crop(self, x: Tensor) -> Tensor:
        """The window of a signal on the torus."""
        index: Any = (..., *(slice(w) for w in self.window))
        return x[index]


# -- what a node does on the torus -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring(Spec):
    """A convolution on a torus: ``padding`` is how far its first tap reads below a pixel; every index is modular."""

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, groups: int | None = None) -> Tensor:
        """What the layer computes for x (batch, c_in, *sides)."""
        d, plain = self.dims, replace(self, padding=(0,) * self.dims, output_padding=(0,) * self.dims)
        reach = [k * (n - 1) + 1 for k, n in zip(self.dilation, weight.shape[2:], strict=True)]
        sides = x.shape[2:]
        assert not isinstance(self.padding, str)
        if not self.transposed:
            for i in range(d):
                index = (torch.arange(sides[i] + reach[i] - 1, device=x.device) - self.padding[i]) % sides[i]
                x = x.index_select(i + 2, index)
            return Spec.run(plain, x, weight, None, groups)
        y = Spec.run(plain, x, weight, None, groups)
        for i in range(d):
            whole = sides[i] * self.stride[i]
            index = (torch.arange(y.shape[i + 2], device=x.device) - self.padding[i]) % whole
            shape = [*y.shape]
            shape[i + 2] = whole
            y = y.new_zeros(shape).index_add(i + 2, index, y)
        return y


class Map:
    """A linear map between local features, frequency by frequency, known by what it does to columns."""

    def __init__(self, on: Callable[[Tensor], Tensor], sizes: Callable[[Tensor], Tensor]) -> None:
        self.on, self.sizes = on, sizes


@dataclass
class Operator:
    """What a linear node does on the torus.

    Attributes:
        node: The node.
        ring: It is a convolution, of ``weight`` or of one fixed ``kernel`` for all channels.
        weight: Path of the weight.
        kernel: (1, 1, *k), float64.
        index: It moves features: where each local feature of the result comes from, over all parents; see ``_index``.
        diagonal: It multiplies channels by numbers.
        scales: It is a sum.
    """

    node: Affine | Wire
    ring: Ring | None = None
    weight: str = ""
    kernel: Tensor | None = None
    index: bool = False
    diagonal: bool = False
    scales: tuple[float, ...] = ()
    made: dict[Any, Any] = field(default_factory=dict)

    def run(self, tensors: Tensors, sheets: Sequence[Sheet], lead: tuple[int, ...]) -> Callable[..., Tensor]:
        """The function on the torus, from batches (b, *lead, *sides) to one; convolutions of the first channel only."""

        def convolve(x: Tensor) -> Tensor:
            assert self.ring is not None
            if self.kernel is not None:
                ring = replace(self.ring, groups=1)
                y = ring.run(x.reshape(-1, 1, *sheets[0].sides), self.kernel.to(x))
                return y.reshape(x.shape[0], *lead, *y.shape[2:])
            return self.ring.run(x, tensors(self.weight).to(x))

        if self.ring is not None:
            return convolve
        if isinstance(self.node, Wire) and self.node.role == "order":
            return lambda x: x.reshape(x.shape[0], *lead, *x.shape[-len(sheets[0].sides) :])
        assert isinstance(self.node, Wire)
        return self.node.linear(tensors)

    @property
    def stride(self) -> tuple[int, ...]:
        """By how much it thins out the grid of what it reads."""
        return () if self.ring is None or self.ring.transposed else self.ring.stride

    def maps(
        self, tensors: Tensors, sheets: Sequence[Sheet], out: Sheet, cells: Cells, like: Tensor, thin: bool = True
    ) -> list[Map]:
        """One map per parent, on a grid of cells.

        Args:
            tensors: Of the graph.
            sheets: Of the parents.
            out: Of the result.
            cells: The grid.
            like: Tells precision and device.
            thin: Whether a stride is part of it; without, it is the convolution at every pixel.
        """
        if self.scales:
            return [_scaled(float(s)) for s in self.scales]
        if self.diagonal:
            assert isinstance(self.node, Wire)
            ones = torch.ones(1, *sheets[0].lead, *(1,) * len(out.sides), dtype=like.dtype, device=like.device)
            entries = self.node.linear(tensors)(ones).reshape(-1)
            parts = Layout.of(out.shape, cells).features // len(entries)
            return [_diagonal(entries.repeat_interleave(parts))]
        if self.ring is None:
            return self._moves(tensors, sheets, out, cells)
        ring = self.ring if thin else replace(self.ring, stride=(1,) * self.ring.dims)
        inner = sheets[0]
        outer = out if thin else replace(inner, lead=out.lead)
        key = ("taps", cells, thin)
        if key not in self.made:
            size = tuple(self.kernel.shape[2:]) if self.kernel is not None else self._size(tensors)
            single = self.kernel is not None
            first, last = ((1, *s.sides) if single else s.shape for s in (inner, outer))
            self.made[key] = Taps(replace(ring, groups=1) if single else ring, size, first, last, cells)
        if self.kernel is None:
            return [_matrix(self.made[key](tensors(self.weight)))]
        return [_channelwise(self.made[key](self.kernel.to(like)))]

    def _size(self, tensors: Tensors) -> tuple[int, ...]:
        return tuple(tensors(self.weight).shape[2:])

    def _moves(self, tensors: Tensors, sheets: Sequence[Sheet], out: Sheet, cells: Cells) -> list[Map]:
        key = ("index", cells)
        if key not in self.made:
            source = _labels(self.run(tensors, sheets, out.lead), sheets)
            offset, made = 0, []
            place, where = cell_rows(out.shape, cells)
            first = torch.nonzero(place == 0).flatten()
            first = first[where[first].argsort()]
            for sheet in sheets:
                count = math.prod(sheet.shape)
                from_cell, from_row = cell_rows(sheet.shape, cells)
                wanted = source[first] - offset
                mine = (wanted >= 0) & (wanted < count)
                wanted = wanted.clamp(0, count - 1)
                made.append((from_row[wanted], mine, _phases(from_cell[wanted], cells)))
                offset += count
            self.made[key] = made
        return [_moved(*m) for m in self.made[key]]


def _labels(run: Callable[..., Tensor], sheets: Sequence[Sheet]) -> Tensor:
    """Which feature each feature of the result is, counted through all parents; −1 for none."""
    images, start = [], 1
    for s in sheets:
        count = math.prod(s.shape)
        images.append(torch.arange(start, start + count, dtype=torch.float64).reshape(1, *s.lead, *s.sides))
        start += count
    with torch.no_grad():
        return run(*images).reshape(-1).round().long() - 1


def _phases(cell: Tensor, cells: Cells) -> Tensor | None:
    """``e^{iω·κ}`` (f, rows) of reading the cell κ instead of the own one; None where that is the own one."""
    if cells is None or not bool(cell.any()):
        return None
    angle: Any = 0.0
    half = (*cells[:-1], cells[-1] // 2 + 1)
    for i, (n, m) in enumerate(zip(cells, half, strict=True)):
        at = cell // math.prod(cells[i + 1 :]) % n
        one = torch.arange(m, dtype=torch.float64)[:, None] * at * (2 * math.pi / n)
        angle = angle + one.reshape(*(m if j == i else 1 for j in range(len(cells))), -1)
    return torch.polar(torch.ones_like(angle), angle).reshape(-1, len(cell))


def _scaled(scale: float) -> Map:
    return Map(lambda x: x if scale == 1 else scale * x, lambda s: abs(scale) * s)


def _diagonal(entries: Tensor) -> Map:
    return Map(lambda x: entries[:, None] * x, lambda s: entries.detach().abs() * s)


def _matrix(matrix: Tensor) -> Map:
    # A frozen or computed weight keeps its own precision, whatever that of the sweep.
    return Map(lambda x: matrix.to(x.dtype) @ x, lambda s: torch.linalg.vector_norm(_rms(matrix.detach()) * s, dim=-1))


def _rms(matrix: Tensor) -> Tensor:
    """Largest modulus of each entry, over the frequencies."""
    return matrix.abs() if matrix.ndim == 2 else matrix.abs().amax(0)


def _channelwise(block: Tensor) -> Map:
    def on(x: Tensor) -> Tensor:
        inner, outer = block.shape[-1], block.shape[-2]
        if inner == outer == 1:
            return block * x
        split = x.reshape(*x.shape[:-2], -1, inner, x.shape[-1])
        return (block[..., None, :, :] @ split).reshape(*x.shape[:-2], -1, x.shape[-1])

    return Map(on, lambda s: (_rms(block) @ s.reshape(-1, block.shape[-1]).mT).mT.reshape(-1))


def _moved(row: Tensor, mine: Tensor, phases: Tensor | None) -> Map:
    def on(x: Tensor) -> Tensor:
        found = x.index_select(-2, row.to(x.device))
        if phases is not None:
            found = phases.to(device=x.device, dtype=x.dtype)[..., None] * found
        return found if bool(mine.all()) else torch.where(mine.to(x.device)[:, None], found, 0.0)

    return Map(on, lambda s: torch.where(mine.to(s.device), s[row.to(s.device)], 0.0))


# -- the operator of a node --------------------------------------------------------------------------------------------


class _Misfit(Exception):
    """Why a node cannot be on the torus."""


def _given(wire: Wire) -> dict[str, Any]:
    """Arguments of a wire by name."""
    schema = resolve(wire.target)._schema.arguments  # type: ignore[attr-defined]
    found = {a.name: a.default_value if a.has_default_value() else None for a in schema}
    found.update(zip([a.name for a in schema], wire.args, strict=False))
    return found | dict(wire.kwargs)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _low(padding: tuple[int, ...] | str, dilation: Sequence[int], size: Sequence[int], dims: int) -> tuple[int, ...]:
    if padding == "valid":
        return (0,) * dims
    if padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(dilation, size, strict=True))
    assert not isinstance(padding, str)
    return padding


def _operator(node: Affine | Wire, parents: Sequence[Node], dims: int, tensors: Tensors) -> Operator:
    """What a linear node is on the torus, to be tried."""
    if isinstance(node, Convolution):
        if not isinstance(node.spec, Spec):
            raise _Misfit("it is a frozen convolution")
        spec = node.spec
        low = spec.border[::2][::-1] if spec.border else _low(spec.padding, spec.dilation, node.kernel, dims)
        return Operator(node, _ring(dims, spec.stride, low, spec.dilation, spec.groups, spec.transposed), node.weight)
    if not isinstance(node, Wire):
        raise _Misfit("it is a matrix")
    if node.role == "sum":
        return Operator(node, scales=node.scales)
    if node.role == "order":
        return Operator(node, index=True)
    name = node.operation
    if name.startswith("conv"):
        given = _given(node)
        path = given["weight"]
        if not isinstance(path, Attr) or not isinstance(node.args[0], object):
            raise _Misfit("its weight is a function of the input")
        size, transposed = tuple(tensors(path.path).shape[2:]), name.startswith("conv_transpose")
        dilation = _each(given["dilation"], dims)
        padding = given["padding"]
        low = _low(padding if isinstance(padding, str) else _each(padding, dims), dilation, size, dims)
        ring = _ring(dims, _each(given["stride"], dims), low, dilation, given["groups"], transposed)
        return Operator(node, ring, path.path)
    fixed = _fixed(node, name, parents[0], dims)
    if fixed is not None:
        return fixed
    return Operator(node)


def _fixed(node: Wire, name: str, parent: Node, dims: int) -> Operator | None:
    """Operations that are convolutions of all channels with one fixed kernel."""
    inner, outer = parent.shape[-dims:], node.shape[-dims:]
    none, one = (0,) * dims, (1,) * dims
    if name.startswith("avg_pool"):
        given = _given(node)
        window = _each(given["kernel_size"], dims)
        stride = _each(given["stride"], dims) if given["stride"] else window
        low = _each(given["padding"], dims)
        count = given.get("divisor_override") or math.prod(window)
        return Operator(node, _ring(dims, stride, low, one, 1), kernel=_ones(window) / count)
    if "adaptive_avg_pool" in name:
        if any(n % m for n, m in zip(inner, outer, strict=True)):
            raise _Misfit("its windows differ in size")
        window = tuple(n // m for n, m in zip(inner, outer, strict=True))
        return Operator(node, _ring(dims, window, none, one, 1), kernel=_ones(window) / math.prod(window))
    if "upsample_nearest" in name:
        if any(m % n for n, m in zip(inner, outer, strict=True)):
            raise _Misfit("its scale is no whole number")
        scale = tuple(m // n for n, m in zip(inner, outer, strict=True))
        return Operator(node, _ring(dims, scale, none, one, 1, True), kernel=_ones(scale))
    if name == "slice":
        given = _given(node)
        axis = given["dim"] % (len(parent.shape) + 1) - 1 - (len(parent.shape) - dims)
        if axis < 0:
            return None
        start, step = given["start"] or 0, given["step"]
        start = start + inner[axis] if start < 0 else start
        move = lambda x, rest: tuple(x if i == axis else rest for i in range(dims))  # noqa: E731
        return Operator(node, _ring(dims, move(step, 1), move(-start, 0), one, 1), kernel=_ones(one))
    if name in ("pad", "constant_pad_nd"):
        given = _given(node)
        amounts = list(given["pad"])
        if any(amounts[2 * dims :]):
            if any(amounts[: 2 * dims]):
                raise _Misfit("it pads pixels and channels at once")
            return None
        low = tuple((amounts + [0] * (2 * dims))[: 2 * dims][::2][::-1])
        return Operator(node, _ring(dims, one, low, one, 1), kernel=_ones(one))
    return None


def _ring(
    dims: int, stride: Sequence[int], low: Sequence[int], dilation: Sequence[int], groups: int, transposed: bool = False
) -> Ring:
    return Ring(dims, tuple(stride), tuple(low), tuple(dilation), groups, transposed, (0,) * dims if transposed else ())


def _ones(size: Sequence[int]) -> Tensor:
    return torch.ones(1, 1, *size, dtype=torch.float64)


# -- the torus ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Torus:
    """A graph on its torus.

    Attributes:
        graph: The graph, with masks.
        sheets: Image values.
        operators: Linear nodes that make images.
        flat: Values that are images in another order: the image.
    """

    graph: Graph
    sheets: dict[str, Sheet]
    operators: dict[str, Operator]
    flat: dict[str, str]

    def image(self, value: str) -> str:
        """The image that a value is, in whatever order."""
        return self.flat.get(value, value)


def on_torus(graph: Graph, module: nn.Module) -> Torus:
    """Put the images of a graph on the smallest torus on which it can be certified.

    Raises:
        GraphError: An operation on images does not commute with shifts: it says which, and why.
    """
    found = {len(n.kernel) for n in graph.nodes if isinstance(n, Convolution)}
    found |= {len(n.shape) - 1 for n in graph.nodes if isinstance(n, Wire) and n.operation.startswith("conv")}
    if len(found) != 1:
        raise GraphError("the graph has no convolutions, or some of different dimensions")
    (dims,) = found
    if len(graph.input.shape) != dims + 1:
        raise GraphError(f"the input of shape {graph.input.shape} is no image")
    try:
        steps = _steps(graph, module, dims)
    except _Misfit as error:
        raise GraphError(str(error)) from error
    sides, reason = graph.input.shape[1:], ""
    tried = None
    for extra in range(_LONGEST * max(sides)):
        start = tuple(s * math.ceil((n + extra) / s) for n, s in zip(sides, steps, strict=True))
        if start == tried:
            continue
        tried = start
        try:
            return _Placing(graph, module, dims, start).run()
        except _Misfit as error:
            reason = str(error)
    raise GraphError(reason)


def _steps(graph: Graph, module: nn.Module, dims: int) -> tuple[int, ...]:
    """What the side of the torus must be divisible by: found on one that is divisible by much."""
    placing = _Placing(graph, module, dims, (_PROBE,) * dims, probe=True).run()
    steps = [1] * dims
    for made in placing.sheets.values():
        for i, n in enumerate(made.sides):
            steps[i] = math.lcm(steps[i], Fraction(n, _PROBE).denominator)
    for node in graph.activations:
        window = getattr(node.resolve(module), "window", ())
        sheet = placing.sheets.get(node.name)
        if sheet is not None and isinstance(window, tuple) and len(window) == dims:
            for i, (n, w) in enumerate(zip(sheet.sides, window, strict=True)):
                steps[i] = math.lcm(steps[i], (Fraction(n, _PROBE) / w).denominator)
    return tuple(steps)


class _Placing:
    """Puts every node on a torus of given sides, and tries it there; with ``probe``, only shapes are found."""

    def __init__(self, graph: Graph, module: nn.Module, dims: int, sides: tuple[int, ...], probe: bool = False) -> None:
        self.graph, self.module, self.dims, self.probe = graph, module, dims, probe
        self.tensors = graph.tensors(_anything(module))
        self.start = sides
        self.sheets: dict[str, Sheet] = {}
        self.operators: dict[str, Operator] = {}
        self.flat: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self.nodes: list[Node] = []

    def run(self) -> Torus:
        for node in self.graph.nodes:
            if isinstance(node, Input):
                self.sheets[node.name] = Sheet(node.shape[:1], node.shape[1:], self.start)
                self.nodes.append(node)
            elif all(self._image(p) in self.sheets for p in node.parents):
                self._place(node)
            else:
                if any(self._image(p) in self.sheets for p in node.parents):
                    raise _Misfit(f"'{node.name}' reads an image and a vector")
                self.nodes.append(node)
        graph = replace(self.graph, nodes=tuple(self.nodes))
        return Torus(graph, self.sheets, self.operators, self.flat)

    def _image(self, value: str) -> str:
        return self.flat.get(value, value)

    def _place(self, node: Node) -> None:
        parents = [self.sheets[self._image(p)] for p in node.parents]
        flat = any(p in self.flat for p in node.parents)
        if isinstance(node, Activation):
            if flat:
                raise _Misfit(f"'{node.name}' is an activation of a flattened image; apply it before it is flattened")
            (source,) = parents
            self.sheets[node.name] = replace(source, clean=True)
            self.nodes.append(node if source.clean else replace(node, masked=True))
            return
        assert isinstance(node, Affine | Wire)
        same = len(node.shape) > self.dims and not flat
        if (
            isinstance(node, Wire)
            and node.role == "linear"
            and same
            and math.prod(node.shape[-self.dims :]) == 1 < math.prod(parents[0].window)
        ):
            same = False  # a mean over all positions leaves the torus, which need not be divisible by the image
        if isinstance(node, Wire) and node.role == "order":
            image = self._image(node.parents[0])
            if len(node.shape) <= self.dims or node.shape[-self.dims :] != self.graph[image].shape[-self.dims :]:
                self.flat[node.name] = image
                self.nodes.append(node)
                return
            node, same = replace(node, parents=(image,)), True  # an image again
        if not same or (isinstance(node, Affine) and not isinstance(node, Convolution)):
            self.nodes.append(node)  # a vector: the image is left
            return
        try:
            operator = _operator(node, [self.graph[p] for p in node.parents], self.dims, self.tensors)
            self._try(operator, node, parents)
        except _Misfit as error:
            raise _Misfit(f"'{node.name}' cannot be on a torus: {error}") from None
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise _Misfit(f"'{node.name}' cannot be on a torus: {error}") from None

    def _try(self, operator: Operator, node: Affine | Wire, parents: list[Sheet]) -> None:
        dims, ring = self.dims, operator.ring
        lead, window = node.shape[:-dims], node.shape[-dims:]
        if self.probe:
            sides = self._probed(operator, node, parents)
            self.sheets[node.name] = Sheet(lead, window, sides)
            self.operators[node.name] = operator
            self.nodes.append(node)
            return
        if any(n % s for n, s in zip(parents[0].sides, operator.stride, strict=False)):
            raise _Misfit("its stride does not divide the torus")
        single = ring is not None and operator.kernel is None  # one channel is enough
        tensors = self.tensors
        if single:
            size = operator._size(tensors)
            weight = torch.rand(1, 1, *size, dtype=torch.float64)
            tensors = lambda path: weight  # noqa: E731
            tried = replace(operator, ring=replace(cast(Ring, ring), groups=1), made={})
            shown = [replace(p, lead=(1,)) for p in parents]
            own: tuple[int, ...] = (1,)
        else:
            tried, shown, own = operator, parents, lead
        run = tried.run(tensors, shown, own)
        generator = torch.Generator().manual_seed(0)
        xs = [torch.randn(2, *s.lead, *s.window, generator=generator, dtype=torch.float64) for s in shown]
        with torch.no_grad():
            truth = self._truth(operator, node, weight if single else None)(*xs)
            placed = [s.embed(x) for s, x in zip(shown, xs, strict=True)]
            y = run(*placed)
            sides = tuple(y.shape[-dims:])
            sheet = Sheet(own, window, sides)
            if any(n < w for n, w in zip(sides, window, strict=True)):
                raise _Misfit("it does not fit")
            if y.shape[1:-dims] != truth.shape[1:-dims] or not _equal(sheet.crop(y), truth):
                raise _Misfit("it does not treat the border as zero padding does, or not all pixels alike")
            outside = y.clone()
            sheet.crop(outside).zero_()
            spills = bool((outside.abs() > 1e-12 * (1 + y.abs().amax())).any())
            junk = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in placed]
            for s, j in zip(shown, junk, strict=True):
                s.crop(j).zero_()
            looks = not _equal(sheet.crop(run(*(x + j for x, j in zip(placed, junk, strict=True)))), truth)
        grid: Cells = sides
        for s in parents:
            grid = meet(grid, s.sides)
        if grid is None or not _commutes(run, grid, placed):
            raise _Misfit("it does not treat all pixels alike")
        if ring is None and not operator.scales:
            self._classify(operator, run, parents, lead)
        clean = not spills
        sources = list(node.parents)
        for i, p in enumerate(node.parents):
            if not self.sheets[p].clean and looks:
                sources[i] = self._masked(p)
            elif not self.sheets[p].clean:
                clean = False
        self.sheets[node.name] = Sheet(lead, window, sides, clean)
        operator.node = replace(node, parents=tuple(sources))
        self.operators[node.name] = operator
        self.nodes.append(operator.node)

    def _probed(self, operator: Operator, node: Node, parents: list[Sheet]) -> tuple[int, ...]:
        ring, sides = operator.ring, parents[0].sides
        if ring is not None and ring.transposed:
            return tuple(n * s for n, s in zip(sides, ring.stride, strict=True))
        if ring is not None:
            if any(n % s for n, s in zip(sides, ring.stride, strict=True)):
                raise _Misfit("the total stride is too large, or has prime factors above 7")
            return tuple(n // s for n, s in zip(sides, ring.stride, strict=True))
        inner, outer = parents[0].window, node.shape[-self.dims :]
        if any((n * m) % w for n, m, w in zip(sides, outer, inner, strict=True)):
            raise _Misfit("it changes the size by a fraction")
        return tuple(n * m // w for n, m, w in zip(sides, outer, inner, strict=True))

    def _truth(self, operator: Operator, node: Affine | Wire, weight: Tensor | None) -> Callable[..., Tensor]:
        """What the node computes on images, for a convolution with one channel of random numbers."""
        if weight is not None and isinstance(node, Convolution):
            spec = node.spec
            assert isinstance(spec, Spec)
            return lambda x: spec.run(x, weight, groups=1)
        assert isinstance(node, Wire)
        if weight is None:
            return node.linear(self.tensors)
        given = _given(node)
        names = [a for a in given if a not in ("input", "weight", "bias")]
        call, options = resolve(node.target), {n: given[n] for n in names} | {"groups": 1}
        return lambda x: call(x, weight, None, **options)

    def _classify(
        self, operator: Operator, run: Callable[..., Tensor], parents: list[Sheet], lead: tuple[int, ...]
    ) -> None:
        """See whether the features are only moved, or multiplied by numbers."""
        source = _labels(run, parents)
        generator = torch.Generator().manual_seed(1)
        xs = [torch.randn(1, *s.lead, *s.sides, generator=generator, dtype=torch.float64) for s in parents]
        with torch.no_grad():
            y = run(*xs).reshape(-1)
        every = torch.cat([torch.zeros(1, dtype=torch.float64), *(x.reshape(-1) for x in xs)])
        if int(source.max()) < len(every) - 1 and int(source.min()) >= -1 and bool((every[source + 1] == y).all()):
            operator.index = True
            return
        if len(parents) == 1 and parents[0].lead == lead and len(y) == len(every) - 1:
            ones = torch.ones(1, *lead, *(1,) * self.dims, dtype=torch.float64)
            with torch.no_grad():
                entries = run(ones)
            if entries.shape == ones.shape and _equal(entries * xs[0], y.reshape(xs[0].shape)):
                operator.diagonal = True
                return
        raise _Misfit("it mixes channels or pixels by a fixed matrix; use a convolution")

    def _masked(self, value: str) -> str:
        """A value that is zero outside of its window."""
        if value not in self.renamed:
            source = self.graph[value]
            name = f"{value}__mask"
            while name in self.graph.index:
                name += "_"
            self.renamed[value] = name
            self.nodes.append(Activation(name, source.shape, (value,), module=nn.Identity(), masked=True))
            self.sheets[name] = replace(self.sheets[value], clean=True)
        return self.renamed[value]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-10 * float(1 + b.abs().max()))


def _commutes(run: Callable[..., Tensor], cells: tuple[int, ...], images: Sequence[Tensor]) -> bool:
    """Whether a function of images commutes with shifts by a cell, tried."""

    def shift(x: Tensor, i: int) -> Tensor:
        axis = x.ndim - len(cells) + i
        return x.roll(x.shape[axis] // cells[i], axis)

    with torch.no_grad():
        y = run(*images)
        return all(_equal(run(*(shift(x, i) for x in images)), shift(y, i)) for i in range(len(cells)))


def _anything(module: nn.Module) -> Callable[[str], Tensor]:
    """The tensors of a module with other numbers: what an operation is must not depend on those it has."""

    def read(path: str) -> Tensor:
        found: Tensor = lookup(module, path)
        if not found.is_floating_point():
            return found
        generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        return 0.5 + torch.rand(found.shape, generator=generator, dtype=torch.float64)

    return read
