"""A regressor whose outputs come with certified intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import RegressorMixin
from torch import nn
from torch.nn import functional as F

from ldlt.certificates import Certificate
from ldlt.check import choice, positive
from ldlt.engine.network import Lipschitz
from ldlt.errors import BoundError
from ldlt.estimators.base import LipschitzEstimator
from ldlt.estimators.certification import typical_constant
from ldlt.estimators.fitting import Batches, RowLoss
from ldlt.estimators.rows import Array, Restore, Rows, location_and_scale, merge

__all__ = ["LipschitzRegressor"]

_LOSSES: dict[str, RowLoss] = {
    "squared": lambda y, target: torch.square(y - target).mean(-1) / 2,
    "huber": lambda y, target: F.huber_loss(y, target, reduction="none").mean(-1),
    "absolute": lambda y, target: (y - target).abs().mean(-1),
}

_BOUNDS = (0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(eq=False, repr=False)
class LipschitzRegressor(RegressorMixin, LipschitzEstimator):
    r"""A regressor for tables, of one or several targets, that is Lipschitz by construction.

    Features and targets are standardised inside, and the network between them has the constant ℓ = ``bound``: an input
    that moves by one standard deviation moves the outputs by at most ℓ of theirs. :attr:`certificate_` has the
    constants in the units of the data and of the target.

    Args:
        bound: ℓ of the map from standardised features to standardised targets. The smaller, the narrower the intervals;
            too small a bound cannot follow the data. ``"auto"``: the least of 0.5, 1, 2, 4, 8 whose loss on
            held-out rows is at most 2 % above the least; a sequence: the same of those.
        loss: ``"squared"``, ``"huber"`` (with its kink at one standard deviation of the target), ``"absolute"``, or a
            function of outputs (n, m) and targets (n, m), both standardised, to losses (n,).
        hidden: This and all other arguments are those of :class:`ldlt.estimators.base.LipschitzEstimator`.

    Attributes:
        model_: The deployed model in float64: inputs in the units of the data to outputs in those of the target (see
            :class:`ldlt.estimators.base.LipschitzEstimator` for the others).
        bound_: ℓ.
        target_mean_: Location of the targets (m,).
        target_scale_: Scale of the targets (m,).

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> regressor = LipschitzRegressor(epochs=20, random_state=0).fit(X, y)
        >>> lower, upper = regressor.predict_interval(X, radius=0.01)
        >>> bool((lower < regressor.predict(X)).all() and (regressor.predict(X) < upper).all())
        True
    """

    loss: str | RowLoss = "squared"
    bound: float | str | Sequence[float] = "auto"

    _losses = tuple(_LOSSES)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    # -- training ----------------------------------------------------------------------------------------------------

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train for one epoch on some rows, at a constant step size.

        The first call fixes the standardisation of features and targets: it should see enough rows for that.

        Args:
            X: Features (n, d).
            y: Targets (n,) or (n, m).
            sample_weight: (n,).
        """
        self._fit(X, y, sample_weight, fresh=not hasattr(self, "model_"), once=True)
        return self

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, fresh: bool, once: bool) -> None:
        self._check_options()
        x, raw, weight = self._read(X, y, sample_weight, reset=fresh, multi_output=True, y_numeric=True)
        target = np.asarray(raw, dtype=np.float64).reshape(len(x), -1)
        if fresh:
            self._flat = np.ndim(raw) == 1
            rows = merge(x, target, weight)
            self.target_mean_, self.target_scale_ = location_and_scale(rows.target, rows.weight)
        elif target.shape[1] != len(self.target_mean_):
            raise ValueError(f"y has {target.shape[1]} targets, the network has {len(self.target_mean_)}")
        self._learn(x, target, weight, outputs=target.shape[1], fresh=fresh, once=once)

    def _check_options(self) -> None:
        super()._check_options()
        if isinstance(self.bound, str):
            choice("bound", self.bound, ("auto",))
        for value in self._settings():
            positive("bound", value, BoundError)

    def _settings(self) -> tuple[float, ...]:
        if isinstance(self.bound, str):
            return _BOUNDS
        return (self.bound,) if np.ndim(self.bound) == 0 else tuple(self.bound)  # type: ignore[return-value,arg-type]

    def _adopt(self, setting: float) -> None:
        self.bound_ = float(setting)

    def _shortfall(self, net: Lipschitz, held: Batches) -> float:
        with torch.no_grad():
            loss = float((self._row_loss(net)(net(held.x), held.target) * held.weight).mean())
        return loss

    def _best(self, shortfalls: Sequence[float]) -> int:
        return int(np.argmax(np.array(shortfalls) <= 1.02 * np.nanmin(shortfalls)))

    def _row_loss(self, net: Lipschitz) -> RowLoss:
        return self.loss if callable(self.loss) else _LOSSES[self.loss]

    def _encode(self, rows: Rows) -> Array:
        found: Array = (rows.target - self.target_mean_) / self.target_scale_
        return found

    def _tail(self) -> tuple[list[nn.Module], float]:
        back = Restore(torch.tensor(self.target_mean_), torch.tensor(self.target_scale_))
        return [back], float(self.target_scale_.max())

    def _quality(self, certificate: Certificate) -> float:
        return typical_constant(certificate.output_bounds())

    # -- predictions -------------------------------------------------------------------------------------------------

    def predict(self, X: Any) -> Array:
        """Predicted targets, (n,) or (n, m) as they were fitted."""
        return self._shaped(self._outputs(self._features(X)).numpy())

    def predict_interval(self, X: Any, radius: Any) -> tuple[Array, Array]:
        r"""What the prediction can become if the true features differ from the given ones.

        The output i stays within :math:`\hat y_i ± ℓ_i r` for every input at a Euclidean distance of at most ``r``,
        with the certified constants :math:`ℓ_i` of the outputs, in the units of the target; the rounding error of
        :math:`\hat y_i` is added. This is about errors of the input, not about noise of the target.

        Args:
            X: Features (n, d).
            radius: r in the units of the data, a number or one for every row (n,).

        Returns:
            Lower and upper ends, of the shape of :meth:`predict`; infinite if nothing is certified.
        """
        x = self._features(X)
        reach: npt.NDArray[np.float64] = np.asarray(radius, dtype=np.float64)
        if reach.shape not in ((), (len(x),)):
            raise ValueError(f"radius must be a number or have shape ({len(x)},), not {reach.shape}")
        if not (reach >= 0).all():
            raise ValueError("radius must not be negative or NaN")
        middle, error = (t.numpy() for t in self._enclosed(x))
        constants = self.certificate_.output_bounds().numpy()
        with np.errstate(invalid="ignore"):  # no distance at all is no error, whatever the constant
            half = np.nan_to_num(np.broadcast_to(reach, len(x))[:, None] * constants, nan=0.0, posinf=np.inf)
        # Rounded outwards, operation by operation.
        half = np.nextafter(np.nextafter(half, np.inf) + error, np.inf)
        lower, upper = np.nextafter(middle - half, -np.inf), np.nextafter(middle + half, np.inf)
        return self._shaped(lower), self._shaped(upper)

    def _shaped(self, values: Array) -> Array:
        return values[:, 0] if self._flat else values
