"""From a trained network to a file that others run, and whose certificate they can check; and back.

A file is one message of ONNX: the network with its weights, and three texts in its properties, the certificate, the
meaning of inputs and outputs, and the model card. It is written first and read back, and what is certified is what was
read: the graph and the weights of the file.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, fx, nn

from ldlt.certificates import Certificate, Region, built_multipliers, certify, issue, verify
from ldlt.certificates.fingerprint import fingerprint, traced
from ldlt.engine.network import Lipschitz, sample_shape
from ldlt.errors import CertificateError, GraphError, LdltError, OnnxError, OptionError, SavedModelError, ShapeError
from ldlt.evaluation import evaluating, reference
from ldlt.files.card import card_of
from ldlt.files.deployed import CLASSIFICATION, REGRESSION, Deployed, Label, Meaning
from ldlt.files.message import OnnxLimits, parse
from ldlt.files.network import activations_of
from ldlt.files.read import network_of
from ldlt.files.replace import readable, show, why, writable, write_whole
from ldlt.files.write import message_of
from ldlt.graph import Graph

__all__ = ["CARD", "CERTIFICATE", "MEANING", "SUFFIX", "deploy", "load", "model_card", "save"]

SUFFIX = ".onnx"

CERTIFICATE, MEANING, CARD = "ldlt.certificate", "ldlt.meaning", "ldlt.card"
"""Names of the properties of a file."""

_ANOTHER = "the certificate is about another network: a weight or the architecture was changed"


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The meaning of inputs and outputs with its SHA-256, which finds accidents, not forgers."""

    sha256: str
    meaning: msgspec.Raw


class _Stated(NamedTuple):
    """What is stated about a network: multipliers in the order of its activations, and their bound."""

    multipliers: Sequence[Tensor]
    bound: float
    method: str = "by construction"
    region: Region | None = None
    strict: bool = False  # whether this bound must be proven, and not another one


class _Claim(NamedTuple):
    """A network of plain weights as it was given, and what is stated, once it is known that it can be written."""

    network: nn.Module
    shape: tuple[int, ...]
    meaning: Meaning
    stated: Callable[[Graph], _Stated | Certificate | None]


def deploy(
    model: Any,
    certificate: Certificate | None = None,
    *,
    input_shape: int | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    before: tuple[Any, Any] | None = None,
) -> Deployed:
    """A network as it is deployed: as it is read from a file, with a certificate about exactly that network.

    Args:
        model: An :class:`ldlt.Lipschitz` network, a fitted estimator (standardisation becomes a part of the network,
            so that inputs are rows of the table), a plain module, or what was deployed before.
        certificate: Of a plain module, from :func:`ldlt.certify`; without it, it is made here.
        input_shape: Of a plain module without a certificate: the shape of one input.
        dtype: Round the weights to ``torch.float32`` or ``torch.float64``; the bound is then proven for what they
            became.
        before: ``(A, b)`` for the network ``x ↦ model(A x + b)``, which is then what is certified. A is a number, one
            number for each input (as they are broadcast to one), or a matrix (d, d') for a model of d inputs.

    Returns:
        The network; its certificate is proven, or has the status ``"not certified"`` and a reason.

    Raises:
        CertificateError: The certificate is about another network, or cannot be proven.
        GraphError: The network has an operation that cannot be written to a file.
        MissingExtraError: The package ``onnx`` is not installed.

    Example:
        >>> import ldlt
        >>> net = ldlt.nn.FeedForward(2, [8], 3, bound=1.0)
        >>> ldlt.deploy(net, before=([0.5, 0.1], [-3.0, 0.0])).certificate.bound < 0.51  # in units of x
        True
    """
    if isinstance(model, Deployed) and certificate is before is None and dtype in (None, model.dtype):
        if model.certificate.is_certified:
            verify(model.certificate, model.network)  # what a file states is not passed on unseen
        else:
            _same(model)
        return model
    return _made(_claim(model, certificate, input_shape), dtype, before)[0]


