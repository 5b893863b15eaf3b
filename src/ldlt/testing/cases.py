"""The conformance suite: one small object per operation, activation, contraction or network, which inherits all checks.

A test module turns cases into tests in one line::

    @pytest.mark.parametrize("case", ldlt.testing.all_cases(), ids=str)
    def test_conformance(case):
        case.check()

A new operation gives its rule (:func:`ldlt.graph.operations.register_operation`), a move that draws it
(:func:`ldlt.testing.register_move`), and is a case from then on.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import ldlt
from ldlt import activations
from ldlt.engine.contraction import CONTRACTIONS
from ldlt.graph import evaluate
from ldlt.graph.trace import trace
from ldlt.testing.check import check_module
from ldlt.testing.hostile import PARAMETERS
from ldlt.testing.moves import MOVES, Move

__all__ = ["ActivationCase", "Case", "ContractionCase", "NetworkCase", "OperationCase", "all_cases"]

_SHAPES: tuple[tuple[int, ...], ...] = ((4,), (2, 4), (2, 4, 4), (4, 4, 4), (4, 4), (3, 3), (6,))


@dataclass(frozen=True)
class Case:
    """What all cases share.

    Attributes:
        name: How it is called in the list of tests.
    """

    name: str

    def __str__(self) -> str:
        return self.name

    def check(self) -> None:
        """Run all checks.

        Raises:
            AssertionError: With what is wrong.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class NetworkCase(Case):
    """A module and what becomes of it.

    Shown: the graph computes what the module does; in both precisions and at all hostile kinds of parameters the
    network keeps its bounds, stays finite, gives every parameter a gradient, satisfies the inequality and the
    reference, and is the same frozen as live.

    Attributes:
        make: Makes the module, in float32.
        shape: Shape of a sample.
        options: Further arguments of :class:`ldlt.Lipschitz`.
        kinds: Kinds of parameters, all by default.
    """

    make: Callable[[], nn.Module] = nn.Identity
    shape: tuple[int, ...] = (4,)
    options: dict[str, Any] = field(default_factory=dict)
    kinds: Sequence[str] = tuple(PARAMETERS)

    def check(self) -> None:  # noqa: D102
        self.graph()
        for dtype in (torch.float64, torch.float32):
            found = check_module(self._made().to(dtype), self.shape, kinds=self.kinds, **self.options)
            assert found.refusal is None, found.refusal
            bad = [*found.violations, *found.declined]
            assert not bad, "\n".join(bad)

    def graph(self) -> None:
        """The graph of the module in evaluation mode computes what the module does."""
        module = self._made().double().eval()
        graph = trace(module, self.shape)
        x = torch.randn(5, *self.shape, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(evaluate(graph, module, x.clone()), module(x.clone()), rtol=1e-10, atol=1e-10)

    def _made(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()


@dataclass(frozen=True)
class OperationCase(Case):
    """A move of the table, between free maps: wherever it fits, it is part of a conforming network, or refused by name.

    Attributes:
        move: The move.
        draws: How many forms of it are tried.
        kinds: At how many kinds of parameters.
    """

    move: Move | None = None
    draws: int = 1
    kinds: int = 2

    def check(self) -> None:  # noqa: D102
        assert self.move is not None
        tried = 0
        for seed in range(20 * self.draws):
            rng = random.Random(seed)
            shape = rng.choice(_SHAPES)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                step = self.move.make(rng, *(shape,) * self.move.parents)
                if step is None:
                    continue
                network = NetworkCase(self.name, lambda s=step, n=shape: _around(s, n, self.move.parents), shape)  # type: ignore[misc, union-attr]
            tried += 1
            try:
                network.graph()
            except ldlt.LdltError:
                continue  # an answer
            kinds = random.Random(f"{self.name} {seed}").sample(sorted(set(PARAMETERS) - {"trained"}), self.kinds)
            found = check_module(network._made().double(), shape, kinds=kinds, seed=seed, output="free")
            bad = [*found.violations, *found.declined]
            assert not bad, f"seed {seed}: " + "\n".join(bad)
            if tried >= self.draws:
                return
        assert tried or self.move.parents > 1, f"'{self.name}' fits none of the shapes {_SHAPES}"


class _Around(nn.Module):
    """``head(step(x, …))``; a second value is the negative of the first."""

    def __init__(self, step: nn.Module, head: nn.Module, parents: int) -> None:
        super().__init__()
        self.step, self.head, self.parents = step, head, parents

    def forward(self, x: Tensor) -> Tensor:
        values = (x, -0.5 * x)[: self.parents]
        found: Tensor = self.head(self.step(*values).flatten(1))
        return found


def _around(step: nn.Module, shape: tuple[int, ...], parents: int) -> nn.Module:
    step = copy.deepcopy(step).eval()
    with torch.no_grad():
        features = prod(step(*(torch.zeros(2, *shape) for _ in range(parents))).shape[1:])
    return _Around(step, nn.Linear(features, 2), parents)


@dataclass(frozen=True)
class ActivationCase(Case):
    """An activation: sampled slopes lie in its sector, and a network with it conforms.

    Attributes:
        make: Makes it.
        features: Of the network's hidden layer.
        certified: Whether ``ldlt.certify`` proves a network with it.
    """

    make: Callable[[], nn.Module] = nn.ReLU
    features: int = 6
    certified: bool = True

    def check(self) -> None:  # noqa: D102
        self.slopes()
        hidden = self.features
        NetworkCase(
            self.name,
            lambda: nn.Sequential(nn.Linear(4, hidden), self.make(), nn.Linear(hidden, 3)),
            (4,),
            {"head": "orthogonal"},
            ("thousand", "cauchy"),
        ).check()

    def slopes(self) -> None:
        """``‖Δw − cΔv‖ ≤ r‖Δv‖``, entry by entry or over groups, for pairs of points near and far."""
        generator = torch.Generator().manual_seed(0)
        act = self.make().double().eval()
        center, radius = activations.spread(act, (self.features,))
        group = activations.mixed(act, (self.features,))
        for scale in (1e-3, 0.1, 1.0, 10.0, 100.0):
            x = scale * torch.randn(200, self.features, generator=generator, dtype=torch.float64)
            y = x + 10 ** torch.randint(-3, 2, (200, 1), generator=generator) * torch.randn(
                x.shape, generator=generator, dtype=torch.float64
            )
            with torch.no_grad():
                moved, given = act(x.clone()) - act(y.clone()), x - y
            left, right = (moved - center * given).square(), (radius * given).square()
            if group is not None:
                spread = torch.nn.functional.one_hot(group).double()
                left, right = left @ spread, right @ spread
            rounding = 1e-13 * (1 + scale) * given.abs().amax() + 1e-24
            assert bool((left <= right * (1 + 1e-9) + rounding).all()), f"{self.name}: a slope outside of its sector"


@dataclass(frozen=True)
class ContractionCase(Case):
    """A contraction: ``U`` of norm below one, ``K'K = (I − UU')^{-1}``, and back again."""

    def check(self) -> None:  # noqa: D102
        generator = torch.Generator().manual_seed(0)
        contraction = CONTRACTIONS[self.name](torch.finfo(torch.float64).eps)
        for rows, columns in ((3, 3), (2, 5), (5, 2), (1, 1)):
            for scale in (0.1, 1.0, 30.0):
                weight = scale * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
                extra = {n: p.double() for n, p in contraction.initial(rows, 0.5).items()}
                found = contraction(weight, extra)
                u, eye = found.matrix, torch.eye(rows, dtype=torch.float64)
                assert float(torch.linalg.matrix_norm(u, 2)) < 1
                noise = found.spread(torch.eye(columns, dtype=torch.float64))  # K U
                wanted = u.T @ torch.linalg.solve(eye - u @ u.T, u)
                torch.testing.assert_close(noise.T @ noise, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


def _activations() -> list[Case]:
    joint: list[Case] = [
        ActivationCase("MaxMin", activations.MaxMin),
        ActivationCase("GroupSort", lambda: activations.GroupSort(3)),
        ActivationCase("Softmax", lambda: nn.Softmax(1)),
    ]
    built: list[Case] = []
    for kind in activations.ELEMENTWISE:
        options: dict[str, Any] = {
            nn.Hardshrink: {"lambd": 0.0},
            nn.Threshold: {"threshold": 0.3, "value": 0.3},
            activations.Clamp: {"min": -1.0},
        }.get(kind, {})  # type: ignore[call-overload]
        built.append(ActivationCase(kind.__name__, lambda k=kind, o=options: k(**o)))  # type: ignore[misc]
    return built + joint


def all_cases() -> list[Case]:
    """Every entry of the tables as a case: moves, activations, contractions."""
    moves: list[Case] = [OperationCase(m.name, m) for m in MOVES if m.kind not in ("activation",)]
    return [*moves, *_activations(), *(ContractionCase(n) for n in CONTRACTIONS)]
