"""Certified radii and the attacks that test them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ldlt


@given(st.integers(0, 10**6))
def test_radius_is_the_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 4, generator=generator)
    bounds = torch.rand(4, 4, generator=generator) + 0.1
    bounds = bounds + bounds.T
    for row, radius in zip(logits.double(), ldlt.certified_radius(logits, bounds), strict=True):
        c = int(row.argmax())
        expected = min(float((row[c] - row[j]) / bounds[c, j].double()) for j in range(4) if j != c)
        assert float(radius) == pytest.approx(expected, rel=1e-12)


def test_ties_and_broken_rows_have_radius_zero():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, 1.0, 0.0], [nan, 1.0, 0.0], [1.0, nan, 0.0], [inf, 1.0, 0.0], [2.0, 1.0, 0.0]])
    radius = ldlt.certified_radius(logits, torch.ones(3, 3))
    assert radius.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    found = ldlt.certified_accuracy(logits, torch.zeros(5, dtype=torch.long), torch.ones(3, 3), [0.0, 0.5, 1.0])
    assert found == {0.0: 0.2, 0.5: 0.2, 1.0: 0.0}  # a radius counts only if it is exceeded


def test_wrong_shapes():
    with pytest.raises(ldlt.ShapeError, match="k ≥ 2"):
        ldlt.certified_radius(torch.randn(3, 1), torch.ones(1, 1))
    with pytest.raises(ldlt.ShapeError, match="pair_bounds"):
        ldlt.certified_radius(torch.randn(3, 4), torch.ones(3, 3))
    with pytest.raises(ldlt.ShapeError, match="labels"):
        ldlt.certified_accuracy(torch.randn(3, 4), torch.zeros(2), torch.ones(4, 4))


def test_no_step_inside_the_radius_changes_the_class():
    net = ldlt.nn.Residual(4, [16, 16], 3, bound=3.0, head="rows")
    optimiser = torch.optim.Adam(net.parameters(), 0.05)
    x = torch.randn(256, 4)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimiser.step()
    plain = net.freeze().double()
    x = x.double()
    radius = ldlt.certified_radius(plain(x), net.pair_bounds())
    predicted = plain(x).argmax(1)
    assert float(radius.median()) > 0.01
    closest = torch.full_like(radius, torch.inf)
    for _ in range(20):  # projected gradient attacks just inside the radius
        delta = torch.randn_like(x)
        for _ in range(20):
            delta = (delta / delta.norm(dim=1, keepdim=True) * radius[:, None] * 0.999).detach().requires_grad_()
            y = plain(x + delta)
            margin = y.gather(1, predicted[:, None])[:, 0] - y.scatter(1, predicted[:, None], -torch.inf).amax(1)
            closest = torch.minimum(closest, margin.detach())
            (slope,) = torch.autograd.grad(margin.sum(), delta)
            delta = delta.detach() - slope
    assert float(closest.min()) >= -1e-9


def test_attack_finds_the_norm_of_a_linear_map():
    layer = nn.Linear(6, 3, dtype=torch.float64)
    found = ldlt.attack.lipschitz_lower_bound(layer, 6, starts=3, steps=5)
    norm = float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
    assert found.value == pytest.approx(norm, rel=1e-9)
    with torch.no_grad():
        gap = (layer(found.x) - layer(found.y)).norm() / (found.x - found.y).norm()
    assert float(gap) == pytest.approx(found.pair, rel=1e-9)


def test_attack_leaves_the_model_alone_and_repeats():
    net = ldlt.nn.FeedForward(4, [8], 2)
    net.train()
    before = [p.clone() for p in net.parameters()]
    first = ldlt.attack.lipschitz_lower_bound(net, 4, starts=4, steps=5, x=torch.randn(2, 4))
    assert net.training
    assert all(
        torch.equal(a, b) and b.requires_grad and b.grad is None for a, b in zip(before, net.parameters(), strict=True)
    )
    torch.manual_seed(99)
    second = ldlt.attack.lipschitz_lower_bound(net, 4, starts=4, steps=5)
    assert second.value == ldlt.attack.lipschitz_lower_bound(net, 4, starts=4, steps=5).value
    assert first.value > 0
    with pytest.raises(ldlt.OptionError):
        ldlt.attack.lipschitz_lower_bound(net, 4, starts=0)
    with pytest.raises(ldlt.ShapeError):
        ldlt.attack.lipschitz_lower_bound(net, 4, x=torch.randn(2, 3))


def test_attack_on_a_constant_and_on_mixed_modes():
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones(len(x), 2)

    assert ldlt.attack.lipschitz_lower_bound(Constant(), 3, starts=2, steps=2).value == 0
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[1].eval()
    ldlt.attack.lipschitz_lower_bound(net, 3, starts=2, steps=2)
    assert net.training
    assert not net[1].training
