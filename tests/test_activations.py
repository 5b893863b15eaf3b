"""Slope bounds against autograd, refusals, call forms, the registry, and the table in the documentation."""

from __future__ import annotations

import copy
import doctest
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import ldlt
from ldlt import activations
from ldlt.activations import (
    ELEMENTWISE,
    MIN_RELATIVE_RADIUS,
    TABLE,
    Abs,
    Atan,
    Clamp,
    Cos,
    GroupSort,
    MaxMin,
    Sector,
    Sin,
    enclose,
    is_activation,
    learned_sector,
    register,
    sector,
    slope_bounds,
    slope_range,
)  # fmt: skip
from ldlt.errors import GraphError, OptionError, ShapeError, SlopeError, UnsupportedOpError
from ldlt.graph.trace import trace


def prelu(weights: list[float]) -> nn.PReLU:
    module = nn.PReLU(len(weights), dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weights, dtype=torch.float64))
    return module


CLOSED = [
    (nn.Identity(), (1, 1)), (nn.Sigmoid(), (0, 0.25)), (nn.Hardsigmoid(), (0, 1 / 6)), (nn.Hardswish(), (-0.5, 1.5)),
    (nn.ELU(2.5), (0, 2.5)), (nn.ELU(0.0), (0, 1)), (nn.ELU(-0.5), (-0.5, 1)), (nn.LeakyReLU(-0.5), (-0.5, 1)),
    (nn.LeakyReLU(1.5), (1, 1.5)), (prelu([0.25]), (0.25, 1)), (prelu([-0.5, 3.0, 0.25]), (-0.5, 3)),
    (nn.RReLU(0.5, 0.5), (0.5, 1)), (nn.CELU(0.125), (0, 1)), (nn.Softplus(-3.0), (0, 1)), (nn.Softplus(1, 14), (0, 1)),
    (nn.GELU(), ((1 - math.erf(1)) / 2 - 1 / (math.e * math.sqrt(math.pi)),
                 (1 + math.erf(1)) / 2 + 1 / (math.e * math.sqrt(math.pi)))),
    (nn.SELU(), (0, 1.7580993408473768)), (nn.Softshrink(0.0), (1, 1)), (nn.Hardshrink(0.0), (1, 1)),
    (nn.Threshold(0.5, 0.5), (0, 1)), (Clamp(1.0, 1.0), (0, 0)), (Clamp(2.0, 1.0), (0, 0)), (Clamp(min=2.0), (0, 1)),
    (Clamp(-math.inf, math.inf), (1, 1)), (nn.Hardtanh(0.0, math.inf), (0, 1)), (nn.Softshrink(0.75), (0, 1)),
]  # fmt: skip


def known() -> list[nn.Module]:
    """The cases of the table, and those above."""
    modules = [cls(**case) for cls in ELEMENTWISE for case in TABLE[cls].cases if cls is not nn.RReLU]
    return [m.double() for m in (*modules, *(m for m, _ in CLOSED)) if m.training]


def derivative(module: nn.Module, x: np.ndarray) -> np.ndarray:
    """Derivative by autograd in float64; one column per channel of a PReLU."""
    v = torch.from_numpy(x).reshape(-1, 1)
    if isinstance(module, nn.Hardsigmoid):  # its backward multiplies by 1/6 in float32; differences of σ are exact
        return ((module(v + 2**-10) - module(v - 2**-10)) / 2**-9).numpy()
    if isinstance(module, nn.PReLU):
        v = v.repeat(1, module.weight.numel())
    v.requires_grad_()
    y = module(v)
    return torch.autograd.grad(y.sum(), v)[0].numpy() if y.requires_grad else np.zeros(v.shape)


def grid(module: nn.Module) -> np.ndarray:
    """Dense near 0, geometric towards infinity and towards every kink, but on none of them."""
    numbers = [float(a) for a in vars(module).values() if isinstance(a, int | float) and math.isfinite(a)]
    if isinstance(module, nn.Softplus):
        numbers.append(module.threshold / module.beta)
    kinks = {0.0, 3.0, *numbers}
    kinks |= {-k for k in kinks}
    steps = np.geomspace(1e-11, 1e9, 401)
    x = [np.linspace(-12, 12, 6001) + 1e-3 / math.pi, steps, -steps]
    x += [k + s * steps[:221] for k in kinks for s in (-1, 1)]
    return np.setdiff1d(np.concatenate(x), list(kinks))


