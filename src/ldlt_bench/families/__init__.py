"""Published families of 1-Lipschitz layers, for comparison.

Six dense families, each from its paper's formula: :class:`AOL`, :class:`Orthogonal` (Cayley),
:class:`Sandwich` (LBDN), :class:`SLL`, :class:`CPL` and :class:`Spectral`; the normalised head
:class:`RowsHead`; and :class:`FamilyNetwork`, which stacks one of them into a network with one constant.
Every layer is a pure function of its free parameters: no cache, no buffer.
"""

from ldlt.cayley import cayley
from ldlt_bench.families.layer import ACTIVATIONS, Explicit, Layer, MaxMin
from ldlt_bench.families.network import FAMILIES, HEADS, FamilyNetwork
from ldlt_bench.families.normalised import AOL, RowsHead, Spectral, aol, normalize_rows, pair_constants, squared_norm
from ldlt_bench.families.orthogonal import Orthogonal, Sandwich, SandwichOutput, cayley_rows
from ldlt_bench.families.potential import CPL, SLL, sll_diagonal

__all__ = [
    "ACTIVATIONS",
    "AOL",
    "CPL",
    "FAMILIES",
    "HEADS",
    "SLL",
    "Explicit",
    "FamilyNetwork",
    "Layer",
    "MaxMin",
    "Orthogonal",
    "RowsHead",
    "Sandwich",
    "SandwichOutput",
    "Spectral",
    "aol",
    "cayley",
    "cayley_rows",
    "normalize_rows",
    "pair_constants",
    "sll_diagonal",
    "squared_norm",
]
