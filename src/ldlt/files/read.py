"""Read a trained network from an ONNX file, to be traced and certified.

The file is data: nothing in it is executed, no other file is opened unless that is asked for, and sizes are checked
before memory is allocated. An operator that the table does not know is refused by name; what is no sum of linear maps
and activations of each sample is refused when the network is traced, like any other module.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ldlt.errors import OnnxError
from ldlt.files.functions import recognised
from ldlt.files.message import DOMAIN, LAYOUT, MOST_AXES, OnnxLimits, Store, distrust, onnx_package, parse, type_name
from ldlt.files.network import Builder, Node, Value
from ldlt.files.operators import MOVES, OPERATORS, refusal
from ldlt.files.replace import show

__all__ = ["OnnxLimits", "OnnxNetwork", "network_of", "read_onnx"]

_OLDEST, _NEWEST = 7, 28  # operator sets whose definitions the table was compared with
_DOUBLE = 11  # protobuf number of float64


@dataclass(frozen=True, eq=False)
class OnnxNetwork:
    """A network from an ONNX file.

    Attributes:
        module: Maps (n, *input_shape) to (n, k): a plain module, to be traced like any other.
        input_shape: Shape of one sample.
        output_shape: Shape of the file's output for one sample, before it was flattened to (k,).
        input_name: Name of the input in the file.
        output_name: Name of the output in the file.
    """

    module: fx.GraphModule
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    input_name: str
    output_name: str


def read_onnx(
    source: str | os.PathLike[str] | bytes,
    *,
    input_name: str | None = None,
    output_name: str | None = None,
    input_shape: Sequence[int] | None = None,
    external_data: bool = False,
    limits: OnnxLimits | None = None,
) -> OnnxNetwork:
    """Turn an ONNX file into a module with the same outputs.

    Every node becomes a call of one torch function, with the weights of the file as they are. The first axis of the
    input must be the batch, named or of fixed size. An output of other than two axes is flattened to (n, k). A Cast
    between float32 and float64 changes nothing here: such a file is computed in float64 throughout.

    Args:
        source: A path, or the bytes of a file.
        input_name: Which input, if the file has several and the output needs only this one.
        output_name: Which output, if the file has several, or any other value of the file, such as the logits before a
            softmax; what it does not need is not read.
        input_shape: Shape of one sample, for files that leave it open.
        external_data: Whether values in other files may be read; these must be in the folder of the file.
        limits: Sizes to refuse beyond.

    Raises:
        OnnxError: The file is damaged, too large, or not a network of known operators; the message names the operator
            and the node, and says what to do.
        MissingExtraError: The package ``onnx`` is not installed.

    Example:
        >>> import ldlt, tempfile
        >>> path = ldlt.save(ldlt.nn.FeedForward(4, [8], 3), Path(tempfile.mkdtemp()) / "net.onnx")
        >>> found = read_onnx(path)
        >>> found.module(torch.zeros(2, *found.input_shape)).shape
        torch.Size([2, 3])
    """
    limits = OnnxLimits() if limits is None else limits
    folder = None
    if external_data:
        if isinstance(source, (bytes, bytearray, memoryview)):
            raise OnnxError("bytes have no folder: give the path of the file to read values beside it")
        folder = Path(source).parent
    names = {"input": input_name, "output": output_name}
    return network_of(parse(source, limits), limits, names, input_shape, Store(folder, limits.elements))


def network_of(
    model: Any,
    limits: OnnxLimits,
    names: dict[str, str | None] | None = None,
    input_shape: Sequence[int] | None = None,
    store: Store | None = None,
) -> OnnxNetwork:
    """As :func:`read_onnx`, for a message that is parsed."""
    with distrust():
        store = Store(None, limits.elements) if store is None else store
        return _File(model, limits, names or {}, store).network(input_shape)


class _File:
    """What an output of a file needs: nodes in order, and the constants they read."""

    def __init__(self, model: Any, limits: OnnxLimits, names: dict[str, str | None], store: Store) -> None:
        self.opset, graph = _checked(model), model.graph
        if len(graph.node) > limits.nodes:
            raise OnnxError(f"{len(graph.node)} nodes are more than {limits.nodes}; raise the limit 'nodes'")
        self.limits, self.store, self.nodes = limits, store, list(graph.node)
        self.functions = {f.name: f for f in model.functions}
        self.constants = _named("initialisers", graph.initializer)
        for name, tensor in self.constants.items():
            store.check(tensor, f"initialiser {show(name)}")
        inputs = _named("inputs", graph.input)
        live = [name for name in inputs if name not in self.constants]  # old files list initialisers as inputs, too
        self.input = _choose("input", live, names.get("input"))
        self.outputs = {info.name: info for info in graph.output}
        self.output = names.get("output") or _choose("output", list(self.outputs), None)
        self.dtype, self.batch, self.shape = _declared(inputs[self.input])
        self.order = self._order({*inputs, *self.constants})
        for index in self.order:
            other = next((n for n in self.nodes[index].input if n in live and n != self.input), None)
            if other is not None:
                raise OnnxError(
                    f"{self._label(index)}: reads the input {show(other)}, too; a network of one input is expected: "
                    "make the others initialisers"
                )

    def _label(self, index: int) -> str:
        node = self.nodes[index]
        return f"{show(node.op_type)[1:-1] or 'nameless'} node {show(node.name) if node.name else f'number {index}'}"

    def _order(self, known: set[str]) -> list[int]:
        """The nodes that the output needs, as they are listed: each after those that it reads, as ONNX wants it."""
        defined = set(known)
        for index, node in enumerate(self.nodes):
            for name in filter(None, node.output):
                if name in defined:
                    raise OnnxError(f"{self._label(index)}: the name {show(name)} is defined twice")
                defined.add(name)
        if self.output not in defined:
            raise OnnxError(f"nothing in the file defines the output {show(self.output)}")
        needed, chosen = {self.output}, []
        for index in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[index]
            if needed.intersection(filter(None, node.output)):
                needed.difference_update(node.output)
                needed.update(filter(None, node.input))
                chosen.append(index)
        missing = needed - known
        if missing:
            name = min(missing)
            index = next((i for i in chosen if name in self.nodes[i].input), 0)
            raise OnnxError(f"{self._label(index)}: reads {show(name)}, which nothing before it defines")
        return chosen[::-1]

    def network(self, input_shape: Sequence[int] | None) -> OnnxNetwork:
        """The module."""
        shape = self._sample(input_shape)
        # A file that changes between widths is computed in the wider one: all its numbers are exact there.
        casts = [a.i for i in self.order for a in self.nodes[i].attribute if self.nodes[i].op_type == "Cast"]
        wide = torch.float64 if _DOUBLE in casts or self.dtype == torch.float64 else torch.float32
        build = Builder(shape, self.dtype, wide, self.batch, self.limits, self.store)
        values: dict[str, Value | Tensor] = {self.input: build.input}
        for index in self.order:
            node, inputs = self.nodes[index], list[Value | Tensor | None]()
            for name in node.input:
                if name and name not in values and name in self.constants:
                    tensor, what = self.constants[name], f"initialiser {show(name)}"
                    build.spend(what, math.prod(tensor.dims))
                    values[name] = self.store.decode(tensor, what)
                if name and name not in values:
                    raise OnnxError(
                        f"{self._label(index)}: reads {show(name)}, an optional result that is not read here"
                    )
                inputs.append(values[name] if name else None)
            results = self._run(index, inputs, build)
            values.update((name, result) for name, result in zip(node.output, results, strict=False) if name)
        output = values.get(self.output)
        if not isinstance(output, Value):
            raise OnnxError(f"the output {show(self.output)} does not depend on the input {show(self.input)}")
        self._check_output(output)
        module = build.finish(output)
        try:
            with torch.no_grad():
                finite = bool(module.forward(torch.zeros(2, *shape, dtype=wide)).isfinite().all())
        except Exception as error:  # tensors without memory let some sizes pass
            raise OnnxError(f"sizes in the file do not fit ({' '.join(str(error).split())[:200]})") from error
        if not finite:
            raise OnnxError("the weights are so large that the output for a zero input is not finite")
        return OnnxNetwork(module, shape, output.shape, self.input, self.output)

    def _check_output(self, output: Value) -> None:
        """Refuse a declaration of the output that others may rely on and that is not true."""
        if self.output not in self.outputs:
            return
        said = self.outputs[self.output].type
        sizes = [d.dim_value if d.WhichOneof("value") == "dim_value" else None for d in said.tensor_type.shape.dim]
        fits = len(sizes) == output.ndim and all(a in (None, b) for a, b in zip(sizes[1:], output.shape, strict=True))
        kind = said.tensor_type.elem_type
        if (kind and LAYOUT.get(kind, (None,))[0] != output.dtype) or (said.tensor_type.HasField("shape") and not fits):
            raise OnnxError(
                f"the output {show(self.output)} is declared as {type_name(kind)} {sizes[: MOST_AXES + 1]}, and is "
                f"{output.dtype} {output.shape} per sample"
            )

    def _run(self, index: int, inputs: list[Value | Tensor | None], build: Builder) -> list[Any]:
        node, label = self.nodes[index], self._label(index)
        if node.overload:
            raise OnnxError(f"{label}: calls a function of the file; inline functions before saving")
        if node.domain == DOMAIN and node.op_type in self.functions:
            seen = Node(node, label, f"activation_{index}", inputs, self.opset, build, least=1)
            return [_activation(seen, self.functions[node.op_type])]
        if node.domain not in ("", "ai.onnx"):
            raise OnnxError(
                f"{label}: operators of the domain {show(node.domain)} are not known; export with standard operators "
                "only"
            )
        if node.op_type not in OPERATORS:
            raise OnnxError(f"{label}: {refusal(node.op_type)}")
        stem = f"{node.op_type.lower()}_{index}"
        seen = Node(node, label, stem, inputs, self.opset, build, node.op_type in MOVES)
        results = OPERATORS[node.op_type](seen)
        seen.refuse_unread()
        return results if isinstance(results, list) else [results]

    def _sample(self, given: Sequence[int] | None) -> tuple[int, ...]:
        sizes = [d for d in self.shape if d is not None]
        if given is None:
            if len(sizes) < len(self.shape):
                raise OnnxError(
                    f"input {show(self.input)}: the file leaves {len(self.shape) - len(sizes)} sizes besides the batch "
                    "open; pass input_shape"
                )
            return tuple(sizes)
        wanted = tuple(int(d) for d in given)
        fits = all(w >= 1 and d in (None, w) for w, d in zip(wanted, self.shape, strict=False))
        if len(wanted) != len(self.shape) or not fits:
            raise OnnxError(f"input_shape {wanted} does not fit the shape in the file, {self.shape} (None: open)")
        return wanted


def _named(what: str, items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        if not item.name or item.name in found:
            raise OnnxError(f"two {what} are called {show(item.name)}, or one has no name")
        found[item.name] = item
    return found


def _activation(node: Node, function: Any) -> Any:
    """A function of a file, which is one of the activations that have no operator."""
    x = node.live()
    module = recognised(function, x.shape, x.dtype)
    if isinstance(module, nn.PReLU):
        slope = node.constant(1)
        if slope.numel() != module.num_parameters or slope.numel() not in (1, x.shape[0]):
            raise node.refuse(f"{slope.numel()} slopes do not fit {x.shape} per sample")
        if slope.shape != (slope.numel(), *(1,) * (len(x.shape) - 1)):
            raise node.refuse("its slopes must be one for each channel")
        module.weight = nn.Parameter(slope.reshape(-1).clone())
    elif node.has(1):
        raise node.refuse("has a second input")
    return node.call(module, x)


def _checked(model: Any) -> int:
    """The operator set of a model without what is not understood."""
    if not model.HasField("graph"):
        raise OnnxError("not an ONNX file, or an empty one: it has no graph")
    names = [f.name for f in model.functions]
    foreign = [f.name for f in model.functions if f.domain != DOMAIN]
    if foreign or len(set(names)) < len(names):
        raise OnnxError(
            f"the file defines its own function {show((foreign or names)[0])}; inline functions before saving "
            "(onnx.inliner.inline_local_functions)"
        )
    for found, reason in (
        (model.training_info, "contains a training graph; export the model for inference"),
        (model.graph.sparse_initializer, "has sparse initialisers; store them densely"),
        (model.graph.quantization_annotation, "is quantised; export the model in floating point"),
    ):
        if found:
            raise OnnxError(f"the file {reason}")
    if model.ir_version > onnx_package().IR_VERSION:
        raise OnnxError(f"the format has version {model.ir_version}: a newer package 'onnx' is needed")
    versions = {int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")}
    version = versions.pop() if len(versions) == 1 else None
    newest = min(_NEWEST, onnx_package().defs.onnx_opset_version())
    if version is None or not _OLDEST <= version <= newest:
        raise OnnxError(
            f"operator set {version} is not known, only {_OLDEST} to {newest}; convert the file "
            "(onnx.version_converter)"
        )
    return version


def _choose(what: str, names: list[str], wanted: str | None) -> str:
    shown = (", ".join(show(n) for n in names[:8]) or "none") + (", ..." if len(names) > 8 else "")
    if wanted is not None:
        if wanted not in names:
            raise OnnxError(f"there is no {what} {show(wanted)}; there are: {shown}")
        return wanted
    if len(names) != 1:
        raise OnnxError(f"exactly one {what} is expected, there are {len(names)}: {shown}; choose with {what}_name")
    return names[0]


def _declared(info: Any) -> tuple[torch.dtype, int | None, tuple[int | None, ...]]:
    """Type, batch size and sample shape of the input."""
    what = f"input {show(info.name)}"
    if info.type.WhichOneof("value") != "tensor_type":
        raise OnnxError(f"{what} must be a tensor")
    tensor = info.type.tensor_type
    dtype = LAYOUT.get(tensor.elem_type, (None,))[0]
    if dtype is None or not dtype.is_floating_point:
        raise OnnxError(f"{what} has elements of type {type_name(tensor.elem_type)}; FLOAT or DOUBLE is expected")
    if not tensor.HasField("shape"):
        raise OnnxError(f"{what} has no declared shape; declare one when exporting")
    sizes: list[int | None] = []
    for dim in tensor.shape.dim:
        size = int(dim.dim_value) if dim.WhichOneof("value") == "dim_value" else None
        if size is not None and size < 1:
            raise OnnxError(f"{what} has a dimension of size {size}; -1 is not a free dimension in ONNX, a name is")
        sizes.append(size)
    if not 2 <= len(sizes) <= MOST_AXES:
        raise OnnxError(f"{what} has {len(sizes)} axes; the first must be the batch, with at least one more behind it")
    return dtype, sizes[0], tuple(sizes[1:])