def save(
    model: Any,
    path: str | os.PathLike[str],
    certificate: Certificate | None = None,
    *,
    input_shape: int | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    before: tuple[Any, Any] | None = None,
    card: str | None = None,
) -> Path:
    """Save a network with its certificate in one ONNX file, for any runtime.

    The batch size is free and weights are inside of the file. Standardisation of an estimator is a part of the network.
    Whether the network can be written is found out first; then the certificate is proven for what was written, and
    ``ldlt.verify(path)`` proves it again.

    Args:
        model: What :func:`ldlt.deploy` accepts: a Lipschitz network, a fitted estimator, a plain module, what was
            deployed.
        path: File to write, ``….onnx``; written whole or not at all.
        certificate: Of a plain module.
        input_shape: Of a plain module without a certificate.
        dtype: Precision of the file; that of the model by default.
        before: ``(A, b)`` to save ``x ↦ model(A x + b)``; see :func:`ldlt.deploy`.
        card: Model card to put into the file, such as one with results; by default :func:`ldlt.model_card` without.

    Returns:
        The path.

    Raises:
        GraphError: An operation or activation cannot be written.
        CertificateError: The certificate does not belong to the model, or cannot be proven.
        OptionError: The file cannot be written.
        MissingExtraError: The package ``onnx`` is not installed.

    Example:
        >>> import tempfile, ldlt
        >>> path = save(ldlt.nn.FeedForward(4, [8], 3), Path(tempfile.mkdtemp()) / "net.onnx")
        >>> ldlt.verify(path).bound == load(path).certificate.bound
        True
    """
    place = writable(path, SUFFIX)
    deployed, message = _made(_claim(model, certificate, input_shape), dtype, before)
    meaning = msgspec.json.encode(deployed.meaning)
    sealed = _Sealed(hashlib.sha256(meaning).hexdigest(), msgspec.Raw(meaning))
    texts = {
        CERTIFICATE: deployed.certificate.to_json(),
        MEANING: msgspec.json.encode(sealed).decode(),
        CARD: card_of(deployed) if card is None else card,
    }
    for name, text in texts.items():
        message.metadata_props.add(key=name, value=text)
    try:
        write_whole(place, message.SerializeToString())
    except OSError as error:
        raise OptionError(f"cannot write {show(str(place))}: {why(error)}") from error
    return place


def load(path: str | os.PathLike[str], *, limits: OnnxLimits | None = None) -> Deployed:
    """Read a network that :func:`ldlt.save` wrote.

    That its weights are those the certificate is about is checked here, by its fingerprint; that the certificate is
    true is proven by ``ldlt.verify(deployed)``.

    Args:
        path: ``….onnx``.
        limits: Sizes to refuse beyond.

    Raises:
        SavedModelError: The file is no saved model, or what it says about its inputs and outputs was changed.
        CertificateError: The certificate is missing, damaged or about other weights.
        OnnxError: The file is damaged, too large, or a network that cannot be read.
        OptionError: There is no such file.
    """
    place = readable(path)
    if place.suffix.lower() == ".safetensors":
        raise SavedModelError(
            f"{show(str(place))} is in a format that is no longer read: save the model again, with ldlt.save(model, "
            f"'{place.stem[:40]}{SUFFIX}')"
        )
    if place.suffix.lower() != SUFFIX:
        raise OptionError(
            f"{show(str(place))} is not an {SUFFIX} file: only files that are data are read. Others, such as the "
            "pickles of torch.save, can execute code when they are read"
        )
    limits = OnnxLimits() if limits is None else limits
    message = parse(place, limits)
    texts: dict[str, str] = {}
    for entry in message.metadata_props:
        if entry.key in texts:
            raise OnnxError(f"two properties are called {show(entry.key)}")
        texts[entry.key] = entry.value
    if CERTIFICATE not in texts:
        raise CertificateError(
            f"{show(place.name)} carries no certificate: make one with ldlt.certify, and ldlt.save the network with it"
        )
    certificate = Certificate.from_json(texts[CERTIFICATE])
    meaning = _meaning(texts[MEANING]) if MEANING in texts else Meaning()
    deployed = Deployed(network_of(message, limits, input_shape=certificate.input_shape).module, certificate, meaning)
    _same(deployed)
    return deployed


