"""Networks read from ONNX files: the same outputs as onnxruntime, or a refusal that names the node."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import ldlt  # noqa: E402
from ldlt.activations import slope_bounds  # noqa: E402
from ldlt.errors import LdltError, MissingExtraError, OnnxError, OptionError  # noqa: E402
from ldlt.files import OnnxLimits, read_onnx  # noqa: E402
from ldlt.files.operators import OPERATORS  # noqa: E402
from ldlt.graph import Affine, evaluate  # noqa: E402
from ldlt.graph.trace import trace  # noqa: E402

ort.set_default_logger_severity(4)
RNG = np.random.default_rng(0)
KINDS = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float64): TensorProto.DOUBLE}


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def node(op: str, inputs: str, output: str = "y", **attributes: Any) -> Any:
    names = ["" if n == "_" else n for n in inputs.split()]
    return helper.make_node(op, names, output.split(), name=f"the_{op}" if output == "y" else "", **attributes)


def model(
    nodes: Sequence[Any],
    constants: dict[str, np.ndarray] | None = None,
    shape: Sequence[Any] = ("n", 4),
    *,
    opset: int = 20,
    kind: int = TensorProto.FLOAT,
    out_kind: int | None = None,
    outputs: Sequence[str] = ("y",),
) -> Any:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", kind, list(shape))],
        [helper.make_tensor_value_info(o, out_kind or kind, None) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def raw(*args: Any, **kwargs: Any) -> bytes:
    return model(*args, **kwargs).SerializeToString()


def session(data: bytes) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def same(data: bytes, *, traced: bool = True, **options: Any) -> Any:
    """Read a file and compare it with onnxruntime, and its graph with the module."""
    network = read_onnx(data, **options)
    run = session(data)
    declared = run.get_inputs()[0]
    double = "double" in declared.type
    batch = declared.shape[0] if isinstance(declared.shape[0], int) else 3
    x = 2 * RNG.standard_normal((batch, *network.input_shape)).astype(np.float64 if double else np.float32)
    wanted = run.run([network.output_name], {network.input_name: x})[0]
    own = [t.dtype for t in network.module.state_dict().values() if t.is_floating_point()]
    inner = torch.from_numpy(x).to(own[0] if own else None)
    with torch.no_grad():
        found = network.module(inner)
    assert wanted.shape == (batch, *network.output_shape)
    scale = 1 + np.abs(wanted).max()
    tolerance = 1e-9 if double and wanted.dtype == np.float64 else 2e-6
    np.testing.assert_allclose(found.numpy(), wanted.reshape(batch, -1), rtol=1e-5, atol=tolerance * scale)
    if traced:
        graph = trace(network.module, network.input_shape)
        with torch.no_grad():
            assert torch.allclose(evaluate(graph, network.module, inner), found, atol=1e-5 * scale)
    return network


def head(inputs: int = 4, outputs: int = 3, source: str = "h", target: str = "y") -> tuple[Any, dict[str, np.ndarray]]:
    """A last layer, so that what is tested is inside the network."""
    return node("MatMul", f"{source} head", target), {"head": floats(inputs, outputs)}


# -- operators one by one ----------------------------------------------------------------------------------------------

W, B = floats(4, 5), floats(5)
ACTIVATIONS: list[tuple[str, dict[str, Any]]] = [
    ("Relu", {}), ("LeakyRelu", {}), ("LeakyRelu", {"alpha": 0.3}), ("Sigmoid", {}), ("Tanh", {}), ("Elu", {}),
    ("Elu", {"alpha": 0.5}), ("Celu", {"alpha": 0.7}), ("Selu", {}), ("Selu", {"alpha": 1.2, "gamma": 0.8}),
    ("Softplus", {}), ("Softsign", {}), ("Gelu", {}), ("Gelu", {"approximate": "tanh"}), ("HardSigmoid", {}),
    ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}), ("HardSigmoid", {"alpha": 0.4, "beta": 0.1}), ("HardSwish", {}),
    ("HardSigmoid", {"alpha": 0.0, "beta": 0.1}), ("Mish", {}), ("Abs", {}), ("Sin", {}), ("Cos", {}), ("Atan", {}),
    ("Shrink", {"bias": 0.5, "lambd": 0.5}), ("Neg", {}), ("Identity", {}), ("Dropout", {}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "attributes"), ACTIVATIONS)
def test_activations(op, attributes):
    last, constants = head()
    same(raw([node(op, "x", "h", **attributes), last], constants))


# operator, inputs, constants, shape of the input, attributes; the result may have any shape
CASES: list[tuple[str, str, dict[str, np.ndarray], tuple[Any, ...], dict[str, Any]]] = [
    ("Gemm", "x w b", {"w": W, "b": B}, ("n", 4), {}),
    ("Gemm", "x w", {"w": W}, ("n", 4), {}),
    ("Gemm", "x w b", {"w": W.T.copy(), "b": B[None]}, ("n", 4), {"transB": 1, "alpha": 0.5, "beta": -2.0}),
    ("Gemm", "x w b", {"w": W, "b": floats()}, ("n", 4), {"beta": 0.3}),
    ("Gemm", "x w b", {"w": W, "b": floats(1, 1)}, (1, 4), {}),
    ("Gemm", "x w b", {"w": W, "b": B}, ("n", 4), {"beta": 0.0}),
    ("Gemm", "x w x", {"w": floats(4, 4)}, ("n", 4), {"beta": 0.5}),
    ("MatMul", "x w", {"w": W}, ("n", 4), {}),
    ("MatMul", "x w", {"w": floats(4)}, ("n", 4), {}),
    ("MatMul", "x w", {"w": floats(4)}, ("n", 3, 4), {}),
    ("MatMul", "x w", {"w": floats(4, 5)}, ("n", 3, 4), {}),
    ("MatMul", "x w", {"w": floats(1, 4, 5)}, ("n", 3, 4), {}),
    ("MatMul", "x w", {"w": floats(2, 4, 5)}, ("n", 2, 3, 4), {}),
    ("MatMul", "x w", {"w": floats(1, 2, 4, 5)}, ("n", 1, 3, 4), {}),
    ("MatMul", "w x", {"w": floats(5, 3)}, ("n", 3, 4), {}),
    ("MatMul", "w x", {"w": floats(3)}, ("n", 3, 4), {}),
    ("MatMul", "w x", {"w": floats(1, 5, 3)}, ("n", 2, 3, 4), {}),
    ("Add", "x c", {"c": floats(4)}, ("n", 4), {}),
    ("Add", "c x", {"c": floats(1, 4)}, ("n", 4), {}),
    ("Add", "x c", {"c": floats()}, ("n", 4), {}),
    ("Add", "x c", {"c": floats(5)}, ("n", 1), {}),
    ("Add", "x c", {"c": floats(3, 1)}, ("n", 3, 4), {}),
    ("Add", "x c", {"c": floats(1, 2, 3, 4)}, ("n", 2, 1, 4), {}),
    ("Add", "x x", {}, ("n", 4), {}),
    ("Sum", "x x x", {}, ("n", 4), {}),
    ("Sub", "x c", {"c": floats(4)}, ("n", 4), {}),
    ("Sub", "c x", {"c": floats(4)}, ("n", 4), {}),
    ("Sub", "c x", {"c": floats()}, ("n", 4), {}),
    ("Mul", "x c", {"c": floats(4)}, ("n", 4), {}),
    ("Mul", "c x", {"c": floats()}, ("n", 4), {}),
    ("Mul", "x c", {"c": np.zeros((), np.float32)}, ("n", 4), {}),
    ("Mul", "x c", {"c": np.ones((), np.float32)}, ("n", 4), {}),
    ("Mul", "x c", {"c": floats(3, 4)}, ("n", 1, 4), {}),
    ("Div", "x c", {"c": floats(4)}, ("n", 4), {}),
    ("Div", "x c", {"c": floats(1, 1)}, ("n", 4), {}),
    ("PRelu", "x c", {"c": floats(1)}, ("n", 4), {}),
    ("PRelu", "x c", {"c": floats(4)}, ("n", 4), {}),
    ("PRelu", "x c", {"c": floats(2, 1, 1)}, ("n", 2, 3, 4), {}),
    ("Clip", "x a b", {"a": np.float32(-0.5).reshape(()), "b": np.float32(1).reshape(())}, ("n", 4), {}),
    ("Clip", "x _ b", {"b": np.float32(1).reshape(())}, ("n", 4), {}),
    ("Clip", "x a b", {"a": np.float32(1).reshape(()), "b": np.float32(np.inf).reshape(())}, ("n", 4), {}),
    ("Clip", "x", {}, ("n", 4), {}),
    ("Flatten", "x", {}, ("n", 2, 3), {}),
    ("Flatten", "x", {}, ("n", 1, 3), {"axis": -1}),
    ("Flatten", "x", {}, ("n", 2, 3), {"axis": 1}),
    ("Reshape", "x s", {"s": ints(0, -1)}, ("n", 2, 3), {}),
    ("Reshape", "x s", {"s": ints(-1, 6)}, ("n", 2, 3), {}),
    ("Reshape", "x s", {"s": ints(-1, 3, 2)}, ("n", 2, 3), {"allowzero": 1}),
    ("Reshape", "x s", {"s": ints(0, 0, 3, 1)}, ("n", 2, 3), {}),
    ("Reshape", "x s", {"s": ints(1, 6)}, (1, 2, 3), {}),
    ("Reshape", "x s", {"s": ints(2, -1)}, (2, 2, 3), {}),
    ("Transpose", "x", {}, ("n", 2, 3), {"perm": [0, 2, 1]}),
    ("Transpose", "x", {}, ("n", 2, 3, 4), {"perm": [0, 3, 1, 2]}),
    ("Squeeze", "x a", {"a": ints(1)}, ("n", 1, 3), {}),
    ("Squeeze", "x a", {"a": ints(-1, 1)}, ("n", 1, 3, 1), {}),
    ("Squeeze", "x", {}, ("n", 1, 3, 1), {}),
    ("Squeeze", "x a", {"a": ints(1)}, ("n", 1), {}),
    ("Unsqueeze", "x a", {"a": ints(1, -1)}, ("n", 3), {}),
    ("Slice", "x a b", {"a": ints(0, 1), "b": ints(2**62, 3)}, ("n", 4), {}),
    ("Slice", "x a b c", {"a": ints(1), "b": ints(-1), "c": ints(-1)}, ("n", 2, 4), {}),
    ("Slice", "x a b c d", {"a": ints(-1), "b": ints(-100), "c": ints(1), "d": ints(-2)}, ("n", 5), {}),
    ("Slice", "x a b c d", {"a": ints(1, 0), "b": ints(9, 9), "c": ints(2, 1), "d": ints(2, 1)}, ("n", 2, 6), {}),
    ("Slice", "x a b c d", {"a": ints(1), "b": ints(9), "c": ints(1), "d": ints(2**62)}, ("n", 6), {}),
    ("Slice", "x a b c d", {"a": ints(4), "b": ints(-9), "c": ints(1), "d": ints(-(2**62))}, ("n", 6), {}),
    ("Gather", "x i", {"i": ints(2, 0, -1, 2)}, ("n", 4), {"axis": 1}),
    ("Gather", "x i", {"i": np.array(1, np.int64)}, ("n", 3, 4), {"axis": 2}),
    ("Gather", "x i", {"i": ints(1, 0, 2, 1).reshape(2, 2)}, ("n", 2, 4), {"axis": -1}),
    ("ReduceSum", "x a", {"a": ints(1)}, ("n", 3, 4), {}),
    ("ReduceSum", "x a", {"a": ints(-1, 1)}, ("n", 3, 4), {"keepdims": 0}),
    ("ReduceMean", "x a", {"a": ints(2)}, ("n", 3, 4), {"keepdims": 0}),
    ("ReduceSum", "x", {}, ("n", 3), {"noop_with_empty_axes": 1}),
    ("GlobalAveragePool", "x", {}, ("n", 2, 3, 4), {}),
    ("Concat", "x x", {}, ("n", 2, 3), {"axis": -1}),
    ("Max", "x c", {"c": floats()}, ("n", 4), {}),
    ("Max", "x x", {}, ("n", 4), {}),
    ("Min", "c x", {"c": floats(1)}, ("n", 4), {}),
    ("ReduceMax", "x a", {"a": ints(2)}, ("n", 2, 3), {"keepdims": 0}),
    ("ReduceMin", "x a", {"a": ints(1, 2)}, ("n", 2, 3), {}),
    ("GlobalMaxPool", "x", {}, ("n", 2, 3, 4), {}),
    ("Softmax", "x", {}, ("n", 4), {}),
    ("Softmax", "x", {}, ("n", 2, 4), {"axis": 1}),
    ("Expand", "x s", {"s": ints(1, 3, 4)}, ("n", 1, 4), {}),
    ("Pad", "x p", {"p": ints(0, 1, 0, 2)}, ("n", 4), {}),
    ("Pad", "x p v", {"p": ints(0, 0, 1, 0, 2, -1), "v": floats()}, ("n", 2, 4), {}),
    ("Pad", "x p", {"p": ints(0, 0, 1, 2, 0, 0, 0, 3)}, ("n", 2, 3, 4), {"mode": "wrap"}),
    ("Pad", "x p _ a", {"p": ints(1, 2), "a": ints(-1)}, ("n", 2, 4), {"mode": "reflect"}),
    ("Pad", "x p", {"p": ints(0, 0, 1, 0, 0, 2)}, ("n", 2, 4), {"mode": "edge"}),
    ("ConvTranspose", "x w b", {"w": floats(2, 3, 3, 2), "b": floats(3)}, ("n", 2, 4, 3), {}),
    ("ConvTranspose", "x w", {"w": floats(4, 1, 3)}, ("n", 4, 5),
     {"group": 2, "strides": [2], "pads": [1, 1], "output_padding": [1]}),
    ("Conv", "x w", {"w": floats(2, 1, 2, 2, 2)}, ("n", 1, 3, 3, 3), {}),
    ("Concat", "x", {}, ("n", 2), {"axis": 1}),
    ("Cast", "x", {}, ("n", 2), {"to": TensorProto.FLOAT}),
    ("BatchNormalization", "x s b m v", {"s": floats(3), "b": floats(3), "m": floats(3), "v": floats(3) ** 2},
     ("n", 3), {"epsilon": 1e-3}),
    ("BatchNormalization", "x s b m v", {"s": floats(3), "b": floats(3), "m": floats(3), "v": floats(3) ** 2},
     ("n", 3, 2, 2), {"momentum": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_operators(case):
    op, inputs, constants, shape, attributes = case
    same(raw([node(op, inputs, **attributes)], constants, shape))


CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 5, 5), (2, 1, 3, 3), {}),
    ((2, 6, 5), (4, 2, 3, 2), {"strides": [2, 1], "pads": [1, 0, 2, 1]}),
    ((4, 7, 6), (6, 2, 3, 3), {"group": 2, "dilations": [2, 1], "pads": [2, 1, 1, 0]}),
    ((3, 5, 5), (3, 1, 3, 3), {"group": 3, "kernel_shape": [3, 3]}),
    ((2, 6, 7), (3, 2, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    ((2, 6, 7), (3, 2, 2, 4), {"auto_pad": "SAME_LOWER", "strides": [1, 2]}),
    ((2, 6, 7), (3, 2, 3, 3), {"auto_pad": "VALID"}),
    ((2, 6, 7), (3, 2, 1, 1), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((2, 6, 7), (3, 2, 1, 1), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    ((2, 9), (3, 2, 4), {"strides": [2], "pads": [3, 0]}),
    ((4, 9), (4, 2, 3), {"group": 2, "dilations": [3]}),
    ((2, 3, 3), (3, 2, 1, 1), {"strides": [5, 5], "pads": [4, 4, 4, 4]}),
]


@pytest.mark.parametrize(("shape", "weight", "attributes"), CONVOLUTIONS)
def test_convolutions(shape, weight, attributes):
    constants = {"w": floats(*weight), "b": floats(weight[0])}
    network = same(raw([node("Conv", "x w b", **attributes)], constants, ("n", *shape)))
    assert np.array_equal(network.module.conv_0_weight.detach().numpy(), constants["w"])
    # onnxruntime has no convolution in float64
    wide = {k: v.astype(np.float64) for k, v in constants.items()}
    double = read_onnx(raw([node("Conv", "x w b", **attributes)], wide, ("n", *shape), kind=TensorProto.DOUBLE))
    assert double.module.conv_0_weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((2, 4, 4), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ((2, 5, 6), {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0]}),
        ((2, 5, 6), {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0], "count_include_pad": 1}),
        ((2, 5, 6), {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        ((3, 8), {"kernel_shape": [4], "strides": [2]}),
        ((3, 8), {"kernel_shape": [2], "strides": [2], "ceil_mode": 1}),
    ],
)
def test_average_pools(shape, attributes):
    same(raw([node("AveragePool", "x", **attributes)], {}, ("n", *shape)))


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((2, 4, 6), {"kernel_shape": [2, 3], "strides": [2, 3]}),
        ((2, 6), {"kernel_shape": [2], "strides": [2], "ceil_mode": 1, "storage_order": 1}),
        ((2, 6, 5), {"kernel_shape": [3, 2], "pads": [1, 0, 1, 0], "strides": [2, 1]}),
        ((2, 7), {"kernel_shape": [2], "dilations": [2]}),
    ],
)
def test_max_pools(shape, attributes):
    same(raw([node("MaxPool", "x", **attributes)], {}, ("n", *shape)))


@pytest.mark.parametrize("shape", [(6,), (3, 2), (2, 3), (2, 2, 4)])
@pytest.mark.parametrize("largest", [0, 1])
def test_sorts(shape, largest):
    same(raw([node("TopK", "x k", "y i", largest=largest)], {"k": ints(shape[-1])}, ("n", *shape)))
    same(raw([node("TopK", "x k", "y i", largest=largest, axis=1)], {"k": ints(1)}, ("n", *shape)))


def test_splits():
    parts = {"p": ints(1, 3)}
    for nodes, constants in (
        ([node("Split", "x p", "a b", axis=1)], parts),
        ([node("Split", "x", "a b", axis=1, num_outputs=2)], {}),
        ([node("Split", "x", "a c b", axis=-1, num_outputs=3)], {}),
    ):
        same(raw([*nodes, node("Concat", "b a", axis=1)], constants, ("n", 4 if len(nodes[0].output) == 2 else 7)))
    for split in ([node("Split", "x p", "y a", axis=1)], [node("Split", "x", "y a b", axis=1, num_outputs=3)]):
        with pytest.raises(OnnxError, match="entries cannot be split"):
            read_onnx(raw(split, {"p": ints(1, 2)}))


def test_old_operator_sets():
    for op, inputs, constants, attributes in (
        ("Squeeze", "x", {}, {"axes": [1]}),
        ("Slice", "x", {}, {"axes": [2], "starts": [1], "ends": [3]}),
        ("Clip", "x", {}, {"min": -0.5, "max": 0.5}),
        ("ReduceMean", "x", {}, {"axes": [1]}),
        ("ReduceSum", "x", {}, {"axes": [2], "keepdims": 0}),
        ("Unsqueeze", "x", {}, {"axes": [1]}),
        ("Dropout", "x", {}, {"ratio": 0.5}),
    ):
        same(raw([node(op, inputs, **attributes)], constants, ("n", 1, 4), opset=9))
    same(raw([node("Split", "x", "a b", axis=1, split=[1, 3]), node("Concat", "b a", axis=1)], {}, opset=9))


def test_every_operator_is_tested():
    tested = {c[0] for c in CASES} | {a[0] for a in ACTIVATIONS} | {"Conv", "Split", "Shape", "Constant"}
    tested |= {"AveragePool", "MaxPool", "TopK"}
    # onnxruntime has no kernel for Swish; Erf is a part of GELU, and ThresholdedRelu is refused
    assert set(OPERATORS) - tested == {"Swish", "Erf", "ThresholdedRelu"}


def test_swish():
    network = read_onnx(raw([node("Swish", "x")], opset=24))
    x = torch.randn(3, 4)
    assert torch.allclose(network.module(x), x * x.sigmoid())


# -- whole networks ----------------------------------------------------------------------------------------------------


def test_weights_are_kept_exactly():
    for dtype in (np.float32, np.float64):
        constants = {"w": floats(4, 5, dtype=dtype), "b": floats(5, dtype=dtype)}
        network = same(raw([node("Gemm", "x w b")], constants, kind=KINDS[np.dtype(dtype)]))
        weight, bias = (p.detach().numpy() for p in network.module.parameters())
        assert np.array_equal(weight, constants["w"].T)
        assert np.array_equal(bias, constants["b"])
        assert weight.dtype == dtype
        assert [type(n) for n in trace(network.module, (4,)).nodes][1:] == [Affine]


def test_residual_network_with_shared_weights():
    nodes = [
        node("MatMul", "x w", "a"), node("Add", "a b", "c"), node("Relu", "c", "d"),
        node("MatMul", "d w", "e"), node("Tanh", "e", "f"), node("Add", "f x", "g"), node("Sub", "g d", "h"),
        node("Concat", "h d x", "i", axis=1), node("MatMul", "i v", "y"),
    ]  # fmt: skip
    network = same(raw(nodes, {"w": floats(4, 4), "b": floats(4), "v": floats(12, 2)}))
    assert len(trace(network.module, (4,)).affines) == 3  # each use of a matrix is a layer of its own


def test_silu_in_two_nodes():
    for pair in ("x s", "s x"):
        network = same(raw([node("Sigmoid", "x", "s"), node("Mul", pair)]))
        assert [type(m) for m in network.module.children()] == [nn.SiLU]  # the sigmoid itself is not needed
    other = read_onnx(raw([node("Sigmoid", "x", "s"), node("Tanh", "x", "t"), node("Mul", "t s")]))
    with pytest.raises(LdltError, match="product"):
        trace(other.module, (4,))


def test_shapes_computed_in_the_file():
    nodes = [
        node("Shape", "x", "s"), node("Gather", "s zero", "n0", axis=0), node("Unsqueeze", "n0 axes", "n1"),
        node("Constant", "", "minus", value_ints=[-1]), node("Concat", "n1 minus", "t", axis=0),
        node("Reshape", "x t", "y"),
    ]  # fmt: skip
    for n in nodes:
        if n.op_type == "Constant":
            del n.input[:]
    network = same(raw(nodes, {"zero": np.array(0, np.int64), "axes": ints(0)}, ("n", 2, 3)))
    assert network.output_shape == (6,)
    sliced = [node("Shape", "x", "s", start=0, end=1), node("Concat", "s rest", "t", axis=0), node("Reshape", "x t")]
    same(raw(sliced, {"rest": ints(3, 2)}, ("n", 2, 3)))
    with pytest.raises(OnnxError, match="Cast node number 1: computes with the batch size"):
        read_onnx(raw([node("Shape", "x", "s"), node("Cast", "s", "f", to=1), node("Add", "x f")], {}, ("n", 2)))


def test_constants_computed_in_the_file():
    nodes = [
        node("Transpose", "w", "a", perm=[1, 0]), node("Identity", "a", "b"), node("Mul", "b two", "c"),
        node("Reshape", "c s", "d"), node("Slice", "d lo hi", "e"), node("Neg", "e", "f"),
        node("Squeeze", "u", "u1"), node("Add", "f u1", "g"), node("MatMul", "x g"),
    ]  # fmt: skip
    constants = {
        "w": floats(5, 4), "two": np.float32(2).reshape(()), "s": ints(0, -1), "lo": ints(0, 1), "hi": ints(4, 4),
        "u": floats(1, 3),
    }  # fmt: skip
    same(raw(nodes, constants))


def test_widths():
    """A file that changes between float32 and float64 is computed in float64."""
    nodes = [node("Cast", "x", "a", to=TensorProto.DOUBLE), node("MatMul", "a w", "b"), node("Cast", "b", to=1)]
    network = same(raw(nodes, {"w": floats(4, 3, dtype=np.float64)}))
    assert network.module.matmul_1_weight.dtype == torch.float64
    with pytest.raises(OnnxError, match="'the_MatMul': mixes 32- and 64-bit"):
        read_onnx(raw([node("MatMul", "x w")], {"w": floats(4, 3, dtype=np.float64)}))


def test_outputs_of_other_shapes_are_flattened():
    network = same(raw([node("Relu", "x")], {}, ("n", 2, 3)))
    assert network.output_shape == (2, 3)
    assert network.module(torch.randn(5, 2, 3)).shape == (5, 6)


def test_selection():
    nodes = [node("Relu", "x", "a"), node("MatMul", "a w", "y"), node("Hardmax", "y", "p")]
    data = raw(nodes, {"w": W}, outputs=("y", "p", "a"))
    with pytest.raises(OnnxError, match="exactly one output is expected, there are 3: 'y', 'p', 'a'"):
        read_onnx(data)
    assert read_onnx(data, output_name="y").output_shape == (5,)
    assert read_onnx(data, output_name="a").output_shape == (4,)
    with pytest.raises(OnnxError, match="Hardmax node number 2: .*output_name"):
        read_onnx(data, output_name="p")
    with pytest.raises(OnnxError, match="nothing in the file defines the output 'q'"):
        read_onnx(data, output_name="q")

    two = model([node("Add", "x z")])
    two.graph.input.append(helper.make_tensor_value_info("z", 1, ["n", 4]))
    with pytest.raises(OnnxError, match="exactly one input"):
        read_onnx(two.SerializeToString())
    with pytest.raises(OnnxError, match="'the_Add': reads the input 'z', too"):
        read_onnx(two.SerializeToString(), input_name="x")
    with pytest.raises(OnnxError, match="no input 'q'"):
        read_onnx(two.SerializeToString(), input_name="q")
    two.graph.node[0].input[1] = "x"
    assert read_onnx(two.SerializeToString(), input_name="x").input_name == "x"


def test_input_shapes():
    data = raw([node("Relu", "x")], {}, ("n", "k"))
    with pytest.raises(OnnxError, match="leaves 1 sizes besides the batch open; pass input_shape"):
        read_onnx(data)
    assert read_onnx(data, input_shape=(6,)).output_shape == (6,)
    for wrong in ((), (0,), (2, 2)):
        with pytest.raises(OnnxError, match="does not fit"):
            read_onnx(data, input_shape=wrong)
    with pytest.raises(OnnxError, match="does not fit"):
        read_onnx(raw([node("Relu", "x")]), input_shape=(5,))
    with pytest.raises(OnnxError, match="has 1 axes; the first must be the batch"):
        read_onnx(raw([node("Relu", "x")], {}, (4,)))


def test_module_is_plain(tmp_path):
    nodes = [node("Conv", "x w", "h"), node("Relu", "h", "r"), node("Mul", "r c")]
    data = raw(nodes, {"w": floats(2, 1, 2, 2), "c": floats(2, 1, 1)}, ("n", 1, 3, 3))
    path = tmp_path / "net.onnx"
    path.write_bytes(data)
    network = read_onnx(path)
    x = torch.randn(3, 1, 3, 3)
    again = pickle.loads(pickle.dumps(network.module))
    assert torch.equal(again(x), network.module(x))
    assert torch.equal(read_onnx(str(path)).module(x), network.module(x))
    assert torch.allclose(network.module.double()(x.double()).float(), again(x), atol=1e-6)
    assert [slope_bounds(m) for m in network.module.children() if not isinstance(m, nn.Linear)] == [(0.0, 1.0)]


def test_random_numbers_are_not_drawn():
    before = torch.get_rng_state()
    read_onnx(raw([node("Gemm", "x w b"), ], {"w": W, "b": B}))  # fmt: skip
    assert torch.equal(before, torch.get_rng_state())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(12, 3)

    def forward(self, x):
        h = nn.functional.gelu(self.a(x))
        return self.c(torch.cat([h, h + nn.functional.silu(self.b(h))], 1).view(x.size(0), -1))


def exported(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    if kind == "chain":
        return nn.Sequential(nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 5), nn.LeakyReLU(0.2), nn.Linear(5, 2)), (4,)
    if kind == "residual":
        return Residual(), (4,)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 2, groups=2), nn.PReLU(2),
        nn.AvgPool2d(3), nn.Flatten(), nn.Dropout(), nn.Linear(2, 3),
    ), (1, 8, 8)  # fmt: skip


@pytest.mark.parametrize("kind", ["chain", "residual", "conv"])
@pytest.mark.parametrize("fixed", [False, True])
def test_exported_by_torch(kind, fixed):
    module, shape = exported(kind)
    module.eval()
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.randn(1, *shape),), stream, dynamo=False, input_names=["x"],
            **({} if fixed else {"dynamic_axes": {"x": {0: "n"}}}),
        )  # fmt: skip
    network = same(stream.getvalue())
    x = torch.randn(3, *shape)
    with torch.no_grad():
        assert torch.allclose(network.module(x), module(x), atol=1e-5)


@pytest.mark.slow
def test_exported_by_the_newer_exporter(tmp_path):
    pytest.importorskip("onnxscript")
    for kind in ("residual", "conv"):
        module, shape = exported(kind)
        path = tmp_path / f"{kind}.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(), (torch.randn(2, *shape),), str(path), dynamo=True, external_data=False,
                dynamic_shapes=({0: "n"},), verbose=False,
            )  # fmt: skip
        same(path.read_bytes())


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[str, str, dict[str, np.ndarray], tuple[Any, ...], dict[str, Any]]] = [
    ("Mul", "x x", {}, ("n", 4), {}),
    ("Div", "x x", {}, ("n", 4), {}),
    ("Div", "c x", {"c": floats(4)}, ("n", 4), {}),
    ("Div", "x c", {"c": np.zeros(4, np.float32)}, ("n", 4), {}),
    ("MatMul", "x x", {}, (4, 4), {}),
    ("MatMul", "c x", {"c": floats(3, 5)}, (5, 4), {}),
    ("MatMul", "x c", {"c": floats(2, 4, 3)}, ("n", 4), {}),
    ("MatMul", "x c", {"c": floats(2, 4, 3)}, (2, 5, 4), {}),
    ("MatMul", "x c", {"c": floats(5, 3)}, ("n", 4), {}),
    ("Gemm", "x c", {"c": floats(3, 2)}, (3, 4), {"transA": 1}),
    ("Gemm", "c x", {"c": floats(3, 5)}, (5, 4), {}),
    ("Gemm", "x w c", {"w": W, "c": floats(3, 5)}, (3, 4), {}),
    ("Gemm", "x w c", {"w": W, "c": floats(4)}, (3, 4), {}),
    ("Gemm", "x w", {"w": W}, ("n", 4), {"broadcast": 1}),
    ("Gemm", "x w", {"w": W}, ("n", 4), {"alpha": 1}),
    ("Gemm", "x", {}, ("n", 4), {}),
    ("Relu", "x x", {}, ("n", 4), {}),
    ("Sum", "x x _", {}, ("n", 4), {}),
    ("Add", "x c", {"c": floats(3, 4)}, (3, 4), {}),
    ("Add", "x c", {"c": floats(1, 1, 4)}, ("n", 4), {}),
    ("Add", "x c", {"c": ints(1, 2, 3, 4)}, ("n", 4), {}),
    ("Add", "x c", {"c": np.array([1, np.nan, 0, 0], np.float32)}, ("n", 4), {}),
    ("MatMul", "x c", {"c": np.full((4, 2), np.inf, np.float32)}, ("n", 4), {}),
    ("PRelu", "x c", {"c": np.full(4, np.nan, np.float32)}, ("n", 4), {}),
    ("PRelu", "x c", {"c": floats(3)}, ("n", 2, 3), {}),
    ("Clip", "x c", {"c": np.float32(np.nan).reshape(())}, ("n", 4), {}),
    ("Concat", "x x", {}, ("n", 4), {"axis": 0}),
    ("Concat", "x c", {"c": floats(1, 2)}, (1, 4), {"axis": 1}),
    ("Concat", "x x", {}, ("n", 4), {"axis": 7}),
    ("Flatten", "x", {}, ("n", 4), {"axis": 0}),
    ("Flatten", "x", {}, ("n", 2, 4), {"axis": 2}),
    ("Reshape", "x s", {"s": ints(-1)}, ("n", 4), {}),
    ("Reshape", "x s", {"s": ints(-1, 2)}, ("n", 4), {}),
    ("Reshape", "x s", {"s": ints(7, 4)}, ("n", 4), {}),
    ("Reshape", "x s", {"s": ints(0, -5)}, ("n", 4), {}),
    ("Reshape", "x s", {"s": ints(0, 2**40, 2**40)}, ("n", 4), {}),
    ("Reshape", "x x", {}, ("n", 4), {}),
    ("Transpose", "x", {}, ("n", 4), {}),
    ("Transpose", "x", {}, ("n", 4), {"perm": [0, 0]}),
    ("Squeeze", "x", {}, (1, 1, 4), {}),
    ("Squeeze", "x a", {"a": ints(0)}, (1, 4), {}),
    ("Unsqueeze", "x a", {"a": ints(0)}, ("n", 4), {}),
    ("Unsqueeze", "x a", {"a": ints(1, 1)}, ("n", 4), {}),
    ("Slice", "x a b", {"a": ints(0), "b": ints(1)}, ("n", 4), {}),
    ("Slice", "x a b c", {"a": ints(3), "b": ints(3), "c": ints(1)}, ("n", 4), {}),
    ("Gather", "x i", {"i": ints(0)}, ("n", 4), {}),
    ("Gather", "x i", {"i": ints(4)}, ("n", 4), {"axis": 1}),
    ("ReduceSum", "x", {}, ("n", 4), {}),
    ("ReduceSum", "x", {}, ("n", 4), {"noop_with_empty_axes": 2}),
    ("ReduceMean", "x a", {"a": ints(0)}, ("n", 4), {}),
    ("Cast", "x", {}, ("n", 4), {"to": TensorProto.INT64}),
    ("Cast", "x", {}, ("n", 4), {"to": TensorProto.FLOAT16}),
    ("Dropout", "x r t", {"r": np.float32(0.5).reshape(()), "t": np.array(True)}, ("n", 4), {}),
    ("Shrink", "x", {}, ("n", 4), {"bias": 0.0, "lambd": 0.5}),
    ("Conv", "x w", {"w": floats(2, 1, 5, 5)}, ("n", 1, 3, 3), {}),
    ("Conv", "x w", {"w": floats(2, 3, 1, 1)}, ("n", 1, 3, 3), {}),
    ("Conv", "x w", {"w": floats(2, 1, 1, 1)}, ("n", 1, 3, 3), {"pads": [2**40, 0, 0, 0]}),
    ("Conv", "x w", {"w": floats(2, 1, 1, 1)}, ("n", 1, 3, 3), {"pads": [2**30, 0, 0, 0]}),
    ("Conv", "x w", {"w": floats(2, 1, 1)}, ("n", 1, 8), {"auto_pad": "SAME_UPPER", "strides": [4]}),
    ("Conv", "x x", {}, (3, 1, 3, 3), {}),
    ("AveragePool", "x", {}, ("n", 3, 7), {"kernel_shape": [2], "strides": [2], "ceil_mode": 1}),
    ("AveragePool", "x", {}, ("n", 3, 7), {"kernel_shape": [1], "pads": [1, 1]}),
    ("TopK", "x k", {"k": ints(4)}, ("n", 4), {"sorted": 0}),
    ("LayerNormalization", "x w", {"w": floats(4)}, ("n", 4), {}),
    ("LSTM", "x", {}, ("n", 4), {}),
    ("Erf", "x", {}, ("n", 4), {}),
    ("QuantizeLinear", "x c", {"c": floats()}, ("n", 4), {}),
    ("Frobnicate", "x", {}, ("n", 4), {}),
]


@pytest.mark.parametrize("case", REFUSALS, ids=[f"{i}-{c[0]}" for i, c in enumerate(REFUSALS)])
def test_refusals(case):
    """By the reader, with the name of the node, or by the table of operations when the network is traced."""
    op, inputs, constants, shape, attributes = case
    data = raw([node(op, inputs, **attributes)], constants, shape)
    with pytest.raises(LdltError) as caught:
        trace(read_onnx(data).module, tuple(shape[1:]))
    if isinstance(caught.value, OnnxError) and op != "Div":  # 0 / 0
        assert f"{op} node 'the_{op}': " in str(caught.value)


def test_refusals_of_batch_normalisation():
    constants = {"s": floats(3), "b": floats(3), "m": floats(3), "v": floats(3) ** 2}
    with pytest.raises(OnnxError, match="evaluation mode"):
        read_onnx(raw([node("BatchNormalization", "x s b m v", training_mode=1)], constants, ("n", 3)))
    with pytest.raises(OnnxError, match="evaluation mode"):
        read_onnx(raw([node("BatchNormalization", "x s b m v", "y q r")], constants, ("n", 3)))
    with pytest.raises(OnnxError, match="variance is not positive"):
        read_onnx(raw([node("BatchNormalization", "x s b m v")], {**constants, "v": -np.ones(3, np.float32)}, ("n", 3)))


def test_a_result_that_is_not_computed():
    with pytest.raises(OnnxError, match="optional result"):
        read_onnx(raw([node("Dropout", "x", "a mask"), node("Relu", "mask")]))


def test_constant_output():
    with pytest.raises(OnnxError, match="does not depend on the input"):
        read_onnx(raw([node("Identity", "c")], {"c": floats(1, 4)}))
    with pytest.raises(OnnxError, match="does not depend on the input"):
        read_onnx(raw([node("Relu", "c")], {"c": floats(1, 4)}))


def changed(change: Any, **options: Any) -> bytes:
    found = model([node("Gemm", "x w b", "h"), node("Relu", "h")], {"w": W, "b": B}, **options)
    change(found)
    return found.SerializeToString()


def _set(target: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(target, name, value)


def _external(m: Any) -> None:
    tensor = m.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../secret.bin"


def _branch(m: Any) -> None:
    m.graph.node[1].CopyFrom(node("If", "h", then_branch=m.graph))


STRUCTURE: list[tuple[str, Any]] = [
    ("domain 'com.example'", lambda m: _set(m.graph.node[1], domain="com.example")),
    ("own function", lambda m: m.functions.add()),
    ("training graph", lambda m: m.training_info.add()),
    ("sparse initialisers", lambda m: m.graph.sparse_initializer.add()),
    ("quantised", lambda m: m.graph.quantization_annotation.add()),
    ("values are in another file", _external),
    ("If node 'the_If': branches and loops", _branch),
    ("operator set 99 is not known", lambda m: _set(m.opset_import[0], version=99)),
    ("operator set None", lambda m: m.ClearField("opset_import")),
    ("operator set None", lambda m: m.opset_import.add(domain="ai.onnx", version=7)),
    ("newer package", lambda m: _set(m, ir_version=99)),
    ("is declared as INT64", lambda m: _set(m.graph.output[0].type.tensor_type, elem_type=7)),
    ("is declared as FLOAT", lambda m: m.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, ["n", 9]))),
    ("is declared as FLOAT", lambda m: m.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, ["n"]))),
    ("no graph", lambda m: m.ClearField("graph")),
    ("exactly one input is expected, there are 0", lambda m: m.graph.ClearField("input")),
    ("exactly one output is expected, there are 0", lambda m: m.graph.ClearField("output")),
    ("two inputs are called 'x'", lambda m: m.graph.input.append(m.graph.input[0])),
    ("two initialisers are called 'w'", lambda m: m.graph.initializer.append(m.graph.initializer[0])),
    ("'the_Relu': the name 'h' is defined twice", lambda m: m.graph.node[1].output.__setitem__(0, "h")),
    ("the name 'x' is defined twice", lambda m: m.graph.node[0].output.append("x")),
    ("reads 'y', which nothing before", lambda m: m.graph.node[0].input.__setitem__(0, "y")),
    ("'the_Relu': reads 'y', which nothing before", lambda m: m.graph.node[1].input.__setitem__(0, "y")),
    ("Gemm node number 0: reads 'q', which nothing before", lambda m: m.graph.node[0].input.__setitem__(1, "q")),
    ("impossible shape", lambda m: m.graph.initializer[0].dims.__setitem__(0, -4)),
    ("impossible shape", lambda m: m.graph.initializer[0].dims.extend([1] * 50)),
    ("impossible", lambda m: m.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=1, dims=[2**40, 0]))),
    ("more than", lambda m: m.graph.initializer[0].dims.__setitem__(0, 2**62)),
    (r"shape \[4, 6\] does not fit 80 bytes", lambda m: m.graph.initializer[0].dims.__setitem__(1, 6)),
    ("several types", lambda m: m.graph.initializer[0].float_data.append(1.0)),
    ("elements of type FLOAT16", lambda m: _set(m.graph.initializer[0], data_type=10)),
    ("elements of type COMPLEX64", lambda m: _set(m.graph.initializer[0], data_type=14)),
    ("elements of type STRING", lambda m: _set(m.graph.initializer[0], data_type=8)),
    ("elements of type 77", lambda m: _set(m.graph.initializer[0], data_type=77)),
    ("must be a tensor", lambda m: m.graph.input[0].type.sequence_type.SetInParent()),
    ("elements of type INT64; FLOAT or DOUBLE", lambda m: _set(m.graph.input[0].type.tensor_type, elem_type=7)),
    ("no declared shape", lambda m: m.graph.input[0].type.tensor_type.ClearField("shape")),
    ("dimension of size -1", lambda m: _set(m.graph.input[0].type.tensor_type.shape.dim[1], dim_value=-1)),
    ("dimension of size 0", lambda m: _set(m.graph.input[0].type.tensor_type.shape.dim[0], dim_value=0)),
    ("do not fit", lambda m: _set(m.graph.input[0].type.tensor_type.shape.dim[1], dim_value=5)),
    ("raise the limit 'features'", lambda m: _set(m.graph.input[0].type.tensor_type.shape.dim[1], dim_value=2**62)),
    ("given twice", lambda m: m.graph.node[0].attribute.extend([helper.make_attribute("alpha", 1.0)] * 2)),
    ("calls a function", lambda m: _set(m.graph.node[0], overload="f")),
]  # fmt: skip


@pytest.mark.parametrize("case", STRUCTURE, ids=[f"{i}-{c[0][:30]}" for i, c in enumerate(STRUCTURE)])
def test_refusals_of_the_structure(case):
    reason, change = case
    with pytest.raises(OnnxError, match=reason):
        read_onnx(changed(change))


def test_initialisers_that_are_listed_as_inputs():
    same(changed(lambda m: m.graph.input.append(helper.make_tensor_value_info("w", 1, [4, 5]))))


def test_values_one_by_one():
    def unpack(m: Any) -> None:
        m.graph.initializer[0].CopyFrom(helper.make_tensor("w", 1, [4, 5], W.reshape(-1).tolist()))

    same(changed(unpack))


def test_names_are_never_code():
    wild = "__import__('os').system('false')\n\x1b[31m"

    def rename(m: Any) -> None:
        m.graph.node[1].name = m.graph.name = m.producer_name = wild
        m.graph.node[0].output[0] = m.graph.node[1].input[0] = wild

    network = same(changed(rename))
    assert [n for n, _ in network.module.named_children()] == ["relu_1"]
    with pytest.raises(OnnxError) as caught:
        read_onnx(changed(lambda m: (rename(m), _set(m.graph.node[1], op_type="Bad" + "x" * 500 + "\n"))))
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_paths(tmp_path):
    with pytest.raises(OnnxError, match="cannot be read"):
        read_onnx(tmp_path / "missing.onnx")
    with pytest.raises(OnnxError, match="is not a file"):
        read_onnx(tmp_path)
    with pytest.raises(OnnxError, match="cannot be read"):
        read_onnx("a\0b")
    with pytest.raises(OnnxError, match="a path or bytes"):
        read_onnx(3)  # type: ignore[arg-type]
    (tmp_path / "large.onnx").write_bytes(b"\0" * 100)
    with pytest.raises(OnnxError, match="raise the limit 'file_bytes'"):
        read_onnx(tmp_path / "large.onnx", limits=OnnxLimits(file_bytes=99))


def test_limits():
    data = changed(lambda m: None)
    for limits, reason in (
        ({"nodes": 1}, "2 nodes are more than 1"),
        ({"fields": 20}, "more than 20 entries"),
        ({"elements": 40}, "raise the limit 'elements'"),
        ({"features": 4}, "Gemm node number 0: the result has 5 entries per sample"),
        ({"file_bytes": 10}, "raise the limit 'file_bytes'"),
    ):
        with pytest.raises(OnnxError, match=reason):
            read_onnx(data, limits=OnnxLimits(**limits))
    for wrong in (0, -1, True, 2.0):
        with pytest.raises(OptionError, match="nodes"):
            OnnxLimits(nodes=wrong)  # type: ignore[arg-type]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match="ldlt\\[files\\]"):
        read_onnx(b"")


# -- hostile files -----------------------------------------------------------------------------------------------------


def refused_or_right(data: bytes) -> bool:
    """Whether the file is accepted; if so, and onnxruntime accepts it too, the outputs are the same."""
    try:
        network = read_onnx(data, limits=OnnxLimits(elements=2**20, features=2**14))
    except OnnxError as error:
        if str(error).startswith("unforeseen"):  # the net below all checks; nothing should fall into it
            raise
        return False
    x = torch.randn(1, *network.input_shape, dtype=next(network.module.parameters(), torch.empty(0)).dtype)
    with torch.no_grad():
        found = network.module(x)
    try:
        run = session(data)
        wanted = run.run([network.output_name], {network.input_name: x.numpy()})[0]
    except Exception:
        return True  # onnxruntime is stricter about types and names
    if np.isfinite(wanted).all() and np.abs(wanted).max() < 1e30:
        np.testing.assert_allclose(
            found.numpy().reshape(-1), wanted.reshape(-1), rtol=1e-4, atol=1e-4 * (1 + np.abs(wanted).max())
        )
    return True


SEEDS = [
    changed(lambda m: None),
    raw(
        [node("Conv", "x w b", "h", pads=[1, 1, 1, 1], strides=[2, 2]), node("Relu", "h", "r"),
         node("AveragePool", "r", "p", kernel_shape=[2, 2]), node("Flatten", "p", "f"), node("Gemm", "f v", transB=1)],
        {"w": floats(2, 1, 3, 3), "b": floats(2), "v": floats(3, 2)}, ("n", 1, 4, 4),
    ),
    raw(
        [node("Slice", "x a b", "h"), node("Concat", "h x", "c", axis=1), node("Reshape", "c s", "r"),
         node("Transpose", "r", "t", perm=[0, 2, 1]), node("MatMul", "t w", "m"), node("ReduceSum", "m e")],
        {"a": ints(0, 1), "b": ints(2**40, 3), "s": ints(0, 2, -1), "w": floats(2, 3), "e": ints(1)},
    ),
]  # fmt: skip


@pytest.mark.parametrize("data", SEEDS)
def test_seeds_are_right(data):
    assert refused_or_right(data)


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x3a\x00")
@settings(max_examples=200)
def test_random_bytes(data):
    assert not refused_or_right(data)


@pytest.mark.parametrize("data", SEEDS)
def test_truncations(data):
    for cut in range(len(data)):
        refused_or_right(data[:cut])


FILES = SEEDS + [raw([node(op, i, **more)], constants, shape) for op, i, constants, shape, more in CASES]


@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=1000)
def test_changed_bytes(seed, changes):
    data = bytearray(seed)
    for place, value in changes:
        data[place % len(data)] = value
    refused_or_right(bytes(data))


@given(st.sampled_from(FILES), st.integers(0, 10**6), st.binary(max_size=12), st.integers(0, 12))
@settings(max_examples=400)
def test_spliced_bytes(data, place, extra, dropped):
    place %= len(data)
    refused_or_right(data[:place] + extra + data[place + dropped :])


def parts_of(message):
    """Every field of a message and of those inside, as (message, field)."""
    for field, value in message.ListFields():
        yield message, field
        if field.type == field.TYPE_MESSAGE:
            for inner in value if isinstance(value, Sequence) else [value]:
                yield from parts_of(inner)


def mutated(data, draw):
    """A file with one field changed, dropped, repeated, or taken from another place."""
    found = onnx.ModelProto.FromString(data)
    owner, field = draw.choice(list(parts_of(found)))
    value = getattr(owner, field.name)
    many = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    deed = draw.randrange(4)
    if deed == 0:
        owner.ClearField(field.name)
    elif field.type == field.TYPE_MESSAGE:
        one = draw.choice(list(value)) if many else value
        others = [one, *(m for m, _ in parts_of(found) if m.DESCRIPTOR is one.DESCRIPTOR)]
        value.append(one) if many and deed == 1 else one.CopyFrom(draw.choice(others))
    else:
        one = draw.choice(list(value)) if many else value
        new = {
            int: [0, 1, -1, 2, 7, 11, 2**31 - 1, -(2**31)],
            float: [0.0, -1.0, 1e30, float("nan"), float("inf")],
            str: ["", "x", "y", "h", "Relu", "Gemm", "ldlt", "\0"],
            bytes: [b"", b"\0", bytes(one)[:-1] if isinstance(one, bytes) else b"", b"\xff" * 4],
        }[type(one)]
        changed = draw.choice(new)
        if field.type == field.TYPE_INT64:
            changed = draw.choice([changed, 2**62, -(2**63), one + 1])
        with contextlib.suppress(ValueError):  # not every number is one that protobuf lets through
            if many and deed == 1:
                value.append(changed)
            elif many:
                value[draw.randrange(len(value))] = changed
            else:
                setattr(owner, field.name, changed)
    return found.SerializeToString()


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 11))])
def test_changed_fields(part):
    draw = random.Random(part)
    for _ in range(1000):
        data = draw.choice(FILES)
        for _ in range(draw.choice([1, 1, 2])):
            data = mutated(data, draw)
        refused_or_right(data)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_changed_fields_of_a_file_with_a_certificate(count, tmp_path):
    """It is refused, or nothing that matters was changed."""
    torch.manual_seed(0)
    path = ldlt.save(ldlt.nn.FeedForward(4, [6], 3, activation=ldlt.activations.MaxMin), tmp_path / "net.onnx")
    whole, stated, draw = path.read_bytes(), ldlt.verify(path), random.Random(count)
    for _ in range(count):
        path.write_bytes(mutated(whole, draw))
        with contextlib.suppress(LdltError):
            found = ldlt.verify(path)
            assert (found.bound, found.fingerprint) == (stated.bound, stated.fingerprint)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6), st.sampled_from(["w", "x"]))
@settings(max_examples=100)
def test_huge_shapes(sizes, where):
    def change(m: Any) -> None:
        if where == "w":
            del m.graph.initializer[0].dims[:]
            m.graph.initializer[0].dims.extend(sizes)
        else:
            shape = m.graph.input[0].type.tensor_type.shape
            del shape.dim[1:]
            for size in sizes:
                shape.dim.add().dim_value = size

    assert not refused_or_right(changed(change))


@pytest.mark.parametrize(
    "op", ["Conv", "AveragePool", "Reshape", "Slice", "Unsqueeze", "Split", "ReduceSum", "Transpose", "Gather"]
)
@given(st.lists(st.one_of(st.integers(-4, 5), st.integers(-(2**63), 2**63 - 1)), min_size=4, max_size=4))
@settings(max_examples=40)
def test_wild_arguments(op, values):
    v = ints(*values)
    shape = ("n", 2, 3, 4)
    made = {
        "Conv": lambda: raw([node("Conv", "x w", pads=values, strides=values[:2])], {"w": floats(1, 2, 2, 2)}, shape),
        "AveragePool": lambda: raw([node("AveragePool", "x", kernel_shape=values[:2], strides=values[2:])], {}, shape),
        "Reshape": lambda: raw([node("Reshape", "x s")], {"s": v}, shape),
        "Slice": lambda: raw([node("Slice", "x a b c d")], {"a": v[:1], "b": v[1:2], "c": v[2:3], "d": v[3:]}, shape),
        "Unsqueeze": lambda: raw([node("Unsqueeze", "x a")], {"a": v[:2]}, shape),
        "Split": lambda: raw([node("Split", "x p", "y z", axis=values[0])], {"p": v[1:3]}, shape),
        "ReduceSum": lambda: raw([node("ReduceSum", "x a")], {"a": v[:2]}, shape),
        "Transpose": lambda: raw([node("Transpose", "x", perm=values)], {}, shape),
        "Gather": lambda: raw([node("Gather", "x i", axis=values[0])], {"i": v[1:]}, shape),
    }[op]
    refused_or_right(made())


def test_many_small_parts_are_refused_before_parsing():
    empty_node = b"\x0a\x00"
    body = empty_node * 2_000_000
    size = len(body)
    prefix = bytearray(b"\x3a")
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    with pytest.raises(OnnxError, match="more than 1000000 entries"):
        read_onnx(bytes(prefix) + body)


def test_deep_nesting_is_refused_before_parsing():
    data = b""
    for _ in range(60):  # a graph in an attribute of a node of a graph ...
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            size, length = len(data), bytearray()
            while size > 0x7F:
                length.append(size & 0x7F | 0x80)
                size >>= 7
            length.append(size)
            data = tag + bytes(length) + data
    size = len(data)
    with pytest.raises(OnnxError, match="levels deep"):
        read_onnx(b"\x3a" + bytes([size & 0x7F | 0x80, size >> 7]) + data)


def test_repeated_use_cannot_multiply_memory():
    """A large initialiser read by many nodes, and values that grow at each node, end at the limits."""
    many = [node("MatMul", f"{'x' if i == 0 else f'h{i - 1}'} w", f"h{i}") for i in range(500)]
    with pytest.raises(OnnxError, match="raise the limit 'elements'"):
        read_onnx(raw(many, {"w": floats(64, 64)}, ("n", 64), outputs=("h499",)), limits=OnnxLimits(elements=2**20))
    double = [node("Concat", f"{'x' if i == 0 else f'h{i - 1}'} " * 2, f"h{i}", axis=1) for i in range(60)]
    with pytest.raises(OnnxError, match="raise the limit 'features'"):
        read_onnx(raw(double, {}, outputs=("h59",)))
    fold = [node("Concat", f"{'c' if i == 0 else f'h{i - 1}'} " * 2, f"h{i}", axis=0) for i in range(60)]
    with pytest.raises(OnnxError, match="raise the limit 'elements'"):
        read_onnx(raw([*fold, node("Add", "x h59")], {"c": floats(4)}))


def test_empty_constants_cannot_carry_sizes():
    empty = {"e": np.zeros(0, np.float32), "s": ints(2**40, 0), "b": floats(1)}
    for extra in ({}, {"allowzero": 1}):
        with pytest.raises(OnnxError, match="Reshape node number 0|do not fit"):
            read_onnx(raw([node("Reshape", "e s", "w", **extra), node("Gemm", "x w b", transB=1)], empty))
    cut = {"w": W, "a": ints(0, 0), "b": ints(4, 0)}
    for op in ("Gemm", "MatMul", "Add"):
        with pytest.raises(OnnxError, match="fit|no entries|differs"):
            read_onnx(raw([node("Slice", "w a b", "v"), node(op, "x v")], cut, (4, 4)))


def test_long_chain():
    chain = [node("Neg", "x" if i == 0 else f"h{i - 1}", f"h{i}") for i in range(3000)]
    network = read_onnx(raw(chain, {}, outputs=("h2999",)))
    assert torch.equal(network.module(torch.ones(1, 4)), torch.ones(1, 4))
