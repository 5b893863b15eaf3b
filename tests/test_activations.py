"""Slope bounds against autograd, refusals, call forms, the registry, and the table in the documentation."""

from __future__ import annotations

import builtins
import copy
import doctest
import math
import operator
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import fx, nn
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
    from_call,
    is_activation,
    register,
    sector,
    slope_bounds,
    slope_range,
)
from ldlt.errors import GraphError, OptionError, ShapeError, SlopeError

SETTINGS = settings(max_examples=8, deadline=None)


def prelu(weights: list[float]) -> nn.PReLU:
    module = nn.PReLU(len(weights), dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weights, dtype=torch.float64))
    return module


def hardtanh(low: float, width: float) -> nn.Hardtanh:
    return nn.Hardtanh(low, low + width)


def real(low: float, high: float) -> st.SearchStrategy[float]:
    """Multiples of 1/1024: exact in float32, to which PyTorch rounds alpha in the backward of CELU."""
    return st.integers(math.ceil(1024 * low), math.floor(1024 * high)).map(lambda k: k / 1024)


STRATEGIES: dict[type[nn.Module], st.SearchStrategy[nn.Module]] = {
    nn.CELU: st.builds(nn.CELU, real(0.05, 10)),
    nn.ELU: st.builds(nn.ELU, real(-3, 3)),
    nn.GELU: st.builds(nn.GELU, st.sampled_from(["none", "tanh"])),
    nn.Hardshrink: st.builds(nn.Hardshrink, st.just(0.0)),
    nn.Hardsigmoid: st.builds(nn.Hardsigmoid),
    nn.Hardswish: st.builds(nn.Hardswish),
    nn.Hardtanh: st.builds(hardtanh, real(-5, 5), real(0.01, 5)),
    nn.Identity: st.builds(nn.Identity),
    nn.LeakyReLU: st.builds(nn.LeakyReLU, real(-2, 3)),
    nn.LogSigmoid: st.builds(nn.LogSigmoid),
    nn.Mish: st.builds(nn.Mish),
    nn.PReLU: st.builds(prelu, st.lists(real(-2, 3), min_size=1, max_size=4)),
    nn.ReLU: st.builds(nn.ReLU),
    nn.ReLU6: st.builds(nn.ReLU6),
    # one slope only, so that training and evaluation agree; the others have their own test
    nn.RReLU: real(-2, 3).map(lambda a: nn.RReLU(a, a)),
    nn.SELU: st.builds(nn.SELU),
    nn.SiLU: st.builds(nn.SiLU),
    nn.Sigmoid: st.builds(nn.Sigmoid),
    nn.Softplus: st.builds(nn.Softplus, real(0.1, 5) | real(-5, -0.1), real(20, 80)),
    nn.Softshrink: st.builds(nn.Softshrink, st.just(0.0) | real(0.01, 3)),
    nn.Softsign: st.builds(nn.Softsign),
    nn.Tanh: st.builds(nn.Tanh),
    nn.Tanhshrink: st.builds(nn.Tanhshrink),
    nn.Threshold: real(-3, 3).map(lambda t: nn.Threshold(t, t)),
    Abs: st.builds(Abs),
    Atan: st.builds(Atan),
    Clamp: st.builds(Clamp, min=real(-3, 3))
    | st.builds(Clamp, max=real(-3, 3))
    | st.builds(Clamp, st.just(1.0), real(-3, 1))
    | st.just(Clamp(-math.inf, math.inf)),
    Cos: st.builds(Cos),
    Sin: st.builds(Sin),
}  # fmt: skip
EVERY = pytest.mark.parametrize("cls", ELEMENTWISE, ids=lambda cls: cls.__name__)


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


GELU_TERMS = (math.erf(1), 1 / (math.e * math.sqrt(math.pi)))


def test_strategies_cover_every_class() -> None:
    assert set(STRATEGIES) == set(ELEMENTWISE)


