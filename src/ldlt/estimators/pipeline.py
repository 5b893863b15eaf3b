r"""Pipelines of scikit-learn with affine steps before an estimator, as one network from the columns of the table.

Every feature that a step makes is an affine function of *inputs*: a number of the table, whether it is missing, or that
a category is there (see :mod:`ldlt.columns`). So all steps together are one map :math:`x ↦ Ax + b` in front of the
standardisation, and radii of the network behind it are distances in the units of the table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    RobustScaler,
    StandardScaler,
)
from torch import nn

from ldlt.certificates import Certificate
from ldlt.columns import STEP, Column, text_of
from ldlt.errors import OptionError
from ldlt.estimators.base import LipschitzEstimator

__all__ = ["AFFINE", "Folded", "fold"]

Input = tuple[int, str | None]
"""Column, and what of it: None its number, ``"?"`` that it is missing, ``"=c"`` that it is c, ``"other"`` any other."""


@dataclass(frozen=True)
class Feature:
    """``Σ weights[i]·i + offset`` over inputs; or a column that nothing was done to yet."""

    weights: Mapping[Input, float]
    offset: float = 0.0
    column: int | None = None  # untouched


@dataclass
class _Table:
    """What is known of the columns so far."""

    names: Sequence[str]
    fills: dict[int, float | str] = field(default_factory=dict)
    categories: dict[int, Column] = field(default_factory=dict)

    def fill(self, column: int, value: float | str) -> None:
        if self.fills.setdefault(column, value) != value:
            raise OptionError(f"the column '{self.names[column]}' is imputed twice, differently: impute it once")

    def number(self, feature: Feature) -> Feature:
        """A feature to calculate with."""
        return feature if feature.column is None else Feature({(feature.column, None): 1.0})

    def columns(self, used: Sequence[Input]) -> tuple[Column, ...]:
        found = []
        for j, name in enumerate(self.names):
            fill = self.fills.get(j)
            if j in self.categories:
                if (j, None) in used:
                    raise OptionError(f"the column '{name}' is used as a number and as a category: make it two columns")
                instead = "" if fill is None else text_of(fill)
                found.append(dataclasses.replace(self.categories[j], name=name, instead=instead))
            else:
                told = (j, "?") in used
                unread = told and (j, None) not in used
                found.append(Column(name, 0.0 if unread else None if fill is None else float(fill), told))
        return tuple(found)


@dataclass(frozen=True)
class Folded:
    """A pipeline as one plain network.

    Attributes:
        estimator: The last step.
        model: From inputs to outputs.
        columns: From the table to inputs.
        gain: At least the norm of the map in front of the estimator's network.
    """

    estimator: LipschitzEstimator
    model: nn.Sequential
    columns: tuple[Column, ...]
    gain: float

    @property
    def inputs(self) -> int:
        """How many inputs there are."""
        return sum(len(c.inputs) for c in self.columns)

    def certificate(self) -> Certificate:
        """Certificate of the whole network, in the units of the table."""
        return self.estimator.certify_model(self.model, self.inputs, self.gain)


def fold(pipeline: Pipeline) -> Folded:
    """A fitted pipeline with affine steps and one of our estimators at its end as one network.

    Raises:
        OptionError: It is not fitted, ends with something else, or a step is not affine; the message says which.
    """
    estimator = pipeline.steps[-1][1]
    if not isinstance(estimator, LipschitzEstimator):
        raise OptionError(f"the pipeline must end with an estimator of ldlt, not with {type(estimator).__name__}")
    if not hasattr(estimator, "model_"):
        raise OptionError("this Pipeline is not fitted yet: call fit first")
    steps = Pipeline(pipeline.steps[:-1])
    first = pipeline[0]
    names = getattr(first, "feature_names_in_", None)
    count = getattr(first, "n_features_in_", len(estimator.columns_))
    table = _Table([f"x{i}" for i in range(count)] if names is None else [str(n) for n in names])
    features = [table.number(f) for f in _apply(steps, [Feature({}, column=j) for j in range(count)], table)]
    if any(len(c.inputs) > 1 or c.categories is not None for c in estimator.columns_):
        raise OptionError("a step hands on texts or missing values: encode them (OneHotEncoder, SimpleImputer) before")
    used = sorted({i for f in features for i in f.weights}, key=str)
    columns = table.columns(used)
    order = [i for j, c in enumerate(columns) for i in _inputs(j, c)]
    place = {i: k for k, i in enumerate(order)}
    matrix, offset = np.zeros((len(features), len(order))), np.array([f.offset for f in features])
    for row, feature in enumerate(features):
        for i, weight in feature.weights.items():
            matrix[row, place[i]] += weight * (1.0 if i[1] in (None, "?") else 1 / STEP)
    scale = estimator.scale_
    front = nn.Linear(len(order), len(features), dtype=torch.float64).requires_grad_(False)
    front.weight.copy_(torch.from_numpy(matrix / scale[:, None]))
    front.bias.copy_(torch.from_numpy((offset - estimator.mean_) / scale))  # type: ignore[union-attr]
    gain = float(torch.linalg.matrix_norm(front.weight, 2)) * (1 + 1e-9)
    return Folded(estimator, nn.Sequential(front, *list(estimator.model_)[1:]).eval(), columns, gain)


def _inputs(j: int, column: Column) -> list[Input]:
    if column.categories is None:
        return [(j, None), (j, "?")][: 1 + column.missing]
    return [*((j, f"={c}") for c in column.categories), *[(j, "other")] * column.other]


# -- steps -------------------------------------------------------------------------------------------------------------


def _apply(step: Any, features: list[Feature], table: _Table) -> list[Feature]:
    if step is None or step == "passthrough":
        return features
    if isinstance(step, str):  # "drop"
        return []
    for kind, rule in AFFINE.items():
        if type(step) is kind:
            return rule(step, features, table)
    known = ", ".join(kind.__name__ for kind in AFFINE)
    raise OptionError(
        f"the step {type(step).__name__} is not known to be affine, so that a radius behind it says nothing about the "
        f"columns of the table: use {known}, or certify what it returns (ldlt.deploy of the last step)"
    )


def _pipeline(step: Pipeline, features: list[Feature], table: _Table) -> list[Feature]:
    for _, part in step.steps:
        features = _apply(part, features, table)
    return features


def _union(step: FeatureUnion, features: list[Feature], table: _Table) -> list[Feature]:
    weights = step.transformer_weights or {}
    return [
        _scaled(table.number(f), weights.get(name, 1.0), 0.0)
        for name, part in step.transformer_list
        for f in _apply(part, features, table)
    ]


def _by_columns(step: ColumnTransformer, features: list[Feature], table: _Table) -> list[Feature]:
    parts: dict[str, list[Feature]] = {}
    weights = step.transformer_weights or {}
    for name, part, chosen in step.transformers_:
        places = np.arange(len(features))[chosen] if not _named(chosen) else [_place(step, n) for n in _list(chosen)]
        found = _apply(part, [features[i] for i in np.atleast_1d(places)], table)
        parts[name] = [_scaled(table.number(f), weights[name], 0.0) for f in found] if name in weights else found
    ordered = sorted(step.output_indices_, key=lambda name: step.output_indices_[name].start)
    return [f for name in ordered for f in parts.get(name, [])]


def _list(chosen: Any) -> list[Any]:
    return [chosen] if isinstance(chosen, str) else list(chosen)


def _named(chosen: Any) -> bool:
    return isinstance(chosen, str) or (not isinstance(chosen, slice) and any(isinstance(c, str) for c in _list(chosen)))


def _place(step: ColumnTransformer, name: str) -> int:
    return int(np.flatnonzero(np.asarray(step.feature_names_in_) == name)[0])


def _scaled(feature: Feature, factor: float, offset: float) -> Feature:
    weights = {i: float(factor) * w for i, w in feature.weights.items()}
    return Feature(weights, float(factor) * feature.offset + float(offset))


def _elementwise(factor: Callable[[Any], Any], offset: Callable[[Any], Any]) -> Callable[..., list[Feature]]:
    """``f·x + o``, each an array of the step."""

    def rule(step: Any, features: list[Feature], table: _Table) -> list[Feature]:
        factors, offsets = (np.broadcast_to(part(step), len(features)) for part in (factor, offset))
        return [_scaled(table.number(x), f, o) for x, f, o in zip(features, factors, offsets, strict=True)]

    return rule


def _over(value: Any) -> Any:
    return 1.0 if value is None else 1.0 / np.asarray(value)


def _centred(center: Any, scale: Any) -> Any:
    return 0.0 if center is None else -np.asarray(center) * _over(scale)


def _unclipped(step: MinMaxScaler) -> Any:
    if step.clip:
        raise OptionError("MinMaxScaler(clip=True) is not affine: leave clip out")
    return step.scale_


def _components(step: PCA, features: list[Feature], table: _Table) -> list[Feature]:
    matrix = np.asarray(step.components_)
    if step.whiten:
        matrix = matrix / np.sqrt(step.explained_variance_)[:, None]
    numbers = [_scaled(table.number(f), 1.0, -m) for f, m in zip(features, step.mean_, strict=True)]
    return [_sum(row, numbers) for row in matrix]


def _sum(row: Any, features: Sequence[Feature]) -> Feature:
    total: dict[Input, float] = {}
    for factor, feature in zip(row, features, strict=True):
        for i, w in feature.weights.items():
            total[i] = total.get(i, 0.0) + float(factor) * w
    return Feature(total, sum(float(c) * f.offset for c, f in zip(row, features, strict=True)))


def _imputed(step: SimpleImputer, features: list[Feature], table: _Table) -> list[Feature]:
    found = []
    for feature, value in zip(features, step.statistics_, strict=True):
        if isinstance(value, float) and math.isnan(value):  # nothing but missing values: the step drops it
            continue
        if feature.column is not None:
            table.fill(feature.column, value if isinstance(value, str) else float(value))
        else:
            ((column, kind), weight), *more = feature.weights.items()
            if more or kind is not None:
                raise OptionError("SimpleImputer must come before steps that mix columns, such as PCA")
            table.fill(column, (float(value) - feature.offset) / weight)
        found.append(feature)
    indicator = step.indicator_ if step.add_indicator else None
    return found + ([] if indicator is None else _missing(indicator, features, table))


def _missing(step: MissingIndicator, features: list[Feature], table: _Table) -> list[Feature]:
    chosen = [features[i] for i in step.features_]
    columns = [next(iter(f.weights))[0] if f.column is None else f.column for f in chosen]
    return [Feature({(column, "?"): 1.0}) for column in columns]


def _categories(step: Any, j: int, feature: Feature, table: _Table) -> list[Input]:
    """Inputs of a column that is encoded; the last one is that of infrequent categories, if there are any."""
    if feature.column is None:
        raise OptionError(f"{type(step).__name__} must come before steps that change its columns")
    rare = getattr(step, "infrequent_categories_", None)
    unlisted = set() if rare is None or rare[j] is None else {text_of(c) for c in rare[j]}
    if unlisted and step.handle_unknown != "infrequent_if_exist":
        raise OptionError(
            f"{type(step).__name__} with infrequent categories needs handle_unknown='infrequent_if_exist'"
        )
    kept = tuple(t for t in map(text_of, step.categories_[j]) if t not in unlisted)
    column = Column("", categories=kept, other=bool(unlisted), strict=step.handle_unknown == "error")
    if table.categories.setdefault(feature.column, column) != column:
        raise OptionError(f"the column '{table.names[feature.column]}' is encoded twice, differently: encode it once")
    return _inputs(feature.column, column)


def _one_hot(step: OneHotEncoder, features: list[Feature], table: _Table) -> list[Feature]:
    found = []
    for j, feature in enumerate(features):
        inputs = _categories(step, j, feature, table)
        dropped = None if step.drop_idx_ is None else step.drop_idx_[j]
        found += [Feature({i: 1.0}) for place, i in enumerate(inputs) if place != dropped]
    return found


def _ordinal(step: OrdinalEncoder, features: list[Feature], table: _Table) -> list[Feature]:
    unknown = 0.0 if step.handle_unknown == "error" else float(step.unknown_value)
    found = []
    for j, feature in enumerate(features):
        inputs = _categories(step, j, feature, table)
        if math.isnan(unknown) or (feature.column, "=") in inputs or inputs[-1][1] == "other":
            raise OptionError("OrdinalEncoder must give missing, unknown and rare categories a number of their own")
        found.append(Feature({i: place - unknown for place, i in enumerate(inputs)}, unknown))
    return found


def _identity(step: FunctionTransformer, features: list[Feature], table: _Table) -> list[Feature]:
    if step.func is not None:
        raise OptionError("FunctionTransformer calls a function that nothing is known about: use an affine step")
    return features


AFFINE: dict[type, Callable[..., list[Feature]]] = {
    StandardScaler: _elementwise(lambda s: _over(s.scale_), lambda s: _centred(s.mean_, s.scale_)),
    RobustScaler: _elementwise(
        lambda s: _over(s.scale_ if s.with_scaling else None),
        lambda s: _centred(s.center_ if s.with_centering else None, s.scale_ if s.with_scaling else None),
    ),
    MinMaxScaler: _elementwise(_unclipped, lambda s: s.min_),
    MaxAbsScaler: _elementwise(lambda s: _over(s.scale_), lambda s: 0.0),
    SimpleImputer: _imputed,
    MissingIndicator: _missing,
    OneHotEncoder: _one_hot,
    OrdinalEncoder: _ordinal,
    PCA: _components,
    FunctionTransformer: _identity,
    ColumnTransformer: _by_columns,
    FeatureUnion: _union,
    Pipeline: _pipeline,
}
"""Steps that are affine, and how each acts on features."""