def extremes(module: nn.Module) -> tuple[float, float]:
    """Numerical infimum and supremum of the derivative: grid, then local refinement around the best point."""
    x = grid(module)
    d = derivative(module, x)
    assert np.isfinite(d).all()
    found = []
    for sign, values in ((1, d.min(axis=1)), (-1, d.max(axis=1))):
        i = int(np.argmin(sign * values))
        near = (x[max(i - 1, 0)], x[min(i + 1, len(x) - 1)])

        def objective(t: float, sign: int = sign) -> float:
            return float((sign * derivative(module, np.array([t]))).min())

        best = minimize_scalar(objective, bounds=near, method="bounded", options={"xatol": 1e-11})
        found.append(sign * min(best.fun, sign * values[i]))
    return found[0], found[1]


@pytest.mark.parametrize("module", known(), ids=lambda module: type(module).__name__)
def test_bounds_are_the_extremes_of_the_derivative(module: nn.Module) -> None:
    """Neither a slope outside, which the cases of the conformance suite try too, nor room to spare."""
    try:
        low, high = slope_bounds(module)
    except SlopeError:
        return
    assert extremes(module) == pytest.approx((low, high), abs=1e-9)
    found = sector(module, 4 if not isinstance(module, nn.PReLU) else module.weight.numel())
    center, radius = (torch.as_tensor(v, dtype=torch.float64) for v in (found.center, found.radius))
    assert found.group is None
    assert (center - radius).min() <= low + 1e-12
    assert (center + radius).max() >= high - 1e-12
    assert (radius > 0).all()
    assert torch.isfinite(torch.as_tensor(found.rho)).all()
    if high - low > 0.05 * max(abs(low), abs(high)) and not isinstance(module, nn.PReLU):
        assert (found.center, found.radius) == ((high + low) / 2, (high - low) / 2)


@pytest.mark.parametrize(("module", "expected"), CLOSED)
def test_closed_forms(module: nn.Module, expected: tuple[float, float]) -> None:
    found = slope_bounds(module)
    assert all(type(bound) is float for bound in found)
    assert found == pytest.approx(expected, rel=1e-15, abs=1e-16)


@pytest.mark.parametrize(("lower", "upper"), [(0.125, 1 / 3), (-1.0, 0.5), (0.5, 2.0)])
def test_rrelu_covers_training_and_evaluation(lower: float, upper: float) -> None:
    module = nn.RReLU(lower, upper)
    low, high = slope_bounds(module)
    x = grid(module)
    torch.manual_seed(0)
    drawn = derivative(module.train(), x)
    assert low <= drawn.min()
    assert drawn.max() <= high
    assert {drawn.min(), drawn.max()} != {1.0}
    assert min(abs(drawn - lower).min(), abs(drawn - upper).min()) < 1e-2
    still = derivative(module.eval(), x)
    assert set(still.ravel()) == {1.0, (lower + upper) / 2}
    assert slope_bounds(module) == (low, high)


# --------------------------------------------------------------------------------------------------- refusals


def gelu(approximate: str) -> nn.GELU:
    module = nn.GELU()
    module.approximate = approximate
    return module


REFUSED = [
    gelu("fast"), nn.CELU(-1.0), nn.CELU(0.0), nn.Hardshrink(), nn.Softshrink(-0.5), nn.Threshold(0.0, 1.0),
    nn.Softplus(1.0, 5.0),
    nn.Softplus(1.0, -1000.0), nn.Softplus(beta=0.0), nn.Softplus(threshold=200.0), nn.ELU(math.nan),
    nn.LeakyReLU(math.inf), nn.LeakyReLU(torch.tensor(0.5)), prelu([0.5, math.nan]), nn.RReLU(math.nan, 0.5),
    Clamp(min=math.nan), nn.LogSoftmax(dim=1), nn.Softmin(dim=1), nn.Softmax2d(), nn.GLU(), nn.MultiheadAttention(4, 1),
    nn.Linear(2, 2), nn.Sequential(nn.ReLU()), nn.Softmax(dim=1), GroupSort(2), MaxMin(),
]  # fmt: skip


