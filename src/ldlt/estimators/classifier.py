"""A classifier whose predictions come with certified radii."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from ldlt.certificates import Certificate
from ldlt.check import choice, finite, positive
from ldlt.engine.network import Lipschitz
from ldlt.errors import BoundError, OptionError
from ldlt.estimators.base import LipschitzEstimator
from ldlt.estimators.certification import typical_constant
from ldlt.estimators.fitting import Batches, RowLoss
from ldlt.estimators.rows import Array, Rows
from ldlt.radius import certified_radius

__all__ = ["LipschitzClassifier"]

_SETTINGS = (0.25, 0.1, 0.5, 0.0, 1.0)
"""Radii that ``"auto"`` tries; the first ones win ties."""


def _asked(radius: float) -> tuple[float, float, float]:
    """Margin and temperature of the loss in units of ℓ, and its power: chosen on data sets, see docs/estimators.md."""
    margin = max(0.1, 0.3 + 0.4 * (radius - 0.25) if radius > 0.25 else 0.1 + 0.8 * radius)
    return margin, min(max(0.1, 0.6 * radius), 0.5), min(0.15, 0.6 * radius)


@dataclass(eq=False, repr=False)
class LipschitzClassifier(ClassifierMixin, LipschitzEstimator):
    r"""A classifier for tables that is Lipschitz by construction, with a certified radius for every prediction.

    The network maps standardised features to one logit per class. ``radius`` says how far predictions shall be robust,
    in standard deviations: a larger one gives larger certified radii at some cost of accuracy.

    Args:
        radius: From 0 (as accurate as a plain network) to about 1. It sets margin o and temperature t of the loss.
            ``"auto"``: the one of 0, 0.1, 0.25, 0.5, 1 with the largest sum of accuracy and certified accuracy at 0.25
            on held-out rows; a sequence of numbers are other radii at which certified accuracy counts.
        loss: ``"margin"``: ``(1 − p^q)/q`` with the probability p of the true class in
            ``softmax((y − √2·ℓ·o·onehot)/(ℓ·t))``, which gives up rows that are out of reach (Zhang & Sabuncu, 2018).
            ``"cross-entropy"``: ``CE(y)``, which does not know ``radius``. Or a function of logits (n, k) and one-hot
            classes (n, k) to losses (n,).
        bound: ℓ of the network on standardised features. Radii do not depend on it when the loss is ``"margin"``,
            which scales with it; with other losses a larger ℓ allows more confident predictions with smaller radii.
        class_weight: None, ``"balanced"`` (``n / (k n_c)``), or a dictionary from class to weight; multiplies
            ``sample_weight``.
        hidden: This and all other arguments are those of :class:`ldlt.estimators.base.LipschitzEstimator`.

    Attributes:
        classes_: The classes (k,).
        radius_: The radius it was trained for.
        temperature_: What logits are divided by for probabilities.
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

    radius: float | str | Sequence[float] = 0.25
    class_weight: Mapping[Any, float] | str | None = None

    _losses = ("margin", "cross-entropy")
    _stratify = True

    # -- training ----------------------------------------------------------------------------------------------------

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train for one epoch on some rows, at a constant step size.

        The first call fixes the standardisation: it should see enough rows for that.

        Args:
            X: Features (n, d).
            y: Classes (n,).
            classes: All classes that will occur; needed at the first call.
            sample_weight: (n,).
        """
        fresh = not hasattr(self, "model_")
        if isinstance(self.class_weight, str):
            raise ValueError(
                "class_weight='balanced' needs all rows at once; give partial_fit a dictionary from class to weight"
            )
        if fresh and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        known = None if classes is None else np.unique(column_or_1d(classes))
        if not fresh and known is not None and not np.array_equal(known, self.classes_):
            raise ValueError(f"classes={known.tolist()} are not those of the first call, {self.classes_.tolist()}")
        self._fit(X, y, sample_weight, fresh=fresh, once=True, classes=known)
        return self

    def _fit(
        self, X: Any, y: Any, sample_weight: Any, *, fresh: bool, once: bool, classes: npt.NDArray[Any] | None = None
    ) -> None:
        self._check_options()
        x, target, weight = self._read(X, y, sample_weight, reset=fresh)
        check_classification_targets(target)
        labels = column_or_1d(target)
        present = labels if once else np.unique(labels[weight > 0])  # rows of weight zero may have any class
        if fresh:
            known = present if classes is None else classes
            if len(known) < 2:
                raise ValueError(
                    f"LipschitzClassifier needs at least two classes; there is only one class, {known.tolist()}"
                )
            weighted = self.class_weight if isinstance(self.class_weight, Mapping) else ()
            unknown = [c for c in weighted if c not in known.tolist()]
            if unknown:
                raise ValueError(f"class_weight has the class {unknown[0]!r}, which does not occur in y")
            self.classes_ = known
        new = np.setdiff1d(present, self.classes_)
        if len(new):
            known = self.classes_.tolist()
            raise ValueError(f"y has the class {new.tolist()[0]!r}, which is not among the known classes {known}")
        code = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1).astype(np.float64)
        self._learn(x, code[:, None], weight, outputs=len(self.classes_), fresh=fresh, once=once)

    def _check_options(self) -> None:
        super()._check_options()
        positive("bound", self.bound, BoundError)
        if isinstance(self.radius, str):
            choice("radius", self.radius, ("auto",))
        for value in [self.radius] if np.ndim(self.radius) == 0 else self.radius:  # type: ignore[union-attr]
            if value != "auto":
                finite("radius", value, least=0.0)
        if isinstance(self.class_weight, Mapping):
            for value in self.class_weight.values():
                finite("class_weight", value, least=0.0)
        elif self.class_weight not in (None, "balanced"):
            raise OptionError(f"class_weight must be None, 'balanced' or a dictionary, not {self.class_weight!r}")

    def _weights(self, rows: Rows) -> Array:
        if self.class_weight is None:
            return rows.weight
        code = rows.target[:, 0].astype(np.int64)
        k = len(self.classes_)
        if isinstance(self.class_weight, str):
            mass = np.bincount(code, weights=rows.weight, minlength=k)
            factor = rows.weight.sum() / (k * np.where(mass > 0, mass, 1.0))
        else:
            factor = np.array([float(self.class_weight.get(c, 1.0)) for c in self.classes_.tolist()])
        found: Array = rows.weight * factor[code]
        return found

    def _encode(self, rows: Rows) -> Array:
        return np.eye(len(self.classes_))[rows.target[:, 0].astype(np.int64)]

    def _settings(self) -> tuple[float, ...]:
        if isinstance(self.radius, str | Sequence):
            return _SETTINGS
        return (float(self.radius),)

    def _adopt(self, setting: float) -> None:
        self.radius_, self.bound_ = setting, float(self.bound)  # type: ignore[arg-type]
        self.temperature_ = _asked(setting)[1] * self.bound_ if self.loss == "margin" else 1.0

    def _shortfall(self, net: Lipschitz, held: Batches) -> float:
        wanted = list(self.radius) if isinstance(self.radius, tuple | list) else [0.25]
        with torch.no_grad():
            logits = net(held.x)
            right = logits.argmax(1) == held.target.argmax(1)
            reach = torch.where(right, certified_radius(logits, net), -1.0)
        counts = [float((held.weight * (reach > r)).sum()) for r in (-0.5, *wanted)]
        return -(counts[0] + sum(counts[1:]) / max(1, len(wanted)))

    def _row_loss(self, net: Lipschitz) -> RowLoss:
        if callable(self.loss):
            return self.loss
        t = self.temperature_
        if self.loss == "cross-entropy":
            return lambda logits, truth: torch.logsumexp(logits, -1) - (logits * truth).sum(-1)
        margin, _, power = _asked(self.radius_)
        offset = math.sqrt(2) * self.bound_ * margin

        def loss(logits: Tensor, truth: Tensor) -> Tensor:
            shifted = (logits - offset * truth) / t  # in units of the temperature: steps do not depend on the bound
            likely = (shifted * truth).sum(-1) - torch.logsumexp(shifted, -1)
            return -torch.expm1(power * likely) / power if power else -likely

        return loss

    def _held_loss(self, net: Lipschitz) -> RowLoss:
        if self.loss != "margin":
            return self._row_loss(net)
        reach = math.sqrt(2) * self.bound_ * self.radius_

        def missed(logits: Tensor, truth: Tensor) -> Tensor:
            own = (logits * truth).sum(-1)
            return (own - logits.masked_fill(truth > 0, -math.inf).amax(-1) <= reach).to(logits)

        return missed

    def _quality(self, certificate: Certificate) -> float:
        return typical_constant(certificate.pair_bounds())

    # -- predictions -------------------------------------------------------------------------------------------------

    def decision_function(self, X: Any) -> Array:
        """Logits (n, k); for two classes the difference ``y_1 − y_0`` (n,)."""
        logits = self._outputs(self._features(X)).numpy()
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Predicted classes (n,)."""
        best = self._outputs(self._features(X)).numpy().argmax(1)
        found: npt.NDArray[Any] = self.classes_[best]
        return found

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes (n, k): ``softmax(logits / t)`` with the temperature t of the loss.

        A loss that asks for a margin does not calibrate them; ``sklearn.calibration.CalibratedClassifierCV`` does.
        """
        logits = self._outputs(self._features(X))
        found: Array = torch.softmax(logits / self.temperature_, 1).numpy()
        return found

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of :meth:`predict_proba` (n, k)."""
        logits = self._outputs(self._features(X))
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
        choice("units", units, ("data", "standard"))
        logits, error = self._enclosed(self._features(X))
        certificate = self.certificate_ if units == "data" else self.standard_certificate_
        return self.classes_[logits.numpy().argmax(1)], certified_radius(logits, certificate, error=error).numpy()
