"""The one table of operations, keyed by ATen operation: how each enters the graph, or why it does not.

An entry is an :class:`Operation`: a rule that reads a node of the exported program into the graph, and what is known of
its rounding. Rules are made by a few functions (:func:`moves`, :func:`mixes`, :func:`refused`, ...), so that most
entries are one line. :func:`register_operation` adds entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn

from ldlt import activations
from ldlt.errors import LdltError, OptionError, UnsupportedOpError
from ldlt.graph.convolution import Spec
from ldlt.graph.nodes import BATCH, Activation, Affine, Attr, Constant, Convolution, Ref, Wire

if TYPE_CHECKING:
    from ldlt.graph.trace import Reader

__all__ = ["TABLE", "Operation", "activates", "mixes", "moves", "refused", "register_operation"]

Rule = Callable[["Reader", fx.Node], None]


@dataclass(frozen=True)
class Operation:
    """An entry of the table.

    Attributes:
        rule: Reads a node of the program into the graph.
        roundings: How many floating-point operations an entry of its matrix takes, when it is found by running the
            operation on unit vectors: 0 if each is a stored number, 0 or 1; None if unknown, so that nothing with
            this operation is proven.
        linear: Whether it may stand in a graph, and so in a file, as an operation of its own.
    """

    rule: Rule
    roundings: int | None = None
    linear: bool = True


TABLE: dict[str, Operation] = {}


def register_operation(names: str, rule: Rule, roundings: int | None = None, linear: bool = True) -> None:
    """Add ATen operations to the table.

    Args:
        names: Names without overloads, separated by spaces, such as ``"permute transpose"``.
        rule: Made by :func:`moves`, :func:`mixes`, :func:`activates`, :func:`refused`, or a function of its own.
        roundings: See :class:`Operation`.
        linear: Likewise.
    """
    if not names.split() or not callable(rule):
        raise OptionError(f"an operation needs a name and a rule, not {names!r} and {rule!r}")
    for name in names.split():
        TABLE[name] = Operation(rule, roundings, linear)


# -- makers of rules ---------------------------------------------------------------------------------------------------


def moves(reader: Reader, node: fx.Node) -> None:
    """Features are moved, dropped or repeated, never mixed."""
    reader.wire(node, "rearrange")


def mixes(reader: Reader, node: fx.Node) -> None:
    """Linear in the one tensor that depends on the input; all others are constants."""
    if len(reader.live(node)) != 1:
        raise UnsupportedOpError(
            reader.label(node),
            "a product or quotient of two functions of the input (gating, attention) has no global Lipschitz bound; "
            "use sums, concatenations, activations, and products with constants",
        )
    reader.wire(node, "linear")


def same(reader: Reader, node: fx.Node) -> None:
    """The value itself."""
    reader.shape(node)
    reader.place(node, reader.name(node.args[0]))


def refused(reason: str) -> Rule:
    """Why an operation has no rule, and what to write instead."""

    def rule(reader: Reader, node: fx.Node) -> None:
        raise UnsupportedOpError(reader.label(node), reason)

    return rule


def activates(make: Callable[..., nn.Module | None]) -> Rule:
    """An elementwise or joint nonlinearity, as the module that ``make`` builds from its further arguments."""

    def rule(reader: Reader, node: fx.Node) -> None:
        source, *rest = node.args
        if any(isinstance(a, fx.Node) for a in (*rest, *node.kwargs.values())):
            raise UnsupportedOpError(
                reader.label(node),
                "an argument that fixes its slopes is a tensor and no number; use a number, or torch.nn.PReLU for "
                "learned slopes",
            )
        try:
            module = make(*rest, **node.kwargs)
        except LdltError as error:
            raise UnsupportedOpError(reader.label(node), str(error)) from error
        except (AssertionError, TypeError, ValueError) as error:
            raise UnsupportedOpError(
                reader.label(node), f"its arguments {tuple(rest)!r} do not fit: {error}"
            ) from error
        if module is None:
            raise UnsupportedOpError(reader.label(node), "its arguments do not fit an activation")
        reader.activation(node, source, module=module)

    return rule


# -- sums and multiples ------------------------------------------------------------------------------------------------


def _sum(left: float, right: float) -> Rule:
    """``left a + right α b``."""

    def rule(reader: Reader, node: fx.Node) -> None:
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        if not isinstance(alpha, (int, float)):
            raise UnsupportedOpError(reader.label(node), "alpha must be a number")
        pairs = list(zip(node.args[:2], (left, right * alpha), strict=True))
        live = [(a, s) for a, s in pairs if reader.is_live(a)]
        shape = reader.shape(node)
        if any(s == 0 or not math.isfinite(s) for _, s in live):  # no row of a free map can be told from zero
            reader.wire(node, "linear", spread=shape)
        else:
            reader.wire(node, "sum", scales=[s for _, s in live], spread=shape)

    return rule


def _times(reader: Reader, node: fx.Node) -> None:
    """A product with a number is a multiple, one with a constant tensor a diagonal map."""
    live = [a for a in node.args if reader.is_live(a)]
    numbers = [float(a) for a in node.args if isinstance(a, (int, float))]
    _multiple(reader, node, live, numbers)


def _over(reader: Reader, node: fx.Node) -> None:
    if not reader.is_live(node.args[0]):
        raise UnsupportedOpError(
            reader.label(node), "a quotient by a function of the input has no global Lipschitz bound"
        )
    if node.kwargs.get("rounding_mode") is not None:
        raise UnsupportedOpError(reader.label(node), "a rounded quotient jumps; divide without rounding_mode")
    live = [a for a in node.args if reader.is_live(a)]
    numbers = [1 / float(a) if a else math.inf for a in node.args[1:2] if isinstance(a, (int, float))]
    _multiple(reader, node, live, numbers)


def _multiple(reader: Reader, node: fx.Node, live: Sequence[Any], numbers: Sequence[float]) -> None:
    if not all(map(math.isfinite, numbers)):
        raise UnsupportedOpError(reader.label(node), "a factor is not a finite number")
    if len(live) == 1 and len(numbers) == 1 and numbers[0] != 0:
        reader.wire(node, "sum", scales=numbers)
    else:
        mixes(reader, node)


def _negative(reader: Reader, node: fx.Node) -> None:
    reader.wire(node, "sum", scales=[-1.0])


def _lerp(reader: Reader, node: fx.Node) -> None:
    """``(1 − w) a + w b``."""
    weight = node.args[2]
    if not isinstance(weight, (int, float)) or len(reader.live(node)) != 2 or weight in (0, 1):
        raise UnsupportedOpError(reader.label(node), "write lerp as a sum of multiples, (1 - w) * a + w * b")
    reader.wire(node, "sum", scales=[1 - weight, float(weight)], spread=reader.shape(node))


# -- what is linear in several arguments, some of them constant --------------------------------------------------------


def _affine(reader: Reader, node: fx.Node) -> None:
    """Linear in all of its tensors together: the constant ones only shift the result."""
    reader.split(node, role="rearrange")


def _where(reader: Reader, node: fx.Node) -> None:
    if reader.is_live(node.args[0]):
        raise UnsupportedOpError(reader.label(node), "a choice that depends on the input jumps; use an activation")
    reader.split(node, fixed=(0,), numbers=(1, 2))


def _masked_fill(reader: Reader, node: fx.Node) -> None:
    if reader.is_live(node.args[1]):
        raise UnsupportedOpError(reader.label(node), "a mask that depends on the input jumps; use an activation")
    reader.split(node, fixed=(1,), numbers=(2,))


def _pad(reader: Reader, node: fx.Node) -> None:
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    if mode == "constant":
        reader.split(node, fixed=(1, 2), numbers=(2, 3))
    else:
        reader.wire(node, "rearrange")


def _addmm(reader: Reader, node: fx.Node) -> None:
    if reader.is_live(node.args[1]) + reader.is_live(node.args[2]) != 1 or node.kwargs:
        raise UnsupportedOpError(reader.label(node), "write it as  x @ matrix + bias")
    reader.split(node, fixed=(1, 2))


# -- free and given maps -----------------------------------------------------------------------------------------------


def _linear(reader: Reader, node: fx.Node) -> None:
    """``x W' + b``: free if ``W`` is a trained parameter that nothing else reads and x is a vector."""
    source, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else None
    if not reader.is_live(source) or reader.is_live(weight) or (bias is not None and reader.is_live(bias)):
        return mixes(reader, node)
    path = reader.free(weight)
    if path is None or len(reader.shape(source)) != 1:
        return reader.split(node, fixed=(1,))
    if 0 in reader.meta(weight).shape:
        raise UnsupportedOpError(reader.label(node), "the layer has no features")
    own = None if bias is None else reader.plain(bias)
    reader.add(node, Affine(reader.label(node), reader.shape(node), (reader.name(source),), path, own))
    return None


