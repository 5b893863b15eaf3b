"""Networks from ONNX files, read with distrust, as modules that can be traced.

From bytes to a module: :mod:`wire` (sizes, before anything is parsed), :mod:`file` (the nodes an output needs),
:mod:`operators` (what each of them means, in :mod:`linear`, :mod:`activations`, :mod:`shapes`, :mod:`sliding` and
:mod:`constants`), :mod:`program` (the module that is built), :mod:`reader` (the one call).
"""

from ldlt.onnx.limits import OnnxLimits
from ldlt.onnx.reader import OnnxNetwork, read_onnx

__all__ = ["OnnxLimits", "OnnxNetwork", "read_onnx"]
