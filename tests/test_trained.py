"""From trained networks to constrained ones that start at the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ldlt
from ldlt.attack import lipschitz_lower_bound

ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.GELU]


def network(kind: str, activation: type[nn.Module], dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    build = {"chain": ldlt.nn.feed_forward_module, "residual": ldlt.nn.residual_module}[kind]
    net = build(5, [12, 9], 3, activation).to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    return net


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(["chain", "residual"]), st.sampled_from(ACTIVATIONS), st.integers(0, 1000))
def test_starts_at_the_given_weights(kind, activation, seed):
    plain = network(kind, activation, torch.float64, seed)
    before = copy.deepcopy(plain.state_dict())
    net = ldlt.Lipschitz.from_trained(plain)
    x = 3 * torch.randn(50, 5, dtype=torch.float64)
    assert distance(net(x), plain(x)) < 1e-9
    assert distance(net.freeze()(x), plain(x)) < 1e-9
    certified = ldlt.certify(plain, 5).bound
    assert certified < net.bound <= certified * 1.001 * (1 + 1e-9)
    assert all(torch.equal(before[n], p) for n, p in plain.state_dict().items())  # the given model is not touched


@pytest.mark.parametrize(("kind", "activation"), [("chain", nn.ReLU), ("chain", nn.GELU), ("residual", nn.LeakyReLU)])
def test_float32(kind, activation):
    """The free parameters are rounded once; the outputs of the frozen network differ by that and by their own noise."""
    plain = network(kind, activation, torch.float32, 3)
    net = ldlt.Lipschitz.from_trained(plain, 2 * ldlt.certify(plain, 5).bound)
    x = torch.randn(200, 5)
    exact = copy.deepcopy(plain).double()(x.double())
    scale = float(exact.detach().abs().max())
    assert distance(copy.deepcopy(net).double()(x.double()), exact) < 1e-6 * scale
    assert distance(net.freeze()(x), plain(x)) < 3e-6 * scale
    assert distance(net(x), plain(x)) < 1e-5 * scale


@pytest.mark.parametrize("kind", ["chain", "residual"])
def test_lowering_the_bound_scales_the_network(kind):
    net = ldlt.Lipschitz.from_trained(network(kind, nn.GELU, torch.float64, 1), 7.0)
    x = torch.randn(20, 5, dtype=torch.float64)
    before = net(x)
    for value in (5.0, 0.7, 2.0):
        net.set_bound(value)
        assert net.bound == value
        assert distance(net(x), before * value / 7.0) < 1e-10
        assert ldlt.certify(net).bound <= value * (1 + 1e-5)
    again = ldlt.Lipschitz.from_trained(network(kind, nn.GELU, torch.float64, 1), 7.0)
    again.load_state_dict(net.state_dict())
    assert again.bound == 2.0
    assert distance(again(x), net(x)) == 0


def test_any_network_can_be_given_another_bound():
    """Also one with a given map before an activation, one without a free output and one with bounded rows."""
    torch.manual_seed(0)

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.b(torch.tanh(x + torch.relu(self.a(x))))

    x = torch.randn(9, 4).double()
    nets = [
        ldlt.Lipschitz(Given().double(), 2.0, input_shape=4),
        ldlt.Lipschitz(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double(), 2.0, input_shape=4, output="scale"),
        ldlt.nn.Residual(4, [8], 3, bound=2.0, head="rows", dtype=torch.float64),
    ]
    for net in nets:
        before, bound = net(x), net.bound
        net.set_bound(0.5)
        assert distance(net(x), before / 4) < 1e-9
        assert net.bound == pytest.approx(bound / 4, rel=1e-9)


def test_training_goes_on_under_the_bound():
    plain = network("chain", nn.ReLU, torch.float64, 0)
    net = ldlt.Lipschitz.from_trained(plain)
    start = net.bound
    x = torch.randn(64, 5, dtype=torch.float64)
    target = torch.sin(3 * x[:, :3])
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    losses = []
    for step in range(60):
        net.set_bound(start * 0.2 ** min(1, step / 30))
        optimiser.zero_grad()
        loss = ((net(x) - target) ** 2).mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert net.bound == pytest.approx(start / 5)
    assert losses[-1] < losses[30]
    assert lipschitz_lower_bound(net.freeze(), 5, starts=16, steps=50).value <= net.bound * (1 + 1e-9)


def test_neurons_that_are_constant():
    plain = network("chain", nn.ReLU, torch.float64, 0)
    with torch.no_grad():
        plain[0].weight[2] = 0
    x = torch.randn(9, 5, dtype=torch.float64)
    assert distance(ldlt.Lipschitz.from_trained(plain)(x), plain(x)) < 1e-6


def test_refusals():
    plain = network("chain", nn.ReLU, torch.float64, 0)
    bound = ldlt.certify(plain, 5).bound
    with pytest.raises(ldlt.BoundError, match="set_bound"):
        ldlt.Lipschitz.from_trained(plain, bound / 5)
    with pytest.raises(ldlt.OptionError, match="slack"):
        ldlt.Lipschitz.from_trained(plain, slack=0)
    with pytest.raises(ldlt.OptionError, match="init"):
        ldlt.Lipschitz.from_trained(plain, init="orthogonal")
    with pytest.raises(ldlt.GraphError, match="nn.Module"):
        ldlt.Lipschitz.from_trained("model")
    with pytest.raises(ldlt.GraphError, match="already"):
        ldlt.Lipschitz.from_trained(ldlt.nn.FeedForward(3, [4], 2))

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(6, 2)

        def forward(self, x):
            return self.map(x[:, 0])

    with pytest.raises(ldlt.ShapeError, match="input_shape"):
        ldlt.Lipschitz.from_trained(First())
    assert ldlt.Lipschitz.from_trained(First(), input_shape=(3, 6)).input_shape == (3, 6)
    with pytest.raises(ldlt.InfeasibleError, match="given map"):
        ldlt.Lipschitz.from_trained(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    other = ldlt.certify(plain, 5, region=ldlt.Region("ball", torch.zeros(5), torch.tensor(0.1)))
    with pytest.raises(ldlt.InfeasibleError, match="multipliers"):
        ldlt.Lipschitz.from_trained(plain, certificate=other)
    trained = ldlt.nn.FeedForward(3, [4], 2, train_bound=True)
    with pytest.raises(ldlt.OptionError, match="trained"):
        trained.set_bound(1.0)
    for odd in (0.0, -1.0, float("nan"), "one"):
        with pytest.raises(ldlt.BoundError):
            ldlt.nn.FeedForward(3, [4], 2).set_bound(odd)