def model_card(
    model: Any, X: Any = None, y: Any = None, *, radii: Sequence[float] | None = None, name: str = "Model card"
) -> str:
    """A model card: architecture, bound and its proof, units, results on given rows, limits.

    Args:
        model: What :func:`ldlt.deploy` accepts without more arguments, or what it returns.
        X: Rows that were not trained on.
        y: Their true classes, or targets.
        radii: Radii of certified accuracy, in the units of the inputs; by default quartiles of the radii found. Of a
            regressor: distances for which intervals are told.
        name: Heading.

    Returns:
        Markdown. Results are told only if rows are given, and nothing that is not known.

    Example:
        >>> import ldlt
        >>> print(model_card(ldlt.nn.FeedForward(4, [8], 3)).splitlines()[0])
        # Model card
    """
    return card_of(deploy(model), X, y, radii, name)


def _meaning(text: str) -> Meaning:
    try:
        sealed = msgspec.json.decode(text.encode("utf-8", "replace"), type=_Sealed)
        if hashlib.sha256(bytes(sealed.meaning)).hexdigest() != sealed.sha256:
            raise SavedModelError("names of classes or columns, or what else is said about the network, was changed")
        unknown = {*msgspec.json.decode(sealed.meaning, type=dict[str, Any])} - {*Meaning.__dataclass_fields__}
        if unknown:
            raise SavedModelError(f"{show(min(unknown))} in the file is not known")
        return msgspec.json.decode(sealed.meaning, type=Meaning)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        if isinstance(error, LdltError):
            raise
        raise SavedModelError(f"'{MEANING}' in the file is not what is written there: {error}") from error


def _same(deployed: Deployed) -> None:
    """Compare fingerprints: a certificate about other weights must not be passed on."""
    try:
        found = fingerprint(traced(deployed.network, deployed.input_shape), deployed.network)
    except Exception as error:  # a file must not be able to raise anything else
        raise CertificateError(f"the certificate does not fit the network: {error}") from error
    if found != deployed.certificate.fingerprint:
        raise CertificateError(_ANOTHER)


# -- what is to be written, and proven ---------------------------------------------------------------------------------


def _claim(model: Any, certificate: Certificate | None, input_shape: Any) -> _Claim:
    """What a model says about itself."""
    estimators = sys.modules.get("ldlt.estimators.base")  # if it was never imported, this is none of them
    fitted = estimators is not None and isinstance(model, estimators.LipschitzEstimator)
    if certificate is not None and (fitted or isinstance(model, (Deployed, Lipschitz))):
        raise OptionError("certificate is for plain modules: an estimator, a network of ldlt or of a file has its own")
    if fitted:
        return _fitted(model)
    pipelines = sys.modules.get("sklearn.pipeline")
    if pipelines is not None and isinstance(model, pipelines.Pipeline):
        return _piped(model)
    if isinstance(model, Deployed):
        stated = _stated(model.network, lambda: model.certificate, strict=True)
        return _Claim(model.network, model.input_shape, model.meaning, stated)
    if isinstance(model, Lipschitz):
        meaning = Meaning(trained_bound=model.declared_bound, architecture=_describe(model))
        built = lambda graph: _Stated(built_multipliers(model), model.bound)  # noqa: E731
        return _Claim(model.frozen_map(), model.input_shape, meaning, built)
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a module or a fitted estimator, not {type(model).__name__}")
    meaning = Meaning(architecture=_describe(model))
    if certificate is None:
        if input_shape is None:
            raise ShapeError("input_shape is needed: the shape of one input, without the batch dimension")
        return _Claim(model, sample_shape(input_shape), meaning, lambda graph: None)
    if input_shape is not None and sample_shape(input_shape) != certificate.input_shape:
        raise ShapeError(f"the certificate is about inputs of shape {certificate.input_shape}, not {input_shape}")
    return _Claim(model, certificate.input_shape, meaning, _stated(model, lambda: certificate, strict=True))


