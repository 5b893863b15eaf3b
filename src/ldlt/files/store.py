"""From a trained network to a file that others run, and whose certificate they can check; and back.

A file is one message of ONNX: the network with its weights, and three texts in its properties, the certificate, the
meaning of inputs and outputs, and the model card. It is written first and read back, and what is certified is what was
read: the graph and the weights of the file.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ldlt.certificates import Certificate, Region, certify, issue, verify
from ldlt.certificates.fingerprint import fingerprint, traced
from ldlt.engine.network import Lipschitz, sample_shape
from ldlt.errors import CertificateError, GraphError, LdltError, OptionError, SavedModelError, ShapeError
from ldlt.evaluation import evaluating, reference
from ldlt.files.card import card_of
from ldlt.files.deployed import CLASSIFICATION, REGRESSION, Deployed, Label, Meaning
from ldlt.files.message import OnnxLimits, parse, properties
from ldlt.files.network import Network
from ldlt.files.read import network_of
from ldlt.files.replace import readable, show, why, writable, write_whole
from ldlt.files.write import message_of

__all__ = ["CARD", "CERTIFICATE", "MEANING", "SUFFIX", "deploy", "load", "model_card", "save"]

SUFFIX = ".onnx"

CERTIFICATE, MEANING, CARD = "ldlt.certificate", "ldlt.meaning", "ldlt.card"
"""Names of the properties of a file."""


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The meaning of inputs and outputs with its SHA-256, which finds accidents, not forgers."""

    sha256: str
    meaning: msgspec.Raw


@dataclass
class _Claim:
    """What is to be proven for the network of a file.

    Attributes:
        network: Of plain weights, as it was given.
        shape: Of one input.
        meaning: Of inputs and outputs.
        certificate: Gives what is stated, once it is known that the network can be written; None to find out.
        multipliers: Gives those in the order of the activations, with their bound; instead of a certificate.
        strict: Whether what is stated must be proven as it is.
    """

    network: nn.Module
    shape: tuple[int, ...]
    meaning: Meaning
    certificate: Callable[[], Certificate] | None = None
    multipliers: Callable[[], tuple[list[Tensor], float]] | None = None
    strict: bool = False


