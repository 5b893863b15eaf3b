"""What the estimators share: options, standardisation, training, the deployed model and its certificate."""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_array, check_is_fitted, check_X_y, validate_data
from torch import Tensor, nn
from torch.optim import AdamW

from ldlt.activations import Abs, MaxMin
from ldlt.certificates import Certificate
from ldlt.check import choice, finite, positive, whole
from ldlt.columns import columns_of, encode, is_frame
from ldlt.engine.contraction import CONTRACTIONS, HEADS
from ldlt.engine.network import Lipschitz
from ldlt.errors import OptionError
from ldlt.estimators.certification import certificate_of
from ldlt.estimators.fitting import Batches, Epoch, RowLoss, Trainer
from ldlt.estimators.rows import Array, Rows, location_and_scale, merge
from ldlt.nn import FeedForward, Residual, Standardise
from ldlt.progress import Progress
from ldlt.rounding import forward_error

__all__ = ["ACTIVATIONS", "ARCHITECTURES", "LipschitzEstimator"]

ARCHITECTURES: dict[str, Callable[..., Lipschitz]] = {"feedforward": FeedForward, "residual": Residual}
"""Networks by name."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "abs": Abs,
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
_MANY = 2000  # rows that are worth a wider network
_ROWS_TO_CHOOSE = 10_000  # how many rows a setting is chosen with, at most
_SHARE_TO_CHOOSE = 0.25  # held out of them


@dataclass(eq=False, repr=False)
class LipschitzEstimator(BaseEstimator):
    """Base of :class:`ldlt.LipschitzClassifier` and :class:`ldlt.LipschitzRegressor`: the arguments they share.

    Args:
        hidden: Widths of the hidden layers; ``"auto"``: (128, 128), from 2,000 rows on (256, 256).
        architecture: ``"feedforward"`` (LDLT-L), or ``"residual"`` (LDLT-R), which has a free map from the input to the
            output beside the hidden layers: that costs a factorisation of a row per input in every step.
        activation: A key of :data:`ldlt.estimators.base.ACTIVATIONS`, or what makes an activation module, such as
            ``functools.partial(ldlt.activations.GroupSort, 4)``.
        contraction: ``"cayley"``, ``"cholesky"`` or ``"symmetric"``, see :class:`ldlt.Lipschitz`.
        head: ``"joint"``, ``"orthogonal"`` or ``"rows"``, see there.
        bound: ℓ of the network, on standardised features.
        loss: Of every row; see the estimator.
        learning_rate: Step size of AdamW at the start of :meth:`fit`; it falls to zero along a cosine.
        weight_decay: Of AdamW.
        epochs: Largest number of passes over the rows. ``"auto"``: as many as make 600 steps, but 30 to 100.
        batch_size: Rows per step. ``"auto"``: 512, more where there are very many rows.
        early_stopping: Hold out rows, keep the epoch that is the best on them, stop after ``patience`` epochs without a
            better one.
        validation_fraction: Share of the rows held out, for a classifier of every class.
        patience: See ``early_stopping``.
        standardise: ``"features"``: every number is centred and divided by its standard deviation. ``"scale"``:
            centred, and all divided by the same number, so that Euclidean radii in the units of the data are those in
            standardised units times that number. False: neither.
        warm_start: :meth:`fit` continues from the network at hand, with its standardisation.
        certify_seconds: Time limit of the search for a certificate; None is no limit.
        callback: Called with an :class:`ldlt.estimators.Epoch` after every epoch.
        random_state: Seed of everything random.
        verbose: Tell progress, where standard error is a terminal.

    Attributes:
        model_: The deployed model in float64 and evaluation mode: standardisation, frozen network, and for a regressor
            the way back to the target's units. A plain module, from inputs in the units of the data.
        network_: The network in training form, from standardised inputs.
        columns_: What the columns of the table are as inputs (:class:`ldlt.columns.Column`): numbers, categories.
        mean_: Location of the inputs (d,).
        scale_: Scale of the inputs (d,); 1 for categories and for what tells that a value is missing.
        loss_curve_: Mean loss of every epoch.
        validation_curve_: What was measured on the validation rows after every epoch; empty without early stopping.
        best_epoch_: The epoch whose parameters were kept.
        n_iter_: Epochs in all.
        n_samples_fit_: Rows of positive weight that it was trained on; with ``partial_fit``, of all calls.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if they were fitted as a data frame.
    """

    hidden: Sequence[int] | str = "auto"
    _: KW_ONLY
    architecture: str = "feedforward"
    activation: str | Callable[[], nn.Module] = "abs"
    contraction: str = "cayley"
    head: str = "joint"
    bound: float | str | Sequence[float] = 1.0
    loss: str | RowLoss = "margin"
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    epochs: int | str = "auto"
    batch_size: int | str = "auto"
    early_stopping: bool = False
    validation_fraction: float = 0.1
    patience: int = 20
    standardise: str | bool = "features"
    warm_start: bool = False
    certify_seconds: float | None = 30.0
    callback: Callable[[Epoch], object] | None = None
    random_state: Any = None
    verbose: int = 0

    _losses: ClassVar[tuple[str, ...]] = ()
    _stratify: ClassVar[bool] = False

    # -- what subclasses say -----------------------------------------------------------------------------------------

    def _settings(self) -> tuple[float, ...]:
        """Values of the option that is chosen on held-out rows, in the order of preference; one if it is given."""
        raise NotImplementedError

    def _adopt(self, setting: float) -> None:
        """Train with this value from now on."""
        raise NotImplementedError

    def _shortfall(self, net: Lipschitz, held: Batches) -> float:
        """How bad a network is on rows that it was not trained on, for the choice of a setting."""
        raise NotImplementedError

    def _best(self, shortfalls: Sequence[float]) -> int:
        """Which setting to take."""
        return int(np.argmin(shortfalls))

    def _row_loss(self, net: Lipschitz) -> RowLoss:
        """What is minimised."""
        raise NotImplementedError

    def _held_loss(self, net: Lipschitz) -> RowLoss:
        """What is told of validation rows, and decides which epoch is the best."""
        return self._row_loss(net)

    def _encode(self, rows: Rows) -> Array:
        """Targets of the network (n, k)."""
        raise NotImplementedError

    def _weights(self, rows: Rows) -> Array:
        """Weights of the rows in the loss (n,)."""
        return rows.weight

    def _tail(self) -> tuple[list[nn.Module], float]:
        """Layers behind the frozen network, and their constant."""
        return [], 1.0

    def _quality(self, certificate: Certificate) -> float:
        """Which certificate to prefer: the smaller the better."""
        raise NotImplementedError

    # -- arguments and rows ------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        choice("architecture", self.architecture, tuple(ARCHITECTURES))
        if not callable(self.activation):
            choice("activation", self.activation, tuple(ACTIVATIONS))
        if not callable(self.loss):
            choice("loss", self.loss, self._losses)
        choice("contraction", self.contraction, CONTRACTIONS)
        choice("head", self.head, HEADS)
        choice("standardise", self.standardise, ("features", "scale", False))
        self._widths()
        positive("learning_rate", self.learning_rate)
        finite("weight_decay", self.weight_decay, least=0.0)
        finite("validation_fraction", self.validation_fraction, above=0.0, below=1.0)
        whole("patience", self.patience)
        for name in ("epochs", "batch_size"):
            if getattr(self, name) != "auto":
                whole(name, getattr(self, name))
        if self.certify_seconds is not None:
            finite("certify_seconds", self.certify_seconds, least=0.0)
        if self.callback is not None and not callable(self.callback):
            raise OptionError(f"callback must be a function of an epoch, or None, not {self.callback!r}")

    def _widths(self, rows: int = 0) -> list[int]:
        if isinstance(self.hidden, str) and self.hidden == "auto":
            return [128, 128] if rows < _MANY else [256, 256]
        given: Any = [self.hidden] if isinstance(self.hidden, numbers.Integral) else self.hidden
        if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray) or not len(given):
            raise OptionError(f"hidden must be a tuple of widths such as (64, 64), not {self.hidden!r}")
        widths = [whole("each width of hidden", width) for width in given]
        if self.activation == "maxmin" and any(width % 2 for width in widths):
            raise OptionError(f"activation='maxmin' sorts pairs of neurons: widths must be even, not {self.hidden!r}")
        return widths

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _read(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool, **options: Any
    ) -> tuple[Array, npt.NDArray[Any], Array]:
        """Inputs, checked targets and weights."""
        if is_frame(X):
            validate_data(self, X, reset=reset, skip_check_array=True)
            table, (_, target) = X, check_X_y(np.zeros((len(X), 1)), y, **options)
        else:
            options |= {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
            table, target = validate_data(self, X, y, reset=reset, **options)
        weight = _check_sample_weight(sample_weight, target, dtype=np.float64)
        if (weight < 0).any():
            raise ValueError("sample_weight must not be negative")
        if not (weight > 0).any():
            raise ValueError("all values of sample_weight are zero: there is nothing to learn from")
        if reset:
            self.columns_ = columns_of(table, weight)
        return check_array(encode(table, self.columns_), input_name="X"), target, weight

    def _features(self, X: Any) -> Array:
        """Inputs of the network, in the units of the data, from rows to predict."""
        check_is_fitted(self)
        options = {"skip_check_array": True} if is_frame(X) else {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
        table = validate_data(self, X, reset=False, **options)
        found: Array = check_array(encode(table, self.columns_), input_name="X")
        return found

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    # -- training ----------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train.

        Args:
            X: Features (n, d), an array of numbers, or a data frame of numbers and texts; values may be missing
                (see :mod:`ldlt.columns`).
            y: Classes (n,), or targets (n,) or (n, m).
            sample_weight: (n,), not negative. A weight of zero is the same as leaving the row out, a whole number the
                same as repeating it.

        Raises:
            ValueError: A number is infinite, a column is a date, there is only one class, or an option has no meaning.
        """
        self._fit(X, y, sample_weight, fresh=not (self.warm_start and hasattr(self, "model_")), once=False)
        return self

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, fresh: bool, once: bool) -> None:
        """Check and encode targets, then :meth:`_learn`."""
        raise NotImplementedError

    def _learn(self, x: Array, target: Array, weight: Array, *, outputs: int, fresh: bool, once: bool) -> None:
        """Train on checked rows.

        Args:
            x: Features (n, d).
            target: Targets (n, t).
            weight: Weights (n,).
            outputs: Outputs of the network k.
            fresh: Start anew: scale and network.
            once: One epoch at a constant step size, without validation rows (``partial_fit``).
        """
        rows = merge(x, target, weight)
        self.n_samples_fit_: int = int((weight > 0).sum()) + (0 if fresh or not once else self.n_samples_fit_)
        if fresh:
            seeds = check_random_state(self.random_state).randint(np.iinfo(np.int32).max, size=2)
            self._random, seed = np.random.default_rng(int(seeds[0])), int(seeds[1])
            self._one_scale = self.standardise == "scale"
            self.mean_, self.scale_ = self._standard(rows)
            self._choose(rows, outputs, seed)
            self.network_ = self._start(len(rows), outputs, seed)
            self._optimiser: AdamW | None = None
            self.loss_curve_: list[float] = []
            self.validation_curve_: list[float] = []
            self.n_iter_: int = 0
        train, held = rows, None
        if self.early_stopping and not once:
            train, held = rows.split(self.validation_fraction, self._random, by_target=self._stratify)
        trainer = self._train(self.network_, train, held, self._optimiser, once=once)
        self._optimiser = trainer.optimiser
        self.loss_curve_ += [epoch.loss for epoch in trainer.epochs]
        self.validation_curve_ += [epoch.validation for epoch in trainer.epochs if held is not None]
        self.best_epoch_ = self.n_iter_ + trainer.best_epoch
        self.n_iter_ += len(trainer.epochs)
        self._deploy()
        if trainer.stopped == "interrupted":
            warnings.warn("Training interrupted by user.", stacklevel=4)
        elif trainer.stopped == "not finite":
            warnings.warn(
                "training stopped because the loss was not finite; the parameters before that were kept. "
                "Try a smaller learning_rate",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _standard(self, rows: Rows) -> tuple[Array, Array]:
        """Location and scale of the inputs (d,)."""
        d = rows.x.shape[1]
        if not self.standardise:
            return np.zeros(d), np.ones(d)
        number = np.array([c.categories is None and i == 0 for c in self.columns_ for i in range(len(c.inputs))])
        mean, scale = location_and_scale(rows.x, rows.weight, number, common=self._one_scale)
        return mean, scale

    def _start(self, rows: int, outputs: int, seed: int) -> Lipschitz:
        """A network with start values that the seed decides."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # of the CPU alone, which is what is restored
            return ARCHITECTURES[self.architecture](
                len(self.mean_),
                self._widths(rows),
                outputs,
                bound=self.bound_,
                activation=self.activation if callable(self.activation) else ACTIVATIONS[self.activation],
                contraction=self.contraction,
                head=self.head,
                alpha=_ALPHA,
                dtype=torch.float32,
            )

    def _choose(self, rows: Rows, outputs: int, seed: int) -> None:
        """Adopt the setting that does best on held-out rows, of those that there are."""
        settings = self._settings()
        self._adopt(settings[0])
        if len(settings) == 1 or len(rows) < 2 * len(settings):
            return
        sample = rows
        if len(rows) > _ROWS_TO_CHOOSE:
            sample = rows.split(_ROWS_TO_CHOOSE / len(rows), self._random, by_target=self._stratify)[1]
        train, held = sample.split(_SHARE_TO_CHOOSE, self._random, by_target=self._stratify)
        found = []
        for setting in settings:
            self._adopt(setting)
            net = self._start(len(train), outputs, seed)
            if self._train(net, train, None, None, once=False, trial=True).stopped == "interrupted":
                raise KeyboardInterrupt
            found.append(self._shortfall(net, self._batches(held, 1)))
        self._adopt(settings[self._best(found)])

    def _train(
        self,
        net: Lipschitz,
        train: Rows,
        held: Rows | None,
        optimiser: AdamW | None,
        *,
        once: bool,
        trial: bool = False,
    ) -> Trainer:
        """Train a network, on which its parameters are set."""
        batches = self._batches(train, Batches.steps_for(len(train), self.batch_size))
        epochs = 1 if once else batches.epochs_for(self.epochs)
        if trial:  # enough to compare settings
            epochs = math.ceil(epochs / 3)
        trainer = Trainer(net, self._row_loss(net), self._held_loss(net), float(self.weight_decay), optimiser)
        with Progress(epochs, show=not trial and bool(self.verbose)) as progress:

            def report(epoch: Epoch) -> None:
                progress.tell(str(epoch), epoch.epoch)
                if not trial and self.callback is not None:
                    self.callback(epoch)

            trainer.run(
                batches,
                None if held is None else self._batches(held, 1),
                learning_rate=float(self.learning_rate),
                epochs=epochs,
                patience=int(self.patience),
                decay=not once,
                random=self._random,
                report=report,
            )
        return trainer

    def _batches(self, rows: Rows, steps: int) -> Batches:
        weight = self._weights(rows)
        total = weight.sum()
        # Rows of a class whose weight is zero may be all there are in a split.
        even = weight * (len(weight) / total) if total > 0 else weight
        x = torch.empty(rows.x.shape, dtype=torch.float32)
        for i in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(i, i + _ROWS_AT_ONCE)
            x[part] = torch.from_numpy((rows.x[part] - self.mean_) / self.scale_)
        target, weights = (torch.tensor(part, dtype=torch.float32) for part in (self._encode(rows), even))
        return Batches(x, target, weights, steps)

    # -- the deployed model ------------------------------------------------------------------------------------------

    def _deploy(self) -> None:
        frozen = copy.deepcopy(self.network_).double().freeze()
        scale = self.scale_[:1].reshape(()) if self._one_scale else self.scale_
        first = Standardise(torch.tensor(self.mean_), torch.tensor(scale))
        self.model_ = nn.Sequential(first, frozen, *self._tail()[0]).eval().requires_grad_(False)
        self._certificates: dict[str, Certificate] = {}

    def _by_parts(self, x: Array, function: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        """Some rows at a time; copies, because arrays may be read-only."""
        with torch.no_grad():
            parts = [function(torch.tensor(x[i : i + _ROWS_AT_ONCE])) for i in range(0, len(x), _ROWS_AT_ONCE)]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _outputs(self, x: Array) -> Tensor:
        """Outputs of the deployed model (n, k)."""
        return self._by_parts(x, lambda part: (self.model_(part),))[0]

    def _enclosed(self, x: Array) -> list[Tensor]:
        """Outputs (n, k) and bounds on their rounding errors (n, k)."""
        return self._by_parts(x, lambda part: forward_error(self.model_, part))

    @property
    def certificate_(self) -> Certificate:
        """Certificate of :attr:`model_`: its constants in the units of the data. Made when it is first asked for.

        ``certificate_.rigorous`` tells that it was proven for the numbers as they are stored; ``ldlt.verify`` proves it
        again. If no proof passes, ``certificate_.status`` is ``"not certified"``, all constants are infinite, and
        there is a warning.
        """
        check_is_fitted(self)
        return self._certificate("data", self.model_, 1 / float(np.min(self.scale_)))

    @property
    def standard_certificate_(self) -> Certificate:
        """Certificate of the frozen network ``model_[1]``: its constants on standardised inputs, at most ``bound``."""
        check_is_fitted(self)
        return self._certificate("standard", self.model_[1], 1.0)

    def _certificate(self, units: str, model: nn.Module, before: float) -> Certificate:
        if units not in self._certificates:
            self._certificates[units] = self.certify_model(model, len(self.mean_), before, units == "data")
        return self._certificates[units]

    def certify_model(self, model: nn.Module, inputs: int, before: float, tail: bool = True) -> Certificate:
        """Certificate of a plain module that has the frozen network behind an affine map.

        Args:
            model: The module.
            inputs: Number of its inputs.
            before: At least the norm of the map in front of the network.
            tail: Whether the way back to the target's units is behind it.
        """
        behind = self._tail()[1] if tail else 1.0
        net = copy.deepcopy(self.network_).double()
        found = certificate_of(
            model,
            inputs,
            # Outputs that are γ times as large satisfy the inequality with γ² times the multipliers.
            [behind**2 * m for m in net.multipliers().values()],
            net.bound * before * behind,
            time_limit=self.certify_seconds,
            quality=self._quality,
        )
        if not found.is_certified:
            warnings.warn(f"nothing is certified: {found.reason}", stacklevel=4)
        return found