def _stated(network: nn.Module, get: Callable[[], Certificate], strict: bool) -> Callable[[Graph], Any]:
    def find(graph: Graph) -> _Stated | Certificate:
        certificate = get()
        if fingerprint(graph, network) != certificate.fingerprint:
            raise CertificateError(_ANOTHER)
        if not certificate.is_certified:
            return certificate
        if not certificate.multipliers and graph.activations:
            raise CertificateError(
                f"the certificate ({certificate.method}) has no multipliers, so that nobody could check it: make one "
                "with ldlt.certify(model, input_shape)"
            )
        given = [certificate.multipliers[a.name] for a in graph.activations if a.name in certificate.multipliers]
        return _Stated(given, certificate.bound, certificate.method, certificate.region, strict)

    return find


def _fitted(estimator: Any) -> _Claim:
    if not hasattr(estimator, "model_"):
        raise OptionError(f"this {type(estimator).__name__} is not fitted yet: call fit first")
    named = hasattr(estimator, "feature_names_in_") or sum(len(c.inputs) for c in estimator.columns_) > len(
        estimator.columns_
    )
    return _tabular(estimator, estimator.model_, estimator.columns_, named, lambda: estimator.certificate_)


def _piped(pipeline: Any) -> _Claim:
    from ldlt.estimators.pipeline import fold  # noqa: PLC0415

    folded = fold(pipeline)
    return _tabular(folded.estimator, folded.model, folded.columns, True, folded.certificate)


def _tabular(estimator: Any, model: nn.Module, columns: Any, named: bool, prove: Callable[[], Certificate]) -> _Claim:
    """A model of a table, whose columns go by name if they have names that mean something."""
    classes = getattr(estimator, "classes_", None)
    names = tuple(name for c in columns for name in c.inputs)
    meaning = Meaning(
        task=REGRESSION if classes is None else CLASSIFICATION,
        classes=None if classes is None else tuple(_label(c) for c in classes.tolist()),
        features=names if named else None,
        columns=columns if named else None,
        rows=estimator.n_samples_fit_,
        trained_bound=float(estimator.network_.declared_bound),
        architecture=_describe(estimator.network_),
    )
    return _Claim(model, (len(names),), meaning, _stated(model, prove, strict=False))


def _label(value: Any) -> Label:
    if isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise GraphError(f"the class {value!r} cannot be written to a file; use texts or finite numbers")


def _describe(model: nn.Module) -> str:
    """Class of a network, and how many layers of which kind it has."""
    inner = model.module if isinstance(model, Lipschitz) else model
    counts: dict[str, int] = {}
    for part in inner.modules():
        if not any(True for _ in part.children()) and part is not inner:
            counts[type(part).__name__] = counts.get(type(part).__name__, 0) + 1
    kinds = ", ".join(f"{n} {name}" for name, n in counts.items())
    return (f"{type(model).__name__}" + (f" ({kinds})" if kinds else ""))[:1000]


