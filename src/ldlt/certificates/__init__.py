"""Certificates: bounds of given networks, proofs that survive rounding, files that others can check.

From a network to a certificate: :mod:`problem` (the matrix inequality by blocks), :mod:`convolutional` (the same per
frequency), :mod:`solve` and :mod:`large` (the best multipliers, on the one elimination of :mod:`ldlt.covariance`),
:mod:`settle` (numbers near them that can be proven), :mod:`certifier` (all of it in one call). What a verdict rests on
knows none of these:
:mod:`ball`, :mod:`enclose`, :mod:`definite`, :mod:`proof` (that the inequality holds for the stored weights, rounding
included), :mod:`near`, :mod:`torus`, :mod:`eliminate` (the same per frequency), :mod:`local` (slopes in a region),
:mod:`fingerprint` and :mod:`certificate` (the statement, its file and its verification).
"""

from ldlt.certificates.certificate import Certificate, verify
from ldlt.certificates.certifier import METHODS, built_multipliers, certify, freeze_certified, issue
from ldlt.certificates.local import Region
from ldlt.certificates.problem import Problem
from ldlt.certificates.proof import Proof, prove
from ldlt.certificates.solve import Solution, Step, minimise

__all__ = [
    "METHODS",
    "Certificate",
    "Problem",
    "Proof",
    "Region",
    "Solution",
    "Step",
    "built_multipliers",
    "certify",
    "freeze_certified",
    "issue",
    "minimise",
    "prove",
    "verify",
]
