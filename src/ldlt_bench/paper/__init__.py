r"""The residual block of the paper: its matrix inequality, its factors, its construction and its errata.

Juston et al., *LDLT L-Lipschitz Network* (2025), study one block,

.. math::
    x_+ = A x + B w_n, \qquad w_j = \sigma_j(C_j w_{j-1} + b_j), \qquad w_0 = x .

This package states that block literally, factorises its matrix inequality in closed form, builds it in the
paper's order with the output map corrected (:func:`corrected_block`), and keeps the printed construction
(:func:`as_printed_block`, :class:`AsPrintedResidual`) next to a counterexample to it, so that every erratum
in ``docs/errata.md`` can be run.

It is a reference to check against, not the way to build networks: the general engine of the library does not
use it, covers any acyclic graph, and is faster.
"""

from __future__ import annotations

from ldlt.block_ldlt import BlockFactors, block_ldlt
from ldlt_bench.paper.as_printed import AsPrintedResidual, AsPrintedWarning, as_printed_block
from ldlt_bench.paper.block import ResidualBlock
from ldlt_bench.paper.corrected import corrected_block
from ldlt_bench.paper.erratum import ScalarCounterexample, SteepestPair, scalar_counterexample, violation
from ldlt_bench.paper.factors import closed_form_factors, printed_last_pivot

__all__ = [
    "AsPrintedResidual",
    "AsPrintedWarning",
    "BlockFactors",
    "ResidualBlock",
    "ScalarCounterexample",
    "SteepestPair",
    "as_printed_block",
    "block_ldlt",
    "closed_form_factors",
    "corrected_block",
    "printed_last_pivot",
    "scalar_counterexample",
    "violation",
]
