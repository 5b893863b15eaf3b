"""Pipelines of scikit-learn as one certified network, and tables with texts and missing values."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_diabetes, load_wine
from sklearn.decomposition import PCA
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
)

import ldlt
from ldlt.columns import Column, columns_of, encode, weighted_median

QUICK = {"hidden": (8,), "contraction": "cholesky", "bound": 1.0, "epochs": 4, "learning_rate": 0.02, "random_state": 0}


@pytest.fixture(scope="module")
def messy():
    rng = np.random.default_rng(0)
    n = 200
    frame = pd.DataFrame(
        {
            "age": rng.normal(40, 10, n),
            "income": np.where(rng.random(n) < 0.2, np.nan, rng.normal(3e4, 1e4, n)),
            "city": rng.choice(["Rome", "Oslo", "Bonn", None], n),
            "member": rng.random(n) > 0.5,
        }
    )
    return frame, np.where((frame["age"] > 40) ^ (frame["city"] == "Rome"), "yes", "no")


def kinds(frame):
    number = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
    text = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore"))
    return ColumnTransformer([("t", text, ["city"]), ("n", number, ["income", "age"]), ("rest", "drop", ["member"])])


STEPS = {
    "scalers": lambda: [StandardScaler(), MinMaxScaler((-1, 1)), MaxAbsScaler(), RobustScaler()],
    "components": lambda: [StandardScaler(), PCA(5, whiten=True)],
    "union": lambda: [FeatureUnion([("a", MinMaxScaler()), ("b", PCA(2))], transformer_weights={"a": 3.0})],
    "by place": lambda: [ColumnTransformer([("a", PCA(2), slice(0, 5)), ("b", "passthrough", [7])], remainder="drop")],
    "rest": lambda: [ColumnTransformer([("a", MaxAbsScaler(), [3, 1])], remainder="passthrough")],
    "nothing": lambda: ["passthrough", FunctionTransformer()],
}


@pytest.mark.parametrize("name", STEPS)
def test_affine_steps_are_a_part_of_the_network(name):
    x, y = load_wine(return_X_y=True)
    pipeline = Pipeline([(str(i), s) for i, s in enumerate([*STEPS[name](), ldlt.LipschitzClassifier(**QUICK)])])
    deployed = ldlt.deploy(pipeline.fit(x, y))
    assert deployed.certificate.rigorous
    assert np.array_equal(deployed.predict(x), pipeline.predict(x))
    slopes = ldlt.attack.lipschitz_lower_bound(deployed.network, 13, starts=4, steps=10).value
    assert 0 < slopes <= deployed.certificate.bound


def test_mixed_columns_from_table_to_file(messy, tmp_path):
    frame, y = messy
    pipeline = make_pipeline(kinds(frame), ldlt.LipschitzClassifier(**QUICK)).fit(frame, y)
    loaded = ldlt.load(ldlt.save(pipeline, tmp_path / "p.onnx"))
    assert ldlt.verify(tmp_path / "p.onnx").rigorous
    assert np.array_equal(loaded.predict(frame[frame.columns[::-1]]), pipeline.predict(frame))
    assert (loaded.certified_radius(frame) > 0).mean() > 0.5
    other = frame.assign(city="Paris")
    assert np.array_equal(loaded.predict(other), pipeline.predict(other))
    with pytest.raises(ldlt.OptionError, match="income"):
        loaded.predict(frame.drop(columns="income"))


def test_encoders_and_regression(messy):
    frame, _ = messy
    y = frame["age"].to_numpy() / 10 + (frame["city"] == "Oslo")
    coded = frame.assign(city=frame["city"].fillna("none"), income=0.0)
    text = {
        "codes": OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
        "few": OneHotEncoder(max_categories=2, handle_unknown="infrequent_if_exist"),
        "first": OneHotEncoder(drop="first"),
    }
    for name, encoder in text.items():
        steps = ColumnTransformer([("t", encoder, ["city"])], remainder="passthrough")
        pipeline = make_pipeline(steps, ldlt.LipschitzRegressor(**QUICK)).fit(coded, y)
        deployed = ldlt.deploy(pipeline)
        assert np.allclose(deployed.predict(coded), pipeline.predict(coded))
        lower, upper = deployed.predict_interval(coded, 1.0)  # one step from a category to another
        for city in ("Rome", "Oslo"):
            moved = pipeline.predict(coded.assign(city=city))
            assert (lower <= moved).all()
            assert (moved <= upper).all()
        if name == "first":
            with pytest.raises(ldlt.OptionError, match="city"):
                deployed.predict(coded.assign(city="Paris"))
        else:
            other = coded.assign(city="Paris")
            assert np.allclose(deployed.predict(other), pipeline.predict(other))


def test_steps_that_are_not_affine_are_refused_by_name(messy):
    x, y = load_wine(return_X_y=True)
    ours = ldlt.LipschitzClassifier(**QUICK)
    for step, word in (
        (PolynomialFeatures(1), "PolynomialFeatures"),
        (MinMaxScaler(clip=True), "clip"),
        (FunctionTransformer(np.abs), "FunctionTransformer"),
    ):
        with pytest.raises(ldlt.OptionError, match=word):
            ldlt.deploy(make_pipeline(step, ours).fit(x, y))
    with pytest.raises(ldlt.OptionError, match="fit"):
        ldlt.deploy(make_pipeline(StandardScaler(), ldlt.LipschitzClassifier()))
    with pytest.raises(ldlt.OptionError, match="StandardScaler"):
        ldlt.deploy(make_pipeline(StandardScaler()).fit(x))
    with pytest.raises(ldlt.OptionError, match="PCA"):
        steps = make_pipeline(PCA(2), SimpleImputer(), ours)
        ldlt.deploy(steps.fit(x, y))


def test_a_table_as_it_is(messy, tmp_path):
    frame, y = messy
    model = ldlt.LipschitzClassifier(**{**QUICK, "epochs": 30}).fit(frame, y)
    assert model.score(frame, y) > 0.8
    # One category to another is a step of length 1, in both units; so is a number's being missing.
    radius = model.certified_radius(frame, "standard")
    moved = model.predict(frame.assign(city="Oslo")) != model.predict(frame)
    assert not (moved & (radius > 1)).any()
    deployed = ldlt.load(ldlt.save(model, tmp_path / "m.onnx"))
    assert np.array_equal(deployed.predict(frame), model.predict(frame))
    assert deployed.certified_radius(frame) == pytest.approx(model.certified_radius(frame), rel=1e-9)
    with pytest.raises(ValueError, match="infinity"):
        model.predict(frame.assign(age=np.inf))


def test_what_columns_are():
    frame = pd.DataFrame({"n": [1.0, np.nan, 3.0, 5.0], "c": ["u", None, "v", "u"], "b": [True, False, True, True]})
    columns = columns_of(frame)
    assert columns == (
        Column("n", 3.0, True),
        Column("c", categories=("", "u", "v")),
        Column("b", categories=("False", "True")),
    )
    coded = encode(frame, columns)
    assert coded[1].tolist() == [3.0, 1.0, *(np.sqrt(0.5) * np.array([1, 0, 0, 1, 0]))]
    assert np.linalg.norm(coded[0, 2:5] - coded[2, 2:5]) == pytest.approx(1.0)
    assert not encode(frame.assign(c="new"), columns)[:, 2:5].any()
    many = pd.DataFrame({"c": [f"t{i % 40}" for i in range(400)] + ["t0"] * 9})
    (column,) = columns_of(many)
    assert len(column.categories) == 32
    assert column.other
    assert encode(many, [column]).sum(1) == pytest.approx(np.sqrt(0.5))
    weight = np.array([1.0, 2.0, 0.0, 3.0])
    assert weighted_median(np.array([4.0, 1.0, 9.0, 2.0]), weight) == 2.0


@pytest.mark.parametrize(
    ("values", "word"),
    [
        (pd.date_range("2024-01-01", periods=40), "date"),
        ([f"12:{i:02}" for i in range(40)], "date"),
        ([*map(str, range(39)), "x?"], "row 40"),
        ([*map(str, range(39)), "4,5"], "point"),
        (np.arange(40) * 1j, "complex"),
    ],
)
def test_columns_that_mean_nothing_are_refused_all_at_once(values, word):
    frame = pd.DataFrame({"good": range(40), "bad": values, "when": pd.date_range("2024-01-01", periods=40)})
    with pytest.raises(ldlt.OptionError, match=word) as caught:
        ldlt.LipschitzClassifier(**QUICK).fit(frame, np.arange(40) % 2)
    assert "'bad'" in str(caught.value)
    assert "'when'" in str(caught.value)


def test_a_bound_is_chosen_on_held_out_rows():
    x, y = load_diabetes(return_X_y=True)
    options = {**QUICK, "bound": (0.01, 1.0), "epochs": 40}
    model = ldlt.LipschitzRegressor(**options).fit(x, y)
    assert model.bound_ == 1.0
    flat = ldlt.LipschitzRegressor(**options).fit(x, np.random.default_rng(0).normal(size=len(x)))
    assert flat.bound_ == 0.01  # where nothing can be learnt, the least


def test_a_radius_is_chosen_on_held_out_rows():
    x, y = load_wine(return_X_y=True)
    chosen = ldlt.LipschitzClassifier(**QUICK, radius=(0.0, 1.0)).fit(x, y)
    assert chosen.radius_ in (0.0, 0.1, 0.25, 0.5, 1.0)
    assert chosen.certificate_.rigorous
