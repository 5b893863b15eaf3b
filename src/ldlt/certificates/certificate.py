r"""Certificates that can be stored, and checked by someone who does not trust whoever made them.

A :class:`Certificate` states a Lipschitz bound of one network, identified by its fingerprint, together with the
multipliers that prove it. :func:`verify` takes nothing on trust: it traces the model, compares the fingerprint, and
proves the bound (and the constants of output directions) again from the model's own weights with
:func:`ldlt.certificates.proof.prove`. What is stated is either proven again or replaced by what was computed; method,
date and versions are information only.

**Constants of pairs.** With the matrix ``G`` of :mod:`ldlt.certificates.form`, proven together with the multipliers,
*every* difference of two outputs has the constant

.. math:: ℓ_{cj} = ℓ\sqrt{(e_c - e_j)'G(e_c - e_j)} = ℓ\sqrt{G_{cc} + G_{jj} - 2G_{cj}} ,

at most ``√2ℓ``, which holds for any pair of a network with the constant ℓ.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ldlt import lmi
from ldlt._version import __version__
from ldlt.certificates import storage
from ldlt.certificates.fingerprint import fingerprint, traced
from ldlt.certificates.local import ranges
from ldlt.certificates.proof import prove, prove_gram, prove_smallest
from ldlt.certificates.region import Region
from ldlt.engine.network import Lipschitz
from ldlt.errors import CertificateError, LdltError
from ldlt.files.read import read_onnx
from ldlt.graph import Graph

__all__ = [
    "CERTIFIED",
    "NOT_CERTIFIED",
    "Certificate",
    "freeze_certified",
    "issue",
    "issue_built",
    "issue_for",
    "verify",
]

CERTIFIED, NOT_CERTIFIED = "certified", "not certified"

_MOST_OUTPUTS = 512  # for which constants of all pairs are stored
_DENSE = 2000  # largest matrix whose eigenvalues are computed
_LARGEST_SQUARE = 1e150  # bound whose square is a number


def _versions() -> dict[str, str]:
    return {
        "ldlt": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


@dataclass(frozen=True, eq=False)
class Certificate:
    """A Lipschitz bound and what it rests on.

    Attributes:
        bound: ℓ in the Euclidean norm; infinite if nothing is certified.
        status: ``"certified"`` or ``"not certified"``.
        reason: Why it is not certified; empty if it is.
        method: How the multipliers were found.
        multipliers: ``Λ`` by activation node, (features,), float64.
        rigorous: Whether rounding errors are accounted for.
        residual: Smallest eigenvalue of the inequality relative to its scale, in floating point (see
            :mod:`ldlt.lmi`); NaN if it is too large for that.
        input_shape: Shape of one input.
        outputs: Number of outputs k.
        fingerprint: Of the network (see :mod:`ldlt.certificates.fingerprint`).
        region: None if the bound holds for all inputs.
        gram: ``G`` (k, k), or None if there are only constants of the whole map.
        versions: Programs that made it.
        created: Time in UTC, ISO 8601.
    """

    bound: float
    status: str
    reason: str
    method: str
    multipliers: dict[str, Tensor]
    rigorous: bool
    residual: float
    input_shape: tuple[int, ...]
    outputs: int
    fingerprint: str
    region: Region | None = None
    gram: Tensor | None = None
    versions: dict[str, str] = field(default_factory=_versions)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def is_certified(self) -> bool:
        """Whether the bound is certified."""
        return self.status == CERTIFIED

    def pair_bounds(self) -> Tensor:
        """Constant of ``y_c − y_j`` for every pair of outputs, (k, k), float64, rounded upwards; infinite if unknown.

        For :func:`ldlt.certified_radius`.
        """
        k = self.outputs
        if not self.is_certified:
            found = np.full((k, k), np.inf)
        else:
            found = np.full((k, k), _up(_up(math.sqrt(2.0)) * self.bound))
            if self.gram is not None:
                gram = self.gram.double().numpy()
                diagonal = gram.diagonal()
                square = np.maximum(_up(_up(diagonal[:, None] + diagonal) - 2 * gram), 0.0)
                found = np.minimum(found, _up(_up(np.sqrt(square)) * self.bound))
        np.fill_diagonal(found, 0.0)
        return torch.from_numpy(found)

    def output_bounds(self) -> Tensor:
        """Constant of every single output, (k,), float64, rounded upwards; infinite if unknown."""
        if not self.is_certified:
            return torch.full((self.outputs,), torch.inf, dtype=torch.float64)
        found = np.full(self.outputs, self.bound)
        if self.gram is not None:
            diagonal = self.gram.double().numpy().diagonal()
            found = np.minimum(found, _up(_up(np.sqrt(np.maximum(diagonal, 0.0))) * self.bound))
        return torch.from_numpy(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, in one step."""
        storage.write(path, _encode(_checked(self)))

    def to_json(self) -> str:
        """What :meth:`save` writes, as a text: to be carried inside another file."""
        return storage.dump(_encode(_checked(self))).decode("ascii")

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Read what :meth:`to_json` returned, with the checks of :meth:`load`.

        Raises:
            CertificateError: The text is no certificate, is truncated or was changed.
        """
        return _decode(storage.parse(text.encode("utf-8", "replace")))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a file that :meth:`save` wrote. This checks its form, not its truth: see :func:`verify`.

        Raises:
            CertificateError: The file is no certificate, is truncated or was changed.
        """
        return _decode(storage.read(path))