@pytest.mark.parametrize("module", REFUSED, ids=lambda value: type(value).__name__)
def test_refusals_name_the_class(module: nn.Module) -> None:
    with pytest.raises(SlopeError, match=type(module).__name__):
        slope_bounds(module)
    if not isinstance(module, GroupSort | MaxMin | nn.Softmax | nn.PReLU):
        with pytest.raises(SlopeError, match=type(module).__name__):
            sector(module)


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 5.0), (2.0, 3.0), (0.5, -1.0), (-1.0, 4.0)])
def test_softplus_is_refused_where_its_jump_shows(beta: float, threshold: float) -> None:
    """The documented reason: at the switch the function falls by log1p(exp(-threshold))/beta."""
    module = nn.Softplus(beta, threshold)
    at = torch.tensor(threshold / beta, dtype=torch.float64)
    side = math.copysign(1e-12, beta)
    fall = float((module(at - side) - module(at + side)).abs())
    assert fall == pytest.approx(math.log1p(math.exp(-threshold)) / abs(beta), rel=1e-6)
    with pytest.raises(SlopeError, match=f"{fall:.2g}"):
        slope_bounds(module)
    assert slope_bounds(nn.Softplus(1.0, 14.0)) == (0.0, 1.0)


@pytest.mark.parametrize("function", [slope_bounds, sector])
def test_classes_and_other_objects_are_not_modules(function) -> None:
    for wrong in (nn.ReLU, "relu", torch.relu):
        with pytest.raises(OptionError):
            function(wrong)


ARGUMENTS = {
    "Threshold": (0.0, 0.0),
    "Softmax": (1,),
    "LogSoftmax": (1,),
    "Softmin": (1,),
    "MultiheadAttention": (4, 1),
}


@pytest.mark.parametrize("name", torch.nn.modules.activation.__all__)
def test_every_activation_of_torch_has_a_rule(name: str) -> None:
    """A new one in a future PyTorch must get a bound or a reason."""
    module = getattr(nn, name)(*ARGUMENTS.get(name, ()))
    if type(module) in ELEMENTWISE and name != "Hardshrink":
        low, high = slope_bounds(module)
        assert low <= high
        assert is_activation(module)
    else:
        with pytest.raises(SlopeError, match=f"^{name}") as caught:
            slope_bounds(module)
        assert "known slope bounds" not in str(caught.value), f"torch.nn.{name} is new: derive its slopes"


# ------------------------------------------------------------------------------------ subclasses and registry


class Gentle(nn.LeakyReLU):
    def __init__(self) -> None:
        super().__init__(0.75)


class Steep(nn.ReLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 5 * super().forward(input)


class Pairs(MaxMin):
    pass


def test_a_subclass_inherits_bounds_only_with_the_forward() -> None:
    assert slope_bounds(Gentle()) == (0.75, 1.0)
    assert is_activation(Gentle())
    assert is_activation(Pairs())
    assert not is_activation(Steep())
    assert sector(Pairs()).group == 2
    with pytest.raises(SlopeError, match="Steep overrides the forward of ReLU"):
        slope_bounds(Steep())
    patched = nn.ReLU()
    patched.forward = lambda x: 5 * x  # type: ignore[method-assign]
    with pytest.raises(SlopeError, match="overrides the forward"):
        slope_bounds(patched)


@pytest.fixture
def registry():
    kept = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(kept)


class Scaled(nn.Module):
    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x.tanh()


@pytest.mark.usefixtures("registry")
def test_register_as_a_call_and_as_a_decorator() -> None:
    with pytest.raises(SlopeError, match="Scaled"):
        slope_bounds(Scaled(3.0))
    assert not is_activation(Scaled(3.0))

    def bounds(module: Scaled) -> tuple[float, float]:
        return 0.0, module.gain

    assert register(Scaled, bounds) is bounds
    assert is_activation(Scaled(3.0))
    assert sector(Scaled(3.0)) == Sector(1.5, 1.5, None)
    assert register(Scaled)(lambda module: (-1, 4))(Scaled()) == (-1, 4)
    assert slope_bounds(Scaled(3.0)) == (-1.0, 4.0)
    register(Scaled, lambda module: (0.0, 0.0))
    assert sector(Scaled(0.0)).rho == 0.0


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "value", [(1.0, 0.0), (0.0, math.inf), (math.nan, 1.0), 1.0, (0.0, 1.0, 2.0), ("low", "high"), None]
)
def test_registered_bounds_are_checked_on_use(value: object) -> None:
    register(Scaled, lambda module: value)
    for function in (slope_bounds, sector):
        with pytest.raises(SlopeError, match="Scaled"):
            function(Scaled(1.0))


