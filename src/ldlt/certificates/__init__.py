"""Certificates: bounds of given networks, proofs that survive rounding, files that others can check.

From a network to a certificate: :mod:`problem` (the matrix inequality by blocks), :mod:`optimise` (the best
multipliers), :mod:`proof` (that they hold for the stored weights, rounding included), :mod:`certificate` (the
statement, its file and its verification).
"""

from ldlt.certificates.certificate import Certificate, freeze_certified, issue, verify
from ldlt.certificates.certifier import METHODS, certify
from ldlt.certificates.optimise import Solution, minimise
from ldlt.certificates.problem import Problem
from ldlt.certificates.proof import Proof, prove, prove_smallest
from ldlt.certificates.region import Region

__all__ = [
    "METHODS",
    "Certificate",
    "Problem",
    "Proof",
    "Region",
    "Solution",
    "certify",
    "freeze_certified",
    "issue",
    "minimise",
    "prove",
    "prove_smallest",
    "verify",
]
