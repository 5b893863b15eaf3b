"""Certified radii and curves."""

from __future__ import annotations

from fractions import Fraction

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
    labels = torch.zeros(3)
    for logits, bounds, truth in (
        (torch.randn(3, 1), torch.ones(1, 1), labels),
        (torch.randn(3, 4), torch.ones(3, 3), labels),
        (torch.randn(3, 4), torch.ones(4, 4), labels[:2]),
        (torch.empty(0, 2), torch.ones(2, 2), labels[:0]),
    ):
        with pytest.raises(ldlt.ShapeError):
            ldlt.certified_accuracy(logits, truth, bounds)
    with pytest.raises(ldlt.OptionError):
        ldlt.certified_radius(torch.randn(3, 4), 1.0)


@given(st.integers(0, 10**6))
def test_curve_is_certified_accuracy_at_every_radius(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 4, (12, 3), generator=generator).float()  # many ties and equal radii
    labels = torch.randint(0, 3, (12,), generator=generator)
    bounds = torch.tensor([[0.0, 1, 2], [1, 0, 4], [2, 4, 0]])
    options = {"error": 0.25, "scale": 3.0} if seed % 2 else {}
    curve = ldlt.certified_curve(logits, labels, bounds, **options)
    places = [*curve.radii.tolist(), *(curve.radii * 0.999).tolist(), *(curve.radii + 1e-9).tolist(), 10.0]
    shares = ldlt.certified_accuracy(logits, labels, bounds, places, **options)
    assert {r: curve.at(r) for r in places} == shares
    assert curve.radii[0] == 0
    assert bool((curve.radii.diff() > 0).all())
    assert bool((curve.accuracy.diff() < 0).all())
    radius = ldlt.certified_radius(logits, bounds, **options) * (logits.argmax(1) == labels)
    assert curve.area == pytest.approx(float(radius.mean()), rel=1e-12, abs=1e-15)


def test_curves_at_the_ends():
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    wrong = ldlt.certified_curve(logits, torch.tensor([1, 1]), torch.ones(2, 2))
    assert wrong.radii.tolist() == [0.0]
    assert wrong.at(0) == wrong.area == 0
    constant = ldlt.certified_curve(logits, torch.tensor([0, 1]), torch.zeros(2, 2))
    assert constant.at(1e300) == 0.5
    assert constant.at(float("inf")) == 0  # as in certified_accuracy, nothing exceeds infinity
    assert constant.area == float("inf")
    for radius in (-1.0, float("nan")):
        with pytest.raises(ldlt.OptionError):
            wrong.at(radius)


@given(st.integers(0, 10**6))
def test_errors_are_charged_and_everything_is_rounded_downwards(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    error = 0.1 * torch.rand(4, 3, generator=generator, dtype=torch.float64)
    bounds = torch.rand(3, 3, generator=generator, dtype=torch.float64) + 0.1
    for used, scale in ((error, None), (error, 0.3), (0.0, None), (0.1, torch.tensor([7.0, 0.7]))):
        found = ldlt.certified_radius(logits, bounds, error=used, scale=scale)
        spread = error if used is error else torch.full_like(error, used)
        factor = 1 if scale is None else Fraction(float(torch.as_tensor(scale, dtype=torch.float64).min()))
        for row, charge, radius in zip(logits.tolist(), spread.tolist(), found.tolist(), strict=True):
            c = row.index(max(row))
            y, e, b = (list(map(Fraction, v)) for v in (row, charge, bounds[c].tolist()))
            exact = factor * max(0, min((y[c] - y[j] - e[c] - e[j]) / b[j] for j in range(3) if j != c))
            assert radius <= exact
            assert radius == pytest.approx(float(exact), rel=1e-10, abs=1e-14)


def test_no_radius_within_the_error():
    inf = float("inf")
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    error = torch.tensor([[0.6, 0.6], [0.0, inf], [0.0, 0.0]])
    for bounds in (torch.ones(2, 2), torch.zeros(2, 2), torch.full((2, 2), inf)):
        assert ldlt.certified_radius(logits, bounds, error=error).tolist() == [0.0, 0.0, 0.0]
    assert ldlt.certified_radius(logits, torch.zeros(2, 2), error=0.1, scale=2.0)[0] == inf
    for wrong in (-1.0, float("nan"), -error):
        with pytest.raises(ldlt.OptionError):
            ldlt.certified_radius(logits, torch.ones(2, 2), error=wrong)
    with pytest.raises(ldlt.ShapeError):
        ldlt.certified_radius(logits, torch.ones(2, 2), error=torch.zeros(2))


def test_radii_in_raw_units():
    """By the smallest scale; the standardisation as a layer gives at least that, and the same for a common scale."""
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    raw = 5 + 3 * torch.randn(10, 3, dtype=torch.float64)
    mean = raw.mean(0)
    certificate = ldlt.certify(net, 3)
    for scale in (torch.tensor([2.0, 0.5, 4.0]).double(), torch.full((3,), 0.5).double()):
        whole = nn.Sequential(ldlt.nn.Standardise(mean, scale), net)
        logits = net((raw - mean) / scale)
        by_scale = ldlt.certified_radius(logits, certificate, scale=scale)
        assert torch.equal(by_scale, 0.5 * ldlt.certified_radius(logits, certificate))
        by_layer = ldlt.certified_radius(whole(raw), ldlt.certify(whole, 3))
        common = len(scale.unique()) == 1
        ratio = (by_layer / by_scale).median()
        assert float(ratio) == pytest.approx(1.0, rel=1e-3) if common else float(ratio) > 1.05
    assert ldlt.certified_radius(logits, certificate, scale=0.5).tolist() == by_scale.tolist()
    for wrong in (0.0, -1.0, float("inf"), torch.tensor([1.0, float("nan")]), torch.empty(0)):
        with pytest.raises(ldlt.OptionError):
            ldlt.certified_radius(logits, certificate, scale=wrong)
