"""From an ``nn.Module`` to a :class:`~ldlt.graph.nodes.Graph`, by ``torch.export``, or a refusal that names the node.

The module is exported with a dynamic batch and decomposed to ATen operations: what is read is what it *computes*,
hooks, subclasses, parametrisations and overwritten tensors included. Each operation then enters the graph by its rule
in :mod:`ldlt.graph.operations`; one without a rule ends in :class:`~ldlt.errors.UnsupportedOpError`. The size of the
batch may appear in shapes and nowhere else. Training and evaluation are both looked at, and must compute the same
function up to dropout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind

from ldlt import activations
from ldlt.errors import GraphError, LdltError, ShapeError, UnsupportedOpError
from ldlt.evaluation import evaluating, reference
from ldlt.graph.builder import Builder
from ldlt.graph.checks import check_graph, hooks_of, require_ordinary
from ldlt.graph.nodes import (
    BATCH,
    Activation,
    Attr,
    Constant,
    Convolution,
    Graph,
    Input,
    Node,
    Ref,
    Wire,
    lookup,
    members,
    replaced,
)
from ldlt.graph.opaque import opaque
from ldlt.graph.operations import TABLE, find, same

__all__ = ["Reader", "hooks_of", "trace"]

_MADE = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0}
"""Constants that read nothing of the input but its shape."""
_SIZED = {"view", "reshape", "_unsafe_view", "expand", "broadcast_to", "unflatten"}
"""Operations whose shape may name the batch; so may those that make a constant of one number."""
_CREATED = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full"}
_SPREAD = {
    *_SIZED, *_CREATED, "slice", "select", "slice_scatter", "select_scatter", "clone", "unsqueeze", "squeeze", "copy",
    "add", "sub", "mul", "div", "neg", "cat", "alias", "detach",
}  # fmt: skip
"""What may be done to a constant with one row per sample: nothing that counts or tells samples apart."""
_AXES = {"dim", "dims", "dim0", "dim1", "dim2", "axis", "axis0", "axis1"}
_SILENT = {
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size",
    "sym_size",
}  # fmt: skip
_DROPPED = {"device", "pin_memory", "layout", "memory_format"}
"""Arguments that say nothing about numbers."""


# -- export ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _exporting(module: nn.Module, shape: tuple[int, ...]) -> Iterator[None]:
    """Without what torch warns of and logs; its exceptions come in our words."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except LdltError:
        raise
    except Exception as error:
        raise _not_exported(module, shape, error) from error
    finally:
        logging.disable(before)


def _program(
    module: nn.Module, shape: tuple[int, ...], training: bool
) -> tuple[ExportedProgram, dict[str, nn.Module], list[str]]:
    """What the module computes in a mode, activations that functions were turned into, and the slopes of its own."""
    like = reference(module)
    x = torch.zeros(3, *shape, dtype=like.dtype, device=like.device)
    with _exporting(module, shape), evaluating(module):
        if training:
            module.train()
        laws = _laws(module)
        with opaque(module, training) as made:
            return export(module, (x,), dynamic_shapes=({0: Dim("batch")},), strict=False), made, laws


def _laws(module: nn.Module) -> list[str]:
    found = []
    for layer in filter(activations.is_activation, module.modules()):
        with contextlib.suppress(LdltError):
            found.append(str(activations.sector(layer)))
    return found


