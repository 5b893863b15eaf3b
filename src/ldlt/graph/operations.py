"""The one table of operations, keyed by ATen operation: how each enters the graph, or why it does not.

An entry is an :class:`Operation`: a rule that reads a node of the exported program into the graph, and what is known of
its rounding. Rules are made by a few functions (:func:`moves`, :func:`mixes`, :func:`refused`, ...), so that most
entries are one line. :func:`register_operation` adds entries. Activations have a table of their own,
:data:`ldlt.activations.TABLE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from ldlt import activations
from ldlt.errors import LdltError, OptionError
from ldlt.graph.convolution import Spec
from ldlt.graph.nodes import Affine, Attr, Constant, Convolution, Ref, Wire

if TYPE_CHECKING:
    from ldlt.graph.trace import Reader

__all__ = ["TABLE", "Operation", "activates", "find", "mixes", "moves", "refused", "register_operation", "same"]

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
    """Add operations to the table.

    Args:
        names: Names of ATen operations without overloads, separated by spaces, such as ``"permute transpose"``; those
            of other libraries with their namespace, ``"mine::scatter"``.
        rule: Made by :func:`moves`, :func:`mixes`, :func:`activates`, :func:`refused`, or a function of its own.
        roundings: See :class:`Operation`.
        linear: Likewise.

    Raises:
        OptionError: An argument is not of its kind.
    """
    if not isinstance(names, str) or not names.split() or not callable(rule):
        raise OptionError(f"an operation needs a name and a rule, not {names!r} and {rule!r}")
    if roundings is not None and (type(roundings) is not int or roundings < 0):
        raise OptionError(f"roundings of '{names}' must be a number of operations or None, not {roundings!r}")
    for name in names.split():
        TABLE[name] = Operation(rule, roundings, linear)


def find(name: str) -> Operation | None:
    """The entry of an operation: of the table, or of an activation that is called by this name."""
    make = None if name in TABLE else activations.maker(name)
    return TABLE.get(name) if make is None else Operation(activates(make), linear=False)


# -- makers of rules ---------------------------------------------------------------------------------------------------


def moves(reader: Reader, node: fx.Node) -> None:
    """Features are moved, dropped or repeated, never mixed."""
    reader.wire(node, "rearrange")


def mixes(reader: Reader, node: fx.Node) -> None:
    """Linear in the one tensor that depends on the input; all others are constants."""
    if len(reader.live(node)) != 1:
        raise reader.refusal(
            node,
            "a product or quotient of two functions of the input (gating, attention) has no global Lipschitz bound; "
            "use sums, concatenations, activations, and products with constants",
        )
    reader.wire(node, "linear")


def same(reader: Reader, node: fx.Node) -> None:
    """The value itself."""
    reader.shape(node)
    reader.add(node, reader.name(node.args[0]))


def refused(reason: str) -> Rule:
    """Why an operation has no rule, and what to write instead."""

    def rule(reader: Reader, node: fx.Node) -> None:
        raise reader.refusal(node, reason)

    return rule


def activates(make: Callable[..., nn.Module]) -> Rule:
    """An elementwise or joint nonlinearity, as the module that ``make`` builds from its further arguments."""

    def rule(reader: Reader, node: fx.Node) -> None:
        source, *rest = node.args
        if any(isinstance(a, fx.Node) for a in (*rest, *node.kwargs.values())):
            raise reader.refusal(
                node,
                "an argument that fixes its slopes is a tensor and no number; use a number, or torch.nn.PReLU for "
                "learned slopes",
            )
        try:
            module = make(*rest, **node.kwargs)
        except (LdltError, AssertionError, TypeError, ValueError) as error:
            raise reader.refusal(node, f"its arguments {tuple(rest)!r} do not fit: {error}") from error
        reader.activation(node, source, module=module)

    return rule


# -- sums and multiples ------------------------------------------------------------------------------------------------


def _sum(weights: Callable[[float], tuple[float, float]]) -> Rule:
    """A sum of two values with weights that depend on ``alpha``."""

    def rule(reader: Reader, node: fx.Node) -> None:
        alpha = reader.given(node).get("alpha", 1)
        if not isinstance(alpha, (int, float)):
            raise reader.refusal(node, "alpha must be a number")
        scales = [s for a, s in zip(node.args[:2], weights(alpha), strict=True) if reader.is_live(a)]
        if any(s == 0 or not math.isfinite(s) for s in scales):  # no row of a free map can be told from zero
            reader.wire(node, "linear", spread=reader.shape(node))
        else:
            reader.wire(node, "sum", scales, spread=reader.shape(node))

    return rule


def _times(reader: Reader, node: fx.Node) -> None:
    _multiple(reader, node, [float(a) for a in node.args if isinstance(a, (int, float))])


def _over(reader: Reader, node: fx.Node) -> None:
    if not reader.is_live(node.args[0]):
        raise reader.refusal(node, "a quotient by a function of the input has no global Lipschitz bound")
    if node.kwargs.get("rounding_mode") is not None:
        raise reader.refusal(node, "a rounded quotient jumps; divide without rounding_mode")
    _multiple(reader, node, [1 / float(a) if a else math.inf for a in node.args[1:2] if isinstance(a, (int, float))])


def _multiple(reader: Reader, node: fx.Node, numbers: Sequence[float]) -> None:
    """A product with a number is a multiple, one with a constant tensor a diagonal map."""
    if not all(map(math.isfinite, numbers)):
        raise reader.refusal(node, "a factor is not a finite number")
    if len(reader.live(node)) == 1 and len(numbers) == 1 and numbers[0] != 0:
        reader.wire(node, "sum", numbers)
    else:
        mixes(reader, node)


def _lerp(reader: Reader, node: fx.Node) -> None:
    """``(1 − w) a + w b``."""
    weight = node.args[2]
    if not isinstance(weight, (int, float)) or len(reader.live(node)) != 2 or weight in (0, 1):
        raise reader.refusal(node, "write lerp as a sum of multiples, (1 - w) * a + w * b")
    reader.wire(node, "sum", [1 - weight, float(weight)], spread=reader.shape(node))


# -- what is linear in several arguments, some of them constant --------------------------------------------------------


def _affine(reader: Reader, node: fx.Node) -> None:
    """Linear in all of its tensors together: the constant ones only shift the result."""
    reader.split(node, role="rearrange")


def _chosen(mask: int, numbers: tuple[int, ...]) -> Rule:
    """A choice between values and numbers, by a mask in one of the places."""

    def rule(reader: Reader, node: fx.Node) -> None:
        if reader.is_live(node.args[mask]):
            raise reader.refusal(node, "a choice that depends on the input jumps; use an activation")
        reader.split(node, fixed=(mask,), numbers=numbers)

    return rule


def _pad(reader: Reader, node: fx.Node) -> None:
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    if mode == "constant":
        reader.split(node, fixed=(1, 2), numbers=(2, 3))
    else:
        reader.wire(node, "rearrange")


def _addmm(reader: Reader, node: fx.Node) -> None:
    if reader.is_live(node.args[1]) + reader.is_live(node.args[2]) != 1 or node.kwargs:
        raise reader.refusal(node, "write it as  x @ matrix + bias")
    reader.split(node, fixed=(1, 2))


# -- free and given maps -----------------------------------------------------------------------------------------------


def _linear(reader: Reader, node: fx.Node) -> None:
    """``x W' + b``: free if ``W`` is a trained parameter that nothing else reads and x is a vector."""
    source, weight, bias = [*node.args, None][:3]
    if not reader.is_live(source) or reader.is_live(weight) or reader.is_live(bias):
        return mixes(reader, node)
    path = reader.free(weight)
    outputs = reader.shape(node)
    plain = bias is None or tuple(reader.meta(bias).shape) == outputs
    if path is None or len(reader.shape(source)) != 1 or not plain:
        return reader.split(node, fixed=(1,))
    if 0 in reader.meta(weight).shape:
        raise reader.refusal(node, "the layer has no features")
    own = None if bias is None else reader.constant(bias).path
    return reader.add(node, Affine(reader.label(node), outputs, (reader.name(source),), path, own))


