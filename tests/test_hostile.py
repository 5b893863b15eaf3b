"""Float32 networks after training that does its worst, against attacks: never above the bound, and close to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ldlt
from test_rule import Stack

INPUTS, OUTPUTS, BOUND = 6, 3, 2.0
ARCHITECTURES = {
    "feed_forward": lambda **o: ldlt.nn.FeedForward(INPUTS, [32] * 4, OUTPUTS, BOUND, **o),
    "residual": lambda **o: ldlt.nn.Residual(INPUTS, [32] * 4, OUTPUTS, BOUND, **o),
    "blocks": lambda **o: ldlt.Lipschitz(Stack(INPUTS, 24, 3, OUTPUTS), BOUND, input_shape=INPUTS, **o),
    "gelu": lambda **o: ldlt.nn.FeedForward(INPUTS, [32] * 3, OUTPUTS, BOUND, activation=nn.GELU, **o),
    "leaky": lambda **o: ldlt.nn.Residual(INPUTS, [32] * 3, OUTPUTS, BOUND, activation=lambda: nn.LeakyReLU(0.1), **o),
    "maxmin": lambda **o: ldlt.nn.Residual(INPUTS, [32] * 3, OUTPUTS, BOUND, activation=ldlt.activations.MaxMin, **o),
    "prelu": lambda **o: ldlt.nn.FeedForward(INPUTS, [32] * 3, OUTPUTS, BOUND, activation=nn.PReLU, **o),
}


def push_apart(net: nn.Module, steps: int = 120, rate: float = 0.03) -> None:
    """Large steps on a loss that pushes the outputs of pairs of inputs apart."""
    optimiser = torch.optim.Adam(net.parameters(), rate)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(128, INPUTS, generator=generator)
        y = x + 0.3 * torch.randn(128, INPUTS, generator=generator)
        slopes = (net(x) - net(y)).norm(dim=1) / (x - y).norm(dim=1)
        optimiser.zero_grad()
        (-slopes.mean()).backward()
        optimiser.step()


def attacked(net: nn.Module) -> ldlt.attack.SteepPair:
    return ldlt.attack.lipschitz_lower_bound(net, INPUTS, starts=48, steps=100)


@pytest.mark.parametrize("contraction", ["cholesky", "symmetric", "cayley"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bound_holds_and_is_reached(name, contraction):
    net = ARCHITECTURES[name](contraction=contraction)
    push_apart(net)
    found = attacked(net)
    assert found.value <= BOUND * (1 + 1e-5)
    assert found.value >= 0.9 * BOUND
    frozen = attacked(net.freeze())
    assert 0.9 * BOUND <= frozen.value <= BOUND * (1 + 1e-5)
    assert ldlt.lmi.residual(net) > -1e-12


@pytest.mark.parametrize("name", ["feed_forward", "residual", "blocks"])
def test_orthogonal_head_reaches_the_bound_itself(name):
    """Where the inequality is tight, rounding is all that is left between the attack and the bound."""
    net = ARCHITECTURES[name](head="orthogonal")
    push_apart(net, steps=250, rate=0.02)
    found = attacked(net)
    assert 0.97 * BOUND <= found.value <= BOUND * (1 + 1e-5)


@pytest.mark.parametrize("contraction", ["cholesky", "symmetric", "cayley"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bound_holds_after_violent_steps(name, contraction):
    """Steps a thousand times the usual ones: the free matrices are huge, and still no pair is too steep.

    The stored float32 weights are attacked in float64: with residual branches of norm 1e4 a float32 forward pass rounds
    by more than the outputs of a close pair differ.
    """
    net = ARCHITECTURES[name](contraction=contraction, head="orthogonal")
    push_apart(net, steps=30, rate=1.0)
    assert max(float(p.detach().abs().max()) for p in net.parameters()) > 5
    assert attacked(net).jacobian <= BOUND * (1 + 1e-5)
    assert attacked(net.freeze().double()).value <= BOUND * (1 + 1e-5)


def test_row_head_bounds_every_output_and_every_pair():
    net = ldlt.nn.Residual(INPUTS, [32] * 3, 5, BOUND, head="rows")
    optimiser = torch.optim.Adam(net.parameters(), 0.1)
    for _ in range(100):
        x = torch.randn(128, INPUTS)
        y = x + 0.3 * torch.randn(128, INPUTS)
        gap = net(x) - net(y)
        optimiser.zero_grad()
        (-(gap[:, 0] - gap[:, 1]).abs().mean() - gap[:, 2].abs().mean()).backward()
        optimiser.step()
    pairs = net.pair_bounds()
    assert torch.equal(pairs, pairs.T)
    assert float(pairs.max()) <= 2 * BOUND + 1e-9
    torch.testing.assert_close(net.output_bounds(), torch.full((5,), BOUND, dtype=torch.float64))
    assert net.declared_bound == BOUND
    assert BOUND < net.bound <= BOUND * 5**0.5 + 1e-9
    plain = net.freeze()
    assert attacked(plain).value <= net.bound * (1 + 1e-5)
    difference = nn.Sequential(plain, nn.Linear(5, 1, bias=False))
    for c in range(5):
        for j in range(c):
            with torch.no_grad():
                difference[1].weight.zero_()
                difference[1].weight[0, c], difference[1].weight[0, j] = 1.0, -1.0
            found = ldlt.attack.lipschitz_lower_bound(difference, INPUTS, starts=12, steps=40).value
            assert found <= float(pairs[c, j]) * (1 + 1e-5)
            if (c, j) == (1, 0):
                assert found >= 0.9 * float(pairs[c, j])


def test_pair_bounds_of_a_joint_head_hold_and_are_below_the_worst_case():
    net = ARCHITECTURES["residual"]()
    push_apart(net)
    pairs = net.pair_bounds()
    assert float(pairs.max()) <= 2**0.5 * BOUND + 1e-9
    x, y = torch.randn(4096, INPUTS), torch.randn(4096, INPUTS)
    with torch.no_grad():
        gap = (net(x) - net(y)).double()
    distance = (x - y).norm(dim=1).double()
    for c in range(OUTPUTS):
        for j in range(c):
            steepest = float(((gap[:, c] - gap[:, j]).abs() / distance).max())
            assert steepest <= float(pairs[c, j]) * (1 + 1e-5)


def test_a_dead_network_fails_the_floor():
    """The floor of the first test is a real one: a network whose head is switched off does not pass it."""
    net = ARCHITECTURES["feed_forward"]()
    with torch.no_grad():
        net.module[-1].weight.mul_(1e-3)
    assert attacked(net).value < 0.9 * BOUND
