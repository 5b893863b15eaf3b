"""What an ONNX file may ask for, and the error when it asks for more or for something else."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ldlt.errors import OptionError

__all__ = ["OnnxLimits", "show"]

_LONGEST_NAME = 80


@dataclass(frozen=True)
class OnnxLimits:
    """Sizes that are checked before memory is allocated.

    Attributes:
        file_bytes: Size of the file.
        fields: Entries of the file's structure (a node has about twenty); bounds what parsing it allocates.
        nodes: Number of nodes.
        features: Entries of any intermediate value, per sample.
        unrolled: Entries of the dense matrix of one convolution, or of one pooling.
        elements: Entries of all weights, constants and intermediate values (per sample) together.
    """

    file_bytes: int = 2**28
    fields: int = 1_000_000
    nodes: int = 10_000
    features: int = 2**20
    unrolled: int = 2**24
    elements: int = 2**26

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"the limit '{field.name}' must be a positive integer, not {value!r}")


def show(name: str) -> str:
    """A name from a file, safe to print: one short line without control characters, in quotes."""
    cut = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
    plain = "".join(c if c.isprintable() else "?" for c in cut)
    return f"'{plain}'"