def issue(
    model: nn.Module,
    input_shape: Sequence[int],
    multipliers: Mapping[str, Tensor],
    bound: float,
    *,
    method: str = "given multipliers",
    region: Region | None = None,
    largest: float = 1 + 1e-3,
    least: float = 1.0,
    pairs: bool = True,
) -> Certificate:
    """A certificate of a stored network, from multipliers that somebody found.

    Args:
        model: The network, with plain weights.
        input_shape: Shape of one input.
        multipliers: ``Λ`` by activation node of the traced network.
        bound: ℓ.
        method: How the multipliers were found.
        region: Bound slopes between points of this region only. The enclosures of the slopes there account for
            rounding by margins, so the certificate is not rigorous; what follows from them is proven all the same.
        largest: Largest factor by which ℓ may be raised so that the proof passes in spite of rounding.
        least: Smallest factor on ℓ.
        pairs: Whether to prove constants of output directions, too.

    Returns:
        A certificate that is rigorous unless it is about a region, or one with the status ``"not certified"`` and a
        reason.
    """
    _require_plain(model)
    graph = traced(model, [int(n) for n in input_shape])
    return issue_for(
        graph, model, multipliers, bound, method=method, region=region, largest=largest, least=least, pairs=pairs
    )


def issue_for(
    graph: Graph,
    model: nn.Module,
    multipliers: Mapping[str, Tensor],
    bound: float,
    *,
    method: str,
    region: Region | None = None,
    largest: float = 1 + 1e-3,
    least: float = 1.0,
    pairs: bool = True,
) -> Certificate:
    """As :func:`issue`, for a network that has just been traced."""
    slopes = None if region is None else ranges(graph, model, region).slopes
    proof = prove_smallest(graph, model, multipliers, bound, largest, least=least, slopes=slopes)
    outputs = graph[graph.output].features
    gram = None
    if proof.holds and pairs and 1 < outputs <= _MOST_OUTPUTS:
        gram = prove_gram(graph, model, proof.multipliers, proof.bound, slopes=slopes).gram
    return Certificate(
        bound=proof.bound if proof.holds else math.inf,
        status=CERTIFIED if proof.holds else NOT_CERTIFIED,
        reason=proof.reason,
        method=method,
        multipliers=proof.multipliers,
        rigorous=proof.holds and region is None,
        residual=_residual(graph, model, proof.multipliers, proof.bound, slopes),
        input_shape=graph.input.shape,
        outputs=outputs,
        fingerprint=fingerprint(graph, model),
        region=region,
        gram=gram,
    )


def freeze_certified(net: Lipschitz) -> tuple[nn.Module, Certificate]:
    """The stored form of a network built here, and its certificate with the network's own multipliers.

    >>> import ldlt
    >>> stored, certificate = freeze_certified(ldlt.nn.FeedForward(4, [8, 8], 3, bound=1.0))
    >>> certificate.status, certificate.rigorous, certificate.bound < 1 + 1e-5
    ('certified', True, True)
    """
    stored = net.freeze()
    return stored, issue_built(net, stored)


