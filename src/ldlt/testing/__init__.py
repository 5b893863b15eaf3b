"""Hostile modules, and the ruler that networks are measured with.

Example:
    >>> from ldlt.testing import run_hostile
    >>> run_hostile(range(2), kinds=1).violations
    []
"""

from __future__ import annotations

from ldlt.testing.check import Report, Summary, check_module, check_network, jacobians, run_hostile
from ldlt.testing.hostile import PARAMETERS, Hostile, hostile_module, pick_kinds
from ldlt.testing.moves import MOVES

__all__ = [
    "MOVES",
    "PARAMETERS",
    "Hostile",
    "Report",
    "Summary",
    "check_module",
    "check_network",
    "hostile_module",
    "jacobians",
    "pick_kinds",
    "run_hostile",
]
