"""The ruler: whether a network keeps what it promises, at the parameters it has.

The main instrument are exact Jacobians: those of the frozen network, with its weights as they are stored, evaluated in
float64. What is computed in the network's own precision is compared with allowance for its rounding, and that is
measured: the same frozen network in float32 and in float64 differ by the size of the numbers on the way times
the rounding unit of float32.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import ldlt
from ldlt import reference
from ldlt.errors import OptionError
from ldlt.graph import Wire
from ldlt.testing.hostile import PARAMETERS, Hostile, hostile_module, pick_kinds
from ldlt.testing.moves import drawn_moves

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
"""How far a slope may be above the bound, relatively."""
AGREEMENT = {torch.float32: 2e-2, torch.float64: 1e-8}
"""How far two ways to compute one output may differ, relative to ``bound·|x| + |y|``.

The frozen weights of a float32 network come from float64. The factor of a stack without full rank has the condition 1/δ
there, δ = ε^{1/3}, so projected weights have errors of ε/δ; a head divides them by ``√α = 2√ε`` where they depend on
each other. The two together are ε^{1/6}/2, or 0.035: no error of a network, but one of its float32 weights.
"""
LEAST_RESIDUAL = -1e-9
SCALES = (1e-9, 0.1, 1.0, 10.0, 300.0, 1e6)
"""Of the points where Jacobians are taken: far points have other patterns than near ones. Not the origin itself: where
there are ties autograd need not return a derivative (``Softshrink(0.0)`` is the identity, with the gradient 0 at 0)."""
ROUNDINGS = 32
"""Measured rounding errors that a comparison allows for."""


@dataclass
class Report:
    """What was found.

    Attributes:
        violations: Broken promises, with numbers.
        overflows: Numbers that are not finite where products of the user's own maps leave the range of the dtype.
        refusal: Why there is no network.
        declined: Exceptions of the package at parameters that were set after construction.
        steepest: Largest slope found, relative to the bound.
        residual: Smallest eigenvalue of the matrix inequality relative to its scale.
    """

    violations: list[str] = field(default_factory=list)
    overflows: list[str] = field(default_factory=list)
    refusal: str | None = None
    declined: list[str] = field(default_factory=list)
    steepest: float = 0.0
    residual: float = math.inf

    def include(self, other: Report, label: str) -> None:
        """Take over what another report says, under a label."""
        for name in ("violations", "overflows", "declined"):
            getattr(self, name).extend(f"{label}: {text}" for text in getattr(other, name))
        self.steepest, self.residual = max(self.steepest, other.steepest), min(self.residual, other.residual)
        if other.refusal is not None:
            self.refusal = other.refusal


def jacobians(function: Callable[[Tensor], Tensor], x: Tensor, factor: float = 1.0) -> Tensor:
    """Exact Jacobians (points, outputs, inputs) of a map of batches at the points x (points, *shape).

    One backward pass over a batch in which every point stands once for each output: nothing has to be vectorised. The
    cotangents are multiplied by ``factor`` and what comes out is divided by it.
    """
    with torch.enable_grad():
        count = function(x[:1].clone())[0].numel()
        spread = x.detach().repeat_interleave(count, 0).requires_grad_()
        y = function(spread.clone()).flatten(1)
        unit = factor * torch.eye(count, dtype=y.dtype).repeat(len(x), 1)
        (rows,) = torch.autograd.grad(y, spread, unit)
    return rows.reshape(len(x), count, -1) / factor


def check_network(net: ldlt.Lipschitz, *, seed: int = 0) -> Report:
    """Check one network at its current parameters, in evaluation mode; the network is left as it was.

    Args:
        net: The network.
        seed: Of the points that are tried.
    """
    return _Check(net, seed).run()


class _Check:
    """The stages of :func:`check_network`, and what they share."""

    def __init__(self, net: ldlt.Lipschitz, seed: int) -> None:
        self.net, self.report, self.stopped = net, Report(), False
        self.dtype = next(p.dtype for p in net.parameters() if p.is_floating_point())
        self.tolerance = TOLERANCE[self.dtype]
        self.generator = torch.Generator().manual_seed(seed)

    def run(self) -> Report:
        was_training = self.net.training
        self.net.eval()
        stages = (
            self.parameters, self.freeze, self.finite, self.slopes, self.inequality, self.reference, self.agreement,
        )  # fmt: skip
        try:
            for stage in stages:
                if not self.stopped:
                    with self.guard(stage.__name__):
                        stage()
        finally:
            self.net.train(was_training)
        return self.report

    @contextlib.contextmanager
    def guard(self, stage: str) -> Iterator[None]:
        """An exception becomes an entry of the report, and ends the check."""
        try:
            yield
        except ldlt.LdltError as error:
            self.report.declined.append(f"{stage}: {error}")
            self.stopped = True
        except Exception as error:
            self.broken(f"{stage}: foreign exception {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            self.stopped = True

    def broken(self, text: str) -> None:
        """Something is not finite or fell over; whose numbers were too large?"""
        (self.report.overflows if strained(self.net) else self.report.violations).append(text)

    def draw(self, count: int) -> Tensor:
        shape = (count, *self.net.input_shape)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    # -- stages ------------------------------------------------------------------------------------------------------

    def parameters(self) -> None:
        """Parameters that are finite to begin with (training may have led elsewhere)."""
        bad = [n for n, p in self.net.named_parameters() if not p.isfinite().all()]
        if bad:
            self.broken(f"parameters: '{bad[0]}' is not finite")
            self.stopped = True

    def freeze(self) -> None:
        self.bound, self.frozen = self.net.bound, self.net.frozen_map().double().eval().requires_grad_(False)

    def finite(self) -> None:
        """Outputs and gradients are finite; every parameter gets one."""
        x = torch.cat([scale * self.draw(2) for scale in (0.1, 1.0, 300.0)]).to(self.dtype)
        y = self.net(x.clone())
        if not y.isfinite().all():
            self.broken(f"finite: {int((~y.isfinite()).sum())} of {y.numel()} outputs are not")
            self.stopped = True
            return
        names, trained = zip(*[(n, p) for n, p in self.net.named_parameters() if p.requires_grad], strict=True)
        loss = (y * torch.randn(y.shape, generator=self.generator, dtype=y.dtype)).sum()
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        missing = [n for n, g in zip(names, found, strict=True) if g is None]
        wrong = [n for n, g in zip(names, found, strict=True) if g is not None and not g.isfinite().all()]
        if missing:
            self.report.violations.append(f"gradients: {missing} get none")
        if wrong:
            self.broken(f"gradients: not finite for {wrong}")

    def slopes(self) -> None:
        """Exact Jacobians of the frozen network, and of the live one's explicit weights, against all constants."""
        points = torch.cat([scale * self.draw(2) for scale in SCALES])
        self.single = self.net.output_bounds().flatten().clamp(max=self.net.declared_bound)
        self.pairs = self.net.pair_bounds()
        centred = {n: torch.zeros_like(p) for n, p in self.frozen.named_parameters() if n.endswith("bias")}
        self._compare("frozen", self.frozen, points)
        if centred:  # no constant depends on biases, and large ones would keep every activation on one side
            self._compare("frozen without biases", lambda x: functional_call(self.frozen, centred, (x,)), points)
        weights = {n: w.detach() for n, w in self.net.explicit().items()}
        if not isinstance(self.frozen, ldlt.Scaled) and all(
            type(w) in (Tensor, nn.Parameter) for w in weights.values()
        ):
            twin = copy.deepcopy(self.net.module).double()
            exact = {n: w.double() for n, w in weights.items()}
            self._compare("live", lambda x: functional_call(twin, exact, (x,)), points)

    def _compare(self, which: str, function: Callable[[Tensor], Tensor], points: Tensor) -> None:
        rows = jacobians(function, points)
        if not rows.isfinite().all():
            self.broken(f"{which}: Jacobian is not finite")
            return
        norm = float(torch.linalg.matrix_norm(rows, 2).max())
        self.report.steepest = max(self.report.steepest, norm / self.bound if self.bound else 0.0)
        each = rows.norm(dim=2).amax(0)
        pairs = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").amax(0)
        checks = [
            ("slope", torch.tensor(norm), torch.tensor(self.bound)),
            ("slope of output", each, self.single),
            ("slope of pair", pairs, self.pairs),
        ]
        # A constant may be zero, or that of two equal rows; a Jacobian then consists of its own rounding.
        least = 64 * torch.finfo(torch.float64).eps * self.net.declared_bound
        if all(bool((found <= limit * (1 + self.tolerance) + least).all()) for _, found, limit in checks):
            return
        again = jacobians(function, points, 1.2345)  # rounded in another way
        noise = ROUNDINGS * (rows - again).norm(dim=2).amax(0)
        spare = [noise.norm(), noise, noise[:, None] + noise]
        for (name, found, limit), more in zip(checks, spare, strict=True):
            excess = found - limit * (1 + self.tolerance) - least - more
            worst = int(torch.nan_to_num(excess, nan=math.inf).argmax())
            if not float(excess.flatten()[worst]) <= 0:
                self._exceeds(f"{which}: {name} {worst}", *(float(v.flatten()[worst]) for v in (found, limit)))

    def _exceeds(self, what: str, found: float, limit: float) -> None:
        excess = found / limit if limit else math.inf
        self.report.violations.append(f"{what} {found:.9g} above {limit:.9g}, ratio {excess:.12g}")

    def inequality(self) -> None:
        """The matrix inequality, from its definition."""
        if self.dtype == torch.float64:
            self.report.residual = ldlt.lmi.residual(self.net)
            if not self.report.residual >= LEAST_RESIDUAL:
                self.report.violations.append(f"inequality: residual {self.report.residual:.3g}")

    def reference(self) -> None:
        """The rule from its definition, with the explicit maps: no contraction is longer than one.

        The reference subtracts, I − UU', so that near the boundary its own rounding is what is seen, which is allowed
        for; the inequality, which subtracts nothing, is the sharper test.
        """
        if self.dtype != torch.float64:
            return
        net = self.net
        tau, weights = (self.bound / net.declared_bound) ** 2, net.explicit(torch.float64)  # scales ℓ² and Λ alike
        multipliers = {n: tau * m for n, m in net.multipliers(torch.float64).items()}
        maps = {
            a.name: w.matrix() if hasattr(w := weights[a.weight], "matrix") else a.matrix(w, net.graph)
            for a in net.graph.affines
        }
        try:
            norms = reference.check(net.graph, net.module, maps, multipliers, self.bound)
        except torch.linalg.LinAlgError:  # on the boundary, where the inequality above decides
            return
        norms["(output)"] *= net.output_gain(torch.float64)
        longest = max(norms, key=norms.__getitem__)
        apart = min((1 - norm for name, norm in norms.items() if name != "(output)"), default=1.0)
        unit = torch.finfo(torch.float64).eps
        rounding = 64 * unit / max(apart, unit) ** 1.5  # K has norm apart^{-1/2}; what leaks from it is εK³
        if not norms[longest] <= 1 + 1e-6 + rounding:
            self.report.violations.append(f"reference: the contraction of '{longest}' has norm {norms[longest]:.12g}")

    def agreement(self) -> None:
        """Live and frozen, alone and in a batch, training and evaluation; slopes between distant inputs."""
        half = torch.cat([scale * self.draw(4) for scale in (0.1, 1.0, 300.0)])
        steps = 10 ** torch.linspace(-3, 3, len(half), dtype=torch.float64)
        apart = half + torch.einsum("b,b...->b...", steps, self.draw(len(half)))
        x = torch.cat([half, apart]).to(self.dtype)
        with torch.no_grad():
            plain = self.frozen(x.double()).flatten(1)
            live = self.net(x.clone()).double().flatten(1)
            # The largest of the batch: a single sample may be rounded well by chance.
            rounded = copy.deepcopy(self.frozen).float()(x.float()).double().flatten(1)
            size = float((rounded - plain).norm(dim=1).max()) / torch.finfo(torch.float32).eps
            if not math.isfinite(size):  # out of the range of float32, which need not be that of the network
                return
            noise = {d: ROUNDINGS * size * torch.finfo(d).eps for d in TOLERANCE}
            allowed = AGREEMENT[self.dtype] * (self.bound * x.double().flatten(1).norm(dim=1) + plain.norm(dim=1))
            allowed = allowed + noise[self.dtype]
            self._same("live and frozen", live, plain, allowed)
            alone = torch.cat([self.frozen(row[None].double()).flatten(1) for row in x[:3]])
            self._same("frozen alone and in a batch", alone, plain, allowed)
            self._same("live alone and in a batch", self.net(x[:1].clone()).double().flatten(1), live, allowed)
            with _unchanged(self.net):
                first, second = (self.net.train()(x.clone()).double().flatten(1) for _ in range(2))
            self.net.eval()
            if torch.equal(first, second):  # no dropout or the like
                self._same("training and evaluation", first, live, allowed)
        distance = (x[: len(half)] - x[len(half) :]).double().flatten(1).norm(dim=1)
        for which, y, dtype in (("live", live, self.dtype), ("frozen", plain, torch.float64)):
            rise = (y[: len(half)] - y[len(half) :]).norm(dim=1)
            excess = rise - self.bound * (1 + self.tolerance) * distance
            worst = int(excess.argmax())
            if not float(excess[worst]) <= 2 * noise[dtype]:
                self._exceeds(f"{which}: rise between inputs", float(rise[worst]), self.bound * float(distance[worst]))

    def _same(self, what: str, found: Tensor, expected: Tensor, allowed: Tensor) -> None:
        gap = (found - expected[: len(found)]).norm(dim=1)
        worst = int((gap / allowed[: len(found)]).argmax())
        if not bool(gap[worst] <= allowed[worst]):
            self.report.violations.append(
                f"{what} differ by {float(gap[worst]):.3g} where {float(allowed[worst]):.3g} is allowed"
            )


