"""A network as it is deployed: plain weights, its certificate, and what its inputs and outputs mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ldlt._version import __version__
from ldlt.certificates import Certificate
from ldlt.certificates.ball import multiply_up, product_up
from ldlt.columns import Column, encode, is_frame
from ldlt.errors import OptionError, SavedModelError, ShapeError
from ldlt.evaluation import evaluating, reference
from ldlt.radius import certified_radius
from ldlt.rounding import forward_error

__all__ = ["CLASSIFICATION", "REGRESSION", "Deployed", "Label", "Meaning"]

CLASSIFICATION: Literal["classification"] = "classification"
REGRESSION: Literal["regression"] = "regression"

_ROWS_AT_ONCE = 16384

Label = bool | int | float | str
_Text = Annotated[str, msgspec.Meta(max_length=1000)]
_MOST = msgspec.Meta(max_length=100_000)


@dataclass(frozen=True)
class Meaning:
    """What the numbers mean that go in and come out; everything may be unknown.

    Attributes:
        task: ``"classification"`` (outputs are logits), ``"regression"`` or None.
        classes: Labels of the outputs of a classifier.
        features: Names of the inputs.
        columns: What the columns of a table are as inputs: numbers, categories, missing values.
        target: Name of what is predicted.
        rows: Number of rows that it was trained on.
        trained_bound: Constant that was asked for, on standardised features.
        architecture: In a few words.
        version: Of the program that made the file.
    """

    task: Literal["classification", "regression"] | None = None
    classes: Annotated[tuple[Label, ...], _MOST] | None = None
    features: Annotated[tuple[_Text, ...], _MOST] | None = None
    columns: Annotated[tuple[Column, ...], _MOST] | None = None
    target: _Text | None = None
    rows: Annotated[int, msgspec.Meta(ge=0)] | None = None
    trained_bound: float | None = None
    architecture: _Text = ""
    version: _Text = __version__


class Deployed(nn.Module):
    r"""A plain network with its certificate: what :func:`ldlt.save` writes and :func:`ldlt.load` returns.

    Args:
        network: The plain network, in evaluation mode.
        certificate: About this network.
        meaning: Of its inputs and outputs.

    Attributes:
        network: The plain network.
        certificate: What is certified about it; ``ldlt.verify(deployed)`` proves it again.
        meaning: What its inputs and outputs are: names of columns, classes, units.

    Shape:
        Input (batch, \*input_shape), output (batch, k).

    Example:
        >>> import ldlt
        >>> deployed = ldlt.deploy(ldlt.nn.FeedForward(4, [8], 3, bound=2.0))
        >>> deployed(torch.zeros(2, 4)).shape, deployed.certificate.rigorous
        (torch.Size([2, 3]), True)
    """

    def __init__(self, network: nn.Module, certificate: Certificate, meaning: Meaning | None = None) -> None:
        super().__init__()
        self.network = network.eval()
        self.certificate = certificate
        self.meaning = Meaning() if meaning is None else meaning
        classes, features = self.meaning.classes, self.meaning.features
        if classes is not None and len(classes) != certificate.outputs:
            raise SavedModelError(f"{len(classes)} classes do not fit {certificate.outputs} outputs")
        if features is not None and len(features) != math.prod(certificate.input_shape):
            raise SavedModelError(f"{len(features)} names do not fit inputs of shape {certificate.input_shape}")
        columns = self.meaning.columns
        if columns is not None and (sum(len(c.inputs) for c in columns),) != certificate.input_shape:
            raise SavedModelError(f"{len(columns)} columns do not fit inputs of shape {certificate.input_shape}")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.certificate.input_shape

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the network."""
        return reference(self.network).dtype

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        found: Tensor = self.network(x)
        return found

    # -- predictions ---------------------------------------------------------------------------------------------------

    def predict(self, X: Any) -> npt.NDArray[Any]:
        r"""Classes (n,) of a classifier; otherwise the outputs, (n,) if there is only one, else (n, k).

        Args:
            X: Inputs (n, \*input_shape), an array or a tensor; of a model that knows the columns of its table, a data
                frame or an array with those.
        """
        x, _ = self._inputs(X)
        with evaluating(self.network), torch.no_grad():
            outputs = torch.cat([self.network(part).flatten(1) for part in x.split(_ROWS_AT_ONCE)]).numpy()
        if self.meaning.task == CLASSIFICATION:
            return self._labels(outputs)
        return outputs[:, 0] if outputs.shape[1] == 1 else outputs

    def certified_radius(self, X: Any) -> npt.NDArray[np.float64]:
        """Euclidean distance (n,) within which no input has another prediction, in the units of the inputs.

        Rounding errors of the outputs are taken off, and that of the inputs, too, if the network is in float32. No ball
        reaches beyond the region that the certificate is about.

        Raises:
            OptionError: The network is a regressor.
        """
        return self.predict_certified(X)[1]

    def predict_certified(self, X: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
        """Predicted classes (n,), and their certified radii (n,)."""
        if self.meaning.task == REGRESSION or self.certificate.outputs < 2:
            raise OptionError("radii are for classifiers; what an error of the input can do here: predict_interval")
        x, moved = self._inputs(X)
        logits, error = self._enclosed(x)
        radius = certified_radius(logits, self.certificate, error=error).numpy()
        radius = np.clip(radius, 0.0, np.maximum(self._room(x), 0.0))
        return self._labels(logits.numpy()), np.where(moved > 0, _nearer(radius, moved), radius)

    def predict_interval(self, X: Any, radius: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Ends of the interval that every output stays in for inputs within a Euclidean distance of ``radius``.

        Returns:
            Lower and upper ends, (n,) if there is one output, else (n, k); infinite if nothing is certified, if the
            output overflows, or if inputs so near can be outside of the region that the certificate is about.
        """
        if not (math.isfinite(radius) and radius >= 0):
            raise OptionError(f"radius must be a finite number that is not negative, not {radius!r}")
        x, moved = self._inputs(X)
        outputs, error = (t.double().numpy() for t in self._enclosed(x))
        constants = self.certificate.output_bounds().numpy()
        reach = np.nextafter(radius + moved, np.inf)[:, None]
        # Rounded outwards, operation by operation.
        half = np.nextafter(np.nextafter(reach * constants, np.inf) + error, np.inf)
        unknown = ~np.isfinite(outputs) | (reach > self._room(x)[:, None])
        outputs, half = np.where(unknown, 0.0, outputs), np.where(unknown, np.inf, half)
        lower, upper = np.nextafter(outputs - half, -np.inf), np.nextafter(outputs + half, np.inf)
        return (lower[:, 0], upper[:, 0]) if lower.shape[1] == 1 else (lower, upper)

    def certified_accuracy(self, X: Any, y: Any, radii: Sequence[float] = (0.0,)) -> npt.NDArray[np.float64]:
        """Share of rows that are classified correctly and certified beyond each radius; a negative one: accuracy."""
        predicted, found = self.predict_certified(X)
        truth = np.asarray(y)
        if truth.shape != predicted.shape:
            raise ShapeError(f"there are {len(predicted)} rows and {truth.shape} true classes")
        reach = np.where(predicted == truth, found, -np.inf)
        shares: npt.NDArray[np.float64] = (reach > np.atleast_1d(np.asarray(radii, np.float64))[:, None]).mean(-1)
        return shares

    def _enclosed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (n, k), and bounds on their rounding errors in float64."""
        parts = [forward_error(self.network, part) for part in x.split(_ROWS_AT_ONCE)]
        return tuple(torch.cat([t.flatten(1) for t in each]) for each in zip(*parts, strict=True))  # type: ignore[return-value]

    def _room(self, x: Tensor) -> npt.NDArray[np.float64]:
        """How far one can go from inputs (n,) before the region ends; negative outside, rounded downwards."""
        region = self.certificate.region
        if region is None:
            return np.full(len(x), np.inf)
        gap = np.abs((x.double() - region.center.double()).flatten(1).numpy())
        gap = np.nextafter(gap, np.inf)
        if region.kind == "ball":
            return np.nextafter(float(region.radius) - _length(gap), -np.inf)
        found: npt.NDArray[np.float64] = np.nextafter(region.radius.double().flatten().numpy() - gap, -np.inf).min(1)
        return found

    def _labels(self, outputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The class of the largest output; its place, if there are no names."""
        classes, place = self.meaning.classes, outputs.argmax(1)
        found: npt.NDArray[Any] = place if classes is None else np.array(classes)[place]
        return found

    def _inputs(self, X: Any) -> tuple[Tensor, npt.NDArray[np.float64]]:
        """Inputs in the precision of the network, and how far rounding moved them (n,)."""
        if X.is_complex() if isinstance(X, Tensor) else np.iscomplexobj(X):
            raise ShapeError("inputs must be real numbers")
        if self.meaning.columns is not None and not isinstance(X, Tensor):
            X = encode(X if is_frame(X) else np.asarray(X), self.meaning.columns)
        names = self.meaning.features
        if names is not None and hasattr(X, "columns") and hasattr(X, "loc"):
            missing = [n for n in names if n not in X.columns]
            if missing:
                raise ShapeError(f"the column '{missing[0]}' is missing, on which the network was trained")
            X = X[list(names)]
        if isinstance(X, Tensor):
            X = X.detach().cpu()
        try:
            exact = np.asarray(X, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"inputs must be numbers: {error}") from error
        if exact.ndim < 1 or exact.shape[1:] != self.input_shape or not len(exact):
            raise ShapeError(f"inputs must have shape {('n', *self.input_shape)}, not {exact.shape}")
        if not np.isfinite(exact).all():
            raise ShapeError("inputs must be finite numbers: fill in what is missing")
        x = torch.tensor(exact).to(self.dtype)
        gap = np.abs(x.double().numpy() - exact).reshape(len(exact), -1)
        return x, np.where(gap.any(1), _length(gap), 0.0)

    def extra_repr(self) -> str:
        """Summary for ``repr``."""
        return f"task={self.meaning.task}, bound={self.certificate.bound:.9g}, status={self.certificate.status!r}"


def _length(gap: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Euclidean norms of rows (n, d) that are not negative, rounded upwards."""
    found: npt.NDArray[np.float64] = np.sqrt(product_up(multiply_up(gap, gap), np.ones(gap.shape[1])))
    return np.nextafter(found, np.inf)


def _nearer(radius: npt.NDArray[np.float64], moved: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Radii around inputs that are that far from the rounded ones, rounded downwards."""
    with np.errstate(invalid="ignore"):  # an infinite radius stays one
        found: npt.NDArray[np.float64] = np.maximum(np.nextafter(radius - moved, -np.inf), 0.0)
    return np.where(np.isinf(radius), radius, found)
