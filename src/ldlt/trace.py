"""From an ``nn.Module`` to a :class:`~ldlt.graph.Graph`, or a refusal that names the node.

Only operations on the lists below are accepted. Nothing is guessed: an operation that is not known to be linear, an
activation with known slopes or a free affine map ends in :class:`~ldlt.errors.UnsupportedOpError`.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ldlt import activations
from ldlt.convolution import Spec
from ldlt.errors import GraphError, LdltError, ShapeError, SlopeError, UnsupportedOpError
from ldlt.evaluation import evaluating, reference
from ldlt.frozen import CircularConv
from ldlt.graph import (
    BATCH,
    Activation,
    Affine,
    Attr,
    Convolution,
    Graph,
    Input,
    Node,
    Ref,
    Wire,
    evaluate,
    index_map,
    lookup,
)
from ldlt.guard import refuse_batch_arithmetic, refuse_hooks, runs_as

__all__ = [
    "DIVIDE",
    "IN_PLACE",
    "MULTIPLY",
    "NEGATE",
    "REARRANGE",
    "REPEAT",
    "SELECT",
    "STACK",
    "SUM",
    "symbolic_trace",
    "trace",
]

SELECT: set[Any] = {
    torch.chunk, torch.split, torch.tensor_split, torch.unbind, torch.flatten, torch.reshape, torch.permute,
    torch.transpose, torch.swapaxes, torch.movedim, torch.squeeze, torch.unsqueeze, torch.flip, torch.roll,
    torch.narrow, torch.select, torch.unflatten, torch.clone, operator.getitem, "chunk", "split", "tensor_split",
    "unbind", "flatten", "reshape", "view", "permute", "transpose", "swapaxes", "movedim", "squeeze", "unsqueeze",
    "flip", "roll", "narrow", "select", "unflatten", "contiguous", "clone", "mT",
}  # fmt: skip
"""Features are moved or dropped: each is there at most once (except for ``getitem`` with a list of indices)."""
REPEAT: set[Any] = {
    torch.tile, torch.repeat_interleave, "expand", "repeat", "repeat_interleave", "tile",
}  # fmt: skip
"""Features are repeated, all equally often (except for ``repeat_interleave`` with a tensor of numbers)."""
STACK: set[Any] = {torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.stack}
"""Features of several tensors side by side."""
REARRANGE = SELECT | REPEAT | STACK
"""Features are moved, dropped or repeated, never mixed."""
SUM: dict[Any, tuple[float, float]] = {
    operator.add: (1.0, 1.0), operator.iadd: (1.0, 1.0), torch.add: (1.0, 1.0), "add": (1.0, 1.0), "add_": (1.0, 1.0),
    operator.sub: (1.0, -1.0), operator.isub: (1.0, -1.0), torch.sub: (1.0, -1.0), torch.subtract: (1.0, -1.0),
    "sub": (1.0, -1.0), "sub_": (1.0, -1.0),
}  # fmt: skip
_OUT_OF_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
MULTIPLY = {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_"}
DIVIDE = {operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide, "div", "div_"}
IN_PLACE: set[Any] = {*_OUT_OF_PLACE, "add_", "sub_", "mul_", "div_"}
NEGATE = {operator.neg, torch.neg, torch.negative, "neg"}
_AVERAGE = {torch.mean, torch.sum, "mean", "sum"}
_MATMUL = {operator.matmul, torch.matmul, torch.mm, "matmul", "mm", F.linear}
_DROPOUT = {F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d}
_DROPOUT_MODULES = (
    nn.Dropout,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
_ORDER_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, *_DROPOUT_MODULES)

_HINTS: list[tuple[tuple[type, ...], str]] = [
    (
        (nn.modules.batchnorm._NormBase,),
        "batch and instance normalisation divide by statistics of the data, which has no global Lipschitz bound; "
        "remove it (the network is normalised by construction), or fold it into the preceding Linear layer "
        "after training",
    ),
    (
        (nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm),
        "layer normalisation divides by a statistic of its input and is not globally Lipschitz; remove it",
    ),
    (
        (nn.RNNBase, nn.RNNCellBase),
        "recurrent layers use one matrix many times; unroll the recursion with separate Linear layers",
    ),
    (
        (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
        "dot-product attention multiplies two functions of the input and is not globally Lipschitz; "
        "use Linear layers and activations",
    ),
    (
        (nn.Bilinear,),
        "a bilinear map multiplies two functions of the input and is not globally Lipschitz; use Linear layers",
    ),
    (
        (nn.Embedding, nn.EmbeddingBag),
        "an embedding is not a function of a real vector; feed its output instead",
    ),
    (
        (nn.modules.conv._ConvNd,),
        "only the convolutions of torch.nn themselves are known, not subclasses; use nn.Conv2d",
    ),
    (
        (nn.modules.pooling._MaxPoolNd,),
        "only nn.MaxPool1d, nn.MaxPool2d and nn.MaxPool3d themselves are known, not subclasses",
    ),
    (
        (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.FractionalMaxPool2d),
        "use nn.MaxPool2d with windows that do not overlap, or nn.AdaptiveAvgPool2d",
    ),
    (
        (nn.LPPool1d, nn.LPPool2d),
        "use nn.AvgPool2d, or nn.MaxPool2d with windows that do not overlap",
    ),
    (
        (nn.modules.padding._ConstantPadNd, nn.modules.padding._ReflectionPadNd, nn.modules.padding._ReplicationPadNd),
        "padding with a constant or with copies treats the border unlike the rest of the image; use "
        "padding_mode='circular' in the convolution",
    ),
]

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_MAX_POOL = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_IMAGE_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.pixel_shuffle: nn.PixelShuffle,
    F.pixel_unshuffle: nn.PixelUnshuffle,
    F.avg_pool1d: nn.AvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.avg_pool3d: nn.AvgPool3d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_avg_pool3d: nn.AdaptiveAvgPool3d,
    F.interpolate: nn.Upsample,
    F.max_pool1d: nn.MaxPool1d,
    F.max_pool2d: nn.MaxPool2d,
    F.max_pool3d: nn.MaxPool3d,
}
"""Functions on images, as the layers that call them with the same arguments."""


def _fixed_image_operation(sub: nn.Module) -> tuple[Any, tuple[Any, ...], str] | None:
    """Function, further arguments and role of a layer that is a fixed linear operation on images."""
    layer = cast(Any, sub)
    run: Any
    if type(sub) is nn.PixelShuffle:
        return F.pixel_shuffle, (layer.upscale_factor,), "rearrange"
    if type(sub) is nn.PixelUnshuffle:
        return F.pixel_unshuffle, (layer.downscale_factor,), "rearrange"
    if type(sub) is nn.AvgPool1d:
        return F.avg_pool1d, (layer.kernel_size, layer.stride, layer.padding, layer.ceil_mode), "linear"
    if type(sub) in (nn.AvgPool2d, nn.AvgPool3d):
        run = F.avg_pool2d if type(sub) is nn.AvgPool2d else F.avg_pool3d
        options = (layer.count_include_pad, layer.divisor_override)
        return run, (layer.kernel_size, layer.stride, layer.padding, layer.ceil_mode, *options), "linear"
    for kind, run in (
        (nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d),
        (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d),
        (nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d),
    ):
        if type(sub) is kind:
            return run, (layer.output_size,), "linear"
    if type(sub) in (nn.Upsample, nn.UpsamplingNearest2d):
        role = "rearrange" if layer.mode in ("nearest", "nearest-exact") else "linear"
        scale = layer.scale_factor if layer.size is None else None
        return F.interpolate, (layer.size, scale, layer.mode, layer.align_corners), role
    return None


def _add_bias(x: Tensor, bias: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Add one number per channel."""
    return x + bias.reshape(-1, *(1,) * (len(shape) - 1))


