"""A network as a message of ONNX, written from its graph.

What an operation is does not matter here, only what the graph knows of it: sums become ``Add`` and ``Mul``, entries
that are moved become slices, transposes and gathers by their index map, convolutions and pools keep their operators,
and any other linear operation becomes its matrix. Activations are operators of ONNX or functions
(:mod:`ldlt.files.functions`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt._version import __version__
from ldlt.errors import GraphError
from ldlt.files.functions import BODIES, NATIVE, OPSET, Nodes, function_of, kind_of
from ldlt.files.message import DOMAIN, onnx_package
from ldlt.graph.convolution import Spec
from ldlt.graph.fold import fold
from ldlt.graph.nodes import Activation, Affine, Attr, Convolution, Graph, Input, Node, Ref, Wire, index_map
from ldlt.images import grids
from ldlt.images.convolutions import FrozenSpec

__all__ = ["INPUT", "LARGEST_MATRIX", "OUTPUT", "message_of"]

INPUT, OUTPUT = "x", "y"
"""Names of the input and the output of a file."""

LARGEST_MATRIX = 2**22
"""Entries up to which an operation without an operator is written as a matrix."""

_IR = 9  # the first version of the format with all that is written here
_DIAGONAL = {"mul", "multiply", "div", "divide", "true_divide", "where", "masked_fill", "tril", "triu"}


def message_of(model: nn.Module, graph: Graph, dtype: torch.dtype) -> Any:
    """The message of a network.

    Args:
        model: A network of plain weights, in evaluation mode.
        graph: What :func:`~ldlt.graph.trace.trace` returned for it.
        dtype: Type of the numbers in the file.

    Raises:
        GraphError: An operation or activation that cannot be written.
    """
    helper, writer = onnx_package().helper, _Writer(model, graph, dtype)
    with torch.no_grad():
        names = fold(graph, writer)
    writer.list.append(helper.make_node("Identity", [names[graph.output]], [OUTPUT]))
    kind = onnx_package().TensorProto.DOUBLE if dtype == torch.float64 else onnx_package().TensorProto.FLOAT
    ends = [(INPUT, graph.input.shape), (OUTPUT, graph[graph.output].shape)]
    infos = [helper.make_tensor_value_info(name, kind, ["batch", *shape]) for name, shape in ends]
    found = helper.make_graph(writer.list, "network", infos[:1], infos[1:], writer.tensors)
    sets = [helper.make_opsetid("", OPSET), *([helper.make_opsetid(DOMAIN, 1)] if writer.functions else [])]
    return helper.make_model(
        found, opset_imports=sets, ir_version=_IR, functions=list(writer.functions.values()), producer_name="ldlt",
        producer_version=__version__,
    )  # fmt: skip


class _Writer(Nodes):
    """The algebra of names of values; constants are initialisers."""

    def __init__(self, model: nn.Module, graph: Graph, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model, self.graph, self.read = model, graph, graph.tensors(model)
        self.tensors: list[Any] = []
        self.functions: dict[str, Any] = {}
        self._held: dict[str, str] = {}

    def constant(self, value: Any) -> str:
        found = self.tensor(value)
        found.name = f"c{len(self.tensors)}"
        self.tensors.append(found)
        return cast(str, found.name)

    def hold(self, path: str) -> str:
        """A tensor of the network, once."""
        if path not in self._held:
            self._held[path] = self.constant(self.read(path))
        return self._held[path]

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def input(self, node: Input) -> str:
        """Its name."""
        return INPUT

    def affine(self, node: Affine, parent: str) -> str:
        """A matrix or a convolution."""
        if isinstance(node, Convolution):
            weight, bias = self.read(node.weight), None if node.bias is None else self.read(node.bias)
            return self._convolution(node, parent, node.spec, weight, bias)
        names = [self.hold(p) for p in (node.weight, node.bias) if p is not None]
        return self.put("Gemm", parent, *names, transB=1)

    def activation(self, node: Activation, parent: str) -> str:
        """An operator, or a function."""
        layer = node.resolve(self.model)
        kind, written = kind_of(layer), None
        if self.dtype == torch.float32 or kind not in BODIES:  # most have no kernels for float64
            if kind in _NATIVE:
                name, options = _NATIVE[kind]
                values: dict[str, Any] = {theirs: getattr(layer, own) for theirs, own in options.items()}
                if "alpha" in values:
                    values["alpha"] = float(values["alpha"])
                written = self.put(name, parent, **values)
            elif kind in _SPECIAL:
                written = _SPECIAL[kind](self, layer, parent, node.shape)
        if written is not None:
            return written
        name = f"{type(layer).__name__}_{len(self.functions)}"
        self.functions[name] = function_of(name, layer, node.shape, self.dtype)
        inputs = [parent]
        if isinstance(layer, nn.PReLU):
            inputs.append(self.constant(layer.weight.reshape(-1, *(1,) * (len(node.shape) - 1))))
        return self.put(name, *inputs, domain=DOMAIN)

    def wire(self, node: Wire, parents: Sequence[str]) -> str:
        """A linear operation."""
        shapes = [self.graph[p].shape for p in node.parents]
        if node.role == "order":
            return self.put("Reshape", parents[0], self.constant([0, *node.shape]))
        if node.role == "sum":
            return self._sum(node, parents, shapes)
        if node.operation in ("cat", "concat", "concatenate") and not node.constants:
            dim = cast(int, node.args[1] if len(node.args) > 1 else dict(node.kwargs).get("dim", 0))
            if [r.index for r in node.args[0]] == list(range(len(parents))):
                return self.put("Concat", *parents, axis=dim)
        if node.role == "rearrange":
            return self._moved(node, parents, shapes)
        found = None
        if len(parents) == 1:
            found = self._native(node, parents[0], shapes[0])
        return found or self._linear(node, parents, shapes)

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _sum(self, node: Wire, parents: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
        """``Σ sᵢ xᵢ + c``."""
        like = torch.zeros(1, dtype=self.dtype)
        total = ""
        for scale, parent in zip(node.scales, parents, strict=True):
            term = parent if abs(scale) == 1 else self.put("Mul", parent, self.constant(float(abs(scale))))
            if not total:
                total = self.put("Neg", term) if scale < 0 else term
            else:
                total = self.put("Sub" if scale < 0 else "Add", total, term)
        constant = node.bind(self.read)(*(like.new_zeros(1, *s) for s in shapes))[0]
        if bool((constant != 0).any()):
            total = self.put("Add", total, self.constant(_narrow(constant)))
        return total if total not in parents else self.put("Identity", total)

    # -- what is moved -------------------------------------------------------------------------------------------------

    def _moved(self, node: Wire, parents: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
        """Entries by their labels: a transpose, slices along axes, or a table of places."""
        labels = index_map(self.graph.index, node, self.read)
        if len(parents) == 1:
            shape, rank = shapes[0], len(shapes[0])
            numbers = torch.arange(math.prod(shape)).reshape(shape)
            for order in itertools.permutations(range(rank)) if rank <= 4 else ():
                moved = numbers.permute(order)
                if tuple(moved.shape) == node.shape and torch.equal(moved.reshape(-1), labels):
                    return self.put("Transpose", parents[0], perm=[0, *(i + 1 for i in order)])
            if len(node.shape) == rank:
                places = [
                    (labels.reshape(node.shape).movedim(d, -1).reshape(-1, n)[0] // math.prod(shape[d + 1 :]))
                    % shape[d]
                    for d, n in enumerate(node.shape)
                ]
                if torch.equal(numbers[torch.meshgrid(*places, indexing="ij")].reshape(-1), labels):
                    return self._along(parents[0], shape, places)
        flat = [
            p if len(s) == 1 else self.put("Reshape", p, self.constant([0, -1]))
            for p, s in zip(parents, shapes, strict=True)
        ]
        whole = flat[0] if len(flat) == 1 else self.put("Concat", *flat, axis=1)
        found = self.put("Gather", whole, self.constant(labels), axis=1)
        return found if len(node.shape) == 1 else self.put("Reshape", found, self.constant([0, *node.shape]))

    def _along(self, x: str, shape: Sequence[int], places: Sequence[Tensor]) -> str:
        for axis, (size, index) in enumerate(zip(shape, places, strict=True), 1):
            taken = [int(i) for i in index]
            step = taken[1] - taken[0] if len(taken) > 1 else 1
            if taken == list(range(size)):
                continue
            if step > 0 and taken == list(range(taken[0], taken[-1] + 1, step)):
                ends = ([taken[0]], [taken[-1] + 1], [axis], [step])
                x = self.put("Slice", x, *(self.constant(e) for e in ends))
            else:
                x = self.put("Gather", x, self.constant(taken), axis=axis)
        return x

    # -- other linear operations ---------------------------------------------------------------------------------------

    def _native(self, node: Wire, x: str, shape: tuple[int, ...]) -> str | None:
        """Operations of one value that have an operator of their own, or are one factor for each entry."""
        operation, options = node.operation, _given(node)
        if operation == "linear" and isinstance(options["weight"], Attr):
            return self.put("MatMul", x, self.constant(self.read(options["weight"].path).T))
        if operation == "matmul" and isinstance(node.args[1], Attr) and not node.args[1].spread:
            return self.put("MatMul", x, self.hold(node.args[1].path))
        if operation in _DIAGONAL and len(node.shape) == len(shape) and _wide(shape, node.shape):
            factor = node.linear(self.read)(torch.ones(1, *shape, dtype=self.dtype))[0]
            return self.put("Mul", x, self.constant(_narrow(factor)))
        if operation in ("sum", "mean") and options.get("dim") and options.get("dtype") is None:
            dims = [d % (len(shape) + 1) for d in cast("list[int]", options["dim"])]
            keep = int(bool(options.get("keepdim", False)))
            return self.put("ReduceMean" if operation == "mean" else "ReduceSum", x, self.constant(dims), keepdims=keep)
        if operation.startswith("conv") and isinstance(options.get("weight"), Attr) and options["input"] == Ref(0):
            spec = _spec(operation, options, self.read(options["weight"].path).ndim - 2)
            return self._convolution(node, x, spec, self.read(options["weight"].path), None)
        if "avg_pool" in operation and self.dtype == torch.float32:
            return self._pool(node, x, shape, options)
        return None

    def _pool(self, node: Wire, x: str, shape: tuple[int, ...], options: dict[str, Any]) -> str | None:
        rank = len(shape) - 1
        if node.operation.lstrip("_").startswith("adaptive"):
            if any(n % m for n, m in zip(shape[1:], node.shape[1:], strict=True)):
                return None
            window = [n // m for n, m in zip(shape[1:], node.shape[1:], strict=True)]
            return self.put("AveragePool", x, kernel_shape=window, strides=window)
        window = _each(options["kernel_size"], rank)
        stride, pads = _each(options.get("stride") or window, rank), _each(options.get("padding", 0), rank)
        if options.get("ceil_mode") or options.get("divisor_override") is not None:
            return None
        counted = int(bool(options.get("count_include_pad", True)))
        return self.put("AveragePool", x, kernel_shape=window, strides=stride, pads=pads * 2, count_include_pad=counted)

    def _convolution(self, node: Node, x: str, spec: Any, weight: Tensor, bias: Tensor | None) -> str:
        """A convolution; in float64, for which runtimes have none, as a matrix if that is small."""
        inputs = self.graph[node.parents[0]].shape
        if self.dtype == torch.float64 and node.features * math.prod(inputs) <= LARGEST_MATRIX:
            spread = None if bias is None else bias.repeat_interleave(math.prod(node.shape[1:]))
            return self._matrix(x, inputs, node.shape, spec.unrolled(weight, inputs), spread)
        if isinstance(spec, FrozenSpec):
            return self._circular(x, spec, weight, bias)
        assert isinstance(spec, Spec)
        if spec.border:
            x = self._continued(x, spec.border)
        pads: list[int] = []
        if spec.padding == "same":
            total = [d * (k - 1) for d, k in zip(spec.dilation, weight.shape[2:], strict=True)]
            pads = [n // 2 for n in total] + [n - n // 2 for n in total]
        elif not spec.border and not isinstance(spec.padding, str):
            pads = [*spec.padding, *spec.padding]
        options: dict[str, Any] = {"strides": spec.stride, "dilations": spec.dilation, "group": spec.groups}
        options |= {"pads": pads} if any(pads) else {}
        options |= {"output_padding": spec.output_padding} if spec.transposed else {}
        names = [self.constant(t) for t in (weight, bias) if t is not None]
        return self.put("ConvTranspose" if spec.transposed else "Conv", x, *names, **options)

    def _circular(self, x: str, spec: FrozenSpec, kernel: Tensor, bias: Tensor | None) -> str:
        r"""A frozen convolution as one of the image that is continued in front.

        With g cells along an axis, ``y[i] = Σ_d K[d] x[i − d mod g] = Σ_t K[g − 1 − t] x̃[i + t]`` for the image x̃ of
        2g − 1 cells that is x with its last g − 1 cells in front.
        """
        cells = tuple(kernel.shape[2:])
        x = self._regrouped(x, spec.inputs, lambda t: grids.to_cells(t, cells))
        x = self._continued(x, [n for size in cells[::-1] for n in (size - 1, 0)])
        y = self.put("Conv", x, self.constant(kernel.flip(tuple(range(2, kernel.ndim)))))
        y = self._regrouped(y, (kernel.shape[0], *cells), lambda t: grids.from_cells(t, spec.outputs))
        return (
            y if bias is None else self.put("Add", y, self.constant(bias.reshape(-1, *(1,) * (len(spec.outputs) - 1))))
        )

    def _regrouped(self, x: str, shape: Sequence[int], function: Callable[[Tensor], Tensor]) -> str:
        """Entries in the order that a function puts them in, in its shape."""
        numbers = torch.arange(math.prod(shape), dtype=torch.float64).reshape(1, *shape)
        moved = function(numbers)
        if moved.shape == numbers.shape and torch.equal(moved, numbers):
            return x
        flat = self.put("Reshape", x, self.constant([0, -1]))
        found = self.put("Gather", flat, self.constant(moved.reshape(-1).long()), axis=1)
        return self.put("Reshape", found, self.constant([0, *moved.shape[1:]]))

    def _continued(self, x: str, border: Sequence[int]) -> str:
        """An image continued around a ring."""
        before, behind = list(border[::2])[::-1], list(border[1::2])[::-1]
        return self.put("Pad", x, self.constant([0, 0, *before, 0, 0, *behind]), mode="wrap")

    def _linear(self, node: Wire, parents: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
        """The matrix of an operation, for each parent, found by running it on unit vectors."""
        run, total = node.linear(self.read), ""
        for place, (parent, shape) in enumerate(zip(parents, shapes, strict=True)):
            count = math.prod(shape)
            if count * node.features > LARGEST_MATRIX:
                raise GraphError(
                    f"'{node.operation}' (node '{node.name}') cannot be written to a file: as a matrix it has "
                    f"{count} x {node.features} entries, more than {LARGEST_MATRIX}"
                )
            xs = [torch.zeros(count, *s, dtype=self.dtype) for s in shapes]
            xs[place] = torch.eye(count, dtype=self.dtype).reshape(count, *shape)
            term = self._matrix(parent, shape, node.shape, run(*xs).reshape(count, -1).T, None)
            total = self.put("Add", total, term) if total else term
        return total

    def _matrix(
        self, x: str, inputs: Sequence[int], outputs: Sequence[int], matrix: Tensor, bias: Tensor | None
    ) -> str:
        flat = x if len(inputs) == 1 else self.put("Reshape", x, self.constant([0, -1]))
        names = [self.constant(t) for t in (matrix, bias) if t is not None]
        found = self.put("Gemm", flat, *names, transB=1)
        return found if len(outputs) == 1 else self.put("Reshape", found, self.constant([0, *outputs]))


def _narrow(tensor: Tensor) -> Tensor:
    """Without repetitions along axes: of size 1 where all entries along an axis are the same."""
    for d in range(tensor.ndim):
        first = tensor.narrow(d, 0, 1)
        tensor = first if torch.equal(first.expand_as(tensor), tensor) else tensor
    return tensor.reshape(()) if tensor.numel() == 1 else tensor


def _wide(shape: Sequence[int], target: Sequence[int]) -> bool:
    return all(a in (1, b) for a, b in zip(shape, target, strict=True))


def _each(value: Any, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _given(node: Wire) -> dict[str, Any]:
    """Arguments of an operation by name."""
    schema = cast(Any, _schema(node.target)).arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    return named | dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)


def _schema(target: str) -> Any:
    space, operation, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), operation), overload)._schema


def _spec(operation: str, options: dict[str, Any], rank: int) -> Spec:
    """The convolution that an operation is."""
    transposed = operation.startswith("conv_transpose")
    padding = options["padding"]
    return Spec(
        dims=rank, stride=tuple(_each(options["stride"], rank)), dilation=tuple(_each(options["dilation"], rank)),
        padding=padding if isinstance(padding, str) else tuple(_each(padding, rank)), groups=options["groups"],
        transposed=transposed, output_padding=tuple(_each(options["output_padding"], rank)) if transposed else (),
    )  # fmt: skip


# -- activations -------------------------------------------------------------------------------------------------------

_Native = Callable[[_Writer, Any, str, Sequence[int]], str | None]


def _clip(limits: Callable[[Any], tuple[float | None, float | None]]) -> _Native:
    def write(w: _Writer, m: Any, x: str, shape: Sequence[int]) -> str:
        ends = [None if v is None or math.isinf(v) else v for v in limits(m)]
        return w.put("Clip", x, *("" if v is None else w.constant(float(v)) for v in ends))

    return write


def _slopes(w: _Writer, m: Any, x: str, shape: Sequence[int]) -> str:
    return w.put("PRelu", x, w.constant(m.weight.reshape(-1, *(1,) * (len(shape) - 1))))


_SPECIAL: dict[type[nn.Module], _Native] = {
    activations.Clamp: _clip(lambda m: (m.min, m.max)),
    nn.Hardsigmoid: lambda w, m, x, shape: w.put("HardSigmoid", x, alpha=1 / 6, beta=0.5),
    nn.Hardtanh: _clip(lambda m: (m.min_val, m.max_val)),
    nn.PReLU: _slopes,
    nn.ReLU6: _clip(lambda m: (m.min_val, m.max_val)),
    nn.SiLU: lambda w, m, x, shape: w.put("Mul", x, w.put("Sigmoid", x)),
    nn.Softplus: lambda w, m, x, shape: w.put("Softplus", x) if m.beta == 1 and m.threshold == 20 else None,
    nn.Softshrink: lambda w, m, x, shape: w.put("Shrink", x, bias=float(m.lambd), lambd=float(m.lambd)),
    nn.Threshold: _clip(lambda m: (float(m.threshold), None)),
}
"""Activations that are operators of ONNX in a form of their own."""

_NATIVE = {kind: (name, options) for name, (kind, options) in NATIVE.items()}