class _Affine(nn.Module):
    """``A x + b``, with one number for each entry, or a matrix."""

    def __init__(self, given: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        try:
            factor, shift = (torch.as_tensor(t, dtype=dtype).detach().clone() for t in given)
            self.factor, self.shift = nn.Buffer(factor), nn.Buffer(shift)
            self.matrix = self.factor.ndim == 2 and len(shape) == 1
            self.shape = (self.factor.shape[-1],) if self.matrix else shape
            fits = self(torch.zeros(1, *self.shape, dtype=dtype)).shape[1:] == shape
        except Exception as error:
            raise OptionError(f"before must be two arrays of numbers (A, b): {error}") from error
        if not fits or not all(bool(t.isfinite().all()) for t in (self.factor, self.shift)):
            raise OptionError(f"before must be finite numbers for inputs of shape {shape} of the model")

    def forward(self, x: Tensor) -> Tensor:
        found = torch.nn.functional.linear(x, self.factor) if self.matrix else x * self.factor
        return found + self.shift

    @property
    def norm(self) -> float:
        found = torch.linalg.matrix_norm(self.factor.double(), 2) if self.matrix else self.factor.double().abs().max()
        return float(found)


def _made(claim: _Claim, dtype: torch.dtype | None, before: tuple[Any, Any] | None) -> tuple[Deployed, Any]:
    """The network as it is read from the message that it is written to, certified, and that message."""
    model, shape, meaning, front = claim.network, claim.shape, claim.meaning, None
    kind = reference(model).dtype
    if dtype not in (None, torch.float32, torch.float64):
        raise OptionError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
    if dtype is None and kind not in (torch.float32, torch.float64):
        raise GraphError(f"a network in {kind} cannot be written to a file: pass dtype=torch.float32")
    graph = traced(model, shape)
    stated = functools.partial(claim.stated, graph)
    if before is not None:
        front = _Affine(before, shape, kind)
        model, shape = nn.Sequential(front, model), front.shape
        graph = traced(model, shape)
        if meaning.features is not None and shape != claim.shape:
            meaning = dataclasses.replace(meaning, features=None)
    rounded, dtype = dtype not in (None, kind), dtype or kind
    with evaluating(model):
        plain = copy.deepcopy(model).to(dtype) if rounded else model
        message = message_of(plain, graph, dtype)
        network = _read_back(message, plain, shape, dtype)
    found = stated()
    region = found.region if isinstance(found, _Stated) else None
    if front is not None and region is not None:
        raise OptionError("the certificate is about a region of the model's inputs, which before would move")
    if isinstance(found, Certificate):
        return Deployed(network, _nothing_about(network, found, shape), meaning), message
    proven, names = None, activations_of(network)
    if found is not None and len(found.multipliers) == len(names):  # else they are for another form of the network
        bound = found.bound * (1.0 if front is None else front.norm)
        given = dict(zip(names, found.multipliers, strict=True))
        proven = issue(network, shape, given, bound, method=found.method, region=region)
        if not proven.is_certified and found.strict and not rounded and front is None:
            raise CertificateError(f"the bound {bound:.9g} is stated but cannot be proven: {proven.reason}")
    built = isinstance(found, _Stated) and found.method == "by construction" and front is None
    if proven is None or not (proven.is_certified or built):
        proven = certify(network, shape, region=region)
    return Deployed(network, proven, meaning), message


def _read_back(message: Any, plain: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> fx.GraphModule:
    """The network of a message, compared with what was written."""
    limits = OnnxLimits()
    try:
        network = network_of(parse(message.SerializeToString(), limits), limits).module
    except LdltError as error:
        raise GraphError(f"the network cannot be saved, since it could not be read again: {error}") from error
    except Exception as error:  # of protobuf, which ends at two gigabytes
        raise GraphError(f"the network is too large for a file of ONNX: {error}") from error
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():  # both in float64, where nothing but the numbers of the file can tell them apart
        found, wanted = (copy.deepcopy(m).double()(x.clone()).flatten(1) for m in (network, plain))
    tolerance = 1e-7 if dtype == torch.float64 else 1e-3
    if not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance * float(1 + wanted.abs().max())):
        raise GraphError("the file does not compute what the network computes; please report this")
    return network


def _nothing_about(network: fx.GraphModule, stated: Certificate, shape: tuple[int, ...]) -> Certificate:
    """A certificate of nothing, about this form of the network, with the reason of another form."""
    return dataclasses.replace(
        stated, bound=math.inf, multipliers={}, rigorous=False, residual=math.nan, gram=None, input_shape=shape,
        fingerprint=fingerprint(traced(network, shape), network),
    )  # fmt: skip