def issue_built(net: Lipschitz, stored: nn.Module) -> Certificate:
    """The certificate of a stored form of a network built here, with the network's own multipliers."""
    graph = traced(stored, net.input_shape)
    names = [a.name for a in graph.activations]
    # Wrapping the module for a gain renames its nodes; their order stays.
    # Where single outputs have the declared bound, the inequality is scaled to that of the whole map.
    scale = (net.bound / net.declared_bound) ** 2
    multipliers = {n: scale * m.double() for n, m in zip(names, net.multipliers().values(), strict=True)}
    return issue_for(graph, stored, multipliers, net.bound, method="by construction")


def verify(
    source: str | os.PathLike[str] | Certificate | nn.Module, model: nn.Module | str | os.PathLike[str] | None = None
) -> Certificate:
    """Check a certificate against a model, from the model's own weights.

    Args:
        source: A file, or a certificate. Without ``model``: a network that carries its certificate, which is what
            :func:`ldlt.load` returns, or its file (``.onnx``).
        model: The stored network that it is said to be about, or its ONNX file.

    Returns:
        A certificate with everything in it proven or computed anew. One about a region is not rigorous, because the
        slopes that occur there are enclosed with margins for rounding.

    Raises:
        CertificateError: The file is no certificate, is about another network, or states what cannot be proven.
    """
    if model is None:
        source, model = _carried(source)
    if isinstance(source, nn.Module):
        raise CertificateError("the certificate comes first, then the model: ldlt.verify(certificate, model)")
    if isinstance(model, (str, os.PathLike)):
        if not str(model).lower().endswith(".onnx"):
            raise CertificateError(f"the model must be a torch.nn.Module or an ONNX file, not '{model}'")
        model = read_onnx(model).module
    stated = _checked(source) if isinstance(source, Certificate) else Certificate.load(source)
    if not stated.is_certified:
        raise CertificateError(f"the certificate does not certify anything: {stated.reason or 'no reason is given'}")
    try:
        _require_plain(model)
        graph = traced(model, stated.input_shape)
        found = fingerprint(graph, model)
    except LdltError as error:
        if isinstance(error, CertificateError):
            raise
        raise CertificateError(f"the certificate does not fit the model: {error}") from error
    if found != stated.fingerprint:
        raise CertificateError("the certificate is about another network: a weight or the architecture was changed")
    outputs = graph[graph.output].features
    if outputs != stated.outputs:
        raise CertificateError(f"the certificate is about {stated.outputs} outputs, the model has {outputs}")
    try:
        slopes = None if stated.region is None else ranges(graph, model, stated.region).slopes
    except LdltError as error:
        raise CertificateError(f"the region does not fit the model: {error}") from error
    proof = prove(graph, model, stated.multipliers, stated.bound, slopes=slopes)
    if not proof.holds:
        raise CertificateError(f"the bound {stated.bound:.9g} is stated but cannot be proven: {proof.reason}")
    if stated.gram is not None:
        directions = prove(graph, model, stated.multipliers, stated.bound, gram=stated.gram, slopes=slopes)
        if not directions.holds:
            raise CertificateError(f"constants of pairs are stated but cannot be proven: {directions.reason}")
    return dataclasses.replace(
        stated,
        rigorous=stated.region is None,
        reason="",
        multipliers=proof.multipliers,
        residual=_residual(graph, model, proof.multipliers, proof.bound, slopes),
    )


def _carried(source: Any) -> tuple[Certificate, nn.Module]:
    """Certificate and network of something that carries both."""
    from ldlt.files import Deployed, load  # noqa: PLC0415 (what is deployed is built on certificates)

    if isinstance(source, Certificate) or str(source).lower().endswith(".json"):
        raise CertificateError("the model, a torch.nn.Module, is missing: ldlt.verify(certificate, model)")
    if isinstance(source, nn.Module) and not isinstance(source, Deployed):
        raise CertificateError("the model carries no certificate: ldlt.verify(certificate, model)")
    deployed = source if isinstance(source, Deployed) else load(source)
    return deployed.certificate, deployed.network


def _require_plain(model: nn.Module) -> None:
    """Refuse a network that computes its weights by the rule."""
    if not isinstance(model, nn.Module):
        raise CertificateError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(m, Lipschitz) for m in model.modules()):
        raise CertificateError("the model computes its weights while it runs; certify what net.freeze() returns")