def _each(value: Any, dims: int) -> tuple[int, ...]:
    """One number per dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _convolution(transposed: bool) -> Rule:
    def rule(reader: Reader, node: fx.Node) -> None:
        given = reader.given(node)
        source, weight, bias, padding = (given[n] for n in ("input", "weight", "bias", "padding"))
        if not reader.is_live(source) or reader.is_live(weight):
            return mixes(reader, node)
        dims, kernel = reader.meta(weight).ndim - 2, tuple(reader.meta(weight).shape[2:])
        padding = padding if isinstance(padding, str) else _each(padding, dims)
        border: tuple[int, ...] = ()
        if padding in ("valid", (0,) * dims):
            source, border = reader.circular(source, dims)
        spec = Spec(
            dims, _each(given["stride"], dims), padding, _each(given["dilation"], dims), given["groups"], transposed,
            _each(given["output_padding"], dims) if transposed else (), "circular" if border else "zeros", border,
        )  # fmt: skip
        path, inputs, outputs = reader.free(weight), reader.shape(source), reader.shape(node)
        if path is None or len(inputs) != dims + 1:
            return reader.split(node, fixed=(1,))
        whole = 1 in (math.prod(inputs[1:]), math.prod(outputs[1:]))  # all positions in a single cell
        if not whole and spec.cells(kernel, inputs, outputs) is None:
            return reader.split(node, fixed=(1,))  # it treats the border unlike the rest: a given map
        own = None if bias is None else reader.constant(bias).path
        parents = (reader.name(source),)
        return reader.add(node, Convolution(reader.label(node), outputs, parents, path, own, spec=spec, kernel=kernel))

    return rule


def _batch_norm(reader: Reader, node: fx.Node) -> None:
    r"""``γ (x − μ)/√(v + ε) + β`` with the running statistics, in both modes: a diagonal map and a constant."""
    given, name = reader.given(node), reader.label(node)
    mean, variance = given.get("running_mean"), given.get("running_var")
    if mean is None or variance is None:
        raise reader.refusal(
            node,
            "normalisation by statistics of the input itself is not globally Lipschitz; use nn.BatchNorm with "
            "track_running_stats=True, or remove it (the network is normalised by construction)",
        )
    shape = reader.shape(given["input"])

    def keep(part: str, target: str, *args: Any) -> Attr:
        return reader.keep(f"{name}.{part}", Constant(f"aten.{target}", args))

    def column(part: str, arg: Any) -> Attr:
        return keep(part, "view.default", reader.constant(arg), [-1, *(1,) * (len(shape) - 1)])

    scale = keep("scale", "rsqrt.default", keep("variance", "add.Scalar", column("own", variance), given["eps"]))
    if given["weight"] is not None:
        scale = keep("slope", "mul.Tensor", scale, column("weight", given["weight"]))
    shift = keep("shift", "mul.Tensor", column("mean", mean), scale)
    if given["bias"] is not None:
        shift = keep("offset", "sub.Tensor", shift, column("bias", given["bias"]))
    inner = Wire(f"{name}__map", shape, (reader.name(given["input"]),), "aten.mul.Tensor", (Ref(0), scale))
    args = (Ref(0), shift)
    outer = Wire(name, shape, (reader.put(inner),), "aten.sub.Tensor", args, role="sum", scales=(1.0,))
    reader.put(outer)
    single = node.target is torch.ops.aten.batch_norm.default
    reader.add(node, name if single else lambda index: name)  # statistics that training returns are not looked at


# -- maxima ------------------------------------------------------------------------------------------------------------


def _ordered(reader: Reader, name: str, source: str, index: torch.Tensor) -> str:
    """Lines of the flattened features ``index`` (lines, k), repetitions allowed, in descending order, end to end.

    Sorting moves no two vectors apart; a feature that is in several lines is copied first, which the rule carries as
    it does any linear operation.
    """
    flat = reader.view(f"{name}__flat", source, (reader.nodes[source].features,))
    lines = reader.view(f"{name}__lines", reader.gather(f"{name}__windows", flat, index), (1, index.numel()))
    return reader.activate(f"{name}__sort", lines, activations.WindowSort((index.shape[1],)))


def _windows(reader: Reader, name: str, source: str, index: torch.Tensor, shape: tuple[int, ...]) -> str:
    """Maxima over the flattened features ``index`` (features of the result, k): the first of each sorted line."""
    ordered = _ordered(reader, name, source, index)
    first = reader.move(f"{name}__first", ordered, "slice.Tensor", Ref(0), 2, 0, 2**62, index.shape[1])
    return reader.view(name, first, shape)


def _max_pool(reader: Reader, node: fx.Node) -> None:
    name, source, given = reader.label(node), reader.name(node.args[0]), reader.given(node)
    shape, result = reader.nodes[source].shape, reader.shape(node)
    dims = len(shape) - 1
    window = _each(given["kernel_size"], dims)
    stride = _each(given["stride"] or window, dims)
    padding, dilation = _each(given["padding"], dims), _each(given["dilation"], dims)
    disjoint = window == stride and not any(padding) and set(dilation) == {1}
    if disjoint and all(n % w == 0 for n, w in zip(shape[1:], window, strict=True)):
        found = reader.activate(f"{name}__sort", source, activations.WindowSort(window))
        for d, w in enumerate(window):  # the first entry of each window
            part = name if d == dims - 1 else f"{name}__first{d}"
            found = reader.move(part, found, "slice.Tensor", Ref(0), d + 2, 0, 2**62, w)
        return reader.result(node, found)
    axes = []
    for n, m, w, s, p, k in zip(shape[1:], result[1:], window, stride, padding, dilation, strict=True):
        at = torch.arange(m)[:, None] * s - p + torch.arange(w) * k  # (outputs, window)
        inside = (at >= 0) & (at < n)
        first = torch.where(inside, at, n).amin(1, keepdim=True)  # what is outside repeats an entry that is inside
        axes.append(torch.where(inside, at, first))
    return reader.result(node, _windows(reader, name, source, _meet(shape, axes), result))


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
    shape, result = reader.nodes[source].shape, reader.shape(node)
    axes = []
    for n, m in zip(shape[1:], result[1:], strict=True):
        ends = [(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        width = max(b - a for a, b in ends)
        axes.append(torch.stack([torch.arange(width).clamp(max=b - a - 1) + a for a, b in ends]))
    reader.result(node, _windows(reader, reader.label(node), source, _meet(shape, axes), result))


def _lines(shape: tuple[int, ...], asked: Any) -> torch.Tensor:
    """Numbers of the features along some dimensions of a batch, (lines, features of a line)."""
    axes = sorted({a % (len(shape) + 1) - 1 for a in ([asked] if isinstance(asked, int) else asked)})
    index = torch.arange(math.prod(shape)).reshape(shape).movedim(axes, [*range(-len(axes), 0)])
    return index.flatten(-len(axes)).reshape(-1, math.prod(shape[a] for a in axes))


def _extreme(sign: int) -> Rule:
    """Maximum or minimum over some dimensions, or of two values of one shape."""

    def rule(reader: Reader, node: fx.Node) -> None:
        name, shape, given = reader.label(node), reader.shape(node), [*node.args, None]
        if isinstance(given[1], fx.Node):
            if len(reader.live(node)) != 2 or any(reader.shape(a) != shape for a in given[:2]):
                raise reader.refusal(
                    node, "two functions of the input of one shape are expected; use clamp for numbers"
                )
            count = math.prod(shape)
            parts = [reader.view(f"{name}__part{i}", reader.name(a), (count,)) for i, a in enumerate(given[:2])]
            source = reader.move(f"{name}__both", parts, "cat.default", [Ref(0), Ref(1)], 1)
            index = torch.arange(2 * count).reshape(2, count).T
        else:
            source = reader.name(given[0])
            index = _lines(reader.nodes[source].shape, given[1])
        source = source if sign > 0 else reader.opposite(f"{name}__negative", source)
        found = _windows(reader, name, source, index, shape)
        reader.result(node, found if sign > 0 else reader.opposite(f"{name}__back", found))

    return rule


def _sort(reader: Reader, node: fx.Node) -> None:
    """Entries along one dimension in order: lines are sorted, and their entries put back in their places."""
    given, name, source = reader.given(node), reader.label(node), reader.name(node.args[0])
    shape = reader.nodes[source].shape
    index = _lines(shape, given["dim"])
    places = torch.arange(index.numel()).reshape(index.shape)
    back = torch.empty(index.numel(), dtype=torch.long)
    back[index.flatten()] = (places if given["descending"] else places.flip(1)).flatten()
    flat = reader.view(f"{name}__ordered", _ordered(reader, name, source, index), (index.numel(),))
    reader.result(node, reader.view(name, reader.gather(f"{name}__back", flat, back), shape))


# -- the table ---------------------------------------------------------------------------------------------------------

register_operation("add", _sum(lambda alpha: (1.0, alpha)), 0)
register_operation("sub subtract", _sum(lambda alpha: (1.0, -alpha)), 0)
register_operation("rsub", _sum(lambda alpha: (-alpha, 1.0)), 0)
register_operation("neg negative", lambda reader, node: reader.wire(node, "sum", [-1.0]), 0)
register_operation("mul multiply", _times, 0)
register_operation("div divide true_divide", _over, 1)
register_operation("lerp", _lerp, 2)

register_operation("clone alias detach contiguous lift lift_fresh_copy _to_copy to", same, 0, linear=False)
register_operation("dropout native_dropout feature_dropout", lambda reader, node: same(reader, node), 0, linear=False)  # noqa: PLW0108
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
register_operation("where", _chosen(0, (1, 2)), 0)
register_operation("masked_fill", _chosen(1, (2,)), 0)
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
    "logsumexp": "let the network end in logits and apply it outside of the certified map, as "
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
