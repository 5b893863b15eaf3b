"""Neural networks of any architecture that are L-Lipschitz by construction.

>>> import torch, ldlt
>>> net = ldlt.nn.Residual(8, [64] * 4, 3, bound=1.0)
>>> net(torch.randn(2, 8)).shape, net.bound
(torch.Size([2, 3]), 1.0)
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ldlt._version import __version__
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

if TYPE_CHECKING:
    from ldlt import activations, attack, lmi, nn
    from ldlt.bilipschitz import BiLipschitz, Inverse
    from ldlt.certificates import Certificate, Region, certify, verify
    from ldlt.engine.network import Lipschitz, Scaled
    from ldlt.estimators import LipschitzClassifier as LipschitzClassifier  # not in __all__: they need an extra
    from ldlt.estimators import LipschitzRegressor as LipschitzRegressor
    from ldlt.files import Deployed, deploy, load, model_card, read_onnx, save
    from ldlt.joined import Metric
    from ldlt.radius import Curve, certified_accuracy, certified_curve, certified_radius
    from ldlt.recurrent import Recurrent
    from ldlt.rounding import forward_error

__all__ = [
    "BiLipschitz",
    "BoundError",
    "Certificate",
    "CertificateError",
    "Curve",
    "Deployed",
    "GraphError",
    "InfeasibleError",
    "Inverse",
    "LdltError",
    "Lipschitz",
    "Metric",
    "MissingExtraError",
    "OnnxError",
    "OptionError",
    "Recurrent",
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
    "forward_error",
    "lmi",
    "load",
    "model_card",
    "nn",
    "read_onnx",
    "save",
    "verify",
]

_HOMES = {
    "bilipschitz": ("BiLipschitz", "Inverse"),
    "joined": ("Metric",),
    "certificates": ("Certificate", "Region", "certify", "verify"),
    "engine.network": ("Lipschitz", "Scaled"),
    "estimators": ("LipschitzClassifier", "LipschitzRegressor"),
    "files": ("Deployed", "deploy", "load", "model_card", "read_onnx", "save"),
    "radius": ("Curve", "certified_accuracy", "certified_curve", "certified_radius"),
    "recurrent": ("Recurrent",),
    "rounding": ("forward_error",),
}
"""What is imported from where when it is asked for: who wants a network need not wait for proofs and files."""


def __getattr__(name: str) -> Any:
    """A public name or a module of the package, imported when it is first asked for."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        value = getattr(import_module(f"ldlt.{home}"), name)
    elif not name.startswith("_") and find_spec(f"ldlt.{name}") is not None:
        value = import_module(f"ldlt.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
