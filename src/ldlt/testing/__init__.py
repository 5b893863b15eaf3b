"""Hostile modules, and the ruler that networks are measured with.

Example:
    >>> from ldlt.testing import run_hostile
    >>> run_hostile(range(2), kinds=1).violations
    []
"""

from __future__ import annotations

from ldlt.testing.cases import ActivationCase, Case, ContractionCase, NetworkCase, OperationCase, all_cases
from ldlt.testing.check import (
    Report,
    Summary,
    check_certificate,
    check_module,
    check_network,
    jacobians,
    run_certificates,
    run_hostile,
)
from ldlt.testing.hostile import PARAMETERS, Hostile, hostile_module, pick_kinds
from ldlt.testing.moves import MOVES, Move, register_move

__all__ = [
    "MOVES",
    "PARAMETERS",
    "ActivationCase",
    "Case",
    "ContractionCase",
    "Hostile",
    "Move",
    "NetworkCase",
    "OperationCase",
    "Report",
    "Summary",
    "all_cases",
    "check_certificate",
    "check_module",
    "check_network",
    "hostile_module",
    "jacobians",
    "pick_kinds",
    "register_move",
    "run_certificates",
    "run_hostile",
]
