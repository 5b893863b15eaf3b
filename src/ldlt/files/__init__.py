"""Networks in files: ONNX, with the weights, the certificate and what inputs and outputs mean inside.

From a network to a file: :mod:`store` (the calls), :mod:`write` (its graph as ONNX nodes), :mod:`functions`
(activations that ONNX has no operator for). From a file to a network: :mod:`message` (bytes, before they are parsed),
:mod:`read`, :mod:`operators` (the table), :mod:`network` (the module that is built). :mod:`deployed` is what users hold
in their hands, :mod:`card` says what there is to say about it, and :mod:`replace` writes files whole.
"""

from typing import TYPE_CHECKING, Any

from ldlt.errors import MissingExtraError
from ldlt.files.message import OnnxLimits
from ldlt.files.replace import TEMPORARY, atomic, write_whole

if TYPE_CHECKING:
    from ldlt.files.deployed import Deployed, Meaning
    from ldlt.files.read import OnnxNetwork, read_onnx
    from ldlt.files.store import deploy, load, model_card, save

__all__ = [
    "TEMPORARY",
    "Deployed",
    "Meaning",
    "OnnxLimits",
    "OnnxNetwork",
    "atomic",
    "deploy",
    "load",
    "model_card",
    "read_onnx",
    "save",
    "write_whole",
]

_PLACES = {
    **dict.fromkeys(("Deployed", "Meaning"), "deployed"),
    **dict.fromkeys(("OnnxNetwork", "read_onnx"), "read"),
    **dict.fromkeys(("deploy", "load", "model_card", "save"), "store"),
}


def __getattr__(name: str) -> Any:
    """What is built on certificates is imported when it is asked for: certificates are written by this package."""
    import importlib  # noqa: PLC0415

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    except ImportError as error:
        if error.name == "msgspec":
            raise MissingExtraError("msgspec", "files") from error
        raise