def _residual(
    graph: Graph,
    model: nn.Module,
    multipliers: Mapping[str, Tensor],
    bound: float,
    slopes: Mapping[str, tuple[Tensor, Tensor]] | None,
) -> float:
    if slopes is not None:
        return math.nan  # the matrix of :mod:`ldlt.lmi` is the one for all inputs
    size = sum(n.features for n in (graph.input, *graph.activations))
    complete = len(multipliers) == len(graph.activations)
    finite = bound < _LARGEST_SQUARE and all(bool(m.isfinite().all()) for m in multipliers.values())
    if not complete or size > _DENSE or not finite:
        return math.nan
    with torch.no_grad():
        matrix = lmi.from_graph(graph, model, dict(model.named_parameters()), multipliers, bound)
    return matrix.residual if bool(matrix.matrix.isfinite().all()) else math.nan


def _up(values: Any) -> Any:
    """The next float above."""
    return np.nextafter(values, np.inf)


# -- data ------------------------------------------------------------------------------------------------------------

_MEMBERS = {f.name for f in dataclasses.fields(Certificate)}


def _encode(certificate: Certificate) -> dict[str, Any]:
    region, gram = certificate.region, certificate.gram
    return {
        **{
            name: getattr(certificate, name)
            for name in ("status", "reason", "method", "rigorous", "outputs", "fingerprint", "versions", "created")
        },
        "bound": float(certificate.bound).hex(),
        "residual": float(certificate.residual).hex(),
        "input_shape": list(certificate.input_shape),
        "multipliers": {n: storage.array(m) for n, m in certificate.multipliers.items()},
        "gram": None if gram is None else storage.array(gram),
        "region": None
        if region is None
        else {"kind": region.kind, "center": storage.array(region.center), "radius": storage.array(region.radius)},
    }


def _decode(data: storage.Reader) -> Certificate:
    data.members(_MEMBERS)
    status = data.text("status")
    if status not in (CERTIFIED, NOT_CERTIFIED):
        raise CertificateError(f"the status '{status[:20]}' is unknown")
    bound = data.number("bound", finite=status == CERTIFIED)
    if not bound > 0:
        raise CertificateError(f"the bound {bound} is not positive")
    stored = data.part("multipliers")
    multipliers = {n: stored.array(n) for n in stored.data}
    if any(m.ndim != 1 or not bool((m > 0).all()) for m in multipliers.values()):
        raise CertificateError("multipliers must be lists of positive numbers")
    outputs = data.integer("outputs")
    if not 0 < outputs <= 2**24:
        raise CertificateError("the number of outputs is not positive")
    gram = None if data.absent("gram") else data.array("gram")
    if gram is not None and not (gram.shape == (outputs, outputs) and bool(gram.isfinite().all())):
        raise CertificateError(f"the constants of pairs must be {outputs} × {outputs} finite numbers")
    region = None
    if not data.absent("region"):
        part = data.part("region")
        part.members({"kind", "center", "radius"})
        try:
            region = Region(part.text("kind"), part.array("center"), part.array("radius"))
        except CertificateError:
            raise
        except LdltError as error:
            raise CertificateError(f"the region is not valid: {error}") from error
    digest = data.text("fingerprint")
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise CertificateError("the fingerprint is not one of SHA-256")
    versions = data.part("versions")
    created = data.text("created", 64)
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        raise CertificateError("the date is not one") from None
    if moment.utcoffset() is None:
        raise CertificateError("the date has no time zone")
    return Certificate(
        bound=bound,
        status=status,
        reason=data.text("reason"),
        method=data.text("method", 200),
        multipliers=multipliers,
        rigorous=data.flag("rigorous"),
        residual=data.number("residual", finite=False),
        input_shape=data.sizes("input_shape"),
        outputs=outputs,
        fingerprint=digest,
        region=region,
        gram=gram,
        versions={n: versions.text(n, 200) for n in versions.data},
        created=created,
    )


def _checked(certificate: Certificate) -> Certificate:
    """The certificate after the same checks that a file goes through."""
    try:
        return _decode(storage.Reader(_encode(certificate), "the certificate"))
    except CertificateError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise CertificateError(f"the certificate has fields of other types: {error}") from error
