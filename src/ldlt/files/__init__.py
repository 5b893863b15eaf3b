"""Networks in files: ONNX, with the weights, the certificate and what inputs and outputs mean inside.

From a network to a file: :mod:`store` (the calls), :mod:`write` (its graph as ONNX nodes), :mod:`functions`
(activations: operators of ONNX, or functions of the file). From a file to a network: :mod:`message` (bytes, before they
are parsed), :mod:`read`, :mod:`operators` (the table), :mod:`network` (the module that is built). :mod:`deployed` is
what users hold in their hands, :mod:`card` says what there is to say about it, :mod:`replace` writes files whole.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """What is built on certificates is imported when it is asked for: certificates are written by this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = {"Deployed": "deployed", "Meaning": "deployed", "OnnxNetwork": "read", "read_onnx": "read"}
    return getattr(import_module(f"{__name__}.{place.get(name, 'store')}"), name)