def deploy(
    model: Any,
    certificate: Certificate | None = None,
    *,
    input_shape: int | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Deployed:
    """A network as it is deployed: as it is read from a file, with a certificate about exactly that network.

    Args:
        model: An :class:`ldlt.Lipschitz` network, a fitted estimator (standardisation becomes a part of the network,
            so that inputs are rows of the table), a plain module, or what was deployed before.
        certificate: Of a plain module, from :func:`ldlt.certify`; without it, it is made here.
        input_shape: Of a plain module without a certificate: the shape of one input.
        dtype: Round the weights to ``torch.float32`` or ``torch.float64``; the bound is then proven for what they
            became.

    Returns:
        The network; its certificate is proven, or has the status ``"not certified"`` and a reason.

    Raises:
        CertificateError: The certificate is about another network, or cannot be proven.
        GraphError: The network has an operation that cannot be written to a file.
        MissingExtraError: The package ``onnx`` is not installed.
    """
    _check_type(dtype)
    if isinstance(model, Deployed) and certificate is None and dtype in (None, model.dtype):
        if model.certificate.is_certified:
            verify(model.certificate, model.network)  # what a file states is not passed on unseen
        else:
            _same(model)
        return model
    return _made(_claim(model, certificate, input_shape), dtype)[0]


def save(
    model: Any,
    path: str | os.PathLike[str],
    certificate: Certificate | None = None,
    *,
    input_shape: int | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
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
    _check_type(dtype)
    deployed, message = _made(_claim(model, certificate, input_shape), dtype)
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
    texts = properties(message)
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
        raise CertificateError("the certificate is about another network: a weight or the architecture was changed")


# -- what is to be written, and proven ---------------------------------------------------------------------------------


def _check_type(dtype: torch.dtype | None) -> None:
    if dtype not in (None, torch.float32, torch.float64):
        raise OptionError(f"dtype must be torch.float32 or torch.float64, not {dtype}")


def _claim(model: Any, certificate: Certificate | None, input_shape: Any) -> _Claim:
    """What a model says about itself."""
    estimators = sys.modules.get("ldlt.estimators.base")  # if it was never imported, this is none of them
    fitted = estimators is not None and isinstance(model, estimators.LipschitzEstimator)
    if certificate is not None and (fitted or isinstance(model, (Deployed, Lipschitz))):
        raise OptionError("certificate is for plain modules: an estimator, a network of ldlt or of a file has its own")
    if fitted:
        return _fitted(model)
    if isinstance(model, Deployed):
        return _Claim(model.network, model.input_shape, model.meaning, lambda: model.certificate, strict=True)
    if isinstance(model, Lipschitz):
        meaning = Meaning(trained_bound=model.declared_bound, architecture=_describe(model))
        return _Claim(model.frozen_map(), model.input_shape, meaning, multipliers=lambda: _built(model))
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a module or a fitted estimator, not {type(model).__name__}")
    meaning = Meaning(architecture=_describe(model))
    if certificate is None:
        if input_shape is None:
            raise ShapeError("input_shape is needed: the shape of one input, without the batch dimension")
        return _Claim(model, sample_shape(input_shape), meaning)
    if input_shape is not None and sample_shape(input_shape) != certificate.input_shape:
        raise ShapeError(f"the certificate is about inputs of shape {certificate.input_shape}, not {input_shape}")
    return _Claim(model, certificate.input_shape, meaning, lambda: certificate, strict=True)


def _built(net: Lipschitz) -> tuple[list[Tensor], float]:
    """The multipliers by which a network was built.

    Where single outputs have the declared bound, the inequality is scaled to that of the whole map.
    """
    scale = (net.bound / net.declared_bound) ** 2
    return [scale * m.double() for m in net.multipliers().values()], net.bound


def _fitted(estimator: Any) -> _Claim:
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
        architecture=_describe(estimator.network_),
    )
    return _Claim(estimator.model_, (estimator.n_features_in_,), meaning, lambda: estimator.certificate_)


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


def _made(claim: _Claim, dtype: torch.dtype | None) -> tuple[Deployed, Any]:
    """The network as it is read from the message that it is written to, certified, and that message."""
    model = claim.network
    kind = reference(model).dtype
    if dtype is None and kind not in (torch.float32, torch.float64):
        raise GraphError(f"a network in {kind} cannot be written to a file: pass dtype=torch.float32")
    rounded, dtype = dtype not in (None, kind), kind if dtype is None else dtype
    graph = traced(model, claim.shape)
    with evaluating(model):
        plain = copy.deepcopy(model).to(dtype) if rounded else model
        message = message_of(plain, graph, dtype)
        network = _read_back(message, plain, claim.shape, dtype)
    stated = None if claim.certificate is None else claim.certificate()
    if stated is not None and fingerprint(graph, model) != stated.fingerprint:
        raise CertificateError("the certificate is about another network: a weight or the architecture was changed")
    if stated is not None and stated.is_certified and not stated.multipliers and graph.activations:
        raise CertificateError(
            f"the certificate ({stated.method}) has no multipliers, so that nobody could check it: make one with "
            "ldlt.certify(model, input_shape)"
        )
    if stated is not None and not stated.is_certified:
        return Deployed(network, _nothing_about(network, stated), claim.meaning), message
    multipliers, bound, method, region = None, math.nan, "by construction", None
    if claim.multipliers is not None:
        multipliers, bound = claim.multipliers()
    elif stated is not None:
        multipliers = [stated.multipliers[a.name] for a in graph.activations if a.name in stated.multipliers]
        bound, method, region = stated.bound, stated.method, stated.region
    found = _proven(network, claim.shape, multipliers, bound, method, region)
    if found is None or not (found.is_certified or claim.multipliers is not None):
        if found is not None and claim.strict and not rounded:
            raise CertificateError(f"the bound {bound:.9g} is stated but cannot be proven: {found.reason}")
        found = certify(network, claim.shape, region=region)
    return Deployed(network, found, claim.meaning), message


def _read_back(message: Any, plain: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Network:
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


def _proven(
    network: Network,
    shape: tuple[int, ...],
    multipliers: Sequence[Tensor] | None,
    bound: float,
    method: str,
    region: Region | None,
) -> Certificate | None:
    """A certificate from the multipliers of another form of the network; None if they are not for this one."""
    names = network.activations
    if multipliers is None or len(multipliers) != len(names):
        return None
    given: Mapping[str, Tensor] = dict(zip(names, multipliers, strict=True))
    return issue(network, shape, given, bound, method=method, region=region)


def _nothing_about(network: Network, stated: Certificate) -> Certificate:
    """A certificate of nothing, about this form of the network, with the reason of another form."""
    found = fingerprint(traced(network, stated.input_shape), network)
    return dataclasses.replace(
        stated, bound=math.inf, multipliers={}, rigorous=False, residual=math.nan, fingerprint=found, gram=None
    )
