"""Networks for other runtimes: ONNX, and programs of ``torch.export``."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ldlt._version import __version__
from ldlt.certificates.certificate import Certificate
from ldlt.certificates.fingerprint import traced
from ldlt.errors import GraphError, MissingExtraError, OnnxError
from ldlt.export.deployed import Deployed, carry_over, deploy, nothing_about
from ldlt.export.portable import portable
from ldlt.export.storage import CERTIFICATE, MEANING, ONNX_SUFFIX, writable, write_file
from ldlt.onnx.reader import read_onnx

__all__ = ["INPUT", "OUTPUT", "export_onnx", "export_program"]

INPUT, OUTPUT = "x", "y"
"""Names of the input and the output of an ONNX file."""

_OPSET = 20  # the first with Gelu
_PROGRAM_SUFFIX = ".pt2"


def export_onnx(
    model: Any,
    path: str | os.PathLike[str],
    certificate: Certificate | None = None,
    *,
    input_shape: Any = None,
    dtype: torch.dtype | None = None,
) -> Certificate:
    """Write a network as an ONNX file that carries its certificate.

    The batch size is free. Standardisation of an estimator is a part of the network. Weights are inside of the file.
    The file is read back, compared with the network, and the certificate is proven for what was read: ``ldlt verify
    net.onnx`` proves it again. (A file that is too large for that carries the certificate of the network itself.)

    Args:
        model: What :func:`ldlt.deploy` accepts.
        path: File to write, ``….onnx``.
        certificate: Of a plain module.
        input_shape: Of a plain module without a certificate.
        dtype: Precision of the file; that of the model by default.

    Returns:
        The certificate that is in the file.

    Raises:
        MissingExtraError: ``onnx`` or ``onnxscript`` is not installed.
        GraphError: The network cannot be exported.
    """
    try:
        import onnx  # noqa: F401, PLC0415
        import onnxscript  # noqa: F401, PLC0415
    except ImportError as error:
        raise MissingExtraError(error.name or "onnxscript", "export") from error
    place = writable(path, ONNX_SUFFIX)
    deployed = deploy(model, certificate, input_shape=input_shape, dtype=dtype)
    # Runtimes of ONNX have no convolutions in float64.
    program, x = _plain(deployed, matrices=deployed.dtype == torch.float64)
    try:
        proto = _converted(program, x, optimize=True)
        found = _read_back(proto.SerializeToString(), deployed)
    except _DiffersError:
        # The optimiser takes factors that are nearly one for one, and summands that are nearly zero for zero.
        proto = _converted(program, x, optimize=False)
        found = _read_back(proto.SerializeToString(), deployed)
    for name, text in ((CERTIFICATE, found.to_json()), (MEANING, json.dumps(deployed.meaning.to_data()))):
        entry = proto.metadata_props.add()
        entry.key, entry.value = name, text
    write_file(place, proto.SerializeToString())
    return found


def _converted(program: nn.Module, x: Tensor, *, optimize: bool) -> Any:
    """The network as a model of ONNX, without what the exporter tells about this machine."""
    with _quiet():
        try:
            exported = torch.onnx.export(
                program,
                (x,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=[INPUT],
                output_names=[OUTPUT],
                opset_version=_OPSET,
                external_data=False,
                verbose=False,
                optimize=optimize,
            )
        except Exception as error:  # whatever class the exporter raises
            raise GraphError(f"the network cannot be exported to ONNX: {_first_line(error)}") from error
    assert exported is not None
    proto = exported.model_proto
    _forget(proto)
    return proto


class _DiffersError(GraphError):
    """A file that computes something else than its network."""


def export_program(
    model: Any,
    path: str | os.PathLike[str],
    certificate: Certificate | None = None,
    *,
    input_shape: Any = None,
    dtype: torch.dtype | None = None,
) -> Certificate:
    """Write a network as a program of ``torch.export``, to be run with ``torch.export.load`` or compiled ahead of time.

    The certificate and the meaning of inputs and outputs are extra files in it, ``ldlt.certificate`` and
    ``ldlt.meaning``. They are for information: nothing here reads such files back, since reading one is not only
    reading data.

    Args:
        model: What :func:`ldlt.deploy` accepts.
        path: File to write, ``….pt2``.
        certificate: Of a plain module.
        input_shape: Of a plain module without a certificate.
        dtype: Precision of the file; that of the model by default.

    Returns:
        The certificate of the network.
    """
    place = writable(path, _PROGRAM_SUFFIX)
    deployed = deploy(model, certificate, input_shape=input_shape, dtype=dtype)
    program, x = _plain(deployed, matrices=False)
    with _quiet():
        try:
            found = torch.export.export(program, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        except Exception as error:  # whatever class the exporter raises
            raise GraphError(f"the network cannot be exported by torch.export: {_first_line(error)}") from error
        for node in found.graph.nodes:
            node.meta.pop("stack_trace", None)  # lines of source with the paths of this machine
        buffer = io.BytesIO()
        extra = {CERTIFICATE: deployed.certificate.to_json(), MEANING: json.dumps(deployed.meaning.to_data())}
        torch.export.save(found, buffer, extra_files=extra)
    write_file(place, buffer.getvalue())
    return deployed.certificate


def _plain(deployed: Deployed, *, matrices: bool) -> tuple[nn.Module, Tensor]:
    """The network in operations that every runtime knows, and two samples."""
    plain = portable(deployed.network, traced(deployed.network, deployed.input_shape), matrices=matrices)
    return plain.requires_grad_(False), torch.zeros(2, *deployed.input_shape, dtype=deployed.dtype)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _forget(proto: Any) -> None:
    """Remove what the exporter tells about this machine: lines of source and their paths."""
    for part in [proto, proto.graph, *proto.graph.node, *proto.graph.initializer, *proto.graph.value_info]:
        del part.metadata_props[:]
    for part in [*proto.graph.node, *proto.graph.input, *proto.graph.output]:
        part.doc_string = ""
    for info in [*proto.graph.input, *proto.graph.output]:
        del info.metadata_props[:]
    proto.producer_name, proto.producer_version = "ldlt", __version__


def _read_back(data: bytes, deployed: Deployed) -> Certificate:
    """The certificate of the network that a file became."""
    stated = deployed.certificate
    try:
        network = read_onnx(data).module
    except OnnxError:
        return stated
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, *deployed.input_shape, generator=generator, dtype=torch.float64).to(deployed.dtype)
    with torch.no_grad():
        found, wanted = network(x), deployed.network(x).flatten(1)
    tolerance = 1e-9 if deployed.dtype == torch.float64 else 1e-4
    if not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance * float(1 + wanted.abs().max())):
        raise _DiffersError("the exported file does not compute what the network computes; please report this")
    if not stated.is_certified:
        return nothing_about(network, stated)
    names = [a.name for a in traced(network, stated.input_shape).activations]
    old = [a.name for a in traced(deployed.network, stated.input_shape).activations]
    return carry_over(network, names, old, stated)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks, none of which is about the network."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
