"""Networks with their certificates as files of safetensors: weights as bytes, everything else as JSON.

The header of such a file has three texts: ``ldlt`` (format, shape of an input and the program), ``ldlt.meaning`` and
``ldlt.certificate``. Nothing of a file is executed, and no class is looked up by a name that a file gives.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldlt.certificates.certificate import Certificate
from ldlt.errors import CertificateError, GraphError, LdltError, MissingExtraError, OptionError, SavedModelError
from ldlt.export.deployed import Deployed, Meaning, as_program, deploy, network_fingerprint
from ldlt.export.encoding import decode, encode, members, typed
from ldlt.export.program import Program
from ldlt.files import write_whole
from ldlt.onnx.file import properties
from ldlt.onnx.limits import OnnxLimits, show
from ldlt.onnx.reader import read_onnx

__all__ = ["CERTIFICATE", "FORMAT", "MEANING", "SUFFIX", "load", "save"]

SUFFIX = ".safetensors"
ONNX_SUFFIX = ".onnx"

FORMAT = "ldlt model 2"
"""Name and version of the format, in every file."""

NETWORK, MEANING, CERTIFICATE = "ldlt", "ldlt.meaning", "ldlt.certificate"

_LARGEST_FILE = 2**32
_LARGEST_HEADER = 2**27


def save(
    model: Any,
    path: str | os.PathLike[str],
    certificate: Certificate | None = None,
    *,
    input_shape: Any = None,
    dtype: torch.dtype | None = None,
) -> Deployed:
    """Save a network with its certificate in one file.

    Args:
        model: What :func:`ldlt.deploy` accepts: a Lipschitz network, a fitted estimator, a plain module.
        path: File to write, ``….safetensors``; written whole or not at all.
        certificate: Of a plain module.
        input_shape: Of a plain module without a certificate.
        dtype: Precision of the file.

    Returns:
        The network as it was saved.

    Raises:
        GraphError: A layer cannot be written as data.
        CertificateError: The certificate does not belong to the model.
        OptionError: The file cannot be written.

    Example:
        >>> import tempfile, ldlt
        >>> path = Path(tempfile.mkdtemp()) / "net.safetensors"
        >>> saved = save(ldlt.nn.FeedForward(4, [8], 3), path)
        >>> ldlt.verify(load(path)).bound == saved.certificate.bound
        True
    """
    if Path(path).suffix.lower() == ONNX_SUFFIX:
        from ldlt.export.exported import export_onnx  # noqa: PLC0415

        deployed = deploy(model, certificate, input_shape=input_shape, dtype=dtype)
        export_onnx(deployed, path)
        return deployed
    tools = _tools()
    place = writable(path, SUFFIX)
    deployed = deploy(model, certificate, input_shape=input_shape, dtype=dtype)
    network = deployed.network
    if not isinstance(network, Program):  # one that was read from ONNX
        deployed = as_program(deployed)
        network = deployed.network
        assert isinstance(network, Program)
    program, tensors = encode(network)
    about = {"format": FORMAT, "input_shape": list(deployed.input_shape), "program": program}
    texts = {
        NETWORK: json.dumps(about, allow_nan=False),
        MEANING: json.dumps(deployed.meaning.to_data(), allow_nan=False),
        CERTIFICATE: deployed.certificate.to_json(),
    }
    # A tensor that two layers share is written twice.
    own = {n: t.clone() for n, t in tensors.items()}
    try:
        _decoded(texts, own)
    except SavedModelError as error:
        raise GraphError(f"the network cannot be saved, since it could not be read again: {error}") from error
    write_file(place, tools.save(own, metadata=texts))
    return deployed


def load(path: str | os.PathLike[str]) -> Deployed:
    """Read a network that :func:`ldlt.save` or :func:`ldlt.export_onnx` wrote.

    That its weights are those the certificate is about is checked here, by its fingerprint; that the certificate is
    true is proven by ``ldlt.verify(deployed)``.

    Args:
        path: ``….safetensors`` or ``….onnx``.

    Raises:
        SavedModelError: The file is damaged, or no saved model.
        CertificateError: The certificate is missing, damaged or about other weights.
        OnnxError: A network that cannot be read.
        OptionError: There is no such file.
    """
    place = readable(path)
    if place.suffix.lower() == ONNX_SUFFIX:
        return _load_onnx(place)
    if place.suffix.lower() != SUFFIX:
        raise OptionError(
            f"'{place}' is neither {SUFFIX} nor {ONNX_SUFFIX}: only files that are data are read. Others, such as the "
            "pickles of torch.save, can execute code when they are read"
        )
    texts, tensors = _read(place)
    for name in (NETWORK, MEANING, CERTIFICATE):
        if name not in texts:
            raise SavedModelError(
                f"'{place.name}' is no model that ldlt.save wrote: '{name}' is missing from its header"
            )
    return _decoded(texts, tensors)


def _decoded(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Deployed:
    """The network of a header's texts and tensors."""
    about = _json(texts[NETWORK], NETWORK)
    members(about, {"format", "input_shape", "program"}, f"'{NETWORK}'")
    if about["format"] != FORMAT:
        raise SavedModelError(f"the file has the format {str(about['format'])[:40]!r}, this program reads {FORMAT!r}")
    certificate = Certificate.from_json(texts[CERTIFICATE])
    shape = typed(about["input_shape"], list, "input_shape")
    if shape != list(certificate.input_shape):
        raise CertificateError("the certificate is about inputs of another shape")
    network = decode(about["program"], tensors, certificate.input_shape)
    meaning = Meaning.from_data(_json(texts[MEANING], MEANING))
    return _checked(Deployed(network, certificate, meaning))