def strained(net: ldlt.Lipschitz) -> bool:
    """Whether the maps that a network leaves as they are have a product whose square is out of the dtype's range.

    Frozen, tied and transported weights are the user's own numbers: nothing normalises them.
    """
    twin = copy.deepcopy(net)
    PARAMETERS["normal"](twin, torch.Generator().manual_seed(0))
    try:
        explicit = twin.explicit()
    except Exception:  # then the numbers of the user are not what is wrong
        return False
    drawn, now = dict(twin.module.named_parameters()), dict(net.module.named_parameters())
    kept = [n for n, p in drawn.items() if type(explicit[n]) in (Tensor, nn.Parameter) and torch.equal(explicit[n], p)]
    norms = {n: float(now[n].detach().double().norm()) for n in kept}
    graph = net.graph
    read = Counter(p for n in graph.nodes if isinstance(n, Wire) for c in n.constants for p in graph.sources(c))
    decades = sum(max(1, read[n]) * abs(math.log10(v)) for n, v in norms.items() if v > 0 and not n.endswith("bias"))
    decades += math.log10(max([1.0, *(v for n, v in norms.items() if n.endswith("bias"))]))
    return not decades < math.log10(torch.finfo(next(iter(now.values())).dtype).max) / 2


def check_module(
    module: nn.Module,
    input_shape: int | Sequence[int],
    *,
    kinds: Iterable[str] = tuple(PARAMETERS),
    seed: int = 0,
    **options: Any,
) -> Report:
    """Make a network of a module and check it at all kinds of parameters.

    Args:
        module: Becomes a part of the network.
        input_shape: As for :class:`ldlt.Lipschitz`.
        kinds: Names in :data:`~ldlt.testing.PARAMETERS`.
        seed: Of parameters and points.
        **options: Further arguments of :class:`ldlt.Lipschitz`.
    """
    report = Report()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            net = ldlt.Lipschitz(module, input_shape=input_shape, **options)
        except ldlt.LdltError as error:
            report.refusal = f"{type(error).__name__}: {error}"
            return report
        except Exception as error:
            report.violations.append(f"construction: foreign exception {type(error).__name__}: {error}")
            return report
        for kind in kinds:
            check = _Check(net, seed)
            with _unchanged(net):
                with check.guard("setting"):
                    PARAMETERS[kind](net, torch.Generator().manual_seed(seed))
                report.include(check.run(), kind)
    return report