WRONG = [
    (nn.ReLU, {}), (GroupSort, {}), (nn.Softmax, {}), (nn.GLU, {}), (nn.ReLU(), {}), (int, {}), ("Scaled", {}),
    (Scaled, {"bounds": (0.0, 1.0)}), (Scaled, {"slopes_on": 1.0}), (Scaled, {"enclose": "x"}),
    (Scaled, {"calls": ["erf"]}), (Scaled, {"calls": "relu"}), (Scaled, {"calls": "no_function_of_torch"}),
    (Scaled, {"cases": "gain"}), (Scaled, {"cases": [1.0]}),
]  # fmt: skip


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("cls", "options"), WRONG)
def test_register_refuses_what_it_cannot_take(cls: object, options: dict) -> None:
    with pytest.raises(OptionError):
        register(cls, **({"bounds": lambda module: (0.0, 1.0)} | options))  # type: ignore[arg-type]
    assert Scaled not in TABLE


class Erf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.erf(x)


@pytest.mark.usefixtures("registry")
def test_a_registered_activation_is_known_where_it_is_called() -> None:
    assert activations.maker("erf") is None
    register(Erf, lambda module: (0.0, 2 / math.sqrt(math.pi)), enclose=lambda m, x, f: f.erf(x), calls="erf")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.erf(self.first(x)))

    net = ldlt.Lipschitz(Net().double(), input_shape=3)
    assert [type(a.module) for a in net.graph.activations] == [Erf]
    assert ldlt.lmi.residual(net) > -1e-9


# -- slopes on intervals and enclosures --------------------------------------------------------------------------------


def test_what_is_not_known_on_intervals_is_known_everywhere() -> None:
    bounds = torch.zeros(1), torch.ones(1)
    for module in (Scaled(), Steep()):
        assert slope_range(module, torch.ones(1), torch.ones(1), bounds) == bounds
        with pytest.raises(GraphError):
            enclose(module, torch.ones(1), None)  # type: ignore[arg-type]
    for low, high in ((math.nan, 1.0), (2.0, 1.0), (-math.inf, 0.0)):
        ends = torch.tensor([low]).double(), torch.tensor([high]).double()
        assert slope_range(nn.ReLU(), *ends, bounds) == bounds


# ---------------------------------------------------------------------------------------------------- sectors


def test_sector_of_relu() -> None:
    found = sector(nn.ReLU())
    assert (found, found.rho) == (Sector(0.5, 0.5, None), 1.0)


@pytest.mark.parametrize("module", [nn.LeakyReLU(1.0), nn.LeakyReLU(0.999), nn.PReLU(init=1.0), nn.Identity()])
def test_a_nearly_linear_sector_is_widened(module: nn.Module) -> None:
    found = sector(module.requires_grad_(False))
    assert float(found.radius) == pytest.approx(MIN_RELATIVE_RADIUS)
    assert float(found.rho) == pytest.approx(1 / MIN_RELATIVE_RADIUS, rel=1e-3)


def test_sector_of_prelu_is_differentiable_and_per_channel() -> None:
    module = prelu([0.25, -0.5, 3.0])
    found = sector(module, 3)
    assert found.center.tolist() == [0.625, 0.25, 2.0]
    assert found.radius.tolist() == [0.375, 0.75, 1.0]
    (gradient,) = torch.autograd.grad(found.center.sum(), module.weight, retain_graph=True)
    assert gradient.tolist() == [0.5, 0.5, 0.5]
    (gradient,) = torch.autograd.grad(found.radius.sum(), module.weight)
    assert gradient.tolist() == [-0.5, -0.5, 0.5]
    assert torch.autograd.gradcheck(lambda w: learned_sector(w).rho, module.weight)
    assert sector(prelu([0.25]), 7).center.shape == (1,)
    with pytest.raises(ShapeError, match=r"3 slopes.*4 channels"):
        sector(module, 4)


def test_sector_of_a_linear_prelu_has_finite_gradients() -> None:
    module = prelu([1.0, 1.0 + 1e-9])
    (gradient,) = torch.autograd.grad(sector(module).rho.sum(), module.weight)
    assert torch.isfinite(gradient).all()


