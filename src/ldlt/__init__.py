"""Neural networks of any architecture that are L-Lipschitz by construction.

>>> import torch, ldlt
>>> net = ldlt.nn.Residual(8, [64] * 4, 3, bound=1.0)
>>> net(torch.randn(2, 8)).shape, net.bound
(torch.Size([2, 3]), 1.0)
"""

from ldlt import activations, attack, lmi, nn, paper
from ldlt._version import __version__
from ldlt.certificates import Certificate, Region, certify, verify
from ldlt.errors import (
    BoundError,
    CertificateError,
    GraphError,
    InfeasibleError,
    LdltError,
    MissingExtraError,
    OnnxError,
    OptionError,
    ShapeError,
    SlopeError,
    UnsupportedOpError,
)
from ldlt.network import Lipschitz, Scaled
from ldlt.radius import certified_accuracy, certified_radius

__all__ = [
    "BoundError",
    "Certificate",
    "CertificateError",
    "GraphError",
    "InfeasibleError",
    "LdltError",
    "Lipschitz",
    "MissingExtraError",
    "OnnxError",
    "OptionError",
    "Region",
    "Scaled",
    "ShapeError",
    "SlopeError",
    "UnsupportedOpError",
    "__version__",
    "activations",
    "attack",
    "certified_accuracy",
    "certified_radius",
    "certify",
    "lmi",
    "nn",
    "paper",
    "verify",
]
