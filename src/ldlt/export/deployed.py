"""A network as it is deployed: plain weights, its certificate, and what its inputs and outputs mean."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ldlt._version import __version__
from ldlt.certificates import Certificate, certify, issue, issue_built, verify
from ldlt.certificates.ball import multiply_up, product_up
from ldlt.certificates.fingerprint import fingerprint, traced
from ldlt.engine.network import Lipschitz, sample_shape
from ldlt.errors import CertificateError, GraphError, OptionError, SavedModelError, ShapeError
from ldlt.evaluation import evaluating, reference
from ldlt.export.encoding import members, typed
from ldlt.export.program import program_of
from ldlt.radius import certified_radius
from ldlt.rounding import forward_error

__all__ = ["CLASSIFICATION", "REGRESSION", "Deployed", "Meaning", "deploy"]

CLASSIFICATION, REGRESSION = "classification", "regression"

_ROWS_AT_ONCE = 16384
_MOST_NAMES = 100_000
_LONGEST_NAME = 1000

Label = str | int | float | bool


@dataclass(frozen=True)
class Meaning:
    """What the numbers mean that go in and come out; everything may be unknown.

    Attributes:
        task: ``"classification"`` (outputs are logits), ``"regression"`` or None.
        classes: Labels of the outputs of a classifier.
        features: Names of the inputs.
        target: Name of what is predicted.
        rows: Number of rows that it was trained on.
        trained_bound: Constant that was asked for, on standardised features.
        architecture: In a few words.
        version: Of the program that made the file.
    """

    task: str | None = None
    classes: tuple[Label, ...] | None = None
    features: tuple[str, ...] | None = None
    target: str | None = None
    rows: int | None = None
    trained_bound: float | None = None
    architecture: str = ""
    version: str = __version__

    def to_data(self) -> dict[str, Any]:
        """As data for JSON, with a checksum that finds accidents, not forgers."""
        data = {
            "task": self.task,
            "classes": None if self.classes is None else list(self.classes),
            "features": None if self.features is None else list(self.features),
            "target": self.target,
            "rows": self.rows,
            "trained_bound": None if self.trained_bound is None else float(self.trained_bound).hex(),
            "architecture": self.architecture,
            "version": self.version,
        }
        return {**data, "checksum": _checksum(data)}

    @classmethod
    def from_data(cls, data: Any) -> Meaning:
        """From what :meth:`to_data` returned.

        Raises:
            SavedModelError: Anything else.
        """
        members(data, {*cls.__dataclass_fields__, "checksum"}, "the meaning of inputs and outputs")
        task = data["task"]
        if task not in (None, CLASSIFICATION, REGRESSION):
            raise SavedModelError("the task is not known")
        classes, features = data["classes"], data["features"]
        if classes is not None:
            labels = typed(classes, list, "classes")
            if len(labels) > _MOST_NAMES or not all(type(c) in (str, int, float, bool) for c in labels):
                raise SavedModelError("the classes must be texts or numbers")
        if features is not None:
            for name in typed(features, list, "features"):
                _text(name, "features")
        target, rows, bound = data["target"], data["rows"], data["trained_bound"]
        if target is not None:
            _text(target, "target")
        if rows is not None and not typed(rows, int, "rows") >= 0:
            raise SavedModelError("the number of rows is negative")
        try:
            number = None if bound is None else float.fromhex(typed(bound, str, "trained_bound"))
        except (ValueError, OverflowError):
            raise SavedModelError("the trained bound is not a hexadecimal number") from None
        found = cls(
            task=task,
            classes=None if classes is None else tuple(classes),
            features=None if features is None else tuple(features),
            target=target,
            rows=rows,
            trained_bound=number,
            architecture=_text(data["architecture"], "architecture"),
            version=_text(data["version"], "version"),
        )
        if data["checksum"] != _checksum({k: v for k, v in data.items() if k != "checksum"}):
            raise SavedModelError("names of classes or columns, or what else is said about the network, was changed")
        return found


def _checksum(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode("ascii")).hexdigest()


def _text(value: Any, name: str) -> str:
    found: str = typed(value, str, name)
    if len(found) > _LONGEST_NAME:
        raise SavedModelError(f"'{name}' is too long")
    return found


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
        >>> deployed = deploy(ldlt.nn.FeedForward(4, [8], 3, bound=2.0))
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
            X: Inputs (n, \*input_shape): an array, a tensor, or a data frame with the columns it was trained on.
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
        names = self.meaning.features
        if names is not None and hasattr(X, "columns") and hasattr(X, "loc"):
            missing = [n for n in names if n not in X.columns]
            if missing:
                raise ShapeError(f"the column '{missing[0]}' is missing, on which the network was trained")
            X = X[list(names)]
        if isinstance(X, Tensor):
            X = X.detach().cpu()
        if np.iscomplexobj(X):
            raise ShapeError("inputs must be real numbers")
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


# -- from whatever there is --------------------------------------------------------------------------------------------


def deploy(
    model: Any,
    certificate: Certificate | None = None,
    *,
    input_shape: int | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Deployed:
    """A network as it is deployed, with a certificate about exactly that network.

    Args:
        model: An :class:`ldlt.Lipschitz` network, a fitted estimator (standardisation becomes a part of the network,
            so that inputs are rows of the table), a plain module, or what was deployed before.
        certificate: Of a plain module, from :func:`ldlt.certify`; without it, it is made here.
        input_shape: Of a plain module without a certificate: the shape of one input.
        dtype: Round the weights to ``torch.float32`` or ``torch.float64``; the bound is then proven for what they
            became.

    Returns:
        The network; its certificate is proven anew, or has the status ``"not certified"`` and a reason.

    Raises:
        CertificateError: The certificate is about another network, or cannot be proven.
        GraphError: The network has an operation that cannot be written down.
    """
    if dtype not in (None, torch.float32, torch.float64):
        raise OptionError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
    if isinstance(model, Deployed):
        _refuse_certificate(certificate, "what was deployed has its own")
        if network_fingerprint(model.network, model.input_shape) != model.certificate.fingerprint:
            raise CertificateError("the network was changed after it was certified: certify it again")
        if model.certificate.is_certified:
            verify(model)  # what a file states is not passed on unseen
        return model if dtype in (None, model.dtype) else as_program(model, dtype)
    estimators = sys.modules.get("ldlt.estimators.base")  # if it was never imported, this is none of them
    if estimators is not None and isinstance(model, estimators.LipschitzEstimator):
        _refuse_certificate(certificate, "an estimator has its own")
        return _deploy_estimator(model, dtype)
    if isinstance(model, Lipschitz):
        _refuse_certificate(certificate, "a network of ldlt.Lipschitz has its own")
        return _deploy_built(model, dtype)
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a module or a fitted estimator, not {type(model).__name__}")
    if certificate is None:
        if input_shape is None:
            raise ShapeError("input_shape is needed: the shape of one input, without the batch dimension")
        certificate = certify(model, input_shape)
    elif input_shape is not None and sample_shape(input_shape) != certificate.input_shape:
        raise ShapeError(f"the certificate is about inputs of shape {certificate.input_shape}, not {input_shape}")
    if not certificate.is_certified:
        proven = certificate
    else:
        if not certificate.multipliers and traced(model, certificate.input_shape).activations:
            raise CertificateError(
                f"the certificate ({certificate.method}) has no multipliers, so that nobody could check it: make one "
                "with ldlt.certify(model, input_shape)"
            )
        proven = verify(certificate, model)
    return _rounded(model, proven, Meaning(architecture=describe(model)), dtype)


def as_program(deployed: Deployed, dtype: torch.dtype | None = None) -> Deployed:
    """The same with a network that is a program, also if it was read from ONNX."""
    return _rounded(deployed.network, deployed.certificate, deployed.meaning, dtype)


def _refuse_certificate(certificate: Certificate | None, why: str) -> None:
    if certificate is not None:
        raise OptionError(f"certificate is for plain modules: {why}")


def _rounded(model: nn.Module, certificate: Certificate, meaning: Meaning, dtype: torch.dtype | None) -> Deployed:
    graph = traced(model, certificate.input_shape)
    program = program_of(model, graph)
    program = program if dtype is None else program.to(dtype)
    if not certificate.is_certified:
        return Deployed(program, nothing_about(program, certificate), meaning)
    names = [a.name for a in graph.activations]
    return Deployed(program, carry_over(program, program.activations, names, certificate), meaning)


def carry_over(other: nn.Module, new: Sequence[str], old: Sequence[str], certificate: Certificate) -> Certificate:
    """The certificate of another form of the same network, proven for that form.

    Args:
        other: The other form.
        new: Names of its activations.
        old: Names of the activations of the network.
        certificate: Of the network.
    """
    shape = certificate.input_shape
    if len(old) == len(new) and set(old) == set(certificate.multipliers):
        renamed = {n: certificate.multipliers[o] for n, o in zip(new, old, strict=True)}
        options: dict[str, Any] = {"method": certificate.method, "region": certificate.region}
        found = issue(other, shape, renamed, certificate.bound, **options)
        if found.is_certified:
            return found
    # Another order of the activations, or other numbers after rounding: look for multipliers from the start.
    return certify(other, shape, region=certificate.region)


def nothing_about(network: nn.Module, certificate: Certificate) -> Certificate:
    """A certificate of nothing, about this form of the network, with the reason of another form."""
    return Certificate(
        bound=math.inf,
        status=certificate.status,
        reason=certificate.reason,
        method=certificate.method,
        multipliers={},
        rigorous=False,
        residual=math.nan,
        input_shape=certificate.input_shape,
        outputs=certificate.outputs,
        fingerprint=network_fingerprint(network, certificate.input_shape),
        region=certificate.region,
    )


def network_fingerprint(network: nn.Module, shape: tuple[int, ...]) -> str:
    """The fingerprint by which a certificate knows its network."""
    return fingerprint(traced(network, shape), network)


def _deploy_built(net: Lipschitz, dtype: torch.dtype | None) -> Deployed:
    frozen = net.freeze()
    program = program_of(frozen, traced(frozen, net.input_shape))
    program = program if dtype is None else program.to(dtype)
    meaning = Meaning(trained_bound=net.declared_bound, architecture=describe(net))
    return Deployed(program, issue_built(net, program), meaning)


def _deploy_estimator(estimator: Any, dtype: torch.dtype | None) -> Deployed:
    if not hasattr(estimator, "model_"):
        raise OptionError(f"this {type(estimator).__name__} is not fitted yet: call fit first")
    classes = getattr(estimator, "classes_", None)
    names = getattr(estimator, "feature_names_in_", None)
    meaning = Meaning(
        task=REGRESSION if classes is None else CLASSIFICATION,
        classes=None if classes is None else tuple(_label(c) for c in classes.tolist()),
        features=None if names is None else tuple(str(n) for n in names),
        rows=estimator.n_samples_fit_,
        trained_bound=float(estimator.network_.declared_bound),
        architecture=describe(estimator.network_),
    )
    return _rounded(estimator.model_, estimator.certificate_, meaning, dtype)


def _label(value: Any) -> Label:
    if isinstance(value, (str, bool, int, float)):
        return value
    raise GraphError(f"a class of type {type(value).__name__} cannot be written to a file; use texts or numbers")


def describe(model: nn.Module) -> str:
    """Class of a network, and how many layers of which kind it has."""
    inner = model.module if isinstance(model, Lipschitz) else model
    counts: dict[str, int] = {}
    for part in inner.modules():
        if not any(True for _ in part.children()) and part is not inner:
            counts[type(part).__name__] = counts.get(type(part).__name__, 0) + 1
    kinds = ", ".join(f"{n} {name}" for name, n in counts.items())
    return f"{type(model).__name__}" + (f" ({kinds})" if kinds else "")