def _convolution(transposed: bool) -> Rule:
    def rule(reader: Reader, node: fx.Node) -> None:
        schema = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        given = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}  # type: ignore[union-attr]
        given |= dict(zip(schema, node.args, strict=False)) | node.kwargs
        source, weight, bias = given["input"], given["weight"], given["bias"]
        if not reader.is_live(source) or reader.is_live(weight):
            return mixes(reader, node)
        dims = reader.meta(weight).ndim - 2
        padded = reader.circular(source, node, dims)
        path = reader.free(weight)
        if path is None:
            return reader.split(node, fixed=(1,))

        def each(value: Any) -> tuple[int, ...]:
            values = (value,) if isinstance(value, int) else tuple(value)
            return values * dims if len(values) == 1 else values

        padding = given["padding"] if isinstance(given["padding"], str) else each(given["padding"])
        if padded is not None and (padding in ("valid", (0,) * dims)):
            source, border = padded
        else:
            border = ()
        spec = Spec(
            dims=dims, stride=each(given["stride"]), padding=padding, dilation=each(given["dilation"]),
            groups=given["groups"], transposed=transposed,
            output_padding=each(given["output_padding"]) if transposed else (),
            mode="circular" if border else "zeros", border=border,
        )  # fmt: skip
        kernel = tuple(reader.meta(weight).shape[2:])
        inputs, outputs = reader.shape(source), reader.shape(node)
        whole = 1 in (math.prod(inputs[1:]), math.prod(outputs[1:]))  # all positions in a single cell
        if len(inputs) != dims + 1 or (spec.cells(kernel, inputs, outputs) is None and not whole):
            return reader.split(node, fixed=(1,))  # it treats the border unlike the rest: a given map
        own = None if bias is None else reader.plain(bias)
        reader.add(
            node,
            Convolution(
                reader.label(node), outputs, (reader.name(source),), weight=path, bias=own, spec=spec, kernel=kernel
            ),
        )
        return None

    return rule