def _why_not_periodic(sub: nn.Conv2d, spec: Spec, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> str:
    """Why a convolution does not commute with shifts of the image, and what to write instead."""
    kind = type(sub).__name__
    kernel = tuple(sub.weight.shape[2:])
    if spec.transposed:
        return (
            f"a transposed convolution with kernel {kernel} and stride {spec.stride} pads with zeros at the border; "
            f"use {kind}(…, kernel_size={spec.stride}, stride={spec.stride}), or a convolution with "
            "padding_mode='circular' and nn.PixelShuffle"
        )
    if any(n % s for n, s in zip(inputs[1:], spec.stride, strict=True)):
        return (
            f"the stride {spec.stride} does not divide the image's size {inputs[1:]}, so that its shifts do not fit; "
            "crop or resize the image"
        )
    reach = [d * (k - 1) for d, k in zip(spec.dilation, kernel, strict=True)]
    wanted = f"padding={tuple(r // 2 for r in reach)}" if all(r % 2 == 0 for r in reach) else "padding='same'"
    if spec.mode == "circular":
        return (
            f"it turns an image of size {inputs[1:]} into one of size {outputs[1:]}, so that shifts of one are not "
            f"shifts of the other; use {wanted}, padding_mode='circular' (with an odd kernel, if there is a stride)"
        )
    return (
        f"padding_mode='{spec.mode}' with this padding treats the border unlike the rest of the image, so that the "
        f"layer is not a convolution on a periodic grid; use {wanted}, padding_mode='circular'"
    )


class _Tracer(fx.Tracer):
    """Symbolic tracer that also stops at the activation modules of this package and at registered ones.

    Buffers are traced, too: arithmetic on them must not be evaluated once and for all.
    """

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = activations.is_activation(m) or runs_as(m, (CircularConv,))
        return known or super().is_leaf_module(m, module_qualified_name)


class _Recorder(fx.Interpreter):
    """Runs a traced module and keeps every intermediate value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}
        self.current = ""

    def run_node(self, n: fx.Node) -> Any:
        self.current = n.name
        value = super().run_node(n)
        self.values[n] = value
        return value


def symbolic_trace(module: nn.Module) -> fx.GraphModule:
    """The traced program of a module, with the node names that :func:`trace` uses."""
    refuse_hooks(module)
    tracer = _Tracer()
    before = set(vars(module))
    try:
        graph = tracer.trace(module)
    except LdltError:
        raise
    except Exception as error:
        raise GraphError(
            f"{type(module).__name__} cannot be traced: {error}. The forward function must not depend on the "
            "values of its input "
            "(no if, while or for over data) and must use torch operations only"
        ) from error
    made = [
        n for n in graph.nodes if n.op == "get_attr" and str(n.target) not in before and "_tensor_constant" in n.name
    ]
    program = fx.GraphModule(tracer.root, graph)
    for name in [n for n in vars(module) if n.startswith("_tensor_constant") and n not in before]:
        delattr(module, name)  # the tracer leaves constants behind
    if made:
        raise UnsupportedOpError(made[0].name, "a tensor is created in forward; store it as a buffer in __init__")
    return program


def _record(traced: fx.GraphModule, batch: int, shape: tuple[int, ...], like: Tensor) -> dict[fx.Node, Any]:
    recorder = _Recorder(traced)
    recorder.extra_traceback = False  # messages stay as they are
    x = torch.rand(batch, *shape, dtype=like.dtype, device=like.device)
    try:
        with torch.no_grad():
            recorder.run(x)
    except LdltError:
        raise
    except Exception as error:
        raise ShapeError(
            f"the module does not accept an input of shape (batch, {', '.join(map(str, shape))}): at node "
            f"'{recorder.current}': {error}"
        ) from error
    return recorder.values


def trace(module: nn.Module, input_shape: tuple[int, ...]) -> Graph:
    """Turn a module with one tensor input and one tensor output into a graph.

    Args:
        module: Any module that ``torch.fx`` can trace and that consists of known operations.
        input_shape: Shape of one sample, without the batch dimension.

    Raises:
        UnsupportedOpError: An operation without a certified rule; the message names it and says what to use instead.
        GraphError: The module cannot be traced or has the wrong number of inputs or outputs.
        ShapeError: ``input_shape`` does not fit.
    """
    try:
        return _traced(module, input_shape)
    except LdltError:
        raise
    except _FOREIGN as error:  # numbers that overflow, options that a layer does not check, …
        raise GraphError(f"{type(module).__name__} is no network of known operations: {error}") from error


_FOREIGN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _traced(module: nn.Module, input_shape: tuple[int, ...]) -> Graph:
    with evaluating(module):
        traced = symbolic_trace(module)
        inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
        if len(inputs) != 1:
            raise GraphError(
                f"the module must have exactly one input tensor, it has {len(inputs)}: concatenate them, or bind the "
                "others"
            )
        like = reference(module)
        # Two batch sizes tell the numbers that are the batch size from those that are not.
        first = _record(traced, 2, input_shape, like)
        second = _record(traced, 3, input_shape, like)
    refuse_batch_arithmetic(traced, first)
    graph = _Builder(module, traced, first, second).build(input_shape)
    _refuse_not_finite(module, graph)
    _check(module, graph)
    return graph


# -- checks ------------------------------------------------------------------------------------------------------------


def _refuse_not_finite(module: nn.Module, graph: Graph) -> None:
    """Refuse tensors of the module in the graph with infinite entries or NaN."""
    paths: list[str] = []
    for node in graph.nodes:
        if isinstance(node, Affine):
            paths += [node.weight, *([] if node.bias is None else [node.bias])]
        elif isinstance(node, Wire):
            paths += node.constants
        elif isinstance(node, Activation) and node.path is not None:
            paths += [f"{node.path}.{n}" for n in node.resolve(module).state_dict()]
    for path in paths:
        found = lookup(module, path)
        if isinstance(found, Tensor) and not found.is_meta and not bool(found.isfinite().all()):
            raise GraphError(f"'{path}' has entries that are infinite or not numbers")


def _check(module: nn.Module, graph: Graph) -> None:
    """Run the graph beside the module itself: what a tracer cannot see (hooks, aliases, randomness) shows up here."""
    try:
        twin = copy.deepcopy(module).double().cpu()
    except Exception as error:
        raise GraphError(f"{type(module).__name__} cannot be copied: {error}") from error
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for p in twin.parameters():
            if p.is_floating_point():
                size = max(1, p.shape[-1]) if p.ndim else 1
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / size**0.5)
        x = 2 * torch.randn(4, *graph.input.shape, generator=generator, dtype=torch.float64)
        random = any(isinstance(n, Wire) and n.kind == "dropout" for n in graph.nodes)
        for training in (False,) if random else (False, True):
            twin.train(training)
            for m in twin.modules():
                if isinstance(m, (*_DROPOUT_MODULES, nn.RReLU)):
                    m.eval()
            expected = evaluate(graph, twin, x.clone())
            together = twin(x.clone())
            apart = torch.cat([twin(x[i : i + 1].clone()) for i in range(len(x))])
            for found, reason in (
                (together, "look for a hook, an overwritten tensor, randomness or a use of self.training"),
                (apart, "samples of a batch influence each other"),
            ):
                if not bool(expected.isfinite().all()):
                    raise GraphError(
                        "with weights of ordinary size the network overflows, or computes what is not a number: its "
                        "constants are too large or not finite"
                    )
                same = found.shape == expected.shape
                near = 1e-9 * float(1 + expected.abs().max())
                if not same or not torch.allclose(found, expected, rtol=1e-9, atol=near):
                    mode = "training" if training else "evaluation"
                    raise GraphError(f"the traced graph is not what the module computes in {mode} mode: {reason}")


class _Builder:
    """Translates the nodes of a traced program one by one."""

    def __init__(
        self, module: nn.Module, traced: fx.GraphModule, first: dict[fx.Node, Any], second: dict[fx.Node, Any]
    ) -> None:
        self.module, self.traced, self.first, self.second = module, traced, first, second
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.nodes: dict[str, Node] = {}
        self.alias: dict[fx.Node, str] = {}  # fx node -> value name
        self.tuples: dict[fx.Node, Any] = {}  # tuple-valued nodes, resolved at getitem
        self.used: dict[int, str] = {}  # parameter -> the affine node that uses it
        self.mixing: list[str] = []  # activations that mix entries of features that are no vectors

    def build(self, input_shape: tuple[int, ...]) -> Graph:
        output: str | None = None
        for node in self.traced.graph.nodes:
            value = self.first[node]
            if node.op == "placeholder":
                self._add(node, Input(node.name, tuple(input_shape), ()))
            elif node.op == "output":
                result = node.args[0]
                if not isinstance(result, fx.Node) or result not in self.alias:
                    raise GraphError("the module must return exactly one tensor that depends on its input")
                output = self.alias[result]
            elif not self._depends(node) or not self._has_tensor(value):
                continue  # constants and sizes are read where they are used
            else:
                self._translate(node)
        assert output is not None
        graph = Graph(tuple(self.nodes.values()), output).pruned()
        self._refuse_double_use(graph)
        self._refuse_mixing(graph)
        if len(graph[output].shape) != 1 and not graph.has_images:
            raise GraphError(
                f"the output must have shape (batch, k), not (batch, {', '.join(map(str, graph[output].shape))}): "
                "flatten it"
            )
        return graph

    def _translate(self, node: fx.Node) -> None:
        try:
            self._refuse_overwrite(node)
            if node.op == "call_module":
                self._call_module(node)
            else:
                self._call(node, node.target)
        except LdltError:
            raise
        except Exception as error:
            raise UnsupportedOpError(
                node.name, f"its arguments could not be understood ({error}); write it in the plain positional form"
            ) from error

    # -- helpers -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _refuse_double_use(graph: Graph) -> None:
        """Refuse a matrix that is a free map and a constant at once."""
        free = {a.weight for a in graph.affines} | {a.bias for a in graph.affines}
        for wire in graph.nodes:
            if isinstance(wire, Wire):
                for arg in [*wire.args, *(v for _, v in wire.kwargs)]:
                    if isinstance(arg, Attr) and arg.path in free:
                        raise UnsupportedOpError(wire.name, f"'{arg.path}' is also the parameter of a Linear layer")

    def _add(self, node: fx.Node, value: Node) -> None:
        self.nodes[value.name] = value
        self.alias[node] = value.name

    @staticmethod
    def _has_tensor(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(isinstance(v, Tensor) for v in value)
        return isinstance(value, Tensor)

    def _depends(self, node: fx.Node) -> bool:
        """Whether the node's value is a tensor (or a tuple) computed from the input."""
        return any(a in self.alias or a in self.tuples for a in node.all_input_nodes)

    def _shape(self, node: fx.Node, value: Any = None) -> tuple[int, ...]:
        one, two = (self.first[node], self.second[node]) if value is None else value
        if one.ndim < 1 or one.shape[0] != 2 or two.shape[0] != 3 or one.shape[1:] != two.shape[1:]:
            raise UnsupportedOpError(
                node.name,
                "the first dimension must stay the batch; this operation moves, mixes or removes it",
            )
        return tuple(one.shape[1:])

    def _template(self, node: fx.Node, arg: Any, parents: list[str]) -> Any:
        """An argument with references instead of values."""
        if isinstance(arg, fx.Node):
            if arg in self.alias:
                parents.append(self.alias[arg])
                return Ref(len(parents) - 1)
            if arg in self.tuples:
                raise UnsupportedOpError(node.name, "a tuple of tensors is passed on whole; unpack it first")
            if arg.op == "get_attr":
                return Attr(str(arg.target))
            one, two = self.first[arg], self.second[arg]
            if isinstance(one, Tensor):
                raise UnsupportedOpError(
                    node.name,
                    f"the constant '{arg.name}' is computed in forward; store it as a buffer in __init__",
                )
            if isinstance(one, (tuple, list)):  # a torch.Size
                return tuple(self._number(node, a, b) for a, b in zip(one, two, strict=True))
            return self._number(node, one, two)
        if isinstance(arg, (tuple, list)):
            return type(arg)(self._template(node, a, parents) for a in arg)
        if isinstance(arg, slice):
            return slice(*(self._template(node, a, parents) for a in (arg.start, arg.stop, arg.step)))
        if isinstance(arg, float) and not math.isfinite(arg):
            raise UnsupportedOpError(node.name, f"the number {arg} is not finite")
        return arg

    @staticmethod
    def _number(node: fx.Node, one: Any, two: Any) -> Any:
        if one == two:
            return one
        if (one, two) == (2, 3):
            return BATCH
        raise UnsupportedOpError(node.name, "a size is computed from the batch size; keep the batch dimension apart")

    def _spec(self, node: fx.Node, kind: str, target: Any) -> tuple[dict[str, Any], list[str]]:
        """Target and argument templates of an operation, in its form that is not in place, and its parents."""
        if "out" in node.kwargs:
            raise UnsupportedOpError(node.name, "out= overwrites a tensor; use the result instead")
        parents: list[str] = []
        args = tuple(self._template(node, a, parents) for a in node.args)
        kwargs = tuple((k, self._template(node, a, parents)) for k, a in node.kwargs.items())
        target = _OUT_OF_PLACE.get(target, target)
        if isinstance(target, str) and target.endswith("_"):
            target = target[:-1]
        return {"kind": kind, "target": target, "args": args, "kwargs": kwargs}, parents

    def _wire(self, node: fx.Node, kind: str, target: Any, role: str) -> None:
        spec, parents = self._spec(node, kind, target)
        if isinstance(self.first[node], (tuple, list)):
            self.tuples[node] = (spec, tuple(parents))
            return
        shape = self._shape(node)
        wire = Wire(node.name, shape, tuple(parents), role=role, **spec)
        self._add(node, self._ordered(wire))

    def _ordered(self, wire: Wire) -> Wire:
        """Mark rearrangements that only change the shape."""
        if wire.role != "rearrange" or len(wire.parents) != 1:
            return wire
        parent = self.nodes[wire.parents[0]]
        if wire.features == parent.features and bool(
            (index_map(self.nodes, wire, self.module) == torch.arange(parent.features)).all()
        ):
            return Wire(**{**wire.__dict__, "role": "order"})
        return wire

    def _refuse_overwrite(self, node: fx.Node) -> None:
        """Refuse to overwrite a tensor that is read elsewhere: the traced values would not be the real ones."""
        if node.op == "call_module":
            overwrites = bool(getattr(self.modules[str(node.target)], "inplace", False))
        else:
            rest = tuple(self.first[a] if isinstance(a, fx.Node) else a for a in node.args[1:])
            kwargs = {k: self.first[a] if isinstance(a, fx.Node) else a for k, a in node.kwargs.items()}
            method = isinstance(node.target, str) and node.target.endswith("_")
            overwrites = method or node.target in IN_PLACE or bool(kwargs.get("inplace", False))
            if not overwrites and node.target not in REARRANGE and node.target not in _AVERAGE | _MATMUL | _DROPOUT:
                try:
                    overwrites = activations.is_inplace(node.target, rest, kwargs)
                except LdltError:
                    overwrites = False  # the call itself is refused below
        if not overwrites:
            return
        target = node.args[0] if node.args else next(iter(node.kwargs.values()))
        reader = node
        while isinstance(target, fx.Node):
            others = [u for u in target.users if u is not reader]
            if others:
                raise UnsupportedOpError(
                    node.name,
                    f"it overwrites '{target.name}', which '{others[0].name}' reads too; use the form that is not in "
                    "place",
                )
            is_view = target.op in ("call_function", "call_method") and target.target in REARRANGE
            if not is_view:
                return
            reader, target = target, target.args[0]

    # -- modules -----------------------------------------------------------------------------------------------------

    def _call_module(self, node: fx.Node) -> None:
        path = str(node.target)
        sub = self.modules[path]
        if type(sub) is nn.Linear:
            source = self._single(node)
            prefix = f"{path}."
            if not sub.weight.requires_grad:  # a map the user wants left alone
                self._given(node, source, prefix + "weight", None if sub.bias is None else prefix + "bias")
                return
            self._affine(node, source, sub.weight, prefix + "weight", sub.bias, prefix + "bias")
        elif isinstance(sub, CircularConv) and runs_as(sub, (CircularConv,)):
            self._own(node, [(sub.weight, f"{path}.weight"), (sub.bias, f"{path}.bias")])
            bias = None if sub.bias is None else f"{path}.bias"
            own: dict[str, Any] = {"spec": sub.spec, "kernel": sub.cells, "weight": f"{path}.weight", "bias": bias}
            self._add(node, Convolution(node.name, self._shape(node), (self._single(node),), **own))
        elif type(sub) in _CONVOLUTIONS:
            self._convolution(node, cast(nn.Conv2d, sub), f"{path}.")
        elif type(sub) in _MAX_POOL or _fixed_image_operation(sub) is not None:
            self._image_operation(node, sub)
        elif runs_as(sub, _ORDER_MODULES):
            # Dropout is the identity of the certificate: it is off in evaluation.
            self._add(node, Wire(node.name, self._shape(node), (self._single(node),), role="order"))
        elif activations.is_activation(sub):
            own = {"module": sub} if isinstance(sub, activations.WindowSort) else {"path": path}
            self._activation(node, Activation(node.name, self._shape(node), (self._single(node),), **own), sub)
        else:
            self._refuse_module(node, sub)

    def _refuse_module(self, node: fx.Node, sub: nn.Module) -> None:
        kind = type(sub).__name__
        if hasattr(sub, "parametrizations"):
            raise UnsupportedOpError(node.name, f"{kind} is parametrized; remove the parametrization first")
        for classes, hint in _HINTS:
            if isinstance(sub, classes):
                raise UnsupportedOpError(node.name, f"{kind}: {hint}")
        try:
            activations.slope_bounds(sub)
        except SlopeError as error:
            raise UnsupportedOpError(node.name, str(error)) from error
        raise UnsupportedOpError(node.name, f"{kind} has no certified rule")

    def _single(self, node: fx.Node) -> str:
        first = node.args[0] if node.args else next(iter(node.kwargs.values()))
        if not isinstance(first, fx.Node) or first not in self.alias:
            raise UnsupportedOpError(node.name, "its first argument must be a tensor computed from the input")
        return self.alias[first]

    def _affine(
        self, node: fx.Node, source: str, weight: Tensor, name: str, bias: Tensor | None, bias_name: str
    ) -> None:
        parent = self.nodes[source]
        if len(parent.shape) != 1:
            raise UnsupportedOpError(
                node.name,
                f"a Linear layer on features of shape {parent.shape} uses one matrix for several positions (shared "
                "weights); "
                "flatten the features first",
            )
        self._own(node, [(weight, name), (bias, bias_name)])
        if weight.shape[0] == 0 or weight.shape[1] == 0:
            raise UnsupportedOpError(node.name, "the layer has no features")
        self._add(
            node,
            Affine(node.name, self._shape(node), (source,), weight=name, bias=None if bias is None else bias_name),
        )

    def _own(self, node: fx.Node, tensors: list[tuple[Tensor | None, str]]) -> None:
        """Refuse parameters that are shared or not plain."""
        known = {n for n, _ in self.module.named_parameters()}
        for tensor, path in tensors:
            if tensor is None:
                continue
            if path not in known:
                raise UnsupportedOpError(
                    node.name,
                    f"'{path}' is not a plain parameter (weight or spectral normalisation, pruning, a tied or a buffer "
                    "weight); remove that first",
                )
            if id(tensor) in self.used:
                raise UnsupportedOpError(
                    node.name,
                    f"its parameters are shared with node '{self.used[id(tensor)]}'; a recurrent or tied use of one "
                    "matrix is not "
                    "supported: give each use its own layer",
                )
            self.used[id(tensor)] = node.name

    def _convolution(self, node: fx.Node, sub: nn.Conv2d, prefix: str) -> None:
        """A convolution: a free map, or a fixed one if its weight is frozen."""
        source = self._single(node)
        spec, kernel = Spec.of(sub), tuple(sub.weight.shape[2:])
        inputs, outputs = self.nodes[source].shape, self._shape(node)
        if len(inputs) != spec.dims + 1:
            raise UnsupportedOpError(
                node.name, f"features must have shape (channels, {'size, ' * spec.dims}) here, not {inputs}"
            )
        whole = 1 in (math.prod(inputs[1:]), math.prod(outputs[1:]))  # all positions in a single cell
        if spec.cells(kernel, inputs, outputs) is None and not whole:
            raise UnsupportedOpError(node.name, _why_not_periodic(sub, spec, inputs, outputs))
        bias = None if sub.bias is None else prefix + "bias"
        if not sub.weight.requires_grad:
            name = node.name if bias is None else f"{node.name}__map"
            self._add(node, Wire(name, outputs, (source,), target=spec.run, args=(Ref(0), Attr(prefix + "weight"))))
            if bias is not None:
                args = (Ref(0), Attr(bias), outputs)
                self._add(
                    node, Wire(node.name, outputs, (name,), target=_add_bias, args=args, role="sum", scales=(1.0,))
                )
            return
        self._own(node, [(sub.weight, prefix + "weight"), (sub.bias, bias or "")])
        self._add(
            node,
            Convolution(node.name, outputs, (source,), weight=prefix + "weight", bias=bias, spec=spec, kernel=kernel),
        )

    def _image_operation(self, node: fx.Node, sub: nn.Module) -> None:
        """A layer without parameters on images: a shuffle, a pool, a change of size."""
        fixed = _fixed_image_operation(sub)
        if fixed is None:
            self._max_pool(node, cast(nn.MaxPool2d, sub))
            return
        run, rest, role = fixed
        source = self._single(node)
        self._add(node, Wire(node.name, self._shape(node), (source,), target=run, args=(Ref(0), *rest), role=role))

    def _image_function(self, node: fx.Node, kind: type[nn.Module]) -> None:
        """``F.avg_pool2d(x, 2)`` and the like: what the layer with these arguments is."""

        def number(value: Any) -> Any:
            if isinstance(value, fx.Node):
                if self.first[value] != self.second[value]:
                    raise UnsupportedOpError(node.name, "its arguments must not depend on the batch size")
                return self.first[value]
            return value

        # The tensor itself is the first argument, by place or by name.
        options = {k: number(v) for k, v in node.kwargs.items() if k != "input"}
        if options.pop("antialias", False):
            raise UnsupportedOpError(node.name, "antialias=True is not supported; use F.avg_pool2d to scale down")
        self._image_operation(node, kind(*map(number, node.args[1:]), **options))

    def _max_pool(self, node: fx.Node, sub: nn.MaxPool2d) -> None:
        """Max-pooling over disjoint windows: sort each window, keep the first."""
        source = self._single(node)
        shape = self.nodes[source].shape
        dims = len(shape) - 1

        def each(value: Any) -> tuple[int, ...]:
            return (int(value),) * dims if isinstance(value, int) else tuple(int(v) for v in value)

        window, stride = each(sub.kernel_size), each(sub.stride)
        if sub.return_indices:
            raise UnsupportedOpError(node.name, "indices are not a continuous function of the input")
        if window != stride or any(each(sub.padding)) or any(d != 1 for d in each(sub.dilation)):
            raise UnsupportedOpError(
                node.name,
                "max-pooling over windows that overlap, or with padding or dilation, reads entries more than once; use "
                f"windows that do not overlap: {type(sub).__name__}({sub.kernel_size})",
            )
        if any(n % w for n, w in zip(shape[1:], window, strict=True)):
            raise UnsupportedOpError(
                node.name, f"windows of {window} do not divide the image's size {shape[1:]}; crop or resize the image"
            )
        name = f"{node.name}__sort"
        self.nodes[name] = Activation(name, shape, (source,), module=activations.WindowSort(window))
        steps = tuple(slice(None, None, w) for w in window)
        args = (Ref(0), (slice(None), slice(None), *steps))
        self._add(
            node, Wire(node.name, self._shape(node), (name,), target=operator.getitem, args=args, role="rearrange")
        )

    def _given(self, node: fx.Node, source: str, weight: str, bias: str | None = None) -> None:
        """A map with a frozen weight: a linear wire, and a constant added to it."""
        shape = self._shape(node)
        name = node.name if bias is None else f"{node.name}__map"
        wire = Wire(name, shape, (source,), target=F.linear, args=(Ref(0), Attr(weight)))
        self._add(node, wire)
        if bias is not None:
            args = (Ref(0), Attr(bias))
            self._add(node, Wire(node.name, shape, (name,), target=operator.add, args=args, role="sum", scales=(1.0,)))

    def _activation(self, node: fx.Node, value: Activation, sub: nn.Module) -> None:
        shape = self.nodes[value.parents[0]].shape
        try:
            sector = activations.sector(sub, shape[0] if shape else 1)
        except LdltError as error:
            raise UnsupportedOpError(node.name, str(error)) from error
        if sector.group is not None and len(shape) != 1:
            self.mixing.append(node.name)
        self._add(node, value)

    def _refuse_mixing(self, graph: Graph) -> None:
        """Groups of channels are sorted at every position of an image; elsewhere only vectors are."""
        for name in self.mixing:
            if graph.has_images or name not in graph.index:
                continue
            found = graph[name]
            assert isinstance(found, Activation)
            raise UnsupportedOpError(
                name,
                f"{type(found.resolve(self.module)).__name__} on features of shape {found.shape} mixes entries that "
                "are not neighbours; flatten first",
            )

    # -- functions and methods ---------------------------------------------------------------------------------------

    def _call(self, node: fx.Node, target: Callable[..., Any] | str) -> None:
        kind = "method" if isinstance(target, str) else "function"
        if target is operator.getitem and node.args[0] in self.tuples:
            spec, parents = self.tuples[cast(fx.Node, node.args[0])]
            index = node.args[1]
            if not isinstance(index, int):
                raise UnsupportedOpError(node.name, "select one element of the tuple at a time")
            wire = Wire(node.name, self._shape(node), parents, select=index, role="rearrange", **spec)
            self._add(node, self._ordered(wire))
        elif target in SUM:
            self._sum(node, *SUM[target])
        elif target in MULTIPLY or target in DIVIDE:
            self._scale(node, divide=target in DIVIDE)
        elif target in NEGATE:
            source = self._single(node)
            self._add(node, Wire(node.name, self._shape(node), (source,), role="sum", scales=(-1.0,)))
        elif target in REARRANGE:
            self._wire(node, kind, target, "rearrange")
        elif target in _DROPOUT:
            self._add(node, Wire(node.name, self._shape(node), (self._single(node),), kind="dropout", role="order"))
        elif target in _AVERAGE:
            self._shape(node)
            self._wire(node, kind, target, "linear")
        elif target in _MATMUL:
            self._matmul(node, kind, target)
        elif target in _IMAGE_FUNCTIONS:
            self._image_function(node, _IMAGE_FUNCTIONS[target])
        else:
            self._functional_activation(node, target)

    def _operands(self, node: fx.Node) -> tuple[list[str], list[Any]]:
        """Operands that depend on the input, and the constant ones."""
        args = [*node.args, *node.kwargs.values()]
        live = [self.alias[a] for a in args if isinstance(a, fx.Node) and a in self.alias]
        rest = [a for a in args if not (isinstance(a, fx.Node) and a in self.alias)]
        return live, rest

    def _sum(self, node: fx.Node, left: float, right: float) -> None:
        shape = self._shape(node)
        self._plain(node, {"alpha", "input", "other", "self"})
        factor = node.kwargs.get("alpha", 1)
        if not isinstance(factor, (int, float)):
            raise UnsupportedOpError(node.name, "alpha must be a number")
        pair = self._pair(node)
        kind = "method" if isinstance(node.target, str) else "function"
        spec, parents = self._spec(node, kind, node.target)
        scales = [
            s for a, s in zip(pair, (left, right * factor), strict=True) if isinstance(a, fx.Node) and a in self.alias
        ]
        if len(parents) != len(scales) or 0 in scales:
            raise UnsupportedOpError(node.name, "a sum of two tensors is expected, with alpha other than 0")
        if all(self.nodes[t].shape == shape for t in parents):
            # A constant operand shifts the value and leaves differences alone.
            wire = Wire(node.name, shape, tuple(parents), role="sum", scales=tuple(scales), **spec)
        elif len(parents) < 2:
            raise UnsupportedOpError(node.name, "adding a constant must not change the shape; expand explicitly")
        else:
            wire = Wire(node.name, shape, tuple(parents), role="linear", **spec)
        self._add(node, wire)

    @staticmethod
    def _plain(node: fx.Node, allowed: set[str]) -> None:
        """Refuse arguments that change the meaning of an operation."""
        extra = [k for k in node.kwargs if k not in allowed]
        if extra or len(node.args) > 2:
            what = f"the argument '{extra[0]}'" if extra else "more than two arguments"
            raise UnsupportedOpError(node.name, f"{what} is not supported here")

    @staticmethod
    def _pair(node: fx.Node) -> list[Any]:
        """The two operands, whether they are given by place or by name."""
        named = [node.kwargs[k] for k in ("input", "self", "other") if k in node.kwargs]
        pair = [*node.args, *named]
        if len(pair) != 2:
            raise UnsupportedOpError(node.name, "two operands are expected")
        return pair

    def _scale(self, node: fx.Node, divide: bool) -> None:
        self._plain(node, {"input", "other", "self"})
        pair = self._pair(node)
        live, rest = self._operands(node)
        if len(live) == 2 or (divide and not (isinstance(pair[0], fx.Node) and pair[0] in self.alias)):
            raise UnsupportedOpError(
                node.name,
                "a product or quotient of two functions of the input (gating, attention) has no global Lipschitz "
                "bound; use sums, concatenations and activations",
            )
        shape = self._shape(node)
        if len(rest) == 1 and isinstance(rest[0], (int, float)) and self.nodes[live[0]].shape == shape:
            number = float(rest[0])
            if number == 0 or not math.isfinite(number):
                raise UnsupportedOpError(node.name, f"a factor of {number:g} leaves nothing to learn")
            kind = "method" if isinstance(node.target, str) else "function"
            spec, parents = self._spec(node, kind, node.target)
            scale = 1 / number if divide else number
            self._add(node, Wire(node.name, shape, tuple(parents), role="sum", scales=(scale,), **spec))
            return
        self._constant(node)
        kind = "method" if isinstance(node.target, str) else "function"
        self._wire(node, kind, node.target, "linear")

    def _constant(self, node: fx.Node) -> None:
        """Refuse trainable constants in a linear operation: they would be free maps without a rule."""
        for arg in node.all_input_nodes:
            if arg.op == "get_attr" and isinstance(self.first[arg], nn.Parameter) and self.first[arg].requires_grad:
                raise UnsupportedOpError(
                    node.name,
                    f"the trainable parameter '{arg.target}' is used outside a Linear layer; use nn.Linear, or "
                    "register it as a buffer if it is meant to be constant",
                )

    def _matmul(self, node: fx.Node, kind: str, target: Any) -> None:
        live, _ = self._operands(node)
        if len(live) > 1:
            raise UnsupportedOpError(
                node.name,
                "a product of two functions of the input has no global Lipschitz bound; use Linear layers",
            )
        if target is F.linear:
            given = [a for a in [*node.args[1:], node.kwargs.get("weight"), node.kwargs.get("bias")] if a is not None]
            names = [a for a in given if isinstance(a, fx.Node) and a.op == "get_attr"]
            if len(names) != len(given) or not names:
                raise UnsupportedOpError(node.name, "weight and bias of linear() must be parameters of the module")
            tensors = [self.first[a] for a in names]
            if isinstance(tensors[0], nn.Parameter) and tensors[0].requires_grad:
                bias = tensors[1] if len(tensors) > 1 else None
                path = str(names[1].target) if len(names) > 1 else ""
                self._affine(node, self._single(node), tensors[0], str(names[0].target), bias, path)
                return
            self._given(node, self._single(node), *(str(n.target) for n in names))
            return
        self._constant(node)
        if not (isinstance(node.args[0], fx.Node) and node.args[0] in self.alias):
            raise UnsupportedOpError(node.name, "write the product with a constant matrix as  x @ matrix")
        self._wire(node, kind, target, "linear")

    def _functional_activation(self, node: fx.Node, target: Any) -> None:
        label = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        rest = [self.first[a] if isinstance(a, fx.Node) else a for a in node.args[1:]]
        kwargs = {
            k: self.first[a] if isinstance(a, fx.Node) else a
            for k, a in node.kwargs.items()
            if k not in ("input", "self")
        }
        live, _ = self._operands(node)
        if target in (F.prelu, torch.prelu, "prelu"):
            raise UnsupportedOpError(node.name, "use the module nn.PReLU, whose current weight can be followed")
        try:
            found = activations.from_call(target, tuple(rest), kwargs) if len(live) == 1 else None
        except LdltError as error:
            raise UnsupportedOpError(node.name, str(error)) from error
        if found is None:
            raise UnsupportedOpError(
                node.name,
                f"'{label}' has no certified rule; supported are Linear layers, elementwise activations, sums, scalar "
                "multiples, "
                "concatenations, slices, reshapes, means, and products with constant matrices",
            )
        self._activation(node, Activation(node.name, self._shape(node), (self._single(node),), module=found), found)