@EVERY
@SETTINGS
@given(data=st.data())
def test_bounds_are_the_extremes_of_the_derivative(cls: type[nn.Module], data: st.DataObject) -> None:
    """Neither a slope outside, which the cases of the conformance suite try too, nor room to spare."""
    module = data.draw(STRATEGIES[cls])
    low, high = slope_bounds(module)
    assert extremes(module) == pytest.approx((low, high), abs=1e-9)
    found = sector(module, 4 if cls is not nn.PReLU else module.weight.numel())
    center, radius = torch.as_tensor(found.center), torch.as_tensor(found.radius)
    assert found.group is None
    assert (center - radius).min() <= low + 1e-12
    assert (center + radius).max() >= high - 1e-12
    assert (radius > 0).all()
    assert torch.isfinite(torch.as_tensor(found.rho)).all()
    if high - low > 0.05 * max(abs(low), abs(high)) and cls is not nn.PReLU:
        assert (found.center, found.radius) == ((high + low) / 2, (high - low) / 2)


CLOSED = [
    (nn.Identity(), (1, 1)), (nn.Sigmoid(), (0, 0.25)), (nn.Hardsigmoid(), (0, 1 / 6)), (nn.Hardswish(), (-0.5, 1.5)),
    (nn.ELU(2.5), (0, 2.5)), (nn.ELU(0.0), (0, 1)), (nn.ELU(-0.5), (-0.5, 1)), (nn.LeakyReLU(-0.5), (-0.5, 1)),
    (nn.LeakyReLU(1.5), (1, 1.5)), (nn.PReLU(init=0.25), (0.25, 1)), (nn.RReLU(-0.5, 1.25), (-0.5, 1.25)),
    (nn.RReLU(0.25, 0.5), (0.25, 1)),
    (nn.GELU(), ((1 - GELU_TERMS[0]) / 2 - GELU_TERMS[1], (1 + GELU_TERMS[0]) / 2 + GELU_TERMS[1])),
    (nn.SELU(), (0, 1.7580993408473768)), (nn.Softshrink(0.0), (1, 1)), (nn.Hardshrink(0.0), (1, 1)),
    (nn.Threshold(0.5, 0.5), (0, 1)), (Clamp(1.0, 1.0), (0, 0)), (Clamp(2.0, 1.0), (0, 0)), (Clamp(min=2.0), (0, 1)),
    (nn.Hardtanh(0.0, math.inf), (0, 1)),
]  # fmt: skip


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