def _batch_norm(reader: Reader, node: fx.Node) -> None:
    r"""``γ (x − μ)/√(v + ε) + β`` with the running statistics, in both modes: a diagonal map and a constant."""
    schema = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(schema, node.args, strict=False)) | node.kwargs
    mean, variance = given.get("running_mean"), given.get("running_var")
    if mean is None or variance is None:
        raise UnsupportedOpError(
            reader.label(node),
            "normalisation by statistics of the input itself is not globally Lipschitz; use nn.BatchNorm with "
            "track_running_stats=True, or remove it (the network is normalised by construction)",
        )
    shape = reader.shape(given["input"])
    along = [-1, *(1,) * (len(shape) - 1)]
    name = reader.label(node)

    def keep(part: str, target: str, *args: Any) -> Attr:
        return reader.keep(f"{name}.{part}", Constant(f"aten.{target}", args))

    def column(part: str, arg: Any) -> Attr:
        return keep(part, "view.default", reader.constant(arg), along)

    shifted = keep("variance", "add.Scalar", column("own_variance", variance), given["eps"])
    scale = keep("scale", "rsqrt.default", shifted)
    if given["weight"] is not None:
        scale = keep("slope", "mul.Tensor", scale, column("weight", given["weight"]))
    shift = keep("shift", "mul.Tensor", column("mean", mean), scale)
    inner = Wire(f"{name}__map", shape, (reader.name(given["input"]),), "aten.mul.Tensor", (Ref(0), scale))
    reader.put(inner)
    args: tuple[Any, ...] = (Ref(0), shift)
    if given["bias"] is not None:
        args = (Ref(0), keep("offset", "sub.Tensor", shift, column("bias", given["bias"])))
    outer = Wire(name, shape, (inner.name,), "aten.sub.Tensor", args, role="sum", scales=(1.0,))
    reader.put(outer)
    reader.elements(node, lambda index: outer.name)
    if node.target is torch.ops.aten.batch_norm.default:
        reader.place(node, outer.name)


# -- maxima ------------------------------------------------------------------------------------------------------------