def _load_onnx(path: Path) -> Deployed:
    texts = properties(path, OnnxLimits())
    if CERTIFICATE not in texts:
        raise CertificateError(
            f"'{path.name}' carries no certificate: make one with 'ldlt certify', or write the file with "
            "ldlt.export_onnx"
        )
    certificate = Certificate.from_json(texts[CERTIFICATE])
    network = read_onnx(path, input_shape=None).module
    meaning = Meaning.from_data(_json(texts[MEANING], MEANING)) if MEANING in texts else Meaning()
    return _checked(Deployed(network, certificate, meaning))


def _checked(deployed: Deployed) -> Deployed:
    """Compare fingerprints: a certificate about other weights must not be passed on."""
    try:
        found = network_fingerprint(deployed.network, deployed.input_shape)
    except LdltError as error:
        raise CertificateError(f"the certificate does not fit the network: {error}") from error
    if found != deployed.certificate.fingerprint:
        raise CertificateError("the certificate is about another network: a weight or the architecture was changed")
    return deployed


# -- files -------------------------------------------------------------------------------------------------------------


def readable(path: str | os.PathLike[str], what: str = "model") -> Path:
    """A file that is there."""
    place = Path(path)
    try:
        if not place.exists():
            raise OptionError(f"{what} {show(str(path))} does not exist")
        if not place.is_file():
            raise OptionError(f"{what} {show(str(path))} is not a file")
    except (OSError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{what} {show(str(path))} cannot be read: {why(error)}") from error
    return place


def writable(path: str | os.PathLike[str], *suffixes: str) -> Path:
    """A place to write to, refused before the work and not after it."""
    place = Path(path)
    if place.suffix.lower() not in suffixes:
        raise OptionError(f"cannot write {show(str(place))}: its name must end in {' or '.join(suffixes)}")
    try:
        if place.is_dir() or not place.parent.is_dir():
            raise OptionError(f"cannot write '{place}': it is a folder, or its folder does not exist")
        if not os.access(place.parent, os.W_OK):
            raise OptionError(f"cannot write '{place}': its folder cannot be written to")
    except (OSError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"cannot write {show(str(path))}: {why(error)}") from error
    return place


def why(error: Exception) -> str:
    """The reason without the name of the file, which can be long."""
    return getattr(error, "strerror", None) or str(error)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise OptionError(f"cannot write '{path}': {why(error)}") from error


def _tools() -> Any:
    try:
        import safetensors.torch  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("safetensors", "export") from error
    return safetensors.torch


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a file."""
    _tools()
    from safetensors import safe_open  # noqa: PLC0415

    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE:
            raise SavedModelError(f"the file has {size} bytes, more than {_LARGEST_FILE}")
        with path.open("rb") as stream:
            if int.from_bytes(stream.read(8), "little") > min(size, _LARGEST_HEADER):
                raise SavedModelError(f"'{path.name}' is not a file of safetensors, or a truncated one")
        with safe_open(str(path), framework="pt") as file:
            texts = file.metadata() or {}
            # Copies: a file that changes while it is mapped must not change the network.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SavedModelError:
        raise
    except Exception as error:  # whatever class the installed reader raises
        raise SavedModelError(f"'{path.name}' is not a file of safetensors, or a damaged one: {error}") from error
    return texts, tensors


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SavedModelError(f"'{name}' in the header is not JSON: {type(error).__name__}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # readers do not agree on which of the two counts
        raise ValueError("a member is repeated")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