REFUSED = [
    nn.CELU(-1.0), nn.CELU(0.0), nn.Hardshrink(), nn.Softshrink(-0.5), nn.Threshold(0.0, 1.0), nn.Softplus(1.0, 5.0),
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


def test_gelu_with_an_unknown_approximation_is_refused() -> None:
    module = nn.GELU()
    module.approximate = "fast"
    with pytest.raises(SlopeError, match="fast"):
        slope_bounds(module)


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


def test_classes_and_other_objects_are_not_modules() -> None:
    for wrong in (nn.ReLU, "relu", torch.relu):
        with pytest.raises(OptionError, match="instance"):
            slope_bounds(wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="instance"):
            sector(wrong)  # type: ignore[arg-type]


def make(name: str) -> nn.Module:
    arguments = {
        "Threshold": (0.0, 0.0),
        "Softmax": (1,),
        "LogSoftmax": (1,),
        "Softmin": (1,),
        "MultiheadAttention": (4, 1),
    }
    return getattr(nn, name)(*arguments.get(name, ()))


@pytest.mark.parametrize("name", torch.nn.modules.activation.__all__)
def test_every_activation_of_torch_has_a_rule(name: str) -> None:
    """A new one in a future PyTorch must get a bound or a reason."""
    module = make(name)
    if type(module) in ELEMENTWISE and name != "Hardshrink":
        low, high = slope_bounds(module)
        assert low <= high
        assert is_activation(module)
    else:
        with pytest.raises(SlopeError, match=f"^{name}") as caught:
            slope_bounds(module)
        assert "known slope bounds" not in str(caught.value), f"torch.nn.{name} is new: derive its slopes"


# ------------------------------------------------------------------------------------ subclasses and registry


def test_a_subclass_inherits_bounds_only_with_the_forward() -> None:
    class Gentle(nn.LeakyReLU):
        def __init__(self) -> None:
            super().__init__(0.75)

    class Steep(nn.ReLU):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 5 * super().forward(input)

    class Pairs(MaxMin):
        pass

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

    def bounds(module: Scaled) -> tuple[float, float]:
        return 0.0, module.gain

    assert not is_activation(Scaled(3.0))
    assert register(Scaled, bounds) is bounds
    assert is_activation(Scaled(3.0))
    assert slope_bounds(Scaled(3.0)) == (0.0, 3.0)
    assert sector(Scaled(3.0)) == Sector(1.5, 1.5, None)

    @register(Scaled)
    def again(module: Scaled) -> tuple[int, int]:
        return -1, 4

    assert slope_bounds(Scaled(3.0)) == (-1.0, 4.0)
    assert again(Scaled(1.0)) == (-1, 4)
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
    assert from_call(torch.erf) is None
    register(Erf, lambda module: (0.0, 2 / math.sqrt(math.pi)), enclose=lambda m, x, f: f.erf(x), calls="erf")
    assert type(from_call(torch.erf)) is Erf
    assert type(from_call("erf_")) is Erf

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
    assert slope_range(Scaled(), torch.ones(1), torch.ones(1), bounds) == bounds
    for low, high in ((math.nan, 1.0), (2.0, 1.0), (-math.inf, 0.0)):
        ends = torch.tensor([low]).double(), torch.tensor([high]).double()
        assert slope_range(nn.ReLU(), *ends, bounds) == bounds
    with pytest.raises(GraphError, match="rounding of Scaled"):
        enclose(Scaled(), torch.ones(1), None)  # type: ignore[arg-type]


class Steep(nn.ReLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 5 * super().forward(input)


def test_overridden_forwards_inherit_nothing() -> None:
    bounds = torch.zeros(1), 5 * torch.ones(1)
    assert slope_range(Steep(), torch.ones(1), torch.ones(1), bounds) == bounds
    with pytest.raises(GraphError):
        enclose(Steep(), torch.ones(1), None)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- sectors


def test_sector_of_relu() -> None:
    found = sector(nn.ReLU())
    assert found == Sector(0.5, 0.5, None)
    assert found.rho == 1.0
    with pytest.raises(AttributeError):
        found.center = 0.0  # type: ignore[misc]


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
    assert torch.autograd.gradcheck(
        lambda w: torch.func.functional_call(RhoOf(module), {"module.weight": w}, ()), module.weight
    )
    assert sector(prelu([0.25]), 7).center.shape == (1,)
    with pytest.raises(ShapeError, match=r"3 slopes.*4 channels"):
        sector(module, 4)


class RhoOf(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> torch.Tensor:
        return sector(self.module).rho


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


# -------------------------------------------------------------------------------------- functions and methods

WEIGHT = torch.tensor([0.5, -0.25, 2.0], dtype=torch.float64)
FUNCTIONS = [
    (torch.relu, (), {}, nn.ReLU), (torch.relu_, (), {}, nn.ReLU), (F.relu, (), {}, nn.ReLU),
    (F.relu, (True,), {}, nn.ReLU), (F.relu, (), {"inplace": True}, nn.ReLU), (F.relu_, (), {}, nn.ReLU),
    (F.relu6, (), {"inplace": False}, nn.ReLU6), (F.elu, (0.5, True), {}, nn.ELU),
    (F.elu, (), {"alpha": -0.5}, nn.ELU), (F.elu_, (0.7,), {}, nn.ELU), (F.celu, (0.5,), {}, nn.CELU),
    (torch.celu, (), {"alpha": 2.0}, nn.CELU), (F.celu_, (2.0,), {}, nn.CELU), (F.selu, (), {}, nn.SELU),
    (torch.selu, (), {}, nn.SELU), (F.selu_, (), {}, nn.SELU), (F.gelu, (), {}, nn.GELU),
    (F.gelu, (), {"approximate": "tanh"}, nn.GELU), (F.silu, (), {"inplace": True}, nn.SiLU),
    (F.mish, (), {}, nn.Mish), (F.hardsigmoid, (), {}, nn.Hardsigmoid), (F.hardswish, (), {}, nn.Hardswish),
    (F.hardtanh, (-0.5, 2.0), {}, nn.Hardtanh), (F.hardtanh, (), {"max_val": 0.25}, nn.Hardtanh),
    (F.hardtanh_, (-0.5, 2.0), {}, nn.Hardtanh), (F.hardshrink, (0.7,), {}, nn.Hardshrink),
    (torch.hardshrink, (), {"lambd": 0.0}, nn.Hardshrink), (F.leaky_relu, (0.3,), {}, nn.LeakyReLU),
    (F.leaky_relu, (), {"negative_slope": 0.3, "inplace": True}, nn.LeakyReLU),
    (F.leaky_relu_, (0.3,), {}, nn.LeakyReLU), (F.logsigmoid, (), {}, nn.LogSigmoid),
    (F.prelu, (WEIGHT,), {}, nn.PReLU), (torch.prelu, (), {"weight": WEIGHT[:1]}, nn.PReLU),
    (F.rrelu, (0.25, 0.5), {}, nn.RReLU), (F.rrelu, (), {"upper": 0.5, "training": False}, nn.RReLU),
    (F.rrelu, (0.5, 0.5, True), {"inplace": True}, nn.RReLU), (torch.sigmoid, (), {}, nn.Sigmoid),
    (F.sigmoid, (), {}, nn.Sigmoid), (torch.special.expit, (), {}, nn.Sigmoid), (F.softplus, (2.0,), {}, nn.Softplus),
    (F.softplus, (), {"beta": 2.0, "threshold": 30}, nn.Softplus), (F.softshrink, (), {"lambd": 0.25}, nn.Softshrink),
    (F.softsign, (), {}, nn.Softsign), (torch.tanh, (), {}, nn.Tanh), (F.tanh, (), {}, nn.Tanh),
    (torch.tanh_, (), {}, nn.Tanh), (F.tanhshrink, (), {}, nn.Tanhshrink),
    (F.threshold, (0.5, 0.5), {}, nn.Threshold),
    (F.threshold, (), {"threshold": 0.5, "value": 0.5, "inplace": True}, nn.Threshold),
    (torch.threshold, (0.5, 0.25), {}, nn.Threshold), (torch.abs, (), {}, Abs), (torch.absolute, (), {}, Abs),
    (builtins.abs, (), {}, Abs), (operator.abs, (), {}, Abs), (torch.sin, (), {}, Sin), (torch.cos, (), {}, Cos),
    (torch.atan, (), {}, Atan), (torch.arctan, (), {}, Atan), (torch.clamp, (-0.5, 1), {}, nn.Hardtanh),
    (torch.clamp, (), {"min": -0.5, "max": 1.0}, nn.Hardtanh), (torch.clamp, (0.5,), {}, Clamp),
    (torch.clamp, (), {"max": 0.5}, Clamp), (torch.clamp, (None, 0.5), {}, Clamp),
    (torch.clamp, (0.5, -0.5), {}, Clamp), (torch.clip, (), {"min": 0}, Clamp), (torch.clamp_min, (0.5,), {}, Clamp),
    (torch.clamp_max, (), {"max": 0.5}, Clamp), (torch.clamp_, (), {"min": 0.5}, Clamp),
]  # fmt: skip
METHODS = [
    ("relu", (), {}, nn.ReLU), ("relu_", (), {}, nn.ReLU), ("sigmoid", (), {}, nn.Sigmoid),
    ("sigmoid_", (), {}, nn.Sigmoid), ("tanh", (), {}, nn.Tanh), ("tanh_", (), {}, nn.Tanh),
    ("hardshrink", (0.5,), {}, nn.Hardshrink), ("prelu", (WEIGHT,), {}, nn.PReLU), ("abs", (), {}, Abs),
    ("abs_", (), {}, Abs), ("absolute", (), {}, Abs), ("sin", (), {}, Sin), ("sin_", (), {}, Sin),
    ("cos", (), {}, Cos), ("cos_", (), {}, Cos), ("atan", (), {}, Atan), ("arctan_", (), {}, Atan),
    ("clamp", (-0.5, 1.0), {}, nn.Hardtanh), ("clamp_", (), {"max": 1.0}, Clamp),
    ("clip", (), {"min": 0.0, "max": 0.5}, nn.Hardtanh), ("clamp_min", (0.0,), {}, Clamp),
    ("clamp_max_", (0.0,), {}, Clamp),
]  # fmt: skip


@pytest.mark.parametrize(("target", "args", "kwargs", "cls"), FUNCTIONS + METHODS)
def test_call_forms_are_their_module(target: object, args: tuple, kwargs: dict, cls: type[nn.Module]) -> None:
    x = 2 * torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module = from_call(target, args, kwargs)
    assert type(module) is cls
    given_input = x.clone()
    call = (lambda *a, **k: getattr(a[0], target)(*a[1:], **k)) if isinstance(target, str) else target
    expected = call(given_input, *args, **kwargs)
    kept = x.clone()
    torch.testing.assert_close(module(kept), expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(kept, x)


def test_every_functional_of_an_elementwise_class_is_known() -> None:
    names = {name.replace("_", ""): name for name in dir(F) if not name.endswith("_")}
    for cls in ELEMENTWISE:
        if cls.__module__.startswith("torch") and cls is not nn.Identity:
            assert names[cls.__name__.lower()] in TABLE[cls].names


@pytest.mark.parametrize(
    "target", [F.dropout, torch.exp, torch.add, operator.add, F.linear, F.layer_norm, "view", "exp", "gelu", len, None]
)
def test_what_is_not_an_activation_gives_none(target: object) -> None:
    assert from_call(target, (), {}) is None


@pytest.mark.parametrize(
    ("target", "args", "cls"),
    [
        (F.softmax, (1,), nn.Softmax),
        (torch.softmax, (1, torch.float64), nn.Softmax),
        ("softmax", (1,), nn.Softmax),
        (F.log_softmax, (), nn.LogSoftmax),
        ("log_softmax", (1,), nn.LogSoftmax),
        (F.softmin, (1,), nn.Softmin),
        (F.glu, (), nn.GLU),
    ],
)
def test_joint_functions_are_refused_by_name(target: object, args: tuple, cls: type[nn.Module]) -> None:
    module = from_call(target, args)
    assert type(module) is cls
    with pytest.raises(SlopeError, match=cls.__name__):
        slope_bounds(module)


def node() -> fx.Node:
    return fx.Graph().placeholder("slope")


def test_slopes_that_are_not_fixed_are_refused() -> None:
    for wrong in (torch.tensor(0.5), nn.Parameter(torch.tensor(0.5)), node()):
        with pytest.raises(SlopeError, match=r"leaky_relu.*PReLU"):
            from_call(F.leaky_relu, (wrong,))
        with pytest.raises(SlopeError, match="clamp"):
            from_call("clamp", (), {"min": wrong})
    for wrong in (node(), 0.5, (WEIGHT.clone().requires_grad_() * 2)):
        with pytest.raises(SlopeError, match=r"torch\.nn\.PReLU"):
            from_call(F.prelu, (wrong,))


def test_arguments_that_do_not_fit_are_refused() -> None:
    for target, args, kwargs in [
        (F.relu, (), {"slope": 1.0}),
        (torch.tanh, (1.0,), {}),
        (F.hardtanh, (1.0, -1.0), {}),
        (F.threshold, (), {}),
        (F.prelu, (), {}),
        (torch.clamp, (), {}),
    ]:
        with pytest.raises(OptionError):
            from_call(target, args, kwargs)


def test_functional_prelu_shares_its_parameter() -> None:
    weight = nn.Parameter(WEIGHT.clone())
    module = from_call(F.prelu, (weight,))
    assert module.weight is weight
    assert not from_call(F.prelu, (WEIGHT,)).weight.requires_grad
    assert slope_bounds(module) == (-0.25, 2.0)
    assert sector(from_call(torch.prelu, (torch.tensor(0.5),))).center.shape == (1,)


# --------------------------------------------------------------------------------------- joint nonlinearities

SHAPES = st.sampled_from([(5, 12), (3, 12, 4), (2, 24, 3, 2)])
JOINT = st.sampled_from([GroupSort(1), GroupSort(2), GroupSort(3), GroupSort(4), GroupSort(12), MaxMin()])


@SETTINGS
@given(module=JOINT, shape=SHAPES, seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-3, 10))
def test_joint_modules_are_1_lipschitz_group_by_group(
    module: nn.Module, shape: tuple[int, ...], seed: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    y = x + scale * torch.randn(shape, dtype=torch.float64, generator=generator)
    found = sector(module, shape[1])
    assert (found.center, found.radius, found.rho) == (0.0, 1.0, 0.0)
    size = (shape[1] // found.group, found.group)
    before = (x - y).unflatten(1, size).norm(dim=2)
    after = (module(x) - module(y)).unflatten(1, size).norm(dim=2)
    assert (after <= before + 1e-12).all()
    out = module(x).unflatten(1, size)
    order = out if isinstance(module, GroupSort) else out.flip(2)
    assert torch.equal(order, x.unflatten(1, size).sort(dim=2).values)
    assert module(x).shape == shape


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
