"""The conformance suite: one small object per operation, activation, contraction or network, which inherits all checks.

A test module turns cases into tests in one line::

    @pytest.mark.parametrize("case", ldlt.testing.all_cases(), ids=str)
    def test_conformance(case):
        case.check()

A new operation gives its rule (:func:`ldlt.graph.operations.register_operation`) and a move that draws it
(:func:`ldlt.testing.register_move`), a new activation its law (:func:`ldlt.activations.register`): both are cases from
then on, and parts of hostile modules.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ldlt
from ldlt import activations
from ldlt.engine.contraction import CONTRACTIONS
from ldlt.errors import OptionError
from ldlt.graph import evaluate
from ldlt.graph.trace import trace
from ldlt.testing.check import Report, check_certificate, check_module
from ldlt.testing.hostile import PARAMETERS
from ldlt.testing.moves import MOVES, Move

_SHAPES: tuple[tuple[int, ...], ...] = ((4,), (2, 4), (2, 4, 4), (4, 4, 4), (4, 4), (3, 3), (6,))


def _assert_clean(found: Report, what: str) -> None:
    bad = [*found.violations, *found.declined]
    assert not bad, f"{what}: " + "\n".join(bad)


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
    reference, and is the same frozen as live; its proof holds, and it comes back from a file as it was.

    Attributes:
        make: Makes the module, in float32.
        shape: Shape of a sample.
        options: Further arguments of :class:`ldlt.Lipschitz`.
        kinds: Kinds of parameters, all by default.
        certified: Whether ``ldlt.certify`` must prove it; else it may refuse.
        filed: Whether it must be written to a file; else that may be refused.
    """

    make: Callable[[], nn.Module] = nn.Identity
    shape: tuple[int, ...] = (4,)
    options: dict[str, Any] = field(default_factory=dict)
    kinds: Sequence[str] = tuple(PARAMETERS)
    certified: bool = False
    filed: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.kinds) - set(PARAMETERS)
        if not callable(self.make) or unknown:
            raise OptionError(
                f"case '{self.name}': make must be a function that returns a module, and kinds names of "
                f"ldlt.testing.PARAMETERS; got {self.make!r} and {sorted(unknown)}"
            )

    def check(self) -> None:  # noqa: D102
        self.graph()
        for dtype in (torch.float64, torch.float32):
            found = check_module(self._made().to(dtype), self.shape, kinds=self.kinds, **self.options)
            assert found.refusal is None, found.refusal
            _assert_clean(found, self.name)
        self.proof()
        self.file()

    def graph(self) -> None:
        """The graph of the module in evaluation mode computes what the module does."""
        module = self._made().double().eval()
        graph = trace(module, self.shape)
        x = torch.randn(5, *self.shape, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(evaluate(graph, module, x.clone()), module(x.clone()), rtol=1e-10, atol=1e-10)

    def proof(self) -> None:
        """A certificate of the module as it is states no less than the slopes that are found."""
        found = check_certificate(self._made().double(), self.shape)
        assert not self.certified or found.refusal is None, found.refusal
        _assert_clean(found, f"{self.name}, certified")

    def file(self) -> None:
        """The frozen network computes the same when it is read from the file it was saved to."""
        net = ldlt.Lipschitz(self._made().double().eval(), input_shape=self.shape, **self.options)
        x = torch.randn(5, *self.shape, dtype=torch.float64)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            path = Path(folder) / "network.onnx"
            try:
                ldlt.save(net, path)
                found = torch.as_tensor(ldlt.load(path).predict(x.numpy()))
            except ldlt.LdltError:
                assert not self.filed, f"{self.name} cannot be saved"
                return  # an answer
            torch.testing.assert_close(found, net.freeze()(x), rtol=1e-9, atol=1e-9)

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
        accepted: Whether it must be part of a network at least once.
    """

    move: Move | None = None
    draws: int = 1
    kinds: int = 2
    accepted: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.move, Move) or self.draws < 1 or not 0 <= self.kinds < len(PARAMETERS):
            raise OptionError(
                f"case '{self.name}': it needs a move, such as register_move returns, at least one draw and at most "
                f"{len(PARAMETERS) - 1} kinds; got {self.move!r}, {self.draws!r}, {self.kinds!r}"
            )

    def check(self) -> None:  # noqa: D102
        move = self.move
        assert move is not None
        tried = accepted = 0
        for seed in range(20 * self.draws):
            rng = random.Random(seed)
            shape = rng.choice(_SHAPES)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                step = move.make(rng, *(shape,) * move.parents)
            if step is None:
                continue
            module = _around(step, shape, move.parents)
            network = NetworkCase(self.name, lambda m=module: copy.deepcopy(m), shape, {"output": "free"})  # type: ignore[misc]
            tried += 1
            try:
                network.graph()
            except ldlt.LdltError:
                continue  # an answer
            kinds = random.Random(f"{self.name} {seed}").sample(sorted(set(PARAMETERS) - {"trained"}), self.kinds)
            found = check_module(network._made().double(), shape, kinds=kinds, seed=seed, output="free")
            _assert_clean(found, f"{self.name}, seed {seed}")
            if found.refusal is None:
                accepted += 1
                if accepted == 1:
                    network.proof()
                    network.file()
            if tried >= self.draws:
                break
        assert tried or move.parents > 1, f"'{self.name}' fits none of the shapes {_SHAPES}"
        assert accepted or not self.accepted, f"'{self.name}' is refused in all of {tried} forms"


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
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features = prod(step.eval()(*(torch.zeros(2, *shape) for _ in range(parents))).shape[1:])
        return _Around(step, nn.Linear(features, 2), parents)


@dataclass(frozen=True)
class ActivationCase(Case):
    """An activation: sampled slopes lie in its sector and on intervals in theirs, its formula is what it computes.

    A network with it conforms, and is proven.

    Attributes:
        make: Makes it.
        features: Of the network's hidden layer.
        certified: Whether ``ldlt.certify`` proves a network with it.
        filed: Whether a network with it can be saved.
    """

    make: Callable[[], nn.Module] = nn.ReLU
    features: int = 6
    certified: bool = True
    filed: bool = True

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise OptionError(f"case '{self.name}': make must be a function that returns an activation")

    def check(self) -> None:  # noqa: D102
        self.slopes()
        self.intervals()
        self.formula()
        NetworkCase(
            self.name,
            lambda: nn.Sequential(nn.Linear(4, self.features), self.make(), nn.Linear(self.features, 3)),
            (4,),
            {"head": "orthogonal"},
            ("thousand", "cauchy"),
            self.certified,
            self.filed,
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

    def intervals(self) -> None:
        """Slopes between points of an interval lie in those of the interval, which lie in those everywhere."""
        act = self.make().double().eval()
        if activations.mixed(act, (1,)) is not None or isinstance(act, nn.PReLU):
            return
        generator = torch.Generator().manual_seed(0)
        everywhere = activations.slope_bounds(act)
        for width in (1e-2, 1.0, 20.0):
            low = 3 * torch.randn(300, generator=generator, dtype=torch.float64)
            bounds = (torch.full_like(low, everywhere[0]), torch.full_like(low, everywhere[1]))
            m, upper = activations.slope_range(act, low, low + width, bounds)
            inside = bool(((bounds[0] <= m) & (m <= upper) & (upper <= bounds[1])).all())
            assert inside, f"{self.name}: slopes on an interval outside of those everywhere"
            points = low + width * torch.linspace(0, 1, 33, dtype=torch.float64)[:, None]
            with torch.no_grad():
                chords = act(points.clone()).diff(dim=0) / points.diff(dim=0)
            rounding = 1e-12 * (1 + points.abs().max()) / (width / 32) + 3e-9
            within = (chords >= m - rounding) & (chords <= upper + rounding)
            assert bool(within.all()), f"{self.name}: a slope outside of that of its interval"

    def formula(self) -> None:
        """Outputs in float64 are those of the law's formula, up to its error bound."""
        act = self.make().double().eval()
        x = torch.cat([s * torch.randn(20, self.features, dtype=torch.float64) for s in (0.1, 1.0, 10.0)])
        try:
            _, error = ldlt.forward_error(nn.Sequential(act), x)
        except ldlt.GraphError:
            return  # it has none
        allowed = 1e-8 * (1 + x.abs().amax(1, keepdim=True))
        assert bool((error <= allowed).all()), f"{self.name}: its formula is not what it computes"


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
    """A case for each class of the table, with its first arguments."""
    built: list[Case] = []
    for kind, law in activations.TABLE.items():
        if law.cases and not law.refused:
            known = kind in activations.BUILT_IN
            make: Callable[[], nn.Module] = lambda k=kind, o=law.cases[0]: k(**o)  # type: ignore[misc]  # noqa: E731
            filed = known and kind is not nn.Softmax
            built.append(ActivationCase(kind.__name__, make, certified=known, filed=filed))
    return built


def all_cases() -> list[Case]:
    """Every entry of the tables as a case: moves, activations, contractions."""
    moves: list[Case] = [OperationCase(m.name, m) for m in MOVES if m.kind != "activation"]
    return [*moves, *_activations(), *(ContractionCase(n) for n in CONTRACTIONS)]
