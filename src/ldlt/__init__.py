"""Neural networks of any architecture that are L-Lipschitz by construction.

>>> import torch, ldlt
>>> net = ldlt.nn.Residual(8, [64] * 4, 3, bound=1.0)
>>> net(torch.randn(2, 8)).shape, net.bound
(torch.Size([2, 3]), 1.0)
"""

from typing import TYPE_CHECKING, Any

from ldlt import activations, attack, empirical, lmi, nn, paper
from ldlt._version import __version__
from ldlt.certificates import Certificate, Region, certify, verify
from ldlt.engine.network import Lipschitz, Scaled
from ldlt.errors import (
    BoundError,
    CertificateError,
    GraphError,
    InfeasibleError,
    LdltError,
    MissingExtraError,
    OnnxError,
    OptionError,
    SavedModelError,
    ShapeError,
    SlopeError,
    UnsupportedOpError,
)
from ldlt.radius import Curve, certified_accuracy, certified_curve, certified_radius
from ldlt.rounding import forward_error

if TYPE_CHECKING:
    from ldlt.files import Deployed, deploy, load, model_card, read_onnx, save

__all__ = [
    "BoundError",
    "Certificate",
    "CertificateError",
    "Curve",
    "Deployed",
    "GraphError",
    "InfeasibleError",
    "LdltError",
    "Lipschitz",
    "MissingExtraError",
    "OnnxError",
    "OptionError",
    "Region",
    "SavedModelError",
    "Scaled",
    "ShapeError",
    "SlopeError",
    "UnsupportedOpError",
    "__version__",
    "activations",
    "attack",
    "certified_accuracy",
    "certified_curve",
    "certified_radius",
    "certify",
    "deploy",
    "empirical",
    "forward_error",
    "lmi",
    "load",
    "model_card",
    "nn",
    "paper",
    "read_onnx",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    """What needs an extra (``sklearn``, ``files``) is imported when it is asked for."""
    if name in ("LipschitzClassifier", "LipschitzRegressor"):
        from ldlt import estimators  # noqa: PLC0415

        return getattr(estimators, name)
    if name in ("Deployed", "deploy", "load", "model_card", "read_onnx", "save"):
        from ldlt import files  # noqa: PLC0415

        return getattr(files, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