def _windows(reader: Reader, node: fx.Node, source: str, index: torch.Tensor, shape: tuple[int, ...]) -> str:
    """Maxima over the flattened features ``index`` (features of the result, k), repetitions allowed.

    A maximum is the first entry of the sorted window, and sorting moves no two vectors apart; a feature that is in
    several windows is copied first, which the rule carries as it does any linear operation.
    """
    count, width = index.shape
    name, features = reader.label(node), math.prod(reader.nodes[source].shape)
    flat = reader.put(
        Wire(f"{name}__flat", (features,), (source,), "aten.view.default", (Ref(0), [BATCH, -1]), role="order")
    )
    table = reader.keep(f"{name}.windows", Constant(value=index.reshape(-1)))
    spread = reader.put(
        Wire(
            f"{name}__windows",
            (count * width,),
            (flat,),
            "aten.index_select.default",
            (Ref(0), 1, table),
            role="rearrange",
        )
    )
    lines = (1, count * width)
    stood = reader.put(
        Wire(f"{name}__lines", lines, (spread,), "aten.view.default", (Ref(0), [BATCH, *lines]), role="order")
    )
    ordered = reader.put(Activation(f"{name}__sort", lines, (stood,), module=activations.WindowSort((width,))))
    first = Wire(
        f"{name}__first", (1, count), (ordered,), "aten.slice.Tensor", (Ref(0), 2, 0, 2**62, width), role="rearrange"
    )
    reader.put(first)
    return reader.put(Wire(name, shape, (first.name,), "aten.view.default", (Ref(0), [BATCH, *shape]), role="order"))


