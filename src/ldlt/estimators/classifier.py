"""A classifier whose predictions come with certified radii."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from ldlt.certificates import Certificate
from ldlt.errors import OptionError
from ldlt.estimators.base import LipschitzEstimator, _choice, _number
from ldlt.estimators.certification import typical_constant
from ldlt.estimators.fitting import Epoch, RowLoss
from ldlt.estimators.rows import Array, Rows
from ldlt.radius import certified_radius

__all__ = ["LipschitzClassifier"]


class LipschitzClassifier(ClassifierMixin, LipschitzEstimator):
    r"""A classifier for tables that is Lipschitz by construction, with a certified radius for every prediction.

    The network maps standardised features to one logit per class and has the constant ℓ = ``bound`` whatever it learns.
    Radii do not depend on ℓ when the loss is ``"margin"``, which scales with it; with ``"cross-entropy"`` a larger ℓ
    allows more confident predictions with smaller radii.

    Args:
        hidden: Widths of the hidden layers.
        architecture: ``"residual"`` (LDLT-R), ``"feedforward"`` (LDLT-L), or ``"auto"``: the first one, but the second
            one for more than 256 features, where it trains much faster.
        activation: A key of :data:`ldlt.estimators.base.ACTIVATIONS`.
        bound: ℓ of the map from standardised features to logits.
        loss: ``"margin"``: ``t·CE((y − o·onehot)/t)`` with ``t = temperature·ℓ``, ``o = √2·ℓ·margin``.
            ``"cross-entropy"``: ``CE(y)``.
        margin: Radius that the loss ``"margin"`` asks for, in standardised units: the larger, the larger the radii,
            at some cost of accuracy.
        temperature: How gently it asks.
        class_weight: None, ``"balanced"`` (``n / (k n_c)``), or a dictionary from class to weight; multiplies
            ``sample_weight``.
        learning_rate: Step size of AdamW at the start of :meth:`fit`; it falls to zero along a cosine.
        weight_decay: Of AdamW.
        epochs: Largest number of passes over the rows.
        batch_size: Rows per step. ``"auto"``: 256, but 4 to 32 steps per epoch.
        early_stopping: Hold out rows, keep the epoch with the smallest loss on them, stop after ``patience`` epochs
            without a smaller one.
        validation_fraction: Share of the rows held out, of every class.
        patience: See ``early_stopping``.
        standardise: ``"features"``: every feature is centred and divided by its standard deviation. ``"scale"``:
            centred, and all divided by the same number, so that Euclidean radii in the units of the data are those in
            standardised units times that number. False: neither.
        warm_start: :meth:`fit` continues from the network at hand, with its standardisation.
        certify_seconds: Time limit of the search for a certificate; None is no limit.
        callback: Called with an :class:`ldlt.estimators.Epoch` after every epoch.
        random_state: Seed of everything random.
        verbose: 1: about ten lines of progress; 2: one for every epoch.

    Attributes:
        classes_: The classes (k,).
        temperature_: t of the loss.
        model_: The deployed model in float64: inputs in the units of the data to logits (see
            :class:`ldlt.estimators.base.LipschitzEstimator` for the others).

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = LipschitzClassifier(epochs=20, random_state=0).fit(X, y)
        >>> bool(classifier.score(X, y) > 0.9), classifier.certified_radius(X).shape
        (True, (150,))
        >>> classifier.certificate_.rigorous
        True
    """

    _losses = ("margin", "cross-entropy")
    _stratify = True

    def __init__(
        self,
        hidden: Sequence[int] = (64, 64),
        *,
        architecture: str = "auto",
        activation: str = "relu",
        bound: float = 1.0,
        loss: str = "margin",
        margin: float = 0.5,
        temperature: float = 0.5,
        class_weight: Mapping[Any, float] | str | None = None,
        learning_rate: float = 5e-3,
        weight_decay: float = 1e-4,
        epochs: int = 100,
        batch_size: int | str = "auto",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 20,
        standardise: str | bool = "features",
        warm_start: bool = False,
        certify_seconds: float | None = 30.0,
        callback: Callable[[Epoch], object] | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.hidden = hidden
        self.architecture = architecture
        self.activation = activation
        self.bound = bound
        self.loss = loss
        self.margin = margin
        self.temperature = temperature
        self.class_weight = class_weight
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.epochs = epochs
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.standardise = standardise
        self.warm_start = warm_start
        self.certify_seconds = certify_seconds
        self.callback = callback
        self.random_state = random_state
        self.verbose = verbose

    # -- training ----------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LipschitzClassifier:
        """Train.

        Args:
            X: Features (n, d), an array or a data frame of numbers.
            y: Classes (n,).
            sample_weight: (n,), not negative. A weight of zero is the same as leaving the row out, a whole number the
                same as repeating it.

        Raises:
            ValueError: The data are not finite numbers, there is only one class, or an option has no meaning.
        """
        self._check_options()
        again = self._goes_on()
        x, labels, weight = self._read_classes(X, y, sample_weight, reset=not again)
        present = np.unique(labels[weight > 0])
        if again:
            self._check_known(present)
        else:
            if len(present) < 2:
                raise ValueError(
                    f"LipschitzClassifier needs at least two classes; there is only one class, {present.tolist()[0]!r}"
                )
            self._check_class_weight(present)
            self.classes_ = present
        self._learn_classes(x, labels, weight, fresh=not again, once=False)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> LipschitzClassifier:
        """Train for one epoch on some rows, at a constant step size.

        The first call fixes the standardisation: it should see enough rows for that.

        Args:
            X: Features (n, d).
            y: Classes (n,).
            classes: All classes that will occur; needed at the first call.
            sample_weight: (n,).
        """
        self._check_options()
        if isinstance(self.class_weight, str):
            raise ValueError(
                "class_weight='balanced' needs all rows at once; give partial_fit a dictionary from class to weight"
            )
        fresh = not hasattr(self, "model_")
        if fresh and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        x, labels, weight = self._read_classes(X, y, sample_weight, reset=fresh)
        if classes is not None:
            known = np.unique(column_or_1d(classes))
            if fresh:
                if len(known) < 2:
                    raise ValueError(f"LipschitzClassifier needs at least two classes, not only {known.tolist()}")
                self._check_class_weight(known)
                self.classes_ = known
            elif not np.array_equal(known, self.classes_):
                raise ValueError(f"classes={known.tolist()} are not those of the first call, {self.classes_.tolist()}")
        self._check_known(labels)
        self._learn_classes(x, labels, weight, fresh=fresh, once=True)
        return self

    def _read_classes(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool
    ) -> tuple[Array, npt.NDArray[Any], Array]:
        x, target, weight = self._read(X, y, sample_weight, reset=reset)
        check_classification_targets(target)
        return x, column_or_1d(target), weight

    def _learn_classes(self, x: Array, labels: npt.NDArray[Any], weight: Array, *, fresh: bool, once: bool) -> None:
        # Rows of weight zero may have any class; they are left out.
        code = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1).astype(np.float64)
        self._learn(x, code[:, None], weight, outputs=len(self.classes_), fresh=fresh, once=once)

    def _check_known(self, labels: npt.NDArray[Any]) -> None:
        new = np.setdiff1d(labels, self.classes_)
        if len(new):
            known = self.classes_.tolist()
            raise ValueError(f"y has the class {new.tolist()[0]!r}, which is not among the known classes {known}")

    def _check_options(self) -> None:
        super()._check_options()
        _number("margin", self.margin, least=0.0)
        _number("temperature", self.temperature, above=0.0)
        weights = self.class_weight
        if isinstance(weights, Mapping):
            for value in weights.values():
                _number("class_weight", value, least=0.0)
        elif weights is not None and weights != "balanced":
            raise OptionError(f"class_weight must be None, 'balanced' or a dictionary, not {weights!r}")

    def _check_class_weight(self, classes: npt.NDArray[Any]) -> None:
        if isinstance(self.class_weight, Mapping):
            known = classes.tolist()
            unknown = [c for c in self.class_weight if c not in known]
            if unknown:
                raise ValueError(f"class_weight has the class {unknown[0]!r}, which does not occur in y")

    def _weights(self, rows: Rows) -> Array:
        code = rows.target[:, 0].astype(np.int64)
        k = len(self.classes_)
        if self.class_weight is None:
            return rows.weight
        if isinstance(self.class_weight, str):
            mass = np.bincount(code, weights=rows.weight, minlength=k)
            factor = rows.weight.sum() / (k * np.where(mass > 0, mass, 1.0))
        else:
            factor = np.array([float(self.class_weight.get(c, 1.0)) for c in self.classes_.tolist()])
        found: Array = rows.weight * factor[code]
        return found

    def _encode(self, rows: Rows) -> Array:
        return np.eye(len(self.classes_))[rows.target[:, 0].astype(np.int64)]

    def _row_loss(self) -> RowLoss:
        ell = self.network_.declared_bound
        t = self.temperature_ = 1.0 if self.loss == "cross-entropy" else float(self.temperature) * ell
        offset = 0.0 if self.loss == "cross-entropy" else math.sqrt(2) * ell * float(self.margin)

        def loss(logits: Tensor, truth: Tensor) -> Tensor:
            shifted = (logits - offset * truth) / t
            # In units of the temperature, so that steps do not depend on the bound.
            return torch.logsumexp(shifted, -1) - (shifted * truth).sum(-1)

        return loss

    def _quality(self, certificate: Certificate) -> float:
        return typical_constant(certificate.pair_bounds())

    # -- predictions -------------------------------------------------------------------------------------------------

    def decision_function(self, X: Any) -> Array:
        """Logits (n, k); for two classes the difference ``y_1 − y_0`` (n,)."""
        logits = self._outputs(self._features(X))
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Predicted classes (n,)."""
        logits = self._outputs(self._features(X))
        found: npt.NDArray[Any] = self.classes_[logits.argmax(1)]
        return found

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes (n, k): ``softmax(logits / t)`` with the temperature t of the loss.

        A loss that asks for a margin does not calibrate them; ``sklearn.calibration.CalibratedClassifierCV`` does.
        """
        logits = torch.from_numpy(self._outputs(self._features(X)))
        found: Array = torch.softmax(logits / self.temperature_, 1).numpy()
        return found

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of :meth:`predict_proba` (n, k)."""
        logits = torch.from_numpy(self._outputs(self._features(X)))
        found: Array = torch.log_softmax(logits / self.temperature_, 1).numpy()
        return found

    # -- certificates ------------------------------------------------------------------------------------------------

    def certified_radius(self, X: Any, units: str = "data") -> Array:
        r"""Radius around every row within which the prediction cannot change (n,).

        .. math:: \min_{j ≠ c} \frac{y_c - y_j}{ℓ_{cj}}

        with the certified constants of differences of logits, and with the rounding errors of the logits taken off.
        The statement is about :attr:`model_` in real arithmetic.

        Args:
            X: Features (n, d).
            units: ``"data"``: Euclidean distance in the units of the data. ``"standard"``: after standardisation, where
                one unit is a standard deviation of the feature.
        """
        return self._certified(X, units)[1]

    def certified_accuracy(self, X: Any, y: Any, radii: Any = 0.0, units: str = "data") -> Any:
        """Share of rows that are classified correctly and certified beyond a radius.

        Args:
            X: Features (n, d).
            y: True classes (n,).
            radii: A number or an array of them.
            units: As in :meth:`certified_radius`.

        Returns:
            A number, or an array of the shape of ``radii``.
        """
        predicted, found = self._certified(X, units)
        truth = column_or_1d(y)
        if len(truth) != len(found):
            raise ValueError(f"X has {len(found)} rows, y has {len(truth)}")
        reach = np.where(predicted == truth, found, -1.0)
        shares = (reach > np.asarray(radii, dtype=np.float64)[..., None]).mean(-1)
        return float(shares) if np.ndim(radii) == 0 else shares

    def _certified(self, X: Any, units: str) -> tuple[npt.NDArray[Any], Array]:
        """Predicted classes and their radii (n,)."""
        _choice("units", units, ("data", "standard"))
        logits, error = self._enclosed(self._features(X))
        certificate = self.certificate_ if units == "data" else self.standard_certificate_
        return self.classes_[logits.numpy().argmax(1)], certified_radius(logits, certificate, error=error).numpy()
