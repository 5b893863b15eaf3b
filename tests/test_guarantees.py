"""Invertible and recurrent networks: two-sided slopes, contraction and gain at hostile parameters, inverses, files."""

from __future__ import annotations

import collections
import copy
import math

import pytest
import torch
from torch import nn

import ldlt
from ldlt.testing import PARAMETERS

ROOM = {torch.float32: 1e-5, torch.float64: 1e-9}
KINDS = [k for k in PARAMETERS if k not in ("trained", "loaded")]


class Mixed(nn.Module):
    """Skips, a concatenation and two kinds of activations."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(inputs, 8), nn.Linear(8, 8), nn.Linear(8 + inputs, outputs)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(torch.cat([x, h + torch.tanh(self.second(h))], 1))


def _at_all_parameters(net: nn.Module):
    """Copies of a network at every hostile kind of parameters."""
    for kind in KINDS:
        twin = copy.deepcopy(net)
        PARAMETERS[kind](getattr(twin, "body", getattr(twin, "cell", twin)), torch.Generator().manual_seed(1))
        yield twin


def _jacobian(run, x: torch.Tensor) -> torch.Tensor:
    """Exact Jacobians of a frozen map, in float64."""
    rows = x.shape[1]
    spread = x.repeat_interleave(rows, 0).requires_grad_()
    (found,) = torch.autograd.grad(run(spread), spread, torch.eye(rows, dtype=x.dtype).repeat(len(x), 1))
    return found.reshape(len(x), rows, rows)


# --------------------------------------------------------------------------------------------------- invertible


@pytest.mark.parametrize("dtype", ROOM)
def test_slopes_from_both_sides(dtype):
    torch.manual_seed(0)
    made = ldlt.BiLipschitz(Mixed(4, 4).to(dtype), 0.1, 10.0, input_shape=4, head="orthogonal")
    for net in _at_all_parameters(made):
        body = net.body.freeze().double()
        x = torch.randn(20, 4, dtype=torch.float64) * torch.logspace(-2, 2, 20, dtype=torch.float64)[:, None]
        slopes = torch.linalg.svdvals(_jacobian(lambda z, c=net.center, g=body: c * z + g(z), x))
        assert float(slopes.max()) <= 10 * (1 + ROOM[dtype])
        assert float(slopes.min()) >= 0.1 - 10 * ROOM[dtype]
        y = net(x.to(dtype)).detach()
        found = net.invert(y)
        # Rounding is that of the numbers on the way, biases included.
        numbers = [x, y, *(p for n, p in body.named_parameters() if n.endswith("bias"))]
        size = max(float(t.detach().abs().max()) for t in numbers) * torch.finfo(dtype).eps
        assert torch.isfinite(found.x).all()
        assert float(found.error.max()) <= 1e4 * size  # it converges at every parameter


@pytest.mark.parametrize("slopes", [(0.1, 10.0), (0.5, 2.0)])
def test_inverse_has_a_proven_error(slopes):
    torch.manual_seed(0)
    frozen = ldlt.BiLipschitz(Mixed(3, 3).double(), *slopes, input_shape=3).freeze()
    assert frozen.certificate.rigorous
    assert slopes[0] * (1 - 1e-6) <= frozen.lower < frozen.upper <= slopes[1] * (1 + 1e-6)
    x = torch.randn(1000, 3, dtype=torch.float64)
    with torch.no_grad():
        y = frozen(x)
    found = frozen.invert(y)
    true = torch.linalg.vector_norm(found.x - x, dim=1)
    assert found.proven
    assert float(true.max()) < 1e-10
    assert bool((found.error >= true).all())
    # A poor solution is called one.
    poor = frozen.invert(y, tolerance=1e-2)
    assert bool((poor.error >= torch.linalg.vector_norm(poor.x - x, dim=1)).all())
    assert float(poor.error.max()) > 1e-5


def test_gradients_of_the_inverse():
    torch.manual_seed(0)
    net = ldlt.BiLipschitz(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double(), 0.5, 2.0, input_shape=3)
    y = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(net.inverse, (y,), atol=1e-6, check_undefined_grad=False)
    (net.inverse(y.detach()) ** 3).sum().backward()
    weight = net.body.module[0].weight
    found = float(weight.grad[0, 0])
    sides = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            weight[0, 0] += step
            sides.append(float((net.inverse(y.detach()) ** 3).sum()))
    assert found == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5)


def test_log_determinants():
    torch.manual_seed(0)
    net = ldlt.BiLipschitz(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double(), 0.5, 2.0, input_shape=3)
    x = torch.randn(6, 3, dtype=torch.float64)
    value, exact = net.log_det(x)
    body = net.body.freeze()
    jacobian = _jacobian(lambda z: net.center * z + body(z), x)
    torch.testing.assert_close(value, net(x))
    torch.testing.assert_close(exact, torch.linalg.slogdet(jacobian).logabsdet)
    generator = torch.Generator().manual_seed(0)
    estimates = torch.stack([net.log_det(x, samples=20, generator=generator)[1].detach() for _ in range(40)])
    error = estimates.std(0) / math.sqrt(len(estimates))
    assert bool(((estimates.mean(0) - exact).abs() < 5 * error).all())
    exact.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.body.module.parameters() if p.ndim == 2)


def test_images_are_invertible_too():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
    net = ldlt.BiLipschitz(nn.Sequential(conv, nn.ReLU(), nn.Conv2d(2, 2, 1)).double(), 0.5, 1.5, input_shape=(2, 4, 4))
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(net.inverse(net(x)), x)


@pytest.mark.parametrize(
    ("slopes", "outputs", "options"),
    [
        ((0.0, 1.0), 3, {}),
        ((2.0, 1.0), 3, {}),
        ((0.5, math.inf), 3, {}),
        ((0.5, 2.0), 2, {}),
        ((0.5, 2.0), 3, {"bound": 1.0}),
        ((0.5, 2.0), 3, {"head": "rows"}),
    ],
)
def test_what_is_not_invertible(slopes, outputs, options):
    with pytest.raises(ldlt.LdltError):
        ldlt.BiLipschitz(nn.Sequential(nn.Linear(3, outputs)), *slopes, input_shape=3, **options)


# ---------------------------------------------------------------------------------------------------- recurrent


@pytest.mark.parametrize("dtype", ROOM)
def test_contraction_and_gain(dtype):
    """Over 100 steps, at every kind of parameters: trajectories approach each other, inputs are not amplified."""
    torch.manual_seed(0)
    rate, gain = 0.97, 2.0
    made = ldlt.Recurrent(Mixed(6, 7).to(dtype), inputs=2, state=4, rate=rate, gain=gain, head="orthogonal")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for net in _at_all_parameters(made):
        frozen = net.freeze().double()
        with torch.no_grad():
            u, x = normal(16, 100, 2), normal(16, 4)
            other, near = u + normal(16, 100, 2), x + 0.1 * normal(16, 4)
            y, last = frozen(u, x)
            _, moved = frozen(u, near)
            start, end = (near - x).norm(dim=1), (moved - last).norm(dim=1)
            assert bool((end <= start * (rate * (1 + ROOM[dtype])) ** 100 + 1e-12).all())
            for changed, begin in ((other, x), (other, near)):
                z, _ = frozen(changed, begin)
                allowed = gain**2 * (changed - u).square().sum((1, 2)) + rate**2 * (begin - x).square().sum(1)
                assert bool(((z - y).square().sum((1, 2)) <= allowed * (1 + 100 * ROOM[dtype]) + 1e-12).all())
        assert torch.isfinite(net(u.to(dtype), x.to(dtype))[0]).all()


def test_recurrent_networks_train_and_freeze():
    torch.manual_seed(0)
    net = ldlt.Recurrent(Mixed(6, 7), inputs=2, state=4, gain=3.0)
    u = torch.randn(8, 20, 2)
    y, last = net(u)
    assert y.shape == (8, 20, 3)
    assert last.shape == (8, 4)
    y.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
    torch.testing.assert_close(net.freeze()(u)[0], y.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.cat([net(u[:, :5])[0], net(u[:, 5:], net(u[:, :5])[1])[0]], 1), y)


@pytest.mark.parametrize(
    "options", [{"rate": 1.5}, {"rate": 0.0}, {"gain": -1.0}, {"state": 9}, {"bound": 1.0}, {"inputs": 5}]
)
def test_what_is_no_recurrent_network(options):
    with pytest.raises(ldlt.LdltError):
        ldlt.Recurrent(Mixed(6, 7), **{"inputs": 2, "state": 4, **options})


@pytest.mark.parametrize("u", [torch.zeros(3, 2), torch.zeros(3, 5, 4), "text"])
def test_sequences_of_another_shape(u):
    net = ldlt.Recurrent(Mixed(6, 7), inputs=2, state=4)
    with pytest.raises(ldlt.ShapeError):
        net(u)
    with pytest.raises(ldlt.ShapeError):
        net(torch.zeros(3, 5, 2), torch.zeros(3, 5))


# ------------------------------------------------------------------------------ several inputs, outputs, bounds


class Actor(nn.Module):
    """An observation and a goal to a policy and a value."""

    def __init__(self, kind: type = dict) -> None:
        super().__init__()
        self.kind = kind
        self.see, self.aim = nn.Linear(4, 8), nn.Linear(2, 8)
        self.inner, self.policy, self.value = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, obs, goal):
        h = torch.relu(self.see(obs) + self.aim(goal))
        h = h + torch.tanh(self.inner(h))
        found = {"policy": self.policy(h), "value": self.value(h)}
        return found if self.kind is dict else self.kind(found.values())


BOUNDS = {"policy": 2.0, "value": 0.5}
SHAPES = {"obs": (4,), "goal": (2,)}


def _slopes(net: ldlt.Lipschitz, seed: int = 0) -> torch.Tensor:
    """Exact Jacobians of the frozen map (points, outputs, inputs), in units of the metric."""
    frozen = net.frozen_map().double().eval()
    x = torch.randn(20, net.input_shape[0], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = frozen(x[:1]).shape[1]
    spread = x.repeat_interleave(rows, 0).requires_grad_()
    (found,) = torch.autograd.grad(frozen(spread), spread, torch.eye(rows, dtype=x.dtype).repeat(len(x), 1))
    return found.reshape(len(x), rows, -1)


@pytest.mark.parametrize("dtype", ROOM)
def test_every_output_keeps_its_own_bound(dtype):
    torch.manual_seed(0)
    room = 1 + ROOM[dtype]
    for net in _at_all_parameters(ldlt.Lipschitz(Actor().to(dtype), BOUNDS, input_shape=SHAPES, head="orthogonal")):
        for part, bound in BOUNDS.items():
            found = torch.linalg.matrix_norm(_slopes(net)[:, net.joined.parts[part]], 2)
            assert float(found.max()) <= bound * room
        assert float(torch.linalg.matrix_norm(_slopes(net), 2).max()) <= net.bound * room
    for rows in _at_all_parameters(ldlt.Lipschitz(Mixed(4, 3).to(dtype), [1.0, 2.0, 3.0], input_shape=4)):
        steepest = _slopes(rows).norm(dim=2).amax(0)
        assert bool((steepest <= torch.tensor([1.0, 2.0, 3.0]) * room).all())
        assert bool((rows.output_bounds() <= torch.tensor([1.0, 2.0, 3.0]) * (1 + 1e-4)).all())


@pytest.mark.parametrize("dtype", ROOM)
def test_slopes_in_a_metric(dtype):
    torch.manual_seed(0)
    units = torch.tensor([1.0, 100.0, 0.01, 3.0])
    made = ldlt.Lipschitz(Mixed(4, 3).to(dtype), ldlt.Metric(units, bound=2.0), input_shape=4, head="orthogonal")
    for net in _at_all_parameters(made):
        frozen = net.freeze().double()
        x = torch.randn(20, 4, dtype=torch.float64) * units.double()
        spread = x.repeat_interleave(3, 0).requires_grad_()
        (found,) = torch.autograd.grad(frozen(spread), spread, torch.eye(3, dtype=x.dtype).repeat(len(x), 1))
        scaled = found.reshape(20, 3, 4) * units.double()
        assert float(torch.linalg.matrix_norm(scaled, 2).max()) <= 2 * (1 + ROOM[dtype])
        if dtype is torch.float64:
            assert ldlt.lmi.residual(net) >= -1e-9


def test_certificates_of_several_inputs_and_metrics(tmp_path):
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    net = ldlt.Lipschitz(Actor(), ldlt.Metric([1.0, 1, 1, 5], [2.0, 2], bound=1.5), input_shape=SHAPES)
    found = ldlt.certify(net)
    assert found.rigorous
    assert found.bound == pytest.approx(1.5, rel=1e-3)
    ldlt.save(net, tmp_path / "actor.onnx")
    assert ldlt.verify(tmp_path / "actor.onnx").bound == pytest.approx(1.5, rel=1e-3)


def test_named_tuples_stay_what_they_are():
    pair = collections.namedtuple("pair", ["policy", "value"])
    net = ldlt.Lipschitz(Actor(lambda values: pair(*values)), input_shape=[(4,), (2,)])
    found = net(torch.zeros(4), torch.zeros(2))
    assert isinstance(found, pair)
    assert found.value.shape == (1,)


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_inputs_and_outputs_are_those_of_the_module(kind):
    net = ldlt.Lipschitz(Actor(kind), input_shape=[(4,), (2,)] if kind is not dict else SHAPES)
    obs, goal = torch.randn(5, 7, 4), torch.randn(5, 7, 2)
    found, plain = net(obs, goal), net.freeze()(obs.flatten(0, 1), goal.flatten(0, 1))
    assert type(found) is kind
    for name in found if kind is dict else range(2):
        torch.testing.assert_close(found[name].flatten(0, 1), plain[name], rtol=1e-3, atol=1e-4)
    if kind is dict:
        torch.testing.assert_close(net(goal=goal, obs=obs)["value"], found["value"])


def test_leading_dimensions_are_a_batch():
    net = ldlt.nn.FeedForward(4, [8], 3)
    x = torch.randn(5, 7, 4)
    torch.testing.assert_close(net(x), net(x.flatten(0, 1)).unflatten(0, (5, 7)))
    torch.testing.assert_close(net(x[0, 0]), net(x[0, :1])[0])


@pytest.mark.parametrize(
    "options",
    [
        {"bound": [1.0, 2.0]},
        {"bound": [1.0, 2.0, -1.0]},
        {"bound": {"0": 1.0, "1": 1.0, "3": 1.0}},
        {"bound": "wide"},
        {"bound": ldlt.Metric([1.0, 2.0])},
        {"input_shape": [(4,), (2,)]},
        {"bound": [1.0, 2.0, 3.0], "output": "scale"},
    ],
)
def test_bounds_that_do_not_fit(options):
    with pytest.raises(ldlt.LdltError):
        ldlt.Lipschitz(Mixed(4, 3), **{"input_shape": 4, **options})


@pytest.mark.parametrize("scale", [[], [[0.0]], [[math.inf]], ["wide"]])
def test_what_is_no_metric(scale):
    with pytest.raises(ldlt.LdltError):
        ldlt.Metric(*scale)


class Goal(nn.Module):
    """A policy whose goal shifts its hidden values by any function."""

    def __init__(self, way: str = "add") -> None:
        super().__init__()
        self.way = way
        self.see, self.aim, self.inner = nn.Linear(4, 8), nn.Linear(2, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, obs, goal):
        aim = 50 * torch.exp(self.inner(torch.sin(self.aim(goal))))
        h = torch.relu(self.see(obs) + aim) if self.way == "add" else torch.relu(self.see(obs)) * aim
        return self.last(h)


@pytest.mark.parametrize("dtype", ROOM)
def test_conditions_shift_what_is_bounded_in_the_rest(dtype):
    torch.manual_seed(0)
    made = ldlt.Lipschitz(Goal().to(dtype), 2.0, input_shape=SHAPES, conditions=["goal"], head="orthogonal")
    for net in _at_all_parameters(made):
        frozen = net.freeze().double()
        goals = torch.randn(20, 2, dtype=torch.float64)
        with torch.no_grad():
            aims = frozen.aim(goals).isfinite().all() and frozen(torch.zeros(20, 4).double(), goals).isfinite().all()
        if not aims:  # a goal may overflow by the module's own exponential
            continue
        x = torch.randn(20, 4, dtype=torch.float64)
        spread = x.repeat_interleave(3, 0).requires_grad_()
        y = frozen(spread, goals.repeat_interleave(3, 0))
        (found,) = torch.autograd.grad(y, spread, torch.eye(3, dtype=x.dtype).repeat(20, 1))
        assert float(torch.linalg.matrix_norm(found.reshape(20, 3, 4), 2).max()) <= 2 * (1 + ROOM[dtype])


def test_conditions_are_inputs_of_the_network():
    torch.manual_seed(0)
    net = ldlt.Lipschitz(Goal().double(), input_shape=SHAPES, conditions=["goal"])
    obs, goal = torch.randn(5, 7, 4).double(), torch.randn(5, 7, 2).double()
    expected = net.freeze()(obs.flatten(0, 1), goal.flatten(0, 1)).unflatten(0, (5, 7))
    torch.testing.assert_close(net(obs, goal), expected)
    assert ldlt.certify(net).bound == pytest.approx(1.0, rel=1e-3)
    (net(obs, goal) ** 2).sum().backward()
    assert bool(net.module.module.aim.weight.grad.abs().sum() > 0)


@pytest.mark.parametrize(
    ("way", "conditions"), [("times", ["goal"]), ("add", ["aim"]), ("add", ["obs", "goal"]), ("add", [0])]
)
def test_conditions_that_are_refused(way, conditions):
    with pytest.raises(ldlt.LdltError):
        ldlt.Lipschitz(Goal(way), input_shape=SHAPES, conditions=conditions)
