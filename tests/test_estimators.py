"""Estimators for scikit-learn: its conventions, sound radii and intervals, weights, seeds, failures, pictures."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import pickle
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import ldlt
from ldlt import LipschitzClassifier, LipschitzRegressor
from ldlt.estimators import certification, fitting, plots
from ldlt.estimators.rows import Restore, Rows, location_and_scale, merge

QUICK = {
    "hidden": (16,),
    "contraction": "cholesky",
    "bound": 1.0,
    "epochs": 15,
    "learning_rate": 0.02,
}
"""A network that learns blobs in a tenth of a second."""


@pytest.fixture(scope="module")
def wine():
    x, y = load_wine(return_X_y=True)
    return train_test_split(x, y, test_size=0.3, random_state=0, stratify=y)


@pytest.fixture(scope="module")
def classifier(wine):
    x, _, y, _ = wine
    return LipschitzClassifier(
        hidden=(32, 32), activation="relu", radius=0.5, epochs=40, learning_rate=0.01, random_state=0
    ).fit(x, y)


@pytest.fixture(scope="module")
def diabetes():
    x, y = load_diabetes(return_X_y=True, scaled=False)
    return x, y


@pytest.fixture(scope="module")
def regressor(diabetes):
    x, y = diabetes
    return LipschitzRegressor(hidden=(32, 32), bound=1.0, epochs=30, learning_rate=0.01, random_state=0).fit(x, y)


def attack(model, x, score, radius, steps=40):
    """Inputs within ``radius`` (n,) of ``x`` that make ``score(outputs)`` (n,) small, by projected gradients."""
    centre, reach = torch.tensor(x), torch.tensor(radius)[:, None]
    point = centre.clone()
    best, found = torch.full((len(x),), torch.inf, dtype=torch.float64), centre.clone()
    for step in range(steps + 1):
        point.requires_grad_()
        value = score(model(point))
        (grad,) = torch.autograd.grad(value.sum(), point)
        with torch.no_grad():
            better = value < best
            best, found = torch.where(better, value, best), torch.where(better[:, None], point, found)
            size = 2 * reach if step == 0 else 0.2 * reach  # the first step goes to the surface
            point = point - size * grad / grad.norm(dim=1, keepdim=True).clamp_min(1e-300)
            offset = point - centre
            length = offset.norm(dim=1, keepdim=True)
            point = centre + offset * (reach / length.clamp_min(1e-300)).clamp(max=1.0)
    return found.detach()


@pytest.mark.parametrize("kind", [LipschitzClassifier, LipschitzRegressor])
def test_all_checks_of_scikit_learn_pass(kind, monkeypatch):
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # without it one check is skipped
    results = check_estimator(kind(**QUICK), on_skip=None, on_fail="raise")
    assert len(results) > 55
    assert {r["status"] for r in results} == {"passed"}


def test_the_missing_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sklearn" else find(name, *rest)
    )
    monkeypatch.delitem(vars(ldlt), "LipschitzClassifier")
    monkeypatch.delitem(sys.modules, "ldlt.estimators")
    with pytest.raises(ldlt.MissingExtraError) as caught:
        ldlt.LipschitzClassifier  # noqa: B018
    assert caught.value.extra == "sklearn"
    with pytest.raises(AttributeError):
        ldlt.LipschitzTransformer  # noqa: B018


def test_clone_keeps_parameters_and_pickles_predict_alike(classifier, wine):
    test = wine[1]
    fresh = clone(classifier)
    assert fresh.get_params() == classifier.get_params()
    assert not hasattr(fresh, "model_")
    again = pickle.loads(pickle.dumps(classifier))
    assert np.array_equal(again.decision_function(test), classifier.decision_function(test))
    assert np.array_equal(again.certified_radius(test), classifier.certified_radius(test))


def test_equal_seeds_give_equal_networks_and_global_generators_are_left_alone(wine):
    x, test, y, _ = wine
    torch.manual_seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    a = LipschitzClassifier(**QUICK, random_state=3).fit(x, y).decision_function(test)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # noqa: NPY002
    torch.manual_seed(2)
    order = np.random.default_rng(0).permutation(len(x))
    b = LipschitzClassifier(**QUICK, random_state=3).fit(x[order], y[order]).decision_function(test)
    c = LipschitzClassifier(**QUICK, random_state=4).fit(x, y).decision_function(test)
    assert np.array_equal(a, b)  # nor does the order of the rows matter
    assert not np.allclose(a, c)


def test_data_frames_pipelines_and_grid_search():
    data = load_iris(as_frame=True)
    frame, y = data.data, data.target_names[data.target]
    model = LipschitzClassifier(**QUICK, random_state=0).fit(frame, y)
    assert list(model.feature_names_in_) == list(frame.columns)
    assert set(model.predict(frame)) == set(data.target_names)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={frame.columns[0]: "other"}))
    pipeline = make_pipeline(StandardScaler(), LipschitzClassifier(**QUICK, random_state=0))
    search = GridSearchCV(pipeline, {"lipschitzclassifier__radius": [0.0, 0.5]}, cv=2).fit(frame, y)
    assert search.best_score_ > 0.8
    assert search.best_estimator_[-1].certified_radius(np.zeros((1, 4))).shape == (1,)


def test_certificates_are_rigorous_proven_again_and_in_the_units_they_say(classifier, wine):
    test = wine[1]
    for certificate, model in [
        (classifier.certificate_, classifier.model_),
        (classifier.standard_certificate_, classifier.model_[1]),
    ]:
        assert certificate.rigorous
        assert ldlt.verify(certificate, model).bound == certificate.bound
        lower = ldlt.attack.lipschitz_lower_bound(model, 13, starts=8, steps=20).value
        assert lower <= certificate.bound
    assert classifier.certificate_ is classifier.certificate_  # made once
    assert classifier.standard_certificate_.bound <= classifier.bound_ * (1 + 1e-8)
    assert classifier.certificate_.bound <= classifier.bound_ / classifier.scale_.min() * (1 + 1e-8)
    assert not classifier.model_.training
    assert type(classifier.model_) is torch.nn.Sequential
    with torch.no_grad():
        logits = classifier.model_(torch.tensor(test)).numpy()
    assert np.array_equal(logits, classifier.decision_function(test))
    standard = classifier.model_[1](torch.tensor((test - classifier.mean_) / classifier.scale_))
    assert np.allclose(standard.numpy(), logits)


def test_no_attack_within_the_radius_changes_a_prediction(classifier, wine):
    test, labels = wine[1], wine[3]
    predicted = torch.tensor(classifier.predict(test))
    radius = classifier.certified_radius(test)
    assert (radius > 0).mean() > 0.9

    def margin(logits):
        own = logits.gather(1, predicted[:, None])
        return (own - logits.scatter(1, predicted[:, None], -torch.inf)).min(1).values

    inside = attack(classifier.model_, test, margin, radius * (1 - 1e-9))
    assert np.array_equal(classifier.predict(inside.numpy()), predicted.numpy())
    standard = classifier.certified_radius(test, units="standard")
    points = (test - classifier.mean_) / classifier.scale_
    # The attack is worth something: a few radii further out it succeeds.
    for share, changed in ((0.999, (0, 0)), (3.0, (0.5, 1))):
        found = attack(torch.nn.Sequential(classifier.model_[1]), points, margin, standard * share).numpy()
        moved = classifier.predict(found * classifier.scale_ + classifier.mean_) != predicted.numpy()
        assert changed[0] <= moved.mean() <= changed[1]
    shares = classifier.certified_accuracy(test, labels, [0.0, 0.1, 0.2])
    assert shares[0] == classifier.score(test, labels)
    assert (np.diff(shares) <= 0).all()
    assert classifier.certified_accuracy(test, labels, 0.1) == shares[1]
    assert classifier.certified_accuracy(test, labels, 0.25, "standard") > 0.8


def test_one_scale_for_all_features_makes_radii_multiples():
    x, y = load_iris(return_X_y=True)
    quick = {**QUICK, "activation": "relu", "random_state": 0}
    model = LipschitzClassifier(**quick, standardise="scale").fit(x, y)
    assert len(set(model.scale_)) == 1
    data, standard = model.certified_radius(x), model.certified_radius(x, "standard")
    assert np.allclose(data, standard * model.scale_[0], rtol=1e-3)  # two searches, to their tolerance
    plain = LipschitzClassifier(**quick, standardise=False).fit(x, y)
    assert np.allclose(plain.certified_radius(x), plain.certified_radius(x, "standard"), rtol=1e-3)


def test_the_best_multipliers_beat_those_of_the_construction_and_a_cut_search_is_valid(classifier):
    quick = pickle.loads(pickle.dumps(classifier)).set_params(certify_seconds=0.0)
    quick._certificates.clear()
    cut = quick.certificate_
    assert cut.rigorous
    assert ldlt.verify(cut, quick.model_).bound == cut.bound
    best = certification.typical_constant(classifier.certificate_.pair_bounds())
    assert best < 0.95 * certification.typical_constant(cut.pair_bounds())


def test_radii_do_not_depend_on_the_bound_with_the_margin_loss():
    x, y = load_iris(return_X_y=True)
    settings = {**QUICK, "epochs": 60, "random_state": 0}
    radii = [
        np.median(LipschitzClassifier(**{**settings, "bound": b}).fit(x, y).certified_radius(x, "standard"))
        for b in (1.0, 10.0)
    ]
    assert radii[0] == pytest.approx(radii[1], rel=0.2)
    # With the cross-entropy a larger bound means more confidence.
    sure = [
        LipschitzClassifier(**{**settings, "bound": b}, loss="cross-entropy").fit(x, y).predict_proba(x).max(1)
        for b in (1.0, 10.0)
    ]
    assert sure[0].mean() < sure[1].mean()


def test_without_a_proof_nothing_is_claimed(monkeypatch, classifier, regressor, wine, diabetes):
    issue = certification.issue

    def refuse(model, shape, *rest, **options):
        made = issue(model, shape, *rest, **options)
        return dataclasses.replace(made, status="not certified", reason="for a test", bound=math.inf, rigorous=False)

    monkeypatch.setattr(certification, "issue", refuse)
    monkeypatch.setattr(classifier, "_certificates", {})
    monkeypatch.setattr(regressor, "_certificates", {})
    with pytest.warns(UserWarning, match="nothing is certified: for a test"):
        assert not classifier.certified_radius(wine[1]).any()
    with pytest.warns(UserWarning, match="nothing is certified"):
        lower, upper = regressor.predict_interval(diabetes[0], 0.1)
    assert np.isinf(lower).all()
    assert np.isinf(upper).all()
    lower, upper = regressor.predict_interval(diabetes[0], 0.0)
    assert np.allclose(lower, upper)


def test_no_attack_leaves_the_interval(regressor, diabetes):
    x, y = diabetes
    assert regressor.score(x, y) > 0.5
    radius = np.linspace(0.0, 2.0, len(x))
    lower, upper = regressor.predict_interval(x, radius)
    predicted = regressor.predict(x)
    assert lower.shape == upper.shape == predicted.shape == y.shape
    assert (lower <= predicted).all()
    assert (predicted <= upper).all()
    for sign, end in ((1.0, lower), (-1.0, upper)):
        found = regressor.predict(attack(regressor.model_, x, lambda out, s=sign: s * out[:, 0], radius).numpy())
        assert (sign * (found - end) >= 0).all()
        if sign == 1.0:  # nor is the interval empty talk
            assert ((predicted - found)[1:] / (predicted - lower)[1:]).max() > 0.3
    assert regressor.certificate_.rigorous
    assert ldlt.verify(regressor.certificate_, regressor.model_).bound == regressor.certificate_.bound


def test_several_targets_of_different_scales(diabetes):
    x, y = diabetes
    both = np.stack([y, -1e-3 * y + 7], axis=1)
    model = LipschitzRegressor(**QUICK, random_state=0).fit(x, both)
    predicted = model.predict(x)
    assert predicted.shape == both.shape
    assert model.score(x, both) > 0.3
    lower, upper = model.predict_interval(x, 0.5)
    width = (upper - lower).mean(0)
    assert 100 < width[0] / width[1] < 10_000  # every target has a constant of its own
    for target, sign in ((0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0)):
        moved = attack(model.model_, x, lambda out, s=sign, t=target: s * out[:, t], np.full(len(x), 0.5), steps=10)
        found = model.predict(moved.numpy())
        assert (found >= lower).all()
        assert (found <= upper).all()
    column = LipschitzRegressor(**QUICK, random_state=0).fit(x, y[:, None])
    assert column.predict(x).shape == (len(x), 1)
    with pytest.raises(ValueError, match="y has 2 targets, the network has 1"):
        column.partial_fit(x, both)


@pytest.mark.parametrize(("loss", "expected"), [("huber", [0.125, 2.5]), ("absolute", [0.5, 3.0])])
def test_robust_losses(loss, expected, diabetes):
    model = LipschitzRegressor(**QUICK, loss=loss, random_state=0).fit(*diabetes)
    assert model.score(*diabetes) > 0.3
    assert model._row_loss(model.network_)(torch.tensor([[0.5], [3.0]]), torch.zeros(2, 1)).tolist() == expected


@pytest.mark.parametrize("radius", [-1.0, math.nan, [1.0, 2.0]])
def test_radii_that_are_none(regressor, diabetes, radius):
    with pytest.raises(ValueError, match="radius"):
        regressor.predict_interval(diabetes[0], radius)


def test_weights_are_multiplicities_to_the_last_bit(wine):
    x, test, y, _ = wine
    weight = np.random.default_rng(0).integers(0, 4, len(x))
    quick = {**QUICK, "early_stopping": True, "random_state": 0}
    weighted = LipschitzClassifier(**quick).fit(x, y, sample_weight=weight)
    repeated = LipschitzClassifier(**quick).fit(x.repeat(weight, 0), y.repeat(weight))
    assert np.array_equal(weighted.decision_function(test), repeated.decision_function(test))
    removed = LipschitzRegressor(**quick).fit(x[weight > 0], y[weight > 0])
    ignored = LipschitzRegressor(**quick).fit(x, y, sample_weight=2.0 * (weight > 0))
    assert np.array_equal(removed.predict(test), ignored.predict(test))


def test_class_weights(wine):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    y = np.where(rng.random(300) < 0.1, "rare", "common")
    x[y == "rare"] += 1.0
    found = {}
    for name, weight in {"none": None, "balanced": "balanced", "dict": {"rare": 9.0}}.items():
        model = LipschitzClassifier(**QUICK, class_weight=weight, random_state=0).fit(x, y)
        found[name] = (model.predict(x) == "rare").mean()
    assert found["none"] < 0.1 < found["balanced"]
    assert found["dict"] == pytest.approx(found["balanced"], abs=0.1)
    # 'balanced' is n / (k n_c) with the sample weights as counts, and multiplies them.
    weight = np.where(y == "rare", 1.0, (y == "rare").sum() / (y == "common").sum())
    by_hand = LipschitzClassifier(**QUICK, random_state=0).fit(x, y, weight).decision_function(x)
    balanced = LipschitzClassifier(**QUICK, class_weight="balanced", random_state=0).fit(x, y, weight)
    assert np.allclose(by_hand, balanced.decision_function(x), atol=1e-2)


def test_rows_are_merged_in_a_fixed_order_and_split_by_class():
    x = np.array([[1.0, -0.0], [0.0, 2.0], [1.0, 0.0], [5.0, 5.0]])
    target = np.array([[1.0], [0.0], [1.0], [0.0]])
    rows = merge(x, target, np.array([1.0, 2.0, 0.5, 0.0]))
    assert rows.x.tolist() == [[0.0, 2.0], [1.0, 0.0]]
    assert rows.target[:, 0].tolist() == [0.0, 1.0]
    assert rows.weight.tolist() == [2.0, 1.5]
    code = np.repeat([0.0, 1.0, 2.0], [50, 30, 1])
    many = Rows(np.arange(81.0)[:, None], code[:, None], np.ones(81))
    train, held = many.split(0.2, np.random.default_rng(0), by_target=True)
    assert len(train) + len(held) == 81
    assert not set(train.x[:, 0]) & set(held.x[:, 0])
    assert np.bincount(held.target[:, 0].astype(int), minlength=3).tolist() in ([10, 6, 0], [10, 5, 0], [9, 6, 0])
    pair = many.at(np.array([0, 1]))
    assert [len(part) for part in pair.split(0.01, np.random.default_rng(0), by_target=True)] == [1, 1]
    assert [len(part) for part in pair.split(0.99, np.random.default_rng(0), by_target=False)] == [1, 1]
    with pytest.raises(ValueError, match="only one sample"):
        many.at(np.array([0])).split(0.5, np.random.default_rng(0), by_target=False)


def test_location_and_scale():
    table = np.array([[1e200, 3.0, 1e9 + 1, 0.0], [-1e200, 3.0, 1e9 - 1, 1e-300]])
    mean, scale = location_and_scale(table, np.ones(2))
    assert np.allclose(mean, [0.0, 3.0, 1e9, 0.0])
    assert np.allclose(scale, [1e200, 1.0, 1.0, 5e-301], rtol=1e-12, atol=0)
    _, common = location_and_scale(table[:, 1:3], np.ones(2), common=True)
    assert common.tolist() == [1.0, 1.0]  # constant columns do not count
    assert location_and_scale(np.full((3, 2), 0.1), np.ones(3), common=True)[1].tolist() == [1.0, 1.0]
    mean, scale = location_and_scale(np.array([[0.0], [1.0]]), np.array([3.0, 1.0]))
    assert (mean[0], scale[0]) == (0.25, pytest.approx(math.sqrt(3) / 4))
    restored = Restore(torch.tensor([5.0]), torch.tensor([2.0]))(torch.tensor([[3.0]]))
    assert restored.item() == 11.0


def test_large_offsets_and_constant_features_do_no_harm():
    x, y = load_iris(return_X_y=True)
    shifted = np.concatenate([x + 1e9, np.full((len(x), 1), 0.1)], axis=1)
    model = LipschitzClassifier(**QUICK, random_state=0).fit(shifted, y)
    assert model.score(shifted, y) > 0.9
    assert model.certificate_.rigorous
    assert (model.certified_radius(shifted) > 0).mean() > 0.9


def test_constants_beyond_floating_point_are_not_claimed():
    x, y = load_iris(return_X_y=True)
    for unit in (1e-150, 1e-300):
        tiny = LipschitzClassifier(**QUICK, random_state=0).fit(x * [unit, 1, 1, 1], y)
        with pytest.warns(UserWarning, match="nothing is certified"):
            assert not tiny.certified_radius(x).any()
        assert not tiny.certificate_.is_certified
        assert (tiny.certified_radius(x * [unit, 1, 1, 1], "standard") > 0).any()


def test_partial_fit(wine):
    x, test, y, labels = wine
    model = LipschitzClassifier(**QUICK, random_state=0)
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        model.partial_fit(x, y)
    first = y != 2
    model.partial_fit(x[first], y[first], classes=[0, 1, 2])
    mean = model.mean_.copy()
    for _ in range(25):
        model.partial_fit(x, y)
    assert np.array_equal(mean, model.mean_)  # fixed at the first call
    assert model.score(test, labels) > 0.9
    assert model.n_iter_ == 26
    assert model.certificate_.rigorous
    before = model.certificate_
    model.partial_fit(x, y)
    assert model.certificate_ is not before
    with pytest.raises(ValueError, match="not those of the first call"):
        model.partial_fit(x, y, classes=[0, 1])
    with pytest.raises(ValueError, match="the class 7"):
        model.partial_fit(x[:1], [7])
    with pytest.raises(ValueError, match="needs all rows at once"):
        LipschitzClassifier(class_weight="balanced").partial_fit(x, y, classes=[0, 1, 2])
    with pytest.raises(ValueError, match="at least two classes"):
        LipschitzClassifier().partial_fit(x, y, classes=[0])


def test_warm_start_goes_on(wine):
    x, _, y, _ = wine
    model = LipschitzClassifier(**{**QUICK, "epochs": 2}, warm_start=True, random_state=0).fit(x, y)
    start = model.loss_curve_[0]
    for _ in range(4):
        model.fit(x, y)
    assert model.n_iter_ == 10
    assert model.loss_curve_[-1] < 0.9 * start
    with pytest.raises(ValueError, match="the class 9"):
        model.fit(x, np.where(y == 0, 9, y))


def test_early_stopping_keeps_the_best_epoch(wine):
    x, _, y, _ = wine
    quick = {**QUICK, "epochs": 60, "early_stopping": True, "patience": 3, "validation_fraction": 0.3}
    model = LipschitzClassifier(**{**quick, "learning_rate": 0.1}, random_state=0).fit(x, y)
    assert len(model.validation_curve_) == len(model.loss_curve_) == model.n_iter_ < 60
    assert model.best_epoch_ == 1 + int(np.argmin(model.validation_curve_)) == model.n_iter_ - 3


@pytest.mark.parametrize("early", [False, True])
def test_an_interrupted_fit_keeps_what_was_learnt(wine, early):
    x, test, y, _ = wine
    for last in (6, 1):
        seen = []

        def interrupt(epoch, seen=seen, last=last):
            seen.append(epoch)
            if epoch.epoch == last:
                raise KeyboardInterrupt

        options = {**QUICK, "epochs": 50, "early_stopping": early, "random_state": 0}
        with pytest.warns(UserWarning, match="interrupted"):
            model = LipschitzClassifier(**options, callback=interrupt).fit(x, y)
        assert model.n_iter_ == len(seen) == last
        assert seen[-1].epochs == 50
        assert math.isnan(seen[0].validation) is not early
        assert model.predict(test).shape == (len(test),)
    assert model.certificate_.rigorous


def test_a_loss_that_is_not_finite_is_told(wine):
    x, test, y, _ = wine
    with pytest.warns(ConvergenceWarning, match="not finite"):
        model = LipschitzClassifier(loss="cross-entropy", **{**QUICK, "learning_rate": 1e30, "weight_decay": 0.0}).fit(
            x, y
        )
    assert np.isfinite(model.decision_function(test)).all()


def test_an_epoch_deals_every_row_once_and_weights_sum_to_mean_losses():
    for rows, size, steps in ((150, "auto", 4), (5000, "auto", 10), (10**6, "auto", 64), (3, "auto", 3), (5, 64, 1)):
        assert fitting.Batches.steps_for(rows, size) == steps
    batches = fitting.Batches(torch.arange(11).float()[:, None], torch.zeros(11, 1), torch.ones(11), 4)
    dealt = list(batches.deal(np.random.default_rng(0)))
    assert [len(x) for x, _, _ in dealt] == [3] * 4
    seen = [float(v) for x, _, w in dealt for v, weight in zip(x[:, 0], w, strict=True) if weight > 0]
    assert sorted(seen) == list(range(11))
    assert float(sum(w.sum() for _, _, w in dealt)) == pytest.approx(4)


def test_recorded_and_plain_steps_train_alike(wine, monkeypatch):
    x, test, y, _ = wine
    recorded = LipschitzClassifier(**QUICK, random_state=0).fit(x, y).decision_function(test)
    monkeypatch.setattr(fitting, "_WORTH_RECORDING", 10**9)
    plain = LipschitzClassifier(**QUICK, random_state=0).fit(x, y).decision_function(test)
    assert np.allclose(recorded, plain, atol=1e-3)

    def fail(*_):
        raise fitting.ProgramError("for a test")

    monkeypatch.setattr(fitting, "_WORTH_RECORDING", 1)
    monkeypatch.setattr(fitting, "record", fail)
    assert np.array_equal(plain, LipschitzClassifier(**QUICK, random_state=0).fit(x, y).decision_function(test))


@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "gelu", "silu", "softplus", "tanh", "maxmin"])
def test_every_activation_is_certified(activation):
    x, y = load_iris(return_X_y=True)
    options = {**QUICK, "architecture": "residual", "epochs": 4, "batch_size": 75}
    model = LipschitzClassifier(**options, activation=activation, random_state=0).fit(x, y)
    assert model.certificate_.rigorous
    assert (model.certified_radius(x) > 0).any()


def test_learns_real_data_about_as_well_as_it_can():
    x, y = load_breast_cancer(return_X_y=True)
    model = LipschitzClassifier(epochs=30, random_state=0)
    assert cross_val_score(model, x, y, cv=2).mean() > 0.94


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("bound", (0, math.inf, "large")),
        ("architecture", ("convolutional",)),
        ("activation", ("sin",)),
        ("loss", ("hinge", "squared")),
        ("standardise", (True,)),
        ("hidden", ((), (8, -1), "64", 6.5)),
        ("learning_rate", (0.0,)),
        ("weight_decay", (-1.0,)),
        ("validation_fraction", (1.0,)),
        ("epochs", (0, 2.5)),
        ("patience", (True,)),
        ("batch_size", (0, "all")),
        ("radius", (-0.1, "far", (0.1, math.nan))),
        ("contraction", ("qr",)),
        ("head", ("two",)),
        ("class_weight", ("even", {0: -1.0}, {5: 1.0})),
        ("certify_seconds", (-1,)),
        ("callback", (3,)),
    ],
)
def test_options_without_meaning_are_refused_in_fit(option, values):
    x, y = load_iris(return_X_y=True)
    for value in values:
        model = LipschitzClassifier(**{option: value})
        with pytest.raises(ValueError, match=option):
            model.fit(x, y)
        assert not hasattr(model, "model_")


def test_other_failures(classifier, wine):
    x, test, y, labels = wine
    with pytest.raises(ValueError, match="only one class"):
        LipschitzClassifier().fit(x, np.zeros(len(x)))
    with pytest.raises(ValueError, match="infinity"):
        LipschitzClassifier().fit(np.where(x > 14, np.inf, x), y)
    with pytest.raises(ValueError, match="not be negative"):
        LipschitzClassifier().fit(x, y, sample_weight=-np.ones(len(x)))
    with pytest.raises(ValueError, match="must be even"):
        LipschitzClassifier(hidden=5, activation="maxmin").fit(x, y)
    with pytest.raises(NotFittedError):
        LipschitzClassifier().certified_radius(x)
    with pytest.raises(NotFittedError):
        LipschitzClassifier().certificate_  # noqa: B018
    with pytest.raises(ldlt.OptionError, match="units"):
        classifier.certified_radius(test, units="metres")
    with pytest.raises(ValueError, match="X has 54 rows, y has 53"):
        classifier.certified_accuracy(test, labels[1:], 0.1)


def test_plots(classifier, wine, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    test, labels = wine[1], wine[3]
    left, right = figure.Figure().subplots(1, 2)
    assert plots.plot_certified_accuracy(classifier, test, labels, ax=left) is left
    radii, shares = left.lines[0].get_data()
    assert shares[0] == classifier.score(test, labels)
    assert np.array_equal(shares, classifier.certified_accuracy(test, labels, radii))
    assert plots.plot_radii(classifier, test, labels, bins=7, ax=right) is right
    assert sum(bar.get_height() for bar in right.patches) == len(test)
    assert [t.get_text() for t in right.get_legend().get_texts()] == ["correct", "wrong"]
    several = plots.plot_settings(LipschitzClassifier(**QUICK, random_state=0), test, labels, (0.0, 1.0))
    assert [t.get_text() for t in several.get_legend().get_texts()] == ["radius=0", "radius=1"]
    new = plots.plot_certified_accuracy(classifier, test, labels, [0.0, 0.5], units="standard")
    assert new.lines[0].get_xdata().tolist() == [0.0, 0.5]
    assert plots.plot_radii(classifier, test, units="standard").get_legend() is None
    pyplot.close("all")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ldlt.MissingExtraError) as caught:
        plots.plot_radii(classifier, test)
    assert caught.value.extra == "figures"


def test_numbers_of_a_frame_may_be_integers():
    frame = pd.DataFrame({"a": range(20), "b": [0, 1] * 10})
    model = LipschitzClassifier(**QUICK, random_state=0).fit(frame, np.arange(20) > 9)
    assert model.predict(frame).dtype == bool
    assert model.predict_log_proba(frame) == pytest.approx(np.log(model.predict_proba(frame)))
