"""Certificates: bounds of given networks, proofs that survive rounding, files that others can check.

From a network to a certificate: :mod:`problem` (the matrix inequality by blocks), :mod:`optimise` (the best
multipliers), :mod:`proof` (that they hold for the stored weights, rounding included), :mod:`certificate` (the
statement, its file and its verification).
"""

from ldlt.certificates.certificate import Certificate, freeze_certified, issue, verify
from ldlt.certificates.certifier import METHODS, certify
from ldlt.certificates.onnx_limits import OnnxError, OnnxLimits
from ldlt.certificates.onnx_reader import OnnxNetwork, read_onnx
from ldlt.certificates.optimise import Solution, minimise
from ldlt.certificates.problem import Problem
from ldlt.certificates.proof import Proof, prove, prove_smallest
from ldlt.certificates.region import Region
from ldlt.certificates.storage import CertificateError

__all__ = [
    "METHODS",
    "Certificate",
    "CertificateError",
    "OnnxError",
    "OnnxLimits",
    "OnnxNetwork",
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
    "read_onnx",
    "verify",
]
