"""The search problem of a convolutional network: one multiplier per channel, block-diagonal over frequencies.

:class:`ldlt.certificates.torus.TorusNetwork` gives the maps, :class:`ldlt.covariance.Covariance`
eliminates: in batches of frequencies as long as images are live, on the coarsest grid that any of them needs, and as
one real matrix from the first vector on. So the searches of :mod:`ldlt.certificates.solve` and
:mod:`ldlt.certificates.large` run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ldlt.certificates.problem import Layer, Problem
from ldlt.certificates.torus import Site, Step, TorusNetwork, refined
from ldlt.covariance import Covariance, Read, mean_diagonal

__all__ = ["TorusProblem"]

_FLOOR = 1e-8  # of channels without signal, relative to the largest


@dataclass(frozen=True, eq=False)
class TorusProblem(Problem):
    """Minimise ℓ over multipliers per channel.

    Attributes:
        network: The network on its torus.
        steps: The order of elimination.
        wide: Activations as the covariance sees them, with all aliases.
    """

    network: TorusNetwork = field(kw_only=True)
    steps: list[Step] = field(kw_only=True)
    wide: list[Layer] = field(kw_only=True)

    @classmethod
    def on(cls, network: TorusNetwork) -> TorusProblem:
        """The problem of a network."""
        layers, wide, steps = [], [], network.steps()
        for step in steps[:-1]:
            site = step.site
            assert site is not None
            layers.append(_layer(site, 1, {b: r.mid for b, r in site.inputs.items()}))
            wide.append(_layer(site, _aliases(network, step), {}))
        return cls(
            input=network.graph.input.name,
            inputs=network.graph.input.features,
            layers=tuple(layers),
            output={b: r.mid for b, r in network.output.items() if r is not None},
            outputs=network.outputs,
            features={s.name: len(s.channel) for s in network.sites},
            network=network,
            steps=steps,
            wide=wide,
        )

    @property
    def neurons(self) -> int:
        """Number of points of all channels."""
        torus = self.network.torus
        assert torus is not None
        return sum(s.size * (torus.points(s.stride) if s.stride else 1) for s in self.network.sites)

    per_frequency = True

    def full(self, flat: Tensor) -> dict[str, Tensor]:
        """Multipliers by activation, and of masks, for every entry."""
        parts = flat.split([layer.count for layer in self.layers])
        return {s.name: part[s.shared][s.channel] for s, part in zip(self.network.sites, parts, strict=True)}

    def covariance(
        self, multipliers: Tensor | Callable[[Layer, Tensor], Tensor], *, everything: bool = False
    ) -> tuple[Covariance, Tensor]:
        """As :meth:`Problem.covariance`."""
        network, torus = self.network, self.network.torus
        assert torus is not None
        assert not everything
        given = None if callable(multipliers) else multipliers.split([layer.count for layer in self.layers])
        finest = torus.strides[0]
        start = torch.eye(network.channels[self.input], dtype=torch.complex128)
        live = Covariance.start(self.input, start.expand(len(torus.weights(finest)), -1, -1))
        total = torch.zeros((), dtype=torch.float64)
        for i, (step, layer) in enumerate(zip(self.steps, self.wide, strict=False)):
            site, count = step.site, _aliases(network, step)
            assert site is not None
            live, read = self._read(live, step)
            scaled = read.spread.detach() / count if given is not None else read.spread / count
            floor = _FLOOR * mean_diagonal(scaled).max() * torch.eye(layer.size, dtype=torch.float64)
            chosen = given[i] if given is not None else multipliers(layer, scaled + floor)  # type: ignore[operator]
            diagonal = count / (2 * layer.radius**2 * chosen[layer.shared])
            live, slack = live.activate(read, diagonal, site.name, layer.center, layer.radius, step.keep)
            grid = step.grid if step.grid and count > 0 and slack.ndim else ()
            if slack.ndim:
                fits = site.stride if len(slack) != len(torus.weights(grid)) else grid
                repeats = torus.points(fits) / torus.weights(fits).sum()
                slack = (slack * torus.weights(fits)).sum() * repeats
            total = total + slack
        return live, total

    def form(self, live: Covariance) -> Tensor:
        """``B G B*`` of the output."""
        step = self.steps[-1]
        spread = self._read(live, step)[1].spread
        return spread / _aliases(self.network, step)

    def _read(self, live: Covariance, step: Step) -> tuple[Covariance, Read]:
        """What a step reads; with nothing live behind it if all is folded into a coarser grid or a vector."""
        torus, own = self.network.torus, self.network.stride if step.site is None else step.site.stride
        assert torus is not None
        if not step.grid:  # vectors
            return live, live.read({b: r.mid[0] for b, r in step.rows.items()})
        if step.grid != step.before:
            matrix, sizes = refined(live.matrix, live.sizes, torus.ratio(step.before, step.grid))
            live = Covariance(sizes, matrix)
        if own and math.prod(own) <= math.prod(step.grid):
            return live, live.read({b: r.mid for b, r in step.rows.items()})
        places = live.places
        rows = torch.cat([r.mid for r in step.rows.values()], -1)
        index = torch.cat([torch.arange(places[b].start, places[b].stop) for b in step.rows])
        cross = rows @ live.matrix[:, index[:, None], index]
        if own:
            spread = (cross @ rows.mH).reshape(-1, torus.ratio(step.grid, own), rows.shape[1], rows.shape[1]).mean(1)
        else:
            weights = torus.weights(step.grid) / torus.points(step.grid)
            spread = _flat(cross) @ _flat(rows * weights[:, None, None]).T
        spread = (spread + spread.mH) / 2
        return Covariance({}, spread[..., :0, :0]), Read(spread[..., :0], spread)

    def norm(self, matrix: Tensor, reader: str | None, block: str, steep: Tensor | None = None) -> float:
        """As :meth:`Problem.norm`, over all frequencies."""
        torus, network = self.network.torus, self.network
        assert torus is not None
        matrix = matrix if steep is None else steep[:, None] * matrix
        own = network.stride if reader is None else network.strides[reader]
        source = network.strides[block]
        if not bool(matrix.isfinite().all()):
            return math.inf
        if not own:
            weights = torus.weights(source) / torus.points(source) if source else torch.ones(1, dtype=torch.float64)
            flat = _flat(matrix) if matrix.is_complex() else matrix[0]
            gram = flat @ (_flat(matrix * weights[:, None, None]) if matrix.is_complex() else flat).T
            return math.sqrt(max(0.0, float(torch.linalg.eigvalsh((gram + gram.T) / 2)[-1])))
        q = torus.ratio(min(source, own, key=math.prod), max(source, own, key=math.prod))
        n, c = matrix.shape[1:]
        if math.prod(own) >= math.prod(source):
            stacked = matrix.reshape(-1, q, n, c).transpose(1, 2).reshape(-1, n, q * c)
        else:
            stacked = matrix.reshape(-1, q * n, c)
        return float(torch.linalg.matrix_norm(stacked, 2).max()) / math.sqrt(q)


def _aliases(network: TorusNetwork, step: Step) -> int:
    """How many aliases a value has on the grid where it is eliminated."""
    own = network.stride if step.site is None else step.site.stride
    assert network.torus is not None
    return network.torus.ratio(own, step.grid) if own and math.prod(own) <= math.prod(step.grid) and step.grid else 1


def _layer(site: Site, copies: int, inputs: dict[str, Tensor]) -> Layer:
    size = copies * site.size
    features, each = len(site.channel), torch.arange(size)
    center, radius, shared = (t.repeat(copies) for t in (site.center, site.radius, site.shared))
    return Layer(site.name, features, each, inputs, center, radius, shared, site.count)


def _flat(rows: Tensor) -> Tensor:
    """(F, n, c) complex as (n, 2 F c) real."""
    return torch.view_as_real(rows.resolve_conj()).permute(1, 0, 2, 3).reshape(rows.shape[1], -1)