def test_bounds_follow_the_current_weight_of_prelu() -> None:
    module = nn.PReLU()
    assert slope_bounds(module) == (0.25, 1.0)
    with torch.no_grad():
        module.weight.fill_(-2.0)
    assert slope_bounds(module) == (-2.0, 1.0)

    class Half(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w / 2

    parametrize.register_parametrization(module, "weight", Half())
    assert slope_bounds(module) == (-1.0, 1.0)
    assert sector(module).center.requires_grad


# ------------------------------------------------------------------------------------------------------ calls

CALLS = [
    (torch.relu, nn.ReLU), (F.relu, nn.ReLU), (F.relu6, nn.ReLU6), (lambda x: F.elu(x, 0.5), nn.ELU),
    (lambda x: F.elu(x, alpha=-0.5), nn.ELU), (lambda x: torch.celu(x, alpha=2.0), nn.CELU), (F.selu, nn.SELU),
    (F.gelu, nn.GELU), (lambda x: F.gelu(x, approximate="tanh"), nn.GELU), (F.silu, nn.SiLU), (F.mish, nn.Mish),
    (F.hardsigmoid, nn.Hardsigmoid), (F.hardswish, nn.Hardswish), (lambda x: F.hardtanh(x, max_val=0.25), nn.Hardtanh),
    (lambda x: torch.hardshrink(x, lambd=0.0), nn.Hardshrink), (lambda x: F.leaky_relu(x, 0.3), nn.LeakyReLU),
    (F.logsigmoid, nn.LogSigmoid), (lambda x: F.rrelu(x, 0.25, 0.5), nn.RReLU), (torch.sigmoid, nn.Sigmoid),
    (torch.special.expit, nn.Sigmoid), (lambda x: F.softplus(x, threshold=30, beta=2.0), nn.Softplus),
    (lambda x: F.softshrink(x, lambd=0.25), nn.Softshrink), (F.softsign, nn.Softsign), (torch.tanh, nn.Tanh),
    (F.tanhshrink, nn.Tanhshrink), (lambda x: F.threshold(x, 0.5, 0.5), nn.Threshold), (abs, Abs),
    (lambda x: x.absolute(), Abs), (torch.sin, Sin), (lambda x: x.cos(), Cos), (torch.arctan, Atan),
    (lambda x: torch.clamp(x, -0.5, 1), Clamp), (lambda x: x.clip(max=0.5), Clamp), (lambda x: x.clamp_min(0.5), Clamp),
    (lambda x: torch.clamp_max(x, 0.5), Clamp), (lambda x: x.clamp(0.5, -0.5), Clamp),
    (lambda x: F.softmax(x, 1), nn.Softmax), (lambda x: x.softmax(-1), nn.Softmax),
]  # fmt: skip
IN_PLACE = [
    (torch.relu_, nn.ReLU), (lambda x: F.elu_(x, 0.7), nn.ELU), (lambda x: x.tanh_(), nn.Tanh), (torch.cos_, Cos),
    (lambda x: F.leaky_relu(x, negative_slope=0.3, inplace=True), nn.LeakyReLU), (lambda x: x.clamp_(max=1.0), Clamp),
    (lambda x: F.hardtanh_(x, -0.5, 2.0), nn.Hardtanh), (lambda x: x.abs_(), Abs), (nn.SiLU(inplace=True), nn.SiLU),
]  # fmt: skip


class Calls(nn.Module):
    def __init__(self, calls) -> None:
        super().__init__()
        self.calls, self.weight = calls, nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([call(x * self.weight) for call in self.calls], 1)


@pytest.mark.parametrize("calls", [CALLS, IN_PLACE], ids=["functions", "in place"])
def test_calls_are_their_module(calls: list) -> None:
    """The graph is run beside the functions before it is given out."""
    graph = trace(Calls([call for call, _ in calls]).eval(), (4,))
    assert [type(node.module) for node in graph.activations] == [kind for _, kind in calls]


def test_every_functional_of_an_elementwise_class_is_known() -> None:
    names = {name.replace("_", ""): name for name in dir(F) if not name.endswith("_")}
    for cls in ELEMENTWISE:
        if cls.__module__.startswith("torch") and cls is not nn.Identity:
            assert names[cls.__name__.lower()] in TABLE[cls].names


@pytest.mark.parametrize(
    "call",
    [
        torch.exp, F.hardshrink, F.glu, lambda x: F.threshold(x, 0.5, 0.25), lambda x: F.log_softmax(x, 1),
        lambda x: F.prelu(x, torch.full((1,), 0.5)), lambda x: x.clamp(min=torch.zeros(4)),
        lambda x: F.softmax(x, 0), lambda x: F.softplus(x, 1.0, 5.0),
    ],
)  # fmt: skip
def test_calls_without_bounded_slopes_are_refused(call) -> None:
    with pytest.raises(UnsupportedOpError):
        trace(Calls([call]).eval(), (4,))


# --------------------------------------------------------------------------------------- joint nonlinearities


@pytest.mark.parametrize("module", [GroupSort(1), GroupSort(3), GroupSort(12), MaxMin()], ids=repr)
@pytest.mark.parametrize("shape", [(5, 12), (3, 12, 4), (2, 24, 3, 2)])
def test_joint_modules_sort_their_groups(module: nn.Module, shape: tuple[int, ...]) -> None:
    x, found = torch.randn(shape, dtype=torch.float64), sector(module, shape[1])
    assert (found.center, found.radius, found.rho) == (0.0, 1.0, 0.0)
    out = module(x).unflatten(1, (-1, found.group))
    order = out if isinstance(module, GroupSort) else out.flip(2)
    assert torch.equal(order, x.unflatten(1, (-1, found.group)).sort(dim=2).values)


def test_joint_modules_refuse_shapes_that_do_not_divide() -> None:
    for module, shape in [(GroupSort(3), (2, 7)), (MaxMin(), (2, 7, 4)), (MaxMin(), (4,))]:
        with pytest.raises(ShapeError, match=type(module).__name__):
            module(torch.zeros(shape))
    for module in (GroupSort(3), MaxMin()):
        with pytest.raises(ShapeError, match="do not divide"):
            sector(module, 7)
    for wrong in (0, -2, 2.0, True, "2"):
        with pytest.raises(OptionError, match="group_size"):
            GroupSort(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="min"):
        Clamp()


def test_the_jacobian_of_maxmin_is_a_permutation_with_ties_and_with_transforms():
    x = torch.tensor([[1.0, 2.0, 4.0, 3.0, 5.0, 5.0, -0.0, 0.0]], dtype=torch.float64)
    (found,) = torch.func.jacrev(MaxMin())(x).reshape(1, 8, 8)
    assert torch.equal(found @ found.T, torch.eye(8, dtype=torch.float64))  # a tie, too, is one order or the other
    assert torch.equal(found @ x[0], MaxMin()(x)[0])
    point = x.clone().requires_grad_()
    rows = [torch.autograd.grad(MaxMin()(point)[0, k], point)[0][0] for k in range(8)]
    assert torch.equal(torch.stack(rows), found)
    distinct = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(MaxMin(), distinct)
    assert torch.autograd.gradgradcheck(MaxMin(), distinct)


@pytest.mark.parametrize("module", [GroupSort(2), MaxMin(), Abs(), Sin(), Cos(), Atan(), Clamp(min=0.0)])
def test_modules_copy_and_pickle(module: nn.Module) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert repr(other) == repr(module)
        assert sector(other) == sector(module)
    assert module(torch.zeros(0, 4)).shape == (0, 4)


# ---------------------------------------------------------------------------------------------- documentation

DOCS = Path(__file__).parents[1] / "docs" / "activations.md"


def test_the_table_in_the_documentation_is_computed() -> None:
    """Columns 3 and 4 of each row are slope_bounds of the module in column 1, to the digits shown."""
    seen = set()
    names = {"nn": nn, "math": math, **{name: getattr(activations, name) for name in activations.__all__}}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| `(?P<code>[^`]+)` \|[^|]*\| (?P<low>[^|]+) \| (?P<high>[^|]+) \|", line)
        if row is None:
            continue
        module = eval(row["code"], names)
        seen.add(type(module))
        if row["low"] == row["high"] == "refused":
            with pytest.raises(SlopeError):
                slope_bounds(module)
            continue
        for text, bound in zip((row["low"], row["high"]), slope_bounds(module), strict=True):
            digits = len(text.partition(".")[2])
            assert float(text.replace("−", "-")) == pytest.approx(bound, abs=0.5001 * 10**-digits), line
    assert seen == set(ELEMENTWISE)


@pytest.mark.usefixtures("registry")
def test_examples_in_docstrings_and_documentation() -> None:
    for result in (doctest.testmod(activations), doctest.testfile(str(DOCS), module_relative=False)):
        assert result.attempted > 4
        assert result.failed == 0
