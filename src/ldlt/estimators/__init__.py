"""Estimators for scikit-learn: Lipschitz by construction, with certificates in the units of the data."""

from importlib.util import find_spec

from ldlt.errors import MissingExtraError

if find_spec("sklearn") is None:
    raise MissingExtraError("sklearn", "sklearn")

from ldlt.estimators.classifier import LipschitzClassifier
from ldlt.estimators.fitting import Epoch
from ldlt.estimators.plots import plot_certified_accuracy, plot_radii, plot_settings
from ldlt.estimators.regressor import LipschitzRegressor

__all__ = [
    "Epoch",
    "LipschitzClassifier",
    "LipschitzRegressor",
    "plot_certified_accuracy",
    "plot_radii",
    "plot_settings",
]
