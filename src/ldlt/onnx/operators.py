"""The list of operators that are understood, and the reasons for refusing others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ldlt import activations
from ldlt.onnx import activations as act
from ldlt.onnx import linear, shapes, sliding
from ldlt.onnx.node import PRODUCT, Node, Value

__all__ = ["OPERATORS", "Rule", "refusal"]


@dataclass(frozen=True)
class Rule:
    """How a node is translated.

    Attributes:
        run: Adds its steps and returns the values it defines.
        least: Least number of inputs.
        most: Largest number of inputs.
        results: Largest number of outputs.
    """

    run: Callable[[Node], list[Value]]
    least: int = 1
    most: int = 1
    results: int = 1


def _only_constants(node: Node) -> list[Value]:
    raise node.refuse("has no inputs")


_ANY = 1024  # inputs of Concat and Sum, outputs of Split

OPERATORS: dict[str, Rule] = {
    "Abs": Rule(act.plain(activations.Abs)),
    "Add": Rule(linear.sum_with(operator.add), 2, 2),
    "Atan": Rule(act.plain(activations.Atan)),
    "AveragePool": Rule(sliding.average_pool),
    "BatchNormalization": Rule(linear.batch_norm, 5, 5),
    "Cast": Rule(shapes.cast),
    "Celu": Rule(act.celu),
    "Clip": Rule(act.clip, 1, 3),
    "Concat": Rule(shapes.concat, 1, _ANY),
    "Constant": Rule(_only_constants, 0, 0),
    "Conv": Rule(sliding.conv, 2, 3),
    "Cos": Rule(act.plain(activations.Cos)),
    "Div": Rule(linear.div, 2, 2),
    "Dropout": Rule(shapes.dropout, 1, 3, 2),
    "Elu": Rule(act.elu),
    "Flatten": Rule(shapes.flatten),
    "Gather": Rule(shapes.gather, 2, 2),
    "Gelu": Rule(act.gelu),
    "Gemm": Rule(linear.gemm, 2, 3),
    "GlobalAveragePool": Rule(sliding.global_average_pool),
    "HardSigmoid": Rule(act.hard_sigmoid),
    "HardSwish": Rule(act.plain(nn.Hardswish)),
    "Identity": Rule(shapes.identity),
    "LeakyRelu": Rule(act.leaky_relu),
    "MatMul": Rule(linear.matmul, 2, 2),
    "MaxPool": Rule(sliding.max_pool, 1, 1, 2),
    "Mish": Rule(act.plain(nn.Mish)),
    "Mul": Rule(linear.mul, 2, 2),
    "Neg": Rule(linear.neg),
    "PRelu": Rule(act.prelu, 2, 2),
    "ReduceMean": Rule(linear.reduce_with(torch.mean), 1, 2),
    "ReduceSum": Rule(linear.reduce_with(torch.sum), 1, 2),
    "Relu": Rule(act.plain(nn.ReLU)),
    "Reshape": Rule(shapes.reshape, 2, 2),
    "Selu": Rule(act.selu),
    "Shape": Rule(shapes.shape),
    "Shrink": Rule(act.shrink),
    "Sigmoid": Rule(act.sigmoid),
    "Sin": Rule(act.plain(activations.Sin)),
    "Slice": Rule(shapes.slice_, 1, 5),
    "Softplus": Rule(act.plain(nn.Softplus)),
    "Softsign": Rule(act.plain(nn.Softsign)),
    "Split": Rule(shapes.split, 1, 2, _ANY),
    "Squeeze": Rule(shapes.squeeze, 1, 2),
    "Sub": Rule(linear.sum_with(operator.sub), 2, 2),
    "Sum": Rule(linear.sum_all, 1, _ANY),
    "Swish": Rule(act.swish),
    "Tanh": Rule(act.plain(nn.Tanh)),
    "TopK": Rule(act.sort, 2, 2, 2),
    "Transpose": Rule(shapes.transpose),
    "Unsqueeze": Rule(shapes.unsqueeze, 1, 2),
}
"""What is understood, by operator."""

_LOGITS = "mixes all entries; certify the logits: pass the name of its input as output_name"
_POWER = "is no activation with bounded slopes; use a known one"
_RECURRENT = "recurrent layers use one matrix many times; unroll the recursion"
_NORM = "divides by a statistic of its input and is not globally Lipschitz"
_QUANTISED = "quantised operators are not continuous; export the model in floating point"
_FLOW = "branches, loops and sequences are not understood; export without control flow"
_HINTS: dict[str, str] = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "ArgMax", "ArgMin"), _LOGITS),
    **dict.fromkeys(("Exp", "Log", "Pow", "Sqrt", "Reciprocal", "Sinh", "Cosh", "Tan", "ThresholdedRelu"), _POWER),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _RECURRENT),
    **dict.fromkeys(
        (
            "LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization", "LRN",
            "LpNormalization", "MeanVarianceNormalization",
        ),
        _NORM,
    ),
    **dict.fromkeys(
        (
            "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul",
            "ConvInteger", "MatMulInteger",
        ),
        _QUANTISED,
    ),
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _FLOW),
    "Attention": PRODUCT,
    "ConvTranspose": "transposed convolutions are not understood; use Conv or Gemm",
    "Erf": "is understood as a part of Gelu only; export with operator set 20, where Gelu is one operator",
    "Max": "takes a maximum over several values; for a constant bound use Clip",
    "Min": "takes a minimum over several values; for a constant bound use Clip",
    "Pad": "is not understood; use the pads of the convolution behind it",
}  # fmt: skip


def refusal(name: str) -> str:
    """Why an operator is not understood."""
    hint = _HINTS.get(name)
    return hint if hint is not None else f"the operator is not understood; known are {', '.join(OPERATORS)}"
