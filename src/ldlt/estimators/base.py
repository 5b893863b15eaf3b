"""What the estimators share: options, standardisation, training, the deployed model and its certificate."""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from ldlt.activations import MaxMin
from ldlt.certificates import Certificate
from ldlt.engine.network import Lipschitz
from ldlt.errors import BoundError, OptionError
from ldlt.estimators.certification import certificate_of
from ldlt.estimators.fitting import AdamW, Batches, Epoch, RowLoss, Trainer
from ldlt.estimators.rows import Array, Rows, merge
from ldlt.estimators.scaling import location_and_scale
from ldlt.nn import FeedForward, Residual, Standardise
from ldlt.rounding import forward_error

__all__ = ["ACTIVATIONS", "ARCHITECTURES", "WIDE", "LipschitzEstimator"]

ARCHITECTURES: dict[str, Callable[..., Lipschitz]] = {"residual": Residual, "feedforward": FeedForward}
"""Networks by name; ``"auto"`` is the first one up to :data:`WIDE` features, then the second."""

WIDE = 256
"""With more features than this, ``"auto"`` has no map from the input straight to the output: beside the hidden layers
that map costs a factorisation of one row per feature in every step, which grows with their cube."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "maxmin": MaxMin,
}
"""Activations by name."""

_ALPHA = 3e-3  # start value of α that trains well on tables
_ROWS_AT_ONCE = 16384


class LipschitzEstimator(BaseEstimator):
    """Base of :class:`ldlt.LipschitzClassifier` and :class:`ldlt.LipschitzRegressor`.

    Attributes:
        model_: The deployed model in float64 and evaluation mode: standardisation, frozen network, and for a regressor
            the way back to the target's units. A plain module, from inputs in the units of the data.
        network_: The network in training form, from standardised inputs.
        mean_: Location of the features (d,).
        scale_: Scale of the features (d,).
        loss_curve_: Mean loss of every epoch.
        validation_curve_: Mean loss of the validation rows after every epoch; empty without early stopping.
        best_epoch_: The epoch whose parameters were kept.
        n_iter_: Epochs in all.
        n_samples_fit_: Rows of positive weight that it was trained on; with :meth:`partial_fit`, of all calls.
        n_features_in_: Number of features d.
        feature_names_in_: Names of the features, if they were fitted as a data frame.
    """

    # Set by the constructors of the subclasses, which scikit-learn reads parameters from.
    hidden: Any
    architecture: Any
    activation: Any
    bound: Any
    loss: Any
    learning_rate: Any
    weight_decay: Any
    epochs: Any
    batch_size: Any
    early_stopping: Any
    validation_fraction: Any
    patience: Any
    standardise: Any
    warm_start: Any
    certify_seconds: Any
    callback: Any
    random_state: Any
    verbose: Any

    model_: nn.Sequential
    network_: Lipschitz
    mean_: Array
    scale_: Array
    loss_curve_: list[float]
    validation_curve_: list[float]
    n_iter_: int
    n_samples_fit_: int
    _random: np.random.Generator
    _optimiser: AdamW | None
    _certificates: dict[str, Certificate]

    _losses: tuple[str, ...] = ()
    _stratify = False

    # -- what subclasses say -----------------------------------------------------------------------------------------

    def _row_loss(self) -> RowLoss:
        raise NotImplementedError

    def _encode(self, rows: Rows) -> Array:
        """Targets of the network (n, k)."""
        raise NotImplementedError

    def _weights(self, rows: Rows) -> Array:
        """Weights of the rows in the loss (n,)."""
        return rows.weight

    def _tail(self) -> list[nn.Module]:
        """Layers behind the frozen network."""
        return []

    def _steepest_tail(self) -> float:
        """Constant of the layers behind the frozen network."""
        return 1.0

    def _quality(self, certificate: Certificate) -> float:
        """Which certificate to prefer: the smaller the better."""
        raise NotImplementedError

    # -- options -----------------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        _choice("architecture", self.architecture, ("auto", *ARCHITECTURES))
        _choice("activation", self.activation, tuple(ACTIVATIONS))
        _choice("loss", self.loss, self._losses)
        _choice("standardise", self.standardise, ("features", "scale", False))
        if not _is_number(self.bound) or not (math.isfinite(self.bound) and self.bound > 0):
            raise BoundError(f"bound must be a positive finite number, not {self.bound!r}")
        self._widths()
        _number("learning_rate", self.learning_rate, above=0.0)
        _number("weight_decay", self.weight_decay, least=0.0)
        _number("validation_fraction", self.validation_fraction, above=0.0, below=1.0)
        _whole("epochs", self.epochs)
        _whole("patience", self.patience)
        if self.batch_size != "auto":
            _whole("batch_size", self.batch_size, "'auto' or ")
        if self.certify_seconds is not None:
            _number("certify_seconds", self.certify_seconds, least=0.0)
        if self.callback is not None and not callable(self.callback):
            raise OptionError(f"callback must be a function of an epoch, or None, not {self.callback!r}")

    def _widths(self) -> list[int]:
        given = self.hidden
        widths = [given] if isinstance(given, numbers.Integral) else given
        if isinstance(widths, str) or not isinstance(widths, Sequence | np.ndarray):
            raise OptionError(f"hidden must be a tuple of widths such as (64, 64), not {given!r}")
        for width in widths:
            if isinstance(width, bool) or not isinstance(width, numbers.Integral) or width < 1:
                raise OptionError(f"hidden must consist of positive whole numbers, not {given!r}")
        if not len(widths):
            raise OptionError("hidden must have at least one layer")
        if self.activation == "maxmin" and any(width % 2 for width in widths):
            raise OptionError(f"activation='maxmin' sorts pairs of neurons: widths must be even, not {given!r}")
        return [int(width) for width in widths]

    # -- rows --------------------------------------------------------------------------------------------------------

    def _read(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool, **options: Any
    ) -> tuple[Array, npt.NDArray[Any], Array]:
        """Checked features, targets and weights."""
        x, target = validate_data(self, X, y, reset=reset, dtype=np.float64, **options)
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64)
        if (weight < 0).any():
            raise ValueError("sample_weight must not be negative")
        if not (weight > 0).any():
            raise ValueError("all values of sample_weight are zero: there is nothing to learn from")
        return x, target, weight

    def _features(self, X: Any) -> Array:
        """Checked features of rows to predict."""
        check_is_fitted(self)
        found: Array = validate_data(self, X, reset=False, dtype=np.float64)
        return found

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def _goes_on(self) -> bool:
        """Whether :meth:`fit` continues from the network at hand."""
        return bool(self.warm_start) and hasattr(self, "model_")

    # -- training ----------------------------------------------------------------------------------------------------

    def _learn(self, x: Array, target: Array, weight: Array, *, outputs: int, fresh: bool, once: bool) -> None:
        """Train on checked rows.

        Args:
            x: Features (n, d).
            target: Targets (n, t).
            weight: Weights (n,).
            outputs: Outputs of the network k.
            fresh: Start anew: scale and network.
            once: One epoch at a constant step size, without validation rows (:meth:`partial_fit`).
        """
        rows = merge(x, target, weight)
        self.n_samples_fit_ = int((weight > 0).sum()) + (0 if fresh or not once else self.n_samples_fit_)
        if fresh:
            seeds = check_random_state(self.random_state).randint(np.iinfo(np.int32).max, size=2)
            self._random = np.random.default_rng(int(seeds[0]))
        train, held = rows, None
        if self.early_stopping and not once:
            train, held = rows.split(self.validation_fraction, self._random, by_target=self._stratify)
        if fresh:
            self._start(rows, outputs, int(seeds[1]))
        trainer = Trainer(self.network_, self._row_loss(), float(self.weight_decay), self._optimiser)
        history = trainer.run(
            self._batches(train, Batches.steps_for(len(train), self.batch_size)),
            None if held is None else self._batches(held, 1),
            learning_rate=float(self.learning_rate),
            epochs=1 if once else int(self.epochs),
            patience=int(self.patience),
            decay=not once,
            random=self._random,
            report=self._report,
        )
        self._optimiser = trainer.state
        self.loss_curve_ += history.loss
        self.validation_curve_ += history.validation
        self.best_epoch_ = self.n_iter_ + history.best_epoch
        self.n_iter_ += len(history.loss)
        self._deploy()
        if history.stopped == "interrupted":
            warnings.warn("Training interrupted by user.", stacklevel=4)
        elif history.stopped == "not finite":
            warnings.warn(
                "training stopped because the loss was not finite; the parameters before that were kept. "
                "Try a smaller learning_rate",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _start(self, rows: Rows, outputs: int, seed: int) -> None:
        d = rows.x.shape[1]
        if self.standardise:
            self.mean_, self.scale_ = location_and_scale(rows.x, rows.weight, common=self.standardise == "scale")
        else:
            self.mean_, self.scale_ = np.zeros(d), np.ones(d)
        self._one_scale = self.standardise == "scale"
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # of the CPU alone, which is what is restored
            self.network_ = self._architecture(d)(
                d,
                self._widths(),
                outputs,
                bound=float(self.bound),
                activation=ACTIVATIONS[self.activation],
                alpha=_ALPHA,
                dtype=torch.float32,
            )
        self._optimiser = None
        self.loss_curve_, self.validation_curve_ = [], []
        self.n_iter_ = 0

    def _architecture(self, features: int) -> Callable[..., Lipschitz]:
        """The network to build."""
        name = self.architecture
        if name == "auto":
            name = "residual" if features <= WIDE else "feedforward"
        return ARCHITECTURES[name]

    def _batches(self, rows: Rows, steps: int) -> Batches:
        weight = self._weights(rows)
        total = weight.sum()
        # Rows of a class whose weight is zero may be all there are in a split.
        even = weight * (len(weight) / total) if total > 0 else weight
        x = (rows.x - self.mean_) / self.scale_
        return Batches(_tensor(x), _tensor(self._encode(rows)), _tensor(even), steps)

    def _report(self, epoch: Epoch) -> None:
        if self.verbose:
            every = 1 if self.verbose > 1 else max(1, epoch.epochs // 10)
            if epoch.epoch % every == 0 or epoch.epoch == epoch.epochs:
                held = "" if math.isnan(epoch.validation) else f"  validation {epoch.validation:.4f}"
                name = type(self).__name__
                print(f"[{name}] epoch {epoch.epoch}/{epoch.epochs}  loss {epoch.loss:.4f}{held}", flush=True)
        if self.callback is not None:
            self.callback(epoch)

    # -- the deployed model ------------------------------------------------------------------------------------------

    def _deploy(self) -> None:
        frozen = copy.deepcopy(self.network_).double().freeze()
        scale = self.scale_[:1].reshape(()) if self._one_scale else self.scale_
        first = Standardise(torch.tensor(self.mean_), torch.tensor(scale))
        self.model_ = nn.Sequential(first, frozen, *self._tail()).eval().requires_grad_(False)
        self._certificates = {}

    def _outputs(self, x: Array) -> Array:
        """Outputs of the deployed model (n, k)."""
        with torch.no_grad():
            found: Array = torch.cat([self.model_(part) for part in _parts(x)]).numpy()
        return found

    def _enclosed(self, x: Array) -> tuple[Tensor, Tensor]:
        """Outputs (n, k) and bounds on their rounding errors (n, k)."""
        values, errors = zip(*(forward_error(self.model_, part) for part in _parts(x)), strict=True)
        return torch.cat(values), torch.cat(errors)

    @property
    def certificate_(self) -> Certificate:
        """Certificate of :attr:`model_`: its constants in the units of the data. Made when it is first asked for.

        ``certificate_.rigorous`` tells that it was proven for the numbers as they are stored; ``ldlt.verify`` proves it
        again. If no proof passes, ``certificate_.status`` is ``"not certified"``, all constants are infinite, and
        there is a warning.
        """
        check_is_fitted(self)
        return self._certificate("data", self.model_, float(np.min(self.scale_)), self._steepest_tail())

    @property
    def standard_certificate_(self) -> Certificate:
        """Certificate of the frozen network ``model_[1]``: its constants on standardised inputs, at most ``bound``."""
        check_is_fitted(self)
        return self._certificate("standard", self.model_[1], 1.0, 1.0)

    def _certificate(self, units: str, model: nn.Module, scale: float, gain: float) -> Certificate:
        """Certificate of the frozen network behind a division by at least ``scale``, multiplied by at most ``gain``."""
        if units not in self._certificates:
            net = copy.deepcopy(self.network_).double()
            found = certificate_of(
                model,
                self.n_features_in_,
                # Outputs that are γ times as large satisfy the inequality with γ² times the multipliers.
                [gain**2 * m for m in net.multipliers().values()],
                net.bound / scale * gain,
                time_limit=self.certify_seconds,
                quality=self._quality,
            )
            if not found.is_certified:
                warnings.warn(f"nothing is certified: {found.reason}", stacklevel=3)
            self._certificates[units] = found
        return self._certificates[units]


def _parts(x: Array) -> Iterator[Tensor]:
    """Rows as tensors, some at a time; copies, because arrays may be read-only."""
    for i in range(0, len(x), _ROWS_AT_ONCE):
        yield torch.tensor(x[i : i + _ROWS_AT_ONCE])


def _tensor(values: Array) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not isinstance(value, str | bool) or value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _number(
    name: str, value: Any, *, above: float = -math.inf, below: float = math.inf, least: float | None = None
) -> None:
    good = _is_number(value) and above < value < below and (least is None or value >= least)
    if not good:
        low = f"at least {least:g}" if least is not None else f"above {above:g}"
        high = "" if below == math.inf else f" and below {below:g}"
        raise OptionError(f"{name} must be a finite number {low}{high}, not {value!r}")


def _whole(name: str, value: Any, other: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise OptionError(f"{name} must be {other}a positive whole number, not {value!r}")