@contextlib.contextmanager
def _unchanged(net: nn.Module) -> Iterator[None]:
    """Parameters and buffers are restored."""
    tensors = [*net.parameters(), *net.buffers()]
    kept = [t.detach().clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(tensors, kept, strict=True):
                tensor.copy_(old)


def check_certificate(
    module: nn.Module, input_shape: int | Sequence[int], *, time_limit: float = 2.0, seed: int = 0
) -> Report:
    """Certify a plain module with the weights it has, and look for slopes above the bound; the certificate is verified.

    Args:
        module: The module, in evaluation mode.
        input_shape: Shape of one sample.
        time_limit: Seconds for the search.
        seed: Of the points that are tried.
    """
    report = Report()
    module = module.eval()
    try:
        found = ldlt.certify(module, input_shape, time_limit=time_limit)
        if found.status == "certified":
            ldlt.verify(found, module)
    except ldlt.LdltError as error:
        report.refusal = f"{type(error).__name__}: {error}"
        return report
    except Exception as error:
        report.violations.append(f"foreign exception {type(error).__name__}: {str(error)[:300]}")
        return report
    if found.status != "certified":
        report.refusal = f"not certified: {found.reason}"
        return report
    shape = (input_shape,) if isinstance(input_shape, int) else tuple(input_shape)
    generator = torch.Generator().manual_seed(seed)
    exact = copy.deepcopy(module).double().requires_grad_(False)
    for scale in SCALES:
        rows = jacobians(exact, scale * torch.randn(3, *shape, generator=generator, dtype=torch.float64))
        if rows.isfinite().all():
            norm = float(torch.linalg.matrix_norm(rows, 2).max())
            report.steepest = max(report.steepest, norm / found.bound if found.bound else float(norm > 0))
            if not norm <= found.bound * (1 + TOLERANCE[torch.float64]):
                kind = "proven" if found.rigorous else "stated"
                report.violations.append(f"slope {norm:.9g} above the {kind} bound {found.bound:.9g} ({found.method})")
    return report


# -- many of them ------------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """What was found about many modules.

    Attributes:
        modules: How many were drawn.
        accepted: How many became networks.
        refusals: Reasons, without names and numbers, and how often each was given.
        violations: Seed and text.
        overflows: Seed and text.
        declined: Seed and text.
        used: How many accepted modules have a move.
        steepest: Largest slope relative to its bound.
    """

    modules: int = 0
    accepted: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)
    overflows: list[tuple[int, str]] = field(default_factory=list)
    declined: list[tuple[int, str]] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)
    steepest: float = 0.0

    def add(self, drawn: Hostile, report: Report) -> None:
        """Count one module."""
        self.modules += 1
        if report.refusal is None:
            self.accepted += 1
            self.used.update(set(drawn.moves))
        else:
            self.refusals[re.sub(r"'[^']*'|\([^)]*\)|[\d.]+", "·", report.refusal)[:100]] += 1
        for name in ("violations", "overflows", "declined"):
            getattr(self, name).extend((drawn.seed, text) for text in getattr(report, name))
        self.steepest = max(self.steepest, report.steepest)

    def __str__(self) -> str:
        lines = [f"{self.modules} modules, {self.accepted} accepted, steepest {self.steepest:.9g} of its bound"]
        lines += [f"refused {count:6d}  {reason}" for reason, count in self.refusals.most_common()]
        rare = sorted(m.name for m in drawn_moves() if not self.used[m.name])
        lines += [f"moves in no accepted module: {', '.join(rare)}"] if rare else []
        for name in ("overflows", "declined", "violations"):
            found = getattr(self, name)
            lines += [f"{name}: {len(found)} in {len({seed for seed, _ in found})} modules"]
            lines += [f"  seed {seed}: {text}" for seed, text in (found if name == "violations" else found[:10])]
        return "\n".join(lines)


def run_hostile(seeds: Iterable[int], kinds: Sequence[str] | int = tuple(PARAMETERS)) -> Summary:
    """Draw and check a module for each seed.

    Args:
        seeds: Which modules.
        kinds: Kinds of parameters; a number takes that many for each module, by its seed.

    Raises:
        OptionError: A seed is no number, or there is no such kind.
    """
    known = 0 < kinds < len(PARAMETERS) if isinstance(kinds, int) else bool(kinds) and set(kinds) <= set(PARAMETERS)
    if not known:
        raise OptionError(f"kinds must be some of {', '.join(PARAMETERS)}, or how many of them; got {kinds!r}")

    def check(drawn: Hostile) -> Report:
        chosen = pick_kinds(drawn.seed, kinds) if isinstance(kinds, int) else kinds
        return check_module(drawn.module, drawn.input_shape, kinds=chosen, seed=drawn.seed, **drawn.options)

    return _run(seeds, check)


def run_certificates(seeds: Iterable[int]) -> Summary:
    """Draw a module for each seed, set its parameters to one kind, and check its certificate.

    Args:
        seeds: Which modules.

    Raises:
        OptionError: A seed is no number.
    """

    def check(drawn: Hostile) -> Report:
        kind = pick_kinds(drawn.seed, 1)[0]
        if kind not in ("trained", "loaded"):
            PARAMETERS[kind](drawn.module, torch.Generator().manual_seed(drawn.seed))
        return check_certificate(drawn.module, drawn.input_shape, seed=drawn.seed)

    return _run(seeds, check)


def _run(seeds: Iterable[int], check: Callable[[Hostile], Report]) -> Summary:
    """What is found about the modules of some seeds."""
    if not isinstance(seeds, Iterable):
        raise OptionError(f"seeds must be numbers, such as range(10), not {seeds!r}")
    summary = Summary()
    for seed in seeds:
        if type(seed) is not int:
            raise OptionError(f"a seed must be a whole number, not {seed!r}")
        drawn = hostile_module(seed)
        summary.add(drawn, check(drawn))
    return summary
