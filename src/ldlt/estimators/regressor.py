"""A regressor that tells what an error of its inputs can do to its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import RegressorMixin
from torch import Tensor, nn

from ldlt.certificates import Certificate
from ldlt.estimators.base import LipschitzEstimator
from ldlt.estimators.certification import typical_constant
from ldlt.estimators.fitting import Epoch, RowLoss
from ldlt.estimators.rows import Array, Rows, merge
from ldlt.estimators.scaling import Restore, location_and_scale

__all__ = ["LipschitzRegressor"]


def _squared(y: Tensor, target: Tensor) -> Tensor:
    return torch.square(y - target).mean(-1) / 2


def _huber(y: Tensor, target: Tensor) -> Tensor:
    gap = (y - target).abs()
    inner = gap.clamp(max=1.0)
    return (inner * (gap - inner / 2)).mean(-1)


def _absolute(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).abs().mean(-1)


_LOSSES: dict[str, RowLoss] = {"squared": _squared, "huber": _huber, "absolute": _absolute}


class LipschitzRegressor(RegressorMixin, LipschitzEstimator):
    r"""A regressor for tables, of one or several targets, that is Lipschitz by construction.

    Features and targets are standardised inside, and the network between them has the constant ℓ = ``bound``: an input
    that moves by one standard deviation moves the outputs by at most ℓ of theirs. :attr:`certificate_` has the
    constants in the units of the data and of the target.

    Args:
        hidden: Widths of the hidden layers.
        architecture: ``"residual"`` (LDLT-R), ``"feedforward"`` (LDLT-L), or ``"auto"``: the first one, but the second
            one for more than 256 features, where it trains much faster.
        activation: A key of :data:`ldlt.estimators.base.ACTIVATIONS`.
        bound: ℓ of the map from standardised features to standardised targets. The smaller, the narrower the intervals;
            too small a bound cannot follow the data.
        loss: ``"squared"``, ``"huber"`` (with its kink at one standard deviation of the target) or ``"absolute"``.
        learning_rate: Step size of AdamW at the start of :meth:`fit`; it falls to zero along a cosine.
        weight_decay: Of AdamW.
        epochs: Largest number of passes over the rows.
        batch_size: Rows per step. ``"auto"``: 256, but 4 to 32 steps per epoch.
        early_stopping: Hold out rows, keep the epoch with the smallest loss on them, stop after ``patience`` epochs
            without a smaller one.
        validation_fraction: Share of the rows held out.
        patience: See ``early_stopping``.
        standardise: Of the features: ``"features"``, ``"scale"`` or False, as in :class:`ldlt.LipschitzClassifier`.
        warm_start: :meth:`fit` continues from the network at hand, with its standardisation.
        certify_seconds: Time limit of the search for a certificate; None is no limit.
        callback: Called with an :class:`ldlt.estimators.Epoch` after every epoch.
        random_state: Seed of everything random.
        verbose: 1: about ten lines of progress; 2: one for every epoch.

    Attributes:
        model_: The deployed model in float64: inputs in the units of the data to outputs in those of the target (see
            :class:`ldlt.estimators.base.LipschitzEstimator` for the others).
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

    _losses = tuple(_LOSSES)

    def __init__(
        self,
        hidden: Sequence[int] = (64, 64),
        *,
        architecture: str = "auto",
        activation: str = "relu",
        bound: float = 1.0,
        loss: str = "squared",
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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    # -- training ----------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LipschitzRegressor:
        """Train.

        Args:
            X: Features (n, d), an array or a data frame of numbers.
            y: Targets (n,) or (n, m).
            sample_weight: (n,), not negative. A weight of zero is the same as leaving the row out, a whole number the
                same as repeating it.

        Raises:
            ValueError: The data are not finite numbers, or an option has no meaning.
        """
        return self._fit(X, y, sample_weight, fresh=not self._goes_on(), once=False)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> LipschitzRegressor:
        """Train for one epoch on some rows, at a constant step size.

        The first call fixes the standardisation of features and targets: it should see enough rows for that.

        Args:
            X: Features (n, d).
            y: Targets (n,) or (n, m).
            sample_weight: (n,).
        """
        return self._fit(X, y, sample_weight, fresh=not hasattr(self, "model_"), once=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, fresh: bool, once: bool) -> LipschitzRegressor:
        self._check_options()
        x, raw, weight = self._read(X, y, sample_weight, reset=fresh, multi_output=True, y_numeric=True)
        target = np.asarray(raw, dtype=np.float64)
        flat = target.ndim == 1
        target = target.reshape(len(x), -1)
        if fresh:
            self._flat = flat
            rows = merge(x, target, weight)
            self.target_mean_, self.target_scale_ = location_and_scale(rows.target, rows.weight)
        elif target.shape[1] != len(self.target_mean_):
            raise ValueError(f"y has {target.shape[1]} targets, the network has {len(self.target_mean_)}")
        self._learn(x, target, weight, outputs=target.shape[1], fresh=fresh, once=once)
        return self

    def _row_loss(self) -> RowLoss:
        return _LOSSES[self.loss]

    def _encode(self, rows: Rows) -> Array:
        found: Array = (rows.target - self.target_mean_) / self.target_scale_
        return found

    def _tail(self) -> list[nn.Module]:
        return [Restore(torch.tensor(self.target_mean_), torch.tensor(self.target_scale_))]

    def _steepest_tail(self) -> float:
        return float(self.target_scale_.max())

    def _quality(self, certificate: Certificate) -> float:
        return typical_constant(certificate.output_bounds())

    # -- predictions -------------------------------------------------------------------------------------------------

    def predict(self, X: Any) -> Array:
        """Predicted targets, (n,) or (n, m) as they were fitted."""
        return self._shaped(self._outputs(self._features(X)))

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
