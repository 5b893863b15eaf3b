r"""Certificates: a statement about one stored network, its file, and its verification by someone who trusts nobody.

A :class:`Certificate` states a Lipschitz bound of one network, identified by its fingerprint, together with the
multipliers that prove it. :func:`verify` takes nothing on trust: it traces the model, compares the fingerprint, and
proves the bound (and the constants of output directions) again from the model's own weights. What is stated is either
proven again or replaced by what was computed; method, date and versions are information only.

**Constants of pairs.** With the matrix ``G`` of :mod:`ldlt.certificates.proof`, proven together with the multipliers,
*every* difference of two outputs has the constant

.. math:: ℓ_{cj} = ℓ\sqrt{(e_c - e_j)'G(e_c - e_j)} = ℓ\sqrt{G_{cc} + G_{jj} - 2G_{cj}} ,

at most ``√2ℓ``, which holds for any pair of a network with the constant ℓ.

**Files** are JSON: one object with the members ``format``, ``schema``, ``statement`` and ``checksum``, SHA-256 over the
statement in canonical form (sorted keys, no spaces, ASCII), which finds accidents, not forgers. Numbers that must be
exact are strings (hexadecimal floats), arrays are little-endian float64 in base 64 beside their shape. The reader
checks the size of a file before reading it, and the shape of an array against the length of its text before decoding
it. Unknown or repeated members, other types (``true`` for a number) and whatever else :meth:`Certificate.save` would
not have written end in :class:`CertificateError`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor, nn

from ldlt import lmi
from ldlt._version import __version__
from ldlt.certificates.eliminate import on_torus, prove_on_torus
from ldlt.certificates.fingerprint import fingerprint, traced
from ldlt.certificates.local import Region, ranges
from ldlt.certificates.proof import Proof, prove
from ldlt.engine.network import Lipschitz
from ldlt.errors import CertificateError, LdltError
from ldlt.files.replace import write_whole
from ldlt.graph import Graph

__all__ = ["CERTIFIED", "LARGEST_FILE", "NOT_CERTIFIED", "SCHEMA", "Certificate", "residual_of", "verify"]

CERTIFIED, NOT_CERTIFIED = "certified", "not certified"

SCHEMA = 1
FORMAT = "ldlt certificate"

LARGEST_FILE = 64 * 2**20
"""Largest size of a file in bytes."""

_LARGEST_ARRAY = 2**22  # elements
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
        write_whole(Path(path), self.to_json().encode("ascii"))

    def to_json(self) -> str:
        """What :meth:`save` writes, as a text: to be carried inside another file."""
        statement = _encode(_checked(self))
        whole = {"format": FORMAT, "schema": SCHEMA, "statement": statement, "checksum": _checksum(statement)}
        text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
        if len(text) > LARGEST_FILE:
            raise CertificateError(f"the certificate has {len(text)} bytes, above {LARGEST_FILE}")
        return text

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Read what :meth:`to_json` returned, with the checks of :meth:`load`.

        Raises:
            CertificateError: The text is no certificate, is truncated or was changed.
        """
        return _parse(text.encode("utf-8", "replace"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a file that :meth:`save` wrote. This checks its form, not its truth: see :func:`verify`.

        Raises:
            CertificateError: The file is no certificate, is truncated or was changed.
        """
        try:
            if not os.path.isfile(path) or os.path.getsize(path) > LARGEST_FILE:  # a pipe would block
                raise CertificateError(f"the certificate cannot be read: no file of at most {LARGEST_FILE} bytes")
            with open(path, "rb") as file:
                data = file.read(LARGEST_FILE + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, CertificateError):
                raise
            raise CertificateError(f"the certificate cannot be read: {error}") from error
        except TypeError as error:
            raise CertificateError(f"the certificate must be a path, not {type(path).__name__}") from error
        return _parse(data)


def _up(values: Any) -> Any:
    """The next float above."""
    return np.nextafter(values, np.inf)


# -- verification ------------------------------------------------------------------------------------------------------


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
        from ldlt.files.read import read_onnx  # noqa: PLC0415 (only for files)

        model = read_onnx(model).module
    stated = _checked(source) if isinstance(source, Certificate) else Certificate.load(source)
    if not stated.is_certified:
        raise CertificateError(f"the certificate does not certify anything: {stated.reason or 'no reason is given'}")
    try:
        require_plain(model)
        graph = traced(model, stated.input_shape)
        found = fingerprint(graph, model)
        if found != stated.fingerprint:
            raise CertificateError("the certificate is about another network: a weight or the architecture was changed")
        slopes = None if stated.region is None else ranges(graph, model, stated.region).slopes
    except LdltError as error:
        if isinstance(error, CertificateError):
            raise
        raise CertificateError(f"the certificate does not fit the model: {error}") from error
    outputs = graph[graph.output].features
    if outputs != stated.outputs:
        raise CertificateError(f"the certificate is about {stated.outputs} outputs, the model has {outputs}")
    proof = _on_torus(graph, model, stated)
    if proof is None:
        proof = prove(graph, model, stated.multipliers, stated.bound, slopes=slopes)
    if not proof.holds:
        raise CertificateError(f"the bound {stated.bound:.9g} is stated but cannot be proven: {proof.reason}")
    if stated.gram is not None and proof.gram is None:
        directions = prove(graph, model, stated.multipliers, stated.bound, gram=stated.gram, slopes=slopes)
        if not directions.holds:
            raise CertificateError(f"constants of pairs are stated but cannot be proven: {directions.reason}")
    return dataclasses.replace(
        stated,
        rigorous=stated.region is None,
        reason="",
        multipliers=proof.multipliers,
        residual=residual_of(graph, model, proof.multipliers, proof.bound, slopes),
    )


def _on_torus(graph: Graph, model: nn.Module, stated: Certificate) -> Proof | None:
    """A proof per frequency, if there is one."""
    try:
        network = on_torus(graph, model) if stated.region is None else None
    except LdltError:
        return None
    proof = None if network is None else prove_on_torus(network, stated.multipliers, stated.bound, stated.gram)
    return proof if proof is not None and proof.holds else None


def _carried(source: Any) -> tuple[Certificate, nn.Module]:
    """Certificate and network of something that carries both."""
    from ldlt.files import Deployed, load  # noqa: PLC0415 (what is deployed is built on certificates)

    if isinstance(source, Certificate) or str(source).lower().endswith(".json"):
        raise CertificateError("the model, a torch.nn.Module, is missing: ldlt.verify(certificate, model)")
    if not isinstance(source, (Deployed, str, os.PathLike)):
        raise CertificateError("the model carries no certificate: ldlt.verify(certificate, model)")
    deployed = source if isinstance(source, Deployed) else load(source)
    return deployed.certificate, deployed.network


def require_plain(model: Any) -> None:
    """Refuse a network that computes its weights by the rule.

    Raises:
        CertificateError: It is one, or no module at all.
    """
    if not isinstance(model, nn.Module):
        raise CertificateError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(m, Lipschitz) for m in model.modules()):
        raise CertificateError("the model computes its weights while it runs; certify what net.freeze() returns")


def residual_of(
    graph: Graph,
    model: nn.Module,
    multipliers: Mapping[str, Tensor],
    bound: float,
    slopes: Mapping[str, tuple[Tensor, Tensor]] | None,
) -> float:
    """The residual of :mod:`ldlt.lmi`; NaN where its matrix is not the one that was proven, or too large."""
    size = sum(n.features for n in (graph.input, *graph.activations))
    complete = len(multipliers) == len(graph.activations)
    finite = bound < _LARGEST_SQUARE and all(bool(m.isfinite().all()) for m in multipliers.values())
    if slopes is not None or not complete or size > _DENSE or not finite:
        return math.nan
    with torch.no_grad():
        matrix = lmi.from_graph(graph, model, dict(model.named_parameters()), multipliers, bound)
    return matrix.residual if bool(matrix.matrix.isfinite().all()) else math.nan


# -- data --------------------------------------------------------------------------------------------------------------

_Size = Annotated[int, Meta(ge=1, le=_LARGEST_ARRAY)]
_Shape = Annotated[list[_Size], Meta(max_length=16)]
_Text = Annotated[str, Meta(max_length=2**12)]
_Short = Annotated[str, Meta(max_length=200)]


class _Part(Struct, forbid_unknown_fields=True):
    """An object of a file: exactly these members, of exactly these types."""


class _Array(_Part):
    shape: _Shape
    float64: str


class _RegionPart(_Part):
    kind: Literal["ball", "box"]
    center: _Array
    radius: _Array


class _Statement(_Part):
    status: Literal["certified", "not certified"]
    reason: _Text
    method: _Short
    rigorous: bool
    outputs: Annotated[int, Meta(ge=1, le=2**24)]
    fingerprint: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    versions: dict[_Short, _Short]
    created: Annotated[str, Meta(max_length=64)]
    bound: Annotated[str, Meta(max_length=64)]
    residual: Annotated[str, Meta(max_length=64)]
    input_shape: _Shape
    multipliers: dict[_Text, _Array]
    gram: _Array | None
    region: _RegionPart | None


class _File(_Part):
    format: Annotated[str, Meta(max_length=64)]
    schema: int
    statement: _Statement
    checksum: Annotated[str, Meta(max_length=64)]


def _array(values: Tensor) -> dict[str, Any]:
    """A real tensor as data: shape and float64 bytes in base 64."""
    flat = np.ascontiguousarray(values.detach().cpu().double().numpy(), dtype="<f8")
    return {"shape": list(values.shape), "float64": base64.b64encode(flat.tobytes()).decode("ascii")}


def _encode(certificate: Certificate) -> dict[str, Any]:
    region, gram = certificate.region, certificate.gram
    plain = ("status", "reason", "method", "rigorous", "outputs", "fingerprint", "versions", "created")
    return {
        **{name: getattr(certificate, name) for name in plain},
        "bound": float(certificate.bound).hex(),
        "residual": float(certificate.residual).hex(),
        "input_shape": list(certificate.input_shape),
        "multipliers": {n: _array(m) for n, m in certificate.multipliers.items()},
        "gram": None if gram is None else _array(gram),
        "region": None
        if region is None
        else {"kind": region.kind, "center": _array(region.center), "radius": _array(region.radius)},
    }


def _checksum(statement: Any) -> str:
    text = json.dumps(statement, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CertificateError("not a certificate: a member is repeated")
    return found


def _parse(data: bytes) -> Certificate:
    """A certificate from the bytes of a file."""
    if len(data) > LARGEST_FILE:
        raise CertificateError(f"not a certificate: more than {LARGEST_FILE} bytes")
    try:
        found = json.loads(data.decode("ascii"), object_pairs_hook=_once)
        schema = found.get("schema") if isinstance(found, dict) and found.get("format") == FORMAT else None
        if type(schema) is int and schema != SCHEMA:  # before the members, of which another version may have others
            raise CertificateError(f"the file has schema version {schema}, this program reads {SCHEMA}")
        whole = msgspec.convert(found, _File)
        if whole.format != FORMAT:
            raise CertificateError("not a certificate: another format")
        if whole.checksum != _checksum(found["statement"]):
            raise CertificateError("the checksum does not fit: the file was changed after it was written")
    except CertificateError:
        raise
    except (ValueError, RecursionError) as error:  # msgspec.ValidationError is one
        raise CertificateError(f"not a certificate, or a truncated one: {error}"[:300]) from error
    return _decode(whole.statement)


def _number(text: str, name: str) -> float:
    try:
        value = float.fromhex(text)
    except (ValueError, OverflowError):
        raise CertificateError(f"'{name}' is not a hexadecimal number") from None
    if value.hex() != text:
        raise CertificateError(f"'{name}' is {text}, not a number in canonical form")
    return value


def _tensor(part: _Array, name: str) -> Tensor:
    """A float64 tensor without NaN. The text is decoded only if its length fits the shape."""
    count = math.prod(part.shape)
    if count > _LARGEST_ARRAY or len(part.float64) != 4 * ((8 * count + 2) // 3):
        raise CertificateError(f"'{name}' is too large, or has a shape that does not fit its data")
    try:
        data = base64.b64decode(part.float64.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise CertificateError(f"'{name}' is not base 64") from None
    if len(data) != 8 * count or base64.b64encode(data).decode("ascii") != part.float64:
        raise CertificateError(f"'{name}' has a shape that does not fit its data")
    values = np.frombuffer(data, dtype="<f8").astype(np.float64)
    if np.isnan(values).any():
        raise CertificateError(f"'{name}' has entries that are not numbers")
    return torch.from_numpy(values).reshape(part.shape)


def _decode(data: _Statement) -> Certificate:
    texts = (data.reason, data.method, data.created, *data.multipliers, *data.versions, *data.versions.values())
    if not all(text.isprintable() for text in texts):
        raise CertificateError("not a certificate: a text is not printable")
    bound = _number(data.bound, "bound")
    if not (bound > 0 and (data.status == NOT_CERTIFIED or math.isfinite(bound))):
        raise CertificateError(f"the bound {bound} is not positive and finite")
    multipliers = {n: _tensor(m, f"multipliers of {n}") for n, m in data.multipliers.items()}
    if any(m.ndim != 1 or not bool((m > 0).all()) for m in multipliers.values()):
        raise CertificateError("multipliers must be lists of positive numbers")
    gram = None if data.gram is None else _tensor(data.gram, "gram")
    if gram is not None and not (gram.shape == (data.outputs, data.outputs) and bool(gram.isfinite().all())):
        raise CertificateError(f"the constants of pairs must be {data.outputs} × {data.outputs} finite numbers")
    region = None
    if data.region is not None:
        ends = _tensor(data.region.center, "center"), _tensor(data.region.radius, "radius")
        try:
            region = Region(data.region.kind, *ends)
        except LdltError as error:
            raise CertificateError(f"the region is not valid: {error}") from error
    if math.prod(data.input_shape) > _LARGEST_ARRAY:
        raise CertificateError("'input_shape' is too large")
    try:
        moment = datetime.fromisoformat(data.created)
    except ValueError:
        raise CertificateError("the date is not one") from None
    if moment.utcoffset() is None:
        raise CertificateError("the date has no time zone")
    return Certificate(
        bound=bound,
        status=data.status,
        reason=data.reason,
        method=data.method,
        multipliers=multipliers,
        rigorous=data.rigorous,
        residual=_number(data.residual, "residual"),
        input_shape=tuple(data.input_shape),
        outputs=data.outputs,
        fingerprint=data.fingerprint,
        region=region,
        gram=gram,
        versions=dict(data.versions),
        created=data.created,
    )


def _checked(certificate: Certificate) -> Certificate:
    """The certificate after the same checks that a file goes through."""
    try:
        return _decode(msgspec.convert(_encode(certificate), _Statement))
    except CertificateError:
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise CertificateError(f"the certificate has fields of other types: {error}") from error
