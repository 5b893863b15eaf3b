"""Every exception that ``ldlt`` raises on purpose.

All derive from :class:`LdltError`, so ``except ldlt.LdltError`` catches them and nothing else. Each also derives from
the built-in exception a Python user would expect (``ValueError``, ``TypeError``, ...).
"""

from __future__ import annotations

__all__ = [
    "BoundError",
    "CertificateError",
    "GraphError",
    "InfeasibleError",
    "LdltError",
    "MissingExtraError",
    "OnnxError",
    "OptionError",
    "SavedModelError",
    "ShapeError",
    "SlopeError",
    "UnsupportedOpError",
]


class LdltError(Exception):
    """Base class of all exceptions of this package."""


class BoundError(LdltError, ValueError):
    """A Lipschitz bound that is not a positive finite number."""


class OptionError(LdltError, ValueError):
    """An option with a value outside its documented set."""


class ShapeError(LdltError, ValueError):
    """A tensor or a shape that does not fit the network."""


class SlopeError(LdltError, ValueError):
    """A nonlinearity without a finite incremental slope bound."""


class GraphError(LdltError, ValueError):
    """A module that is not an acyclic graph of linear maps and activations."""


class UnsupportedOpError(GraphError):
    """An operation inside a module that has no certified rule.

    Attributes:
        node: Name of the offending node of the traced graph.
    """

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"node '{node}': {reason}")
        self.node = node
        self.reason = reason

    def __reduce__(self) -> tuple[type[UnsupportedOpError], tuple[str, str]]:
        return type(self), (self.node, self.reason)


class InfeasibleError(LdltError, ValueError):
    """Weights and multipliers for which the linear matrix inequality does not hold strictly."""


class MissingExtraError(LdltError, ImportError):
    """An optional dependency that is not installed.

    Args:
        package: Import name of the missing package.
        extra: Name of the extra of ``ldlt`` that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"'{package}' is needed for this: install it with  pip install 'ldlt[{extra}]'")
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str]]:
        return type(self), (self.package, self.extra)


class CertificateError(LdltError, ValueError):
    """A certificate that cannot be read, does not belong to the network, or cannot be proven."""


class OnnxError(LdltError, ValueError):
    """An ONNX file that is damaged, too large, or not a network of known operations that act on each sample."""


class SavedModelError(LdltError, ValueError):
    """A file of a saved model that is damaged, was changed, or is no saved model."""
