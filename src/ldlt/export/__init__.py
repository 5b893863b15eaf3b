"""From a trained network to a file that others run, and whose certificate they can check.

:mod:`deployed` (a network with its certificate), :mod:`storage` (safetensors), :mod:`exported` (ONNX and
``torch.export``), :mod:`card` (what there is to say about it). In between: :mod:`program`, the one form in which
networks are written down, :mod:`encoding` of it as data, and :mod:`portable` operations for other runtimes.
"""

from ldlt.export.card import model_card
from ldlt.export.deployed import Deployed, Meaning, deploy
from ldlt.export.exported import export_onnx, export_program
from ldlt.export.storage import load, save

__all__ = ["Deployed", "Meaning", "deploy", "export_onnx", "export_program", "load", "model_card", "save"]