def _numbers(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(1, *shape)


def _max_pool(reader: Reader, node: fx.Node) -> None:
    source = reader.name(node.args[0])
    shape, result = reader.nodes[source].shape, reader.pooled(node)
    dims = len(shape) - 1
    options = [*node.args[1:], *([[]] * 5)]

    def each(value: Any, default: Sequence[int]) -> list[int]:
        values = [value] if isinstance(value, int) else list(value or default)
        return values * dims if len(values) == 1 else values

    window = each(options[0], ())
    stride = each(options[1], window)
    padding, dilation = each(options[2], [0]), each(options[3], [1])
    disjoint = window == stride and not any(padding) and set(dilation) == {1}
    if disjoint and all(n % w == 0 for n, w in zip(shape[1:], window, strict=True)):
        name = reader.label(node)
        ordered = reader.put(
            Activation(f"{name}__sort", shape, (source,), module=activations.WindowSort(tuple(window)))
        )
        for d, w in enumerate(window):  # the first entry of each window
            last = d == dims - 1
            kept = (shape[0], *(n // k for n, k in zip(shape[1 : d + 2], window, strict=False)), *shape[d + 2 :])
            args = (Ref(0), d + 2, 0, 2**62, w)
            wire = Wire(
                name if last else f"{name}__first{d}", kept, (ordered,), "aten.slice.Tensor", args, role="rearrange"
            )
            ordered = reader.put(wire)
        return reader.result(node, ordered)
    axes = []
    for n, m, w, s, p, k in zip(shape[1:], result[1:], window, stride, padding, dilation, strict=True):
        at = torch.arange(m)[:, None] * s - p + torch.arange(w) * k  # (outputs, window)
        inside = (at >= 0) & (at < n)
        first = torch.where(inside, at, n).amin(1, keepdim=True)  # what is outside repeats an entry that is inside
        axes.append(torch.where(inside, at, first))
    return reader.result(node, _windows(reader, node, source, _meet(shape, axes), result))


def _meet(shape: Sequence[int], axes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Features that the windows of a pool read, (channels × positions, window), from those along each axis."""
    index = torch.arange(shape[0]).reshape(-1, *(1,) * (2 * len(axes)))
    for d, (n, at) in enumerate(zip(shape[1:], axes, strict=True)):
        spread = [1] * (1 + 2 * len(axes))
        spread[1 + d], spread[1 + len(axes) + d] = at.shape
        index = index * n + at.reshape(spread)
    return index.flatten(0, len(axes)).flatten(1)


def _adaptive_max_pool(reader: Reader, node: fx.Node) -> None:
    source = reader.name(node.args[0])
    shape, result = reader.nodes[source].shape, reader.pooled(node)
    axes = []
    for n, m in zip(shape[1:], result[1:], strict=True):
        ends = [(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        width = max(b - a for a, b in ends)
        axes.append(torch.stack([torch.arange(width).clamp(max=b - a - 1) + a for a, b in ends]))
    reader.result(node, _windows(reader, node, source, _meet(shape, axes), result))


def _extreme(sign: int) -> Rule:
    """Maximum or minimum over some dimensions, or of two values."""

    def rule(reader: Reader, node: fx.Node) -> None:
        first, *rest = node.args
        if rest and isinstance(rest[0], fx.Node):
            return _pairwise(reader, node, sign)
        source = reader.name(first)
        shape = reader.nodes[source].shape
        axes = [rest[0]] if rest and isinstance(rest[0], int) else list(cast(Any, rest[0])) if rest else []
        axes = sorted({a % (len(shape) + 1) for a in axes})
        if not axes or 0 in axes:
            raise UnsupportedOpError(
                reader.label(node), "it mixes the samples of a batch; name the dimensions behind the batch"
            )
        numbers = _numbers(shape)
        index = (
            numbers.movedim(axes, list(range(-len(axes), 0)))
            .flatten(-len(axes))
            .reshape(-1, math.prod(numbers.shape[a] for a in axes))
        )
        if sign < 0:
            source = _opposite(reader, node, source, "__negative")
        result = _windows(reader, node, source, index, reader.pooled(node))
        return reader.result(node, result if sign > 0 else _opposite(reader, node, result, "__back"))

    return rule


def _sort(reader: Reader, node: fx.Node) -> None:
    """Entries along one dimension in order: the lines are moved to the end, sorted, and moved back."""
    schema = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(schema, node.args, strict=False)) | node.kwargs
    source = reader.name(given["self"])
    shape = reader.nodes[source].shape
    axis = given.get("dim", -1) % (len(shape) + 1)
    if axis == 0:
        raise UnsupportedOpError(reader.label(node), "it mixes the samples of a batch")
    order = [i for i in range(len(shape) + 1) if i != axis] + [axis]
    label, lines = reader.label(node), tuple(shape[i - 1] for i in order[1:])
    moved = Wire(f"{label}__lines", lines, (source,), "aten.permute.default", (Ref(0), order), role="rearrange")
    window = (*(1 for _ in lines[1:-1]), lines[-1])
    stood = reader.put(moved)
    if len(lines) == 1:
        lines = (1, *lines)
        stood = reader.put(
            Wire(f"{label}__line", lines, (stood,), "aten.view.default", (Ref(0), [BATCH, *lines]), role="order")
        )
    name = reader.put(Activation(f"{label}__sort", lines, (stood,), module=activations.WindowSort(window)))
    if not given.get("descending", False):
        name = reader.put(
            Wire(f"{label}__flip", lines, (name,), "aten.flip.default", (Ref(0), [len(lines)]), role="rearrange")
        )
    back = sorted(range(len(order)), key=order.__getitem__)
    if len(shape) == 1:
        name = reader.put(Wire(label, shape, (name,), "aten.view.default", (Ref(0), [BATCH, *shape]), role="order"))
    else:
        name = reader.put(Wire(label, shape, (name,), "aten.permute.default", (Ref(0), back), role="rearrange"))
    reader.result(node, name)


def _opposite(reader: Reader, node: fx.Node, source: str, suffix: str) -> str:
    name = reader.label(node) + suffix
    return reader.put(
        Wire(name, reader.nodes[source].shape, (source,), "aten.neg.default", (Ref(0),), role="sum", scales=(-1.0,))
    )


def _pairwise(reader: Reader, node: fx.Node, sign: int) -> None:
    shape = reader.shape(node)
    if len(reader.live(node)) != 2 or any(reader.shape(a) != shape for a in node.args[:2]):
        raise UnsupportedOpError(
            reader.label(node), "two functions of the input of one shape are expected; use clamp for numbers"
        )
    features = math.prod(shape)
    parts = []
    for place, arg in enumerate(node.args[:2]):
        wire = Wire(
            f"{reader.label(node)}__part{place}",
            (features,),
            (reader.name(arg),),
            "aten.view.default",
            (Ref(0), [BATCH, -1]),
            role="order",
        )
        parts.append(reader.put(wire))
    both = reader.put(
        Wire(
            f"{reader.label(node)}__both",
            (2 * features,),
            tuple(parts),
            "aten.cat.default",
            ([Ref(0), Ref(1)], 1),
            role="rearrange",
        )
    )
    if sign < 0:
        both = _opposite(reader, node, both, "__negative")
    index = torch.stack([torch.arange(features), torch.arange(features) + features], 1)
    result = _windows(reader, node, both, index, shape)
    reader.place(node, result if sign > 0 else _opposite(reader, node, result, "__back"))


# -- the table ---------------------------------------------------------------------------------------------------------

register_operation("add", _sum(1.0, 1.0), 0)
register_operation("sub subtract", _sum(1.0, -1.0), 0)
register_operation("rsub", _sum(-1.0, 1.0), 0)
register_operation("neg negative", _negative, 0)
register_operation("mul multiply", _times, 0)
register_operation("div divide true_divide", _over, 1)
register_operation("lerp", _lerp, 2)

register_operation(
    "clone alias detach contiguous lift_fresh_copy _to_copy to dropout native_dropout feature_dropout",
    same,
    0,
    linear=False,
)
register_operation(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze permute transpose t mT swapaxes swapdims movedim "
    "select slice narrow split split_with_sizes chunk tensor_split unbind index_select index flip roll rot90 "
    "unfold diagonal pixel_shuffle pixel_unshuffle "
    "channel_shuffle native_channel_shuffle expand expand_as repeat tile repeat_interleave broadcast_to "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
    moves,
    0,
)
register_operation("sum matmul mm bmm mv einsum diff cumsum tril triu im2col diag_embed", mixes, 0)
register_operation("tensordot inner kron", mixes)
register_operation("mean", mixes, 1)
register_operation("avg_pool1d avg_pool2d avg_pool3d", mixes, 1)
register_operation("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", mixes, 1)
register_operation("_adaptive_avg_pool2d _adaptive_avg_pool3d", mixes, 1)
register_operation("upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d", mixes)

register_operation("cat concat concatenate stack hstack vstack dstack column_stack", _affine, 0)
register_operation("slice_scatter select_scatter copy", _affine, 0)
register_operation("where", _where, 0)
register_operation("masked_fill", _masked_fill, 0)
register_operation("pad constant_pad_nd", _pad, 0)
register_operation("addmm", _addmm, 0)

register_operation("linear", _linear, 0)
register_operation("conv1d conv2d conv3d", _convolution(False), 0)
register_operation("conv_transpose1d conv_transpose2d conv_transpose3d", _convolution(True), 0)
register_operation(
    "batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit_functional _native_batch_norm_legit "
    "native_batch_norm",
    _batch_norm,
    linear=False,
)

register_operation("sort", _sort, linear=False)
register_operation(
    "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices", _max_pool, linear=False
)
register_operation("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", _adaptive_max_pool, linear=False)
register_operation("amax max maximum fmax", _extreme(1), linear=False)
register_operation("amin min minimum fmin", _extreme(-1), linear=False)

for _name in activations.CALLS:
    register_operation(
        {"logsigmoid": "log_sigmoid"}.get(_name, _name), activates(activations.CALLS[_name]), linear=False
    )
for _name in ("softmax", "_softmax"):
    register_operation(_name, activates(lambda dim, *_: nn.Softmax(dim)), linear=False)

_HINTS = {
    "layer_norm native_layer_norm group_norm native_group_norm rms_norm instance_norm local_response_norm":
        "normalisation by statistics of its input is not globally Lipschitz; remove it, the network is normalised by "
        "construction",
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu _transformer_encoder_layer_fwd "
    "_native_multi_head_attention":
        "dot-product attention multiplies two functions of the input and is not globally Lipschitz; use Linear layers "
        "and activations",
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell":
        "a recurrent layer uses one matrix many times and multiplies gates; unroll the recursion with Linear layers",
    "embedding embedding_bag _embedding_bag": "an embedding is no function of a real vector; feed its output instead",
    "bilinear": "a bilinear map multiplies two functions of the input; use Linear layers",
    "glu": "it multiplies one half of its input by a gate made from the other, so its slopes are unbounded; use an "
        "elementwise activation such as SiLU",
    "log_softmax _log_softmax logsumexp": "let the network end in logits and apply it outside of the certified map, as "
        "part of the loss",
    "exp exp2 pow square sqrt rsqrt reciprocal log log2 log10 log1p expm1 sinh cosh tan":
        "its slopes are unbounded; use an activation with bounded slopes",
    "linalg_vector_norm norm std var cdist dist renorm _weight_norm":
        "it is not a sum of linear maps and elementwise activations with known slopes; use those",
    "sign round floor ceil trunc heaviside gt lt ge le eq ne argmax argmin":
        "it jumps, so its slopes are unbounded; use a continuous activation",
    "bernoulli rand_like randn_like rand randn": "it is random; use nn.Dropout, or draw noise outside of the network",
}  # fmt: skip
for _names, _reason in _HINTS.items():
    register_operation(_names, refused(_reason), linear=False)
