r"""Proofs for convolutional networks: the elimination of the theory, frequency by frequency, rounded upwards.

Read the inequality without its output as the precision of a Gaussian over the input and the activations, with a
covariance ``G`` of what is live (:mod:`ldlt.certificates.torus` has the maps). An activation with multipliers ``Λ``,
``D = 1/(2r²Λ)``, slopes in ``[c − r, c + r]`` and pre-activation ``v = Cz`` needs ``D ≻ T = CGC^*`` and makes ``G``
grow by ``X^*(D − T)^{-1}X``, ``X = CG``; at the end the bound holds if ``BGB^* \preceq ℓ^2``.

**Rounding.** All of this is monotone: if ``G \preceq \bar G``, then whatever follows from ``\bar G`` is not smaller
than what follows from ``G``, because a larger covariance is a smaller quadratic form to start from. So after every
step the computed ``G`` is raised by ``δI``, with ``δ`` above the norm of all errors made in it, and is an exact matrix
again. Errors are those of :class:`ldlt.certificates.near.Near`. For the inverse take any ``K`` near ``(D − T)^{-1}X``,
with ``R = X − (D − T)K``:

.. math:: X^*(D - T)^{-1}X = K^*X + R^*K + R^*(D - T)^{-1}R ,

so that nothing but ``D − T \succeq μI`` is to be proven, and the last two terms are bounded by ``‖R‖‖K‖ + ‖R‖²/μ``.

Channels are scaled by powers of two so that ``D`` is near one. ``D`` may be rounded in any way: it belongs to other
multipliers then, which are as good a proof of the same bound. Constants of output directions ``a`` are ``a'BGB^*a ≤
ℓ^2\,a'G_ya``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ldlt.certificates.ball import UNIT, arithmetic_is_ieee
from ldlt.certificates.near import Near, norm, positive_by, product_error, raised
from ldlt.certificates.proof import Proof
from ldlt.certificates.torus import Site, Step, TorusNetwork, refined
from ldlt.graph import Convolution, Graph, Wire

__all__ = ["LEAST", "Outcome", "eliminate", "on_torus", "prove_on_torus"]

LEAST = 1600
"""Inputs and neurons together, up to which the whole matrix is small enough for everything."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What was proven.

    Attributes:
        form: ``BGB^*`` as an enclosure; for an image, one matrix per frequency. None if something was not proven.
        reason: Why not.
        multipliers: ``Λ`` that were used, by activation and mask.
    """

    form: Near | None
    reason: str
    multipliers: dict[str, Tensor]

    def holds(self, bound: float, gram: Tensor | None = None) -> bool:
        """Whether ``BGB^* ⪯ ℓ²``, or ``⪯ ℓ² G_y`` for a given ``G_y``."""
        if self.form is None:
            return False
        square = math.nextafter(bound * bound, 0.0)
        right = torch.eye(self.form.mid.shape[-1], dtype=torch.float64) if gram is None else gram
        target = square * right
        error = 4 * UNIT * norm(target)
        difference = Near(target - self.form.mid, self.form.rad + error + 4 * UNIT * norm(self.form.mid))
        return bool(positive_by(difference, torch.zeros_like(difference.rad)).all())


def eliminate(network: TorusNetwork, multipliers: Mapping[str, Tensor], bound: float) -> Outcome:
    """The covariance of the output for given multipliers and bound.

    Args:
        network: The network on its torus.
        multipliers: ``Λ`` by activation and mask, one number for every entry; the least of each class counts.
        bound: ℓ.
    """
    if not arithmetic_is_ieee():
        return Outcome(None, "the processor does not round to nearest, or flushes small numbers to zero", {})
    used, spreads, refused = {}, {}, ""
    for site in network.sites:
        given = multipliers.get(site.name)
        if given is None or given.numel() != len(site.channel) or not bool((given > 0).all() & given.isfinite().all()):
            refused = f"there are no positive, finite multipliers for all {len(site.channel)} entries of '{site.name}'"
            break
        flat = given.detach().double().cpu().reshape(-1)
        least = torch.full((site.count,), torch.inf, dtype=torch.float64)
        least = least.scatter_reduce(0, site.shared[site.channel], flat, "amin")
        used[site.name] = least[site.shared][site.channel]
        spreads[site.name] = bound * bound / (2 * site.radius**2 * least[site.shared])
    if set(multipliers) - set(used) and not refused:
        refused = "there are multipliers for values that are no activations of the network"
    if refused:
        return Outcome(None, refused, {})
    walk = _Walk(network, spreads)
    for step in network.steps():
        problem = walk.step(step)
        if problem:
            return Outcome(None, problem, used)
    return Outcome(walk.form, "", used)


def on_torus(graph: Graph, module: nn.Module) -> TorusNetwork | None:
    """A convolutional network on its torus; None if it is small enough for the whole matrix, or no network of images.

    Raises:
        GraphError: There is no torus, or it needs too much memory.
    """
    size = sum(n.features for n in (graph.input, *graph.activations))
    convolves = any(isinstance(n, Convolution) or (isinstance(n, Wire) and "conv" in n.operation) for n in graph.nodes)
    return TorusNetwork(graph, module) if size > LEAST and convolves and len(graph.input.shape) > 1 else None


def prove_on_torus(
    network: TorusNetwork, multipliers: Mapping[str, Tensor], bound: float, gram: Tensor | None = None
) -> Proof:
    """As :func:`ldlt.certificates.proof.prove`, per frequency."""
    found = eliminate(network, multipliers, bound)
    vector = found.form is not None and len(found.form.mid) == 1
    if found.holds(bound) and (gram is None or (vector and found.holds(bound, gram))):
        return Proof(True, bound, 0.0, "", found.multipliers, gram)
    reason = found.reason or f"not proven for the bound {bound:.9g}: the output's covariance is too large"
    return Proof(False, bound, -math.inf, reason, found.multipliers)


class _Walk:
    """The covariance of what is live, scaled, as an exact Hermitian matrix that is not below the true one."""

    def __init__(self, network: TorusNetwork, spreads: Mapping[str, Tensor]) -> None:
        assert network.torus is not None
        self.network, self.torus = network, network.torus
        first = network.graph.input.name
        count, channels = len(self.torus.weights(self.torus.strides[0])), network.channels[first]
        self.matrix = torch.eye(channels, dtype=torch.complex128).repeat(count, 1, 1)
        self.sizes = {first: channels}
        self.scales = {first: torch.ones(channels, dtype=torch.float64)}
        self.diagonals: dict[str, Tensor] = {}
        for name, spread in spreads.items():
            exponent = torch.floor(torch.log2(spread.sqrt()))
            self.scales[name] = torch.ldexp(torch.ones_like(spread), exponent)
            self.diagonals[name] = spread / self.scales[name] ** 2
        self.form: Near | None = None

    def step(self, step: Step) -> str:
        """One activation, or the output; why it failed, or nothing."""
        if step.grid and step.grid != step.before:
            self.matrix, self.sizes = refined(self.matrix, self.sizes, self.torus.ratio(step.before, step.grid))
            self._raise(4 * UNIT * norm(self.matrix))
        cross, spread, copies = self._read(step)
        if not bool(spread.mid.isfinite().all()):
            return "a number overflowed"
        if step.site is None:
            self.form = spread if copies == 1 else spread.times(1 / copies)
            return ""
        return self._activate(step, step.site, cross, spread, copies)

    def _read(self, step: Step) -> tuple[Near | None, Near, int]:
        """``X`` with all that is live (None if that is forgotten), ``T``, and the number of aliases of the value."""
        own = self.network.stride if step.site is None else step.site.stride
        rows_scale = torch.ones(1, dtype=torch.float64) if step.site is None else 1 / self.scales[step.site.name]
        places, start = {}, 0
        for b, size in self.sizes.items():
            places[b], start = torch.arange(start, start + size), start + size
        parts = []
        for b, near in step.rows.items():
            columns = self.scales[b]
            columns = columns.repeat(near.mid.shape[-1] // len(columns))
            each = rows_scale if len(rows_scale) == 1 else rows_scale.repeat(near.mid.shape[-2] // len(rows_scale))
            parts.append(near.scaled(each, columns))
        index = torch.cat([places[b] for b in step.rows])
        rows = Near(torch.cat([p.mid for p in parts], -1), raised(torch.stack([p.rad for p in parts]).sum(0)))
        live = Near(self.matrix[:, index], torch.zeros(len(self.matrix), dtype=torch.float64))
        cross = rows @ live
        inner = Near(cross.mid[..., index], cross.rad)
        if not step.grid or (own and math.prod(own) <= math.prod(step.grid)):
            copies = self.torus.ratio(own, step.grid) if own and step.grid else 1
            return cross, inner @ rows.mH, copies
        n = rows.mid.shape[-2]
        if own:
            ratio = self.torus.ratio(step.grid, own)
            every = inner @ rows.mH
            mid = every.mid.reshape(-1, ratio, n, n)
            rad = every.rad + 2 * ratio * UNIT * norm(every.mid)
            return None, Near(mid.mean(1), raised(rad.reshape(-1, ratio).sum(1) / ratio)), 1
        weights = self.torus.weights(step.grid) / self.torus.points(step.grid)
        left, right = _flat(inner.mid), _flat(rows.mid * weights[:, None, None])
        error = product_error(left.shape[-1], norm(left), norm(right)) + 4 * UNIT * norm(left) * norm(right)
        spill = inner.rad * rows.size + norm(inner.mid) * rows.rad
        return None, Near((left @ right.mT)[None], raised(error + (weights * spill).sum())[None]), 1

    def _activate(self, step: Step, site: Site, cross: Near | None, spread: Near, copies: int) -> str:
        n, diagonal = spread.mid.shape[-1], (copies * self.diagonals[site.name].repeat(copies))
        center, radius = site.center.repeat(copies), site.radius.repeat(copies)
        middle = (spread.mid + spread.mid.mH) / 2
        spread = Near(middle, raised(spread.rad + 4 * UNIT * norm(middle)))
        rest = -middle
        rest.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        gap = Near(rest, raised(spread.rad + 4 * UNIT * norm(rest)))
        least = torch.linalg.eigvalsh(rest)[..., 0] / 2
        if not bool((least > 0).all()) or not bool(positive_by(gap, least).all()):
            return f"the multipliers of '{site.name}' are not feasible, or too close to that"
        live = {b: s for b, s in self.sizes.items() if b in step.keep and cross is not None}
        places: list[int] = []
        start = 0
        for b, s in self.sizes.items():
            places += range(start, start + s) if b in live else []
            start += s
        columns = spread.mid
        error = spread.rad
        if live and cross is not None:
            columns = torch.cat([columns, cross.mid[..., places]], -1)
            error = raised(error + cross.rad)
        solved = torch.cholesky_solve(columns, torch.linalg.cholesky(rest))
        left = gap @ Near(solved, torch.zeros_like(error))
        missing = columns - left.mid
        size = raised(norm(missing) * (1 + 2 * UNIT) + left.rad + error)
        gain = solved.mH @ columns
        width = norm(solved)
        slack = product_error(n, width, norm(columns)) + error * width + size * width + size**2 / least
        slack = raised(slack)
        steep = max(1.0, float(center.abs().max()))
        # Everything below is linear in what is enclosed; each entry is rounded a few times.
        top = raised(steep * steep * (slack + 2 * error) + 16 * UNIT * steep * steep * (norm(gain) + norm(columns)))
        own = center[:, None] * (middle + gain[..., :n, :n]) * center
        own.diagonal(dim1=-2, dim2=-1).add_(radius**2 * diagonal)
        top = raised(top + 8 * UNIT * norm(torch.diag(radius**2 * diagonal)))
        kept = self.matrix[:, places][..., places] if live else None
        if site.name not in step.keep:
            assert kept is not None
            matrix = kept + gain[..., n:, n:]
        elif kept is None:
            matrix = own
        else:
            across = center[:, None] * (columns[..., n:] + gain[..., :n, n:])
            matrix = torch.cat([torch.cat([kept + gain[..., n:, n:], across.mH], -1), torch.cat([across, own], -1)], -2)
        if kept is not None:
            top = raised(top + 4 * UNIT * norm(kept))
        self.matrix = (matrix + matrix.mH) / 2
        self._raise(raised(top + 4 * UNIT * norm(self.matrix)))
        self.sizes = live | ({site.name: n} if site.name in step.keep else {})
        return ""

    def _raise(self, error: Tensor) -> None:
        """Add ``δI``, its own rounding included."""
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1)
        shift = raised(error + 4 * UNIT * diagonal.real.abs().amax(-1))
        diagonal.add_(shift[..., None])


def _flat(rows: Tensor) -> Tensor:
    """(F, n, c) complex as (n, 2 F c) real."""
    return torch.view_as_real(rows.resolve_conj()).permute(1, 0, 2, 3).reshape(rows.shape[1], -1)