def _operation(node: fx.Node) -> str:
    """The key of a node in the table of operations; empty if it is none of tensors."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name, space = node.target._overloadpacket.__name__, node.target.namespace
    return name if space == "aten" else f"{space}::{name}"


def _settled(program: ExportedProgram) -> bool:
    """Whether the table knows all operations of a program and none overwrites a tensor, so that it is read as it is."""
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if name := _operation(node):
            known = name in _SILENT | _CREATED | {"ldlt::layer"} or find(name) is not None
            if node.target._schema.is_mutable or not known:
                return False
        elif not callable(getattr(operator, getattr(node.target, "__name__", ""), None)):
            return False
    return True


def _not_exported(module: nn.Module, shape: tuple[int, ...], error: Exception) -> LdltError:
    """What torch refuses, in our words."""
    for layer in module.modules():
        if isinstance(layer, (nn.RNNBase, nn.RNNCellBase)):
            kind = type(layer).__name__
            return GraphError(f"{kind}: a recurrent layer multiplies gates; unroll the recursion with Linear layers")
    whole, kind = str(error).strip(), type(error).__name__
    first = whole.splitlines()[0] if whole else kind
    if "Constraint" in whole[:200] or "specialized" in whole or "dynamic" in whole[:300]:
        return GraphError(f"the module treats batches of some sizes differently; samples must be independent ({first})")
    if "data-dependent" in whole or "DataDependent" in kind or "unbacked" in whole:
        return GraphError(
            f"the forward function depends on the values of its input (an if, a while, an item() or an index made of "
            f"data), which has no certified rule ({first})"
        )
    if "shape" in first or "size" in first or "dim" in first.lower():
        shown = ", ".join(map(str, shape))
        return ShapeError(f"the module does not accept an input of shape (batch, {shown}): {first}")
    return GraphError(
        f"{type(module).__name__} cannot be exported: {first}. The forward function must take one tensor, use torch "
        "operations only, and not depend on the values of its input"
    )


# -- reading -----------------------------------------------------------------------------------------------------------


class Reader(Builder):
    """Reads one exported program; ``made`` are activations that functions were turned into, by path.

    The rules of the table call its methods.
    """

    def __init__(
        self, module: nn.Module, program: ExportedProgram, made: dict[str, nn.Module], shape: tuple[int, ...]
    ) -> None:
        super().__init__(module)
        self.program, self.made, self.input_shape = program, made, shape
        self._live: dict[fx.Node, str] = {}
        self._tuples: dict[fx.Node, Callable[[int], str]] = {}
        self._attrs: dict[fx.Node, Attr] = {}
        self._labels: dict[fx.Node, str] = {}
        program.graph.eliminate_dead_code()
        self._uses = self._count()

    def _count(self) -> Counter[int]:
        """How often each parameter is read, whatever its name."""
        specs = self.program.graph_signature.input_specs
        paths = {s.arg.name: str(s.target) for s in specs if s.kind == InputKind.PARAMETER}
        uses: Counter[int] = Counter()
        for node in self.program.graph.nodes:
            if node.op == "call_function" and _operation(node) not in _SILENT and _alias_of(node) is None:
                names = [_origin(a).name for a in _occurrences(node)]
                uses.update(id(lookup(self.module, paths[n])) for n in names if n in paths)
        for layer in self.module.modules():
            if activations.is_activation(layer):
                uses.update(map(id, layer.parameters(recurse=False)))
        return uses

    def read(self) -> Graph:
        signature = self.program.graph_signature
        specs = {s.arg.name: s for s in signature.input_specs}
        wanted = [s.arg.name for s in signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
        single = len(wanted) == 1 and self.program.call_spec.out_spec.is_leaf()
        output: str | None = None
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, specs[node.name])
            elif node.op == "output" and single:
                output = next((self._live.get(a) for a in _occurrences(node) if a.name in wanted), None)
            elif single and any(self.is_live(a) for a in node.all_input_nodes):
                self._read(node)
        if output is None:
            raise GraphError("the module must return exactly one tensor that depends on its input")
        return Graph(tuple(self.nodes.values()), output, self.constants).pruned()

    def _placeholder(self, node: fx.Node, spec: Any) -> None:
        if spec.kind == InputKind.USER_INPUT:
            if self.nodes:
                raise GraphError("the module must have exactly one input tensor: concatenate them, or bind the others")
            self._batch, self._dtype = node.meta["val"].shape[0], node.meta["val"].dtype
            self.add(node, Input(node.name, self.input_shape, ()))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            self._attrs[node] = Attr(spec.target)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            value = self.program.constants[spec.target]
            self._attrs[node] = self.keep(f"={spec.target}", Constant(value=value.detach().clone()))
        else:
            raise GraphError(f"the forward function reads '{spec.target}', which is no tensor")

    def _read(self, node: fx.Node) -> None:
        name = _operation(node)
        if isinstance(node.meta.get("val"), torch.SymInt) or name in _SILENT:
            return  # a size: it is looked at where it is used
        if name == "ldlt::layer":
            return self._layer(node)
        if not name:
            return self._element(node)
        if name in _MADE or name in ("full_like", "new_full", "fill"):
            return self._filled(node, _MADE[name] if name in _MADE else node.args[-1])
        entry = find(name)
        if entry is None:
            raise UnsupportedOpError(
                node.name,
                f"'{name}' has no certified rule; supported are Linear layers and convolutions, activations with known "
                "slopes, sums, multiples, concatenations, slices, reshapes, means, pools, and products with constants",
            )
        try:
            self._refuse_batch_axis(node)
            return entry.rule(self, node)
        except LdltError:
            raise
        except Exception as error:
            raise self.refusal(
                node, f"its arguments could not be understood ({error}); write it in a plainer form"
            ) from error

    def _element(self, node: fx.Node) -> None:
        if not node.users:
            return
        source, index = cast(Any, [*node.args, None, None][:2])
        if getattr(node.target, "__name__", "") != "getitem" or source not in self._tuples:
            raise UnsupportedOpError(node.name, f"'{node.target}' is no operation on tensors")
        self._live[node] = self._tuples[source](index)

    def _filled(self, node: fx.Node, value: Any) -> None:
        shape = [1 if isinstance(n, torch.SymInt) else n for n in self.meta(node).shape]
        made = Constant("aten.full.default", (shape, value))
        if isinstance(value, fx.Node):
            made = Constant("aten.expand.default", (self.constant(value), shape))
        self._attrs[node] = self.keep(f"={self.label(node)}", made)

    def _layer(self, node: fx.Node) -> None:
        source, path = node.args[0], str(node.args[1])
        if path in self.made:
            return self.activation(node, source, module=self.made[path])
        layer = lookup(self.module, path)
        if activations.is_activation(layer):
            return self.activation(node, source, path=path)
        if not hasattr(layer, "ldlt_frozen"):
            raise self.refusal(node, "it may be called by the layers of ldlt only")
        bias, kernel = None if layer.bias is None else f"{path}.bias", tuple(layer.weight.shape[2:])
        frozen = Convolution(
            self.label(node), self.shape(node), (self.name(source),), f"{path}.weight", bias,
            spec=layer.ldlt_frozen, kernel=kernel,
        )  # fmt: skip
        return self.add(node, frozen)

    # -- the batch -----------------------------------------------------------------------------------------------------

    def shape(self, node: Any, value: Tensor | None = None) -> tuple[int, ...]:
        """Feature shape of a value, whose first dimension must be the batch."""
        found = self.meta(node) if value is None else value
        sizes = tuple(found.shape)
        if not sizes or not self._is_batch(sizes[0]) or not all(type(n) is int for n in sizes[1:]):
            raise self.refusal(
                node, "the first dimension must stay the batch; this operation moves, mixes or removes it"
            )
        if found.dtype != self._dtype:
            raise self.refusal(
                node, f"it gives {found.dtype} where the network computes in {self._dtype}; use one precision"
            )
        return sizes[1:]

    def _is_batch(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and size.node.expr == self._batch.node.expr

    def _refuse_batch_axis(self, node: fx.Node) -> None:
        """Refuse to act along the batch: trying some batch sizes out would not tell (``x.roll(12, 0)``)."""
        given, name = self.given(node), _operation(node)
        first = next((v for a in _occurrences(node) if isinstance(v := self.meta(a), Tensor)), None)
        if first is None or name == "permute":
            return
        count = first.ndim + (name in ("unsqueeze", "stack"))
        asked = [v for k, v in given.items() if k in _AXES and v is not None]
        axes = [a % count for v in asked for a in (v if isinstance(v, (list, tuple)) else [v]) if count]
        whole = name.startswith("slice") and given.get("start") in (0, None) and (given.get("end") or 2**62) >= 2**62
        along = (0 in axes and not (whole and given.get("step", 1) == 1)) or (name == "roll" and not axes)
        if name == "index":
            along = given["indices"][0] is not None
        if name in ("tril", "triu"):
            along = count < 3
        if along:
            raise self.refusal(node, "it acts along the batch; samples must not influence each other")

    def _refuse_counting(self, node: fx.Node) -> None:
        """Refuse a constant that is computed from the number of samples, or tells them apart."""
        read = [v for a in _occurrences(node) if isinstance(v := self.meta(a), Tensor)]
        if any(isinstance(n, torch.SymInt) for v in read for n in v.shape[:1]):
            if _operation(node) not in _SPREAD:
                raise self.refusal(node, "it is computed from a tensor with one row per sample; make it for one sample")
            self._refuse_batch_axis(node)

    # -- what rules ask ------------------------------------------------------------------------------------------------

    def refusal(self, node: fx.Node, reason: str) -> UnsupportedOpError:
        return UnsupportedOpError(self.label(node), reason)

    def is_live(self, arg: Any) -> bool:
        return isinstance(arg, fx.Node) and (arg in self._live or arg in self._tuples)

    def live(self, node: fx.Node) -> list[fx.Node]:
        """Arguments that depend on the input, as often as they are read."""
        return [a for a in _occurrences(node) if self.is_live(a)]

    def given(self, node: fx.Node) -> dict[str, Any]:
        """The arguments of an operation by their names, with what they are by default."""
        schema = cast(torch._ops.OpOverload, node.target)._schema.arguments
        found = {a.name: a.default_value for a in schema}
        return found | dict(zip(found, node.args, strict=False)) | node.kwargs

    def meta(self, node: Any) -> Any:
        """What is known of a value, or of the first of a tuple: a tensor without data, of its shape and dtype."""
        found = node.meta.get("val")
        return found[0] if isinstance(found, (tuple, list)) and found else found

    def name(self, arg: Any) -> str:
        if isinstance(arg, fx.Node) and arg in self._live:
            return self._live[arg]
        raise UnsupportedOpError(str(arg), "a tensor computed from the input is expected here")

    def label(self, node: fx.Node) -> str:
        """A unique name: the path of the layer of torch.nn that computes the value, or the name of its operation."""
        if node not in self._labels:
            packet = getattr(node.target, "_overloadpacket", None)
            path, kind = [("", ""), *(node.meta.get("nn_module_stack") or {}).values()][-1]
            kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            inside = path if kind.startswith("torch.nn.modules.") and "container" not in kind else ""
            name = packet.__name__ if packet else node.name
            if _operation(node) == "ldlt::layer":
                own = str(node.args[1])
                name, inside = (own[1:].rsplit("_", 1)[0], inside) if own.startswith("=") else (name, own)
            if inside:
                name = inside.replace(".", "_") + ("__pad" if packet is torch.ops.aten.pad else "")
            self._labels[node] = self.unique(f"_{name}" if name[0].isdigit() else name)
        return self._labels[node]

    def free(self, arg: Any) -> str | None:
        """Path of a trained parameter that is read here and nowhere else; None for any other tensor."""
        path = self.constant(arg).path
        tensor = None if path in self.constants else lookup(self.module, path)
        plain = isinstance(tensor, nn.Parameter) and tensor.requires_grad and self._uses[id(tensor)] == 1
        return path if plain else None

    def constant(self, arg: Any) -> Attr:
        """A tensor that does not depend on the input, which is computed when the graph is run."""
        if arg in self._attrs:
            return self._attrs[arg]
        if not isinstance(arg, fx.Node) or arg.op != "call_function" or self.is_live(arg):
            raise UnsupportedOpError(str(arg), "a constant tensor is expected here")
        alias = _alias_of(arg)
        self._attrs[arg] = self._computed(arg) if alias is None else self.constant(alias)
        return self._attrs[arg]

    def _computed(self, node: fx.Node) -> Attr:
        """A constant that an operation makes of others."""
        source, select = node, None
        if getattr(node.target, "__name__", "") == "getitem":
            source, select = cast(Any, node.args)
        if not isinstance(source.target, torch._ops.OpOverload):
            raise UnsupportedOpError(node.name, f"'{source.target}' is no operation on tensors")
        if source.target.namespace != "aten":
            raise self.refusal(
                node, "a layer is applied to a constant tensor; call the function instead, torch.relu for nn.ReLU"
            )
        if torch.Tag.nondeterministic_seeded in source.target.tags:
            raise UnsupportedOpError(node.name, "it is random; draw noise outside of the network")
        self._refuse_counting(source)
        args, kwargs = self._templates(source, None)
        return self.keep(f"={self.label(node)}", Constant(str(source.target), args, kwargs, select))

    def circular(self, source: Any, dims: int) -> tuple[Any, tuple[int, ...]]:
        """The image that a circular padding continues for one convolution alone, and by how much."""
        if isinstance(source, fx.Node) and source.target is torch.ops.aten.pad.default and len(source.users) == 1:
            image, border, mode = [*source.args, None][:3]
            if mode == "circular" and len(cast(Any, border)) == 2 * dims and self.is_live(image):
                return image, tuple(cast(Any, border))
        return source, ()

    # -- templates of arguments ----------------------------------------------------------------------------------------

    def _templates(
        self, node: fx.Node, parents: list[str] | None
    ) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """Positional and keyword arguments with references instead of values."""
        args = tuple(self._template(a, parents, node) for a in node.args)
        options = [(k, v) for k, v in node.kwargs.items() if k not in _DROPPED]
        return args, tuple((k, self._template(v, parents, node)) for k, v in options)

    def _template(self, arg: Any, parents: list[str] | None, node: fx.Node, inside: bool = False) -> Any:
        """An argument with references instead of values; without parents, that of a constant of one sample."""
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise UnsupportedOpError(str(arg), "the size of the batch may appear in shapes only")
        if isinstance(arg, (tuple, list)):
            return [self._template(a, parents, node, True) for a in arg]
        if not isinstance(arg, fx.Node):
            return arg
        if isinstance(arg.meta.get("val"), (torch.SymFloat, torch.SymBool)):
            raise UnsupportedOpError(arg.name, "a tensor is read as a number (item, float, tolist); use the tensor")
        if parents is not None and self.is_live(arg):
            parents.append(self.name(arg))
            return Ref(len(parents) - 1)
        value = arg.meta.get("val")
        if isinstance(value, torch.SymInt):
            plain = arg.target is torch.ops.aten.sym_size.int and self._is_batch(value)
            if plain and inside and _operation(node) in _SIZED | _CREATED:
                return 1 if parents is None else BATCH
            raise UnsupportedOpError(
                arg.name, "the size of the batch is computed with; it may appear in shapes only, as it is"
            )
        if isinstance(value, (int, float, bool)):
            return value
        first = value.shape[0] if isinstance(value, Tensor) and value.ndim else None
        return Attr(self.constant(arg).path, isinstance(first, torch.SymInt) and parents is not None)

    # -- what rules make -----------------------------------------------------------------------------------------------

    def add(self, node: fx.Node, value: Node | str | Callable[[int], str]) -> None:
        """Say which value a node is, by a new one or its name, or which ones the elements of a tuple are."""
        if callable(value):
            self._tuples[node] = value
        else:
            self._live[node] = value if isinstance(value, str) else self.put(value)

    def result(self, node: fx.Node, name: str) -> None:
        """Say which value a node is, or the first element of its tuple; the others are indices."""

        def element(index: int) -> str:
            if index:
                raise UnsupportedOpError(node.name, "indices are not a continuous function of the input")
            return name

        self.add(node, element if isinstance(node.meta["val"], (tuple, list)) else name)

    def activation(self, node: fx.Node, source: Any, module: nn.Module | None = None, path: str | None = None) -> None:
        self.shape(node)
        self.add(node, self.activate(self.label(node), self.name(source), module, path))

    def wire(
        self, node: fx.Node, role: str, scales: Sequence[float] = (), spread: tuple[int, ...] | None = None
    ) -> None:
        """Add a linear operation; all parents are expanded to the shape ``spread`` first."""
        parents: list[str] = []
        args, kwargs = self._templates(node, parents)
        target, label, values = str(node.target), self.label(node), node.meta["val"]
        if spread is not None:
            parents = [self._expanded(p, spread) for p in parents]
        if not isinstance(values, (tuple, list)):
            wire = Wire(label, self.shape(node), tuple(parents), target, args, kwargs, None, role, tuple(scales))
            return self.add(node, self.ordered(wire))

        def element(index: int) -> str:
            name = f"{label}_{index}" if len(values) > 1 else label
            if name not in self.nodes:
                shape = self.shape(node, values[index])
                self.put(self.ordered(Wire(name, shape, tuple(parents), target, args, kwargs, index, role)))
            return name

        return self.add(node, element)

    def _expanded(self, name: str, shape: tuple[int, ...]) -> str:
        """A value in a shape that its own spreads to."""
        own = self.nodes[name].shape
        if own == shape:
            return name
        if len(own) != len(shape):
            raise UnsupportedOpError(
                name, f"features of shape {own} do not spread to {shape}; add dimensions of size 1"
            )
        return self.move(self.unique(f"{name}__wide"), name, "expand.default", Ref(0), [BATCH, *shape])

    def split(
        self, node: fx.Node, fixed: Sequence[int] = (), numbers: Sequence[int] = (), role: str = "linear"
    ) -> None:
        """Add an operation that is linear in all of its tensors together as a linear one and a constant.

        ``fixed`` are places of arguments that are no summands (a weight, a mask), ``numbers`` places of numbers that
        are; ``role`` is that of the operation if it has no constants.
        """
        parents: list[str] = []
        args, kwargs = self._templates(node, parents)
        label, shape, target = self.label(node), self.shape(node), str(node.target)
        twice = any(_holds(args[i], Ref) for i in fixed if i < len(args))
        if not parents or twice or _holds([v for _, v in kwargs], (Ref, Attr)):
            raise UnsupportedOpError(label, "it multiplies two functions of the input, or names its tensors")
        places = [i for i, a in enumerate(args) if i not in fixed and _holds(a, Attr)]
        places += [i for i in numbers if i < len(args) and isinstance(args[i], (int, float)) and args[i] != 0]
        if not places:
            return self.add(node, self.ordered(Wire(label, shape, tuple(parents), target, args, kwargs, role=role)))
        real = [a for a in members(args) if isinstance(a, Attr) and self.tensors(a.path).is_floating_point()]

        def none(arg: Any) -> Any:
            """Zero in the place of a constant."""
            if not isinstance(arg, Attr):
                return 0.0 if isinstance(arg, (int, float)) else arg
            return Attr(self.keep(f"{label}.none", Constant("aten.zeros_like.default", (arg,))).path, arg.spread)

        def zeros(arg: Any) -> Any:
            """Zero in the place of a value."""
            if not isinstance(arg, Ref):
                return 1 if arg is BATCH else arg
            size = [1, *self.nodes[parents[arg.index]].shape]
            like = ("aten.new_zeros.default", (real[0], size)) if real else ("aten.full.default", (size, 0.0))
            return self.keep(f"{label}.zeros", Constant(*like))

        inner = [replaced(none, a) if i in places else a for i, a in enumerate(args)]
        if "bias" in self.given(node):
            inner[2] = None
        shift = self.keep(f"{label}.shift", Constant(target, tuple(replaced(zeros, a) for a in args), kwargs))
        first = self.put(Wire(f"{label}__map", shape, tuple(parents), target, tuple(inner), kwargs))
        return self.add(
            node, Wire(label, shape, (first,), "aten.add.Tensor", (Ref(0), shift), role="sum", scales=(1.0,))
        )


def _holds(arg: Any, kinds: Any) -> bool:
    return any(isinstance(a, kinds) for a in members(arg))


def _alias_of(node: fx.Node) -> fx.Node | None:
    """The node whose numbers a node has, in the same precision; None if it computes something."""
    entry = TABLE.get(_operation(node))
    if entry is None or entry.rule is not same or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    kinds = [getattr(n.meta.get("val"), "dtype", None) for n in (node, source)]
    return source if kinds[0] == kinds[1] else None


def _origin(node: fx.Node) -> fx.Node:
    """The node that a chain of aliases begins with."""
    source = _alias_of(node)
    return node if source is None else _origin(source)


def _occurrences(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, as often as it reads them."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


# -- the front door ----------------------------------------------------------------------------------------------------


def trace(module: nn.Module, input_shape: tuple[int, ...]) -> Graph:
    """Turn a module with one tensor input and one tensor output into a graph.

    Args:
        module: Any module that ``torch.export`` can read and that consists of known operations.
        input_shape: Shape of one sample, without the batch dimension.

    Raises:
        UnsupportedOpError: An operation without a certified rule; the message names it and says what to use instead.
        GraphError: The module cannot be exported, or is another function in training than in evaluation.
        ShapeError: ``input_shape`` does not fit.
    """
    require_ordinary(module)
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    before = [t.detach().clone() for t in tensors]
    (program, made, laws), (trained, others, other_laws) = (_program(module, input_shape, m) for m in (False, True))
    if laws != other_laws:
        raise GraphError("the slopes of an activation are others in training than in evaluation; they must not be")
    if not all(map(torch.equal, before, tensors)):
        raise GraphError("the module changes its own tensors when its mode is set; it must not")
    if not (_settled(program) and _settled(trained)):  # in simpler operations, without overwritten tensors
        with _exporting(module, input_shape):
            program, trained = (p.run_decompositions({}) for p in (program, trained))
    graph = Reader(module, program, made, input_shape).read()
    if _plain_form(graph) != _plain_form(Reader(module, trained, others, input_shape).read()):
        raise GraphError(
            "the module computes another function in training than in evaluation (besides dropout and batch "
            "normalisation); it must not depend on self.training"
        )
    check_graph(module, graph)
    return graph


def _plain_form(graph: Graph) -> Any:
    """What two graphs must share to be the same; modules are compared by what they show."""
    nodes = [
        dataclasses.replace(n, module=cast(Any, repr(n.module))) if isinstance(n, Activation) else n
        for n in graph.nodes
    ]
    values = [None if c.value is None else (c.value.dtype, c.value.tolist()) for c in graph.constants.values()]
    return graph.output, dict(graph.constants), values, nodes
