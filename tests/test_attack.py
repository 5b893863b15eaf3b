"""Attacks: what they find is real, near the truth where that is known, and within what is certified."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

import ldlt
from ldlt.attack import ATTACKS, attack_radius, lipschitz_lower_bound, robustness_gap

pytest.importorskip("eagerpy")  # what foolbox is built on; foolbox itself warns when it is imported
inf = float("inf")


def check(model, x, labels, found):
    """What is reported is real."""
    hit = (found.radius > 0) & found.radius.isfinite()
    with torch.no_grad():
        assert bool((model(found.adversarial).argmax(1) != labels)[hit].all())
    length = (found.adversarial.double() - x.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(length[hit], found.radius[hit], rtol=1e-12, atol=0)
    assert torch.equal(found.adversarial[~hit], x[~hit])
    assert [a is not None for a in found.attack] == hit.tolist()


EACH = [(2, 1.0, [name]) for name in ATTACKS] + [(4, 1e3, ["deepfool", "ddn"]), (3, 1e-4, ["deepfool", "ddn"])]


@pytest.mark.parametrize(("classes", "size", "attacks"), EACH)
def test_linear_classifiers(classes, size, attacks):
    """The certified radius of a linear classifier is the distance; attacks nearly reach it at any scale."""
    model = nn.Linear(6, classes, dtype=torch.float64)
    x = size * torch.randn(40, 6, dtype=torch.float64)
    certified = ldlt.certified_radius(model(x), torch.cdist(model.weight.detach(), model.weight.detach()))
    found = attack_radius(model, x, attacks=attacks, steps=50)
    check(model, x, model(x).argmax(1), found)
    gap = robustness_gap(certified, found)
    assert gap.samples == 40
    assert set(found.attack) <= {*attacks}
    assert not len(gap.refuted)
    assert bool((found.radius < 1.05 * certified).all())
    assert 0.95 < gap.ratio <= 1
    assert gap.certified <= gap.attacked


def test_certified_radii_hold_on_a_trained_network():
    net = ldlt.nn.FeedForward(4, [16, 16], 3, bound=3.0, head="rows")
    optimiser = torch.optim.Adam(net.parameters(), 0.05)
    x = torch.randn(128, 4)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for _ in range(50):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimiser.step()
    plain, x, labels = net.freeze().double(), x[:50].double(), labels[:50]
    certified = ldlt.certified_radius(plain(x), ldlt.certify(plain, 4))
    found = attack_radius(plain, x, steps=40, batch=32)
    check(plain, x, plain(x).argmax(1), found)
    assert bool(found.radius.isfinite().all())
    gap = robustness_gap(certified, found)
    assert not len(gap.refuted)
    assert gap.ratio > 0.5
    correct = plain(x).argmax(1) == labels
    given = attack_radius(plain, x, labels, ["deepfool"])
    assert torch.equal(given.radius == 0, ~correct)
    check(plain, x, labels, given)
    # a claim that is too large is refuted
    assert len(robustness_gap(2 * certified, found).refuted) > 25


def test_images_saturation_and_flat_models():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        model[1].weight.mul_(50)  # gradients nearly vanish
    x = torch.randn(6, 3, 2, 2)
    found = attack_radius(model, x, attacks=["deepfool", "ddn"], steps=40)
    check(model, x, model(x).argmax(1), found)
    assert int(found.radius.isfinite().sum()) >= 5

    class Constant(nn.Module):
        def forward(self, x):
            return torch.tensor([[2.0, 1.0]]).expand(len(x), 2)

    none = attack_radius(Constant(), x, steps=5)
    assert none.radius.tolist() == [inf] * 6
    assert set(none.attack) == {None}
    assert torch.equal(none.adversarial, x)
    gap = robustness_gap(torch.ones(6), none)
    assert gap.samples == 0
    assert math.isnan(gap.ratio)
    broken = x.clone()
    broken[0] = float("nan")
    assert attack_radius(model, broken, attacks=["deepfool"]).radius[0] == 0
    assert attack_radius(model, x[:0]).radius.shape == (0,)


def test_repeatable_and_leaves_no_trace():
    net = ldlt.nn.FeedForward(3, [8], 2)
    net.train()
    x = torch.randn(5, 3)
    state, before = torch.get_rng_state(), [p.clone() for p in net.parameters()]
    required = [p.requires_grad for p in net.parameters()]
    with torch.no_grad():
        first = attack_radius(net, x, attacks=["ddn"], steps=10)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    assert [p.requires_grad for p in net.parameters()] == required
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, net.parameters(), strict=True))
    torch.randn(7)
    second = attack_radius(net, x, attacks=["ddn"], steps=10)
    assert torch.equal(first.radius, second.radius)
    assert torch.equal(first.adversarial, second.adversarial)


def test_options_and_the_missing_extra(monkeypatch):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    for options in ({"attacks": "ddn"}, {"attacks": []}, {"attacks": ["pgd"]}, {"steps": 0}, {"batch": 1.5}):
        with pytest.raises(ldlt.OptionError):
            attack_radius(model, x, **options)
    for wrong in (lambda: attack_radius(model, x[0]), lambda: attack_radius(model, x, torch.zeros(3))):
        with pytest.raises(ldlt.ShapeError):
            wrong()
    with pytest.raises(ldlt.ShapeError):
        attack_radius(nn.Linear(3, 1), x)
    with pytest.raises(ldlt.ShapeError):
        robustness_gap(torch.ones(3), torch.ones(2))
    monkeypatch.setitem(sys.modules, "foolbox", None)
    with pytest.raises(ldlt.MissingExtraError) as caught:
        attack_radius(model, x)
    assert caught.value.extra == "attack"


# -- steep pairs -------------------------------------------------------------------------------------------------------


def test_the_steepest_pair_of_a_linear_map_has_its_norm():
    layer = nn.Linear(6, 3, dtype=torch.float64)
    found = lipschitz_lower_bound(layer, 6, starts=3, steps=5)
    norm = float(torch.linalg.matrix_norm(layer.weight.detach(), 2))
    assert found.value == pytest.approx(norm, rel=1e-9)
    with torch.no_grad():
        gap = (layer(found.x) - layer(found.y)).norm() / (found.x - found.y).norm()
    assert float(gap) == pytest.approx(found.pair, rel=1e-9)


def test_steep_pairs_leave_the_model_alone_and_repeat():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))
    net[1].eval()
    before = [p.clone() for p in net.parameters()]
    assert lipschitz_lower_bound(net, 4, starts=4, steps=5, x=torch.randn(2, 4)).value > 0
    assert [m.training for m in net] == [True, False, True, True]
    for a, b in zip(before, net.parameters(), strict=True):
        assert torch.equal(a, b)
        assert b.requires_grad
        assert b.grad is None
    torch.manual_seed(99)
    found = [lipschitz_lower_bound(net, 4, starts=4, steps=5).value for _ in range(2)]
    assert found[0] == found[1]

    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones(len(x), 2)

    assert lipschitz_lower_bound(Constant(), 3, starts=2, steps=2).value == 0
    for options in ({"starts": 0}, {"steps": -1}, {"scale": 0.0}, {"starts": 2.0}):
        with pytest.raises(ldlt.OptionError):
            lipschitz_lower_bound(net, 4, **options)
    for shape, x in ((4, torch.randn(2, 3)), (0, None), ("four", None)):
        with pytest.raises(ldlt.ShapeError):
            lipschitz_lower_bound(net, shape, x=x)
