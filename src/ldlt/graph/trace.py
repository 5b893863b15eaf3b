"""From an ``nn.Module`` to a :class:`~ldlt.graph.nodes.Graph`, by ``torch.export``, or a refusal that names the node.

The module is exported with a dynamic batch and decomposed to ATen operations: what is read is what it *computes*,
hooks, subclasses, parametrisations and overwritten tensors included. Each operation then enters the graph by its rule
in :mod:`ldlt.graph.operations`; one without a rule ends in :class:`~ldlt.errors.UnsupportedOpError`. The size of the
batch may appear in shapes and nowhere else. Training and evaluation are both looked at, and must compute the same
function up to dropout.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ldlt import activations
from ldlt.errors import GraphError, LdltError, ShapeError, UnsupportedOpError
from ldlt.evaluation import evaluating, reference
from ldlt.graph.fold import evaluate
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
    index_map,
    lookup,
)
from ldlt.graph.operations import TABLE

__all__ = ["Reader", "check_graph", "hooks_of", "require_finite", "trace"]

_DROPOUT = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Identity,
)  # fmt: skip
_FUNCTIONS = {F.softsign, F.tanhshrink, F.softshrink, F.rrelu}
"""Activations that ATen writes as several operations."""
_CHANCE = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip
_MADE = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0}
"""Constants that read nothing of the input but its shape."""
_ALIASES = {"to", "_to_copy", "detach", "alias", "lift_fresh_copy", "contiguous", "clone", "lift"}
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
    "_assert_tensor_metadata",
    "_assert_scalar",
    "sym_constrain_range_for_size",
    "sym_constrain_range",
    "_assert_async",
}


# -- opaque operations -------------------------------------------------------------------------------------------------
# A layer whose rule is known as a whole is exported as one operation that carries its path.


@torch.library.custom_op("ldlt::activation", mutates_args=())
def _activation(x: Tensor, path: str) -> Tensor:
    return x.clone()


@_activation.register_fake
def _(x: Tensor, path: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("ldlt::frozen", mutates_args=())
def _frozen(x: Tensor, path: str, shape: list[int]) -> Tensor:
    return x.new_empty(x.shape[0], *shape)


@_frozen.register_fake
def _(x: Tensor, path: str, shape: list[int]) -> Tensor:
    return x.new_empty(x.shape[0], *shape)


def _run_activation(x: Tensor, path: str) -> Tensor:
    return cast(Tensor, torch.ops.ldlt.activation(x, path))


def _run_frozen(x: Tensor, path: str, shape: list[int]) -> Tensor:
    return cast(Tensor, torch.ops.ldlt.frozen(x, path, shape))


def _plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module runs the forward function of one of these classes, and no other."""
    own = getattr(module.forward, "__func__", None)
    return any(isinstance(module, k) and own is k.forward for k in kinds)


class _Known(TorchFunctionMode):
    """Functions that are exported as one operation; dropout is the identity of every certificate.

    Args:
        functions: Whether activations are exported, too; without, the mode only switches dropout off.
        training: Whether the module is in training mode: dropout that is on in evaluation is refused.
    """

    def __init__(self, functions: bool = True, training: bool = False) -> None:
        super().__init__()
        self.functions, self.training = functions, training
        self.made: dict[str, nn.Module] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = dict(kwargs or {})
        if func in _CHANCE and not self.training:
            default = func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
            if args[2] if len(args) > 2 else options.get("training", options.get("train", default)):
                raise GraphError("dropout that is on in evaluation is random; pass training=self.training")
        if func in _CHANCE and not options.get("inplace", False) and args[3:4] != (True,):
            return args[0] if args else options["input"]
        if self.functions and func in _FUNCTIONS and not activations.is_inplace(func, args[1:], options):
            x, *rest = args if args else (options.pop("input"),)
            path = f"={getattr(func, '__name__', 'function')}_{len(self.made)}"
            self.made[path] = activations.from_call(func, tuple(rest), options)  # type: ignore[assignment]
            return torch.ops.ldlt.activation(x, path)
        return func(*args, **options)


@contextlib.contextmanager
def _opaque(module: nn.Module, training: bool = False) -> Iterator[dict[str, nn.Module]]:
    """Within this context known layers export as one operation; yields those that functions were turned into."""
    swapped: list[nn.Module] = []

    def swap(layer: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        layer.__dict__["forward"] = run
        swapped.append(layer)

    try:
        for path, layer in module.named_modules():
            if "forward" in layer.__dict__ or getattr(layer, "inplace", False) or ".parametrizations." in path:
                continue
            if _plain(layer, _DROPOUT):
                swap(layer, lambda x: x)
            elif _plain(layer, tuple(k for k in type(layer).__mro__ if "ldlt_frozen" in k.__dict__)):
                swap(layer, partial(_run_frozen, path=path, shape=list(cast(Any, layer).outputs)))
            elif activations.is_activation(layer):
                swap(layer, partial(_run_activation, path=path))
        with _Known(training=training) as known:
            yield known.made
    finally:
        for layer in swapped:
            del layer.__dict__["forward"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs of a program that it then refuses: the refusal says it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _program(module: nn.Module, shape: tuple[int, ...], training: bool) -> tuple[ExportedProgram, dict[str, nn.Module]]:
    like = reference(module)
    x = torch.zeros(3, *shape, dtype=like.dtype, device=like.device)
    with evaluating(module), warnings.catch_warnings(), _quiet(), _opaque(module, training) as made:
        warnings.simplefilter("ignore")
        if training:
            module.train()
        try:
            return export(module, (x,), dynamic_shapes=({0: Dim("batch")},), strict=False), made
        except LdltError:
            raise
        except Exception as error:
            raise _not_exported(module, shape, error) from error


def _settled(program: ExportedProgram) -> bool:
    """Whether the table knows all operations of a program and none overwrites a tensor, so that it is read as it is."""
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            name = node.target._overloadpacket.__name__
            known = node.target.namespace == "ldlt" or name in TABLE or name in _SILENT | _CREATED or name == "sym_size"
            if node.target._schema.is_mutable or not known:
                return False
        elif node.op == "call_function" and not callable(getattr(operator, getattr(node.target, "__name__", ""), None)):
            return False
    return True


def _decomposed(module: nn.Module, shape: tuple[int, ...], program: ExportedProgram) -> ExportedProgram:
    """The program without overwritten tensors, in simpler operations."""
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        try:
            return program.run_decompositions({})
        except Exception as error:
            raise _not_exported(module, shape, error) from error


def _says(program: ExportedProgram, made: dict[str, nn.Module]) -> Any:
    """All that a program says; those of training and evaluation are mostly the same, and then only one is read."""
    constants = {n: (str(t.dtype), t.tolist()) for n, t in program.constants.items() if isinstance(t, Tensor)}
    graphs = [str(m.graph) for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    return graphs, str(program.graph_signature), constants, repr(made)


def _not_exported(module: nn.Module, shape: tuple[int, ...], error: Exception) -> LdltError:
    """What torch refuses, in our words."""
    for layer in module.modules():
        if isinstance(layer, (nn.RNNBase, nn.RNNCellBase)):
            kind = type(layer).__name__
            return GraphError(f"{kind}: a recurrent layer multiplies gates; unroll the recursion with Linear layers")
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    kind = type(error).__name__
    if "Constraint" in str(error)[:200] or "specialized" in str(error) or "dynamic" in str(error)[:300]:
        return GraphError(f"the module treats batches of some sizes differently; samples must be independent ({first})")
    if "data-dependent" in str(error) or "DataDependent" in kind or "unbacked" in str(error):
        return GraphError(
            f"the forward function depends on the values of its input (an if, a while, an item() or an index made of "
            f"data), which has no certified rule ({first})"
        )
    if "shape" in first or "size" in first or "dimension" in first.lower() or "dim" in first:
        shown = ", ".join(map(str, shape))
        return ShapeError(f"the module does not accept an input of shape (batch, {shown}): {first}")
    return GraphError(
        f"{type(module).__name__} cannot be exported: {first}. The forward function must take one tensor, use torch "
        "operations only, and not depend on the values of its input"
    )


# -- reading -----------------------------------------------------------------------------------------------------------


class Reader:
    """Reads one exported program; the rules of the table call its methods.

    Args:
        module: The module it was exported from.
        program: The program.
        made: Activations that functions were turned into, by path.
        shape: Shape of one sample.
    """

    def __init__(
        self, module: nn.Module, program: ExportedProgram, made: dict[str, nn.Module], shape: tuple[int, ...]
    ) -> None:
        self.module, self.program, self.made, self.input_shape = module, program, made, shape
        self.nodes: dict[str, Node] = {}
        self.constants: dict[str, Constant] = {}
        self._live: dict[fx.Node, str] = {}
        self._tuples: dict[fx.Node, Callable[[int], str]] = {}
        self._attrs: dict[fx.Node, Attr] = {}
        self._labels: dict[fx.Node, str] = {}
        self._taken: set[str] = set()
        program.graph.eliminate_dead_code()
        self._uses = self._count()
        self._tensors = Graph((), "", self.constants).tensors(module)  # constants are added while it is used

    def _count(self) -> Counter[int]:
        """How often each parameter is read, whatever its name."""
        uses: Counter[int] = Counter()
        paths = {
            s.arg.name: s.target for s in self.program.graph_signature.input_specs if s.kind == InputKind.PARAMETER
        }
        for node in self.program.graph.nodes:
            silent = getattr(getattr(node.target, "_overloadpacket", None), "__name__", "") in _SILENT
            if node.op != "call_function" or silent or _alias_of(node) is not None:
                continue
            for name in [_origin(a).name for a in _occurrences(node)]:
                if name in paths:
                    uses[id(lookup(self.module, cast(str, paths[name])))] += 1
        for layer in self.module.modules():
            if activations.is_activation(layer):
                uses.update(map(id, layer.parameters(recurse=False)))
        return uses

    def read(self) -> Graph:
        """The graph of the program."""
        signature = self.program.graph_signature
        specs = {s.arg.name: s for s in signature.input_specs}
        if not self.program.call_spec.out_spec.is_leaf():
            raise GraphError("the module must return exactly one tensor that depends on its input")
        wanted = [s.arg.name for s in signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
        output: str | None = None
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, specs[node.name])
            elif node.op == "output":
                found = [a for a in _occurrences(node) if a.name in wanted]
                if len(wanted) != 1 or not found or found[0] not in self._live:
                    raise GraphError("the module must return exactly one tensor that depends on its input")
                output = self._live[found[0]]
            elif any(a in self._live or a in self._tuples for a in node.all_input_nodes):
                self._operation(node)
        assert output is not None
        return Graph(tuple(self.nodes.values()), output, self.constants).pruned()

    def _placeholder(self, node: fx.Node, spec: Any) -> None:
        if spec.kind == InputKind.USER_INPUT:
            if any(isinstance(n, Input) for n in self.nodes.values()):
                raise GraphError("the module must have exactly one input tensor: concatenate them, or bind the others")
            self._batch = node.meta["val"].shape[0]
            self._dtype = node.meta["val"].dtype
            self.add(node, Input(node.name, self.input_shape, ()))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            self._attrs[node] = Attr(spec.target)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            value = self.program.constants[spec.target]
            self._attrs[node] = self.keep(f"={spec.target}", Constant(value=value.detach().clone()))
        else:
            raise GraphError(f"the forward function reads '{spec.target}', which is no tensor")

    def _operation(self, node: fx.Node) -> None:
        if isinstance(node.meta.get("val"), torch.SymInt):
            return  # a size: it is looked at where it is used
        if node.target in (torch.ops.ldlt.activation.default, torch.ops.ldlt.frozen.default):
            return self._layer(node)
        if getattr(node.target, "__name__", "") == "getitem":
            source, index = cast(Any, node.args)
            if source not in self._tuples:
                raise UnsupportedOpError(node.name, "an element of what is no tuple of tensors")
            if node.users:
                self._live[node] = self._tuples[source](index)
            return None
        if not isinstance(node.target, torch._ops.OpOverload):
            if node.users:
                raise UnsupportedOpError(node.name, f"'{node.target}' is no operation on tensors")
            return None
        name = node.target._overloadpacket.__name__
        if name in _SILENT or name == "sym_size":
            return None
        if name in _MADE or name in ("full_like", "new_full", "fill"):
            self._filled(node, _MADE[name] if name in _MADE else node.args[-1])
            return None
        entry = TABLE.get(name)
        if entry is None and node.target.namespace != "aten":
            raise UnsupportedOpError(node.name, f"the custom operation '{node.target}' has no certified rule")
        if entry is None:
            raise UnsupportedOpError(
                node.name,
                f"'{name}' has no certified rule; supported are Linear layers and convolutions, activations with known "
                "slopes, sums, multiples, concatenations, slices, reshapes, means, pools, and products with constants",
            )
        try:
            self._refuse_batch_axis(node)
            entry.rule(self, node)
        except LdltError:
            raise
        except Exception as error:
            raise UnsupportedOpError(
                self.label(node), f"its arguments could not be understood ({error}); write it in a plainer form"
            ) from error
        return None

    def _refuse_batch_axis(self, node: fx.Node) -> None:
        """Refuse to act along the batch: trying some batch sizes out would not tell (``x.roll(12, 0)``)."""
        target = cast(torch._ops.OpOverload, node.target)
        schema = target._schema.arguments
        given = {a.name: a.default_value for a in schema} | dict(zip((a.name for a in schema), node.args, strict=False))
        given |= node.kwargs
        first = next((a for a in _occurrences(node) if isinstance(self._value(a), Tensor)), None)
        name = target._overloadpacket.__name__
        if first is None or name == "permute":
            return
        count = self._value(first).ndim + (name in ("unsqueeze", "stack"))
        asked = [v for k, v in given.items() if k in _AXES and v is not None]
        axes = [a % count for v in asked for a in (v if isinstance(v, (list, tuple)) else [v]) if count]
        whole = name.startswith("slice") and given.get("start") in (0, None) and (given.get("end") or 2**62) >= 2**62
        along = (0 in axes and not (whole and given.get("step", 1) == 1)) or (name == "roll" and not axes)
        if name == "index":
            along = cast(Any, given["indices"])[0] is not None
        if name in ("tril", "triu"):
            along = count < 3
        if along:
            raise UnsupportedOpError(self.label(node), "it acts along the batch; samples must not influence each other")

    @staticmethod
    def _value(node: fx.Node) -> Any:
        found = node.meta.get("val")
        return found[0] if isinstance(found, (tuple, list)) and found else found

    def _filled(self, node: fx.Node, value: Any) -> None:
        """A constant of the shape of a value."""
        shape = [1 if isinstance(n, torch.SymInt) else n for n in self.meta(node).shape]
        made = Constant("aten.full.default", (shape, value))
        if isinstance(value, fx.Node):
            made = Constant("aten.expand.default", (self.constant(value), shape))
        self._attrs[node] = self.keep(f"={self.label(node)}", made)

    def _layer(self, node: fx.Node) -> None:
        """A layer that was exported as one operation."""
        source, path = node.args[:2]
        if node.target is torch.ops.ldlt.frozen.default:
            layer = lookup(self.module, str(path))
            bias = None if layer.bias is None else f"{path}.bias"
            own: dict[str, Any] = {"spec": layer.ldlt_frozen, "weight": f"{path}.weight", "bias": bias}
            own["kernel"] = tuple(layer.weight.shape[2:])
            self.add(node, Convolution(self.label(node), self.shape(node), (self.name(source),), **own))
        elif str(path) in self.made:
            self.activation(node, source, module=self.made[str(path)])
        else:
            self.activation(node, source, path=str(path))

    # -- what rules ask ------------------------------------------------------------------------------------------------

    def is_live(self, arg: Any) -> bool:
        """Whether an argument depends on the input."""
        return isinstance(arg, fx.Node) and (arg in self._live or arg in self._tuples)

    def live(self, node: fx.Node) -> list[fx.Node]:
        """Arguments that depend on the input, as often as they are read."""
        return [a for a in _occurrences(node) if self.is_live(a)]

    def meta(self, node: Any) -> Tensor:
        """A tensor without data, of the shape and dtype of a value."""
        found = node.meta["val"]
        return cast(Tensor, found[0] if isinstance(found, (tuple, list)) else found)

    def name(self, arg: Any) -> str:
        """Name of the value of an argument that depends on the input."""
        if isinstance(arg, fx.Node) and arg in self._live:
            return self._live[arg]
        raise UnsupportedOpError(str(arg), "a tensor computed from the input is expected here")

    def shape(self, node: Any) -> tuple[int, ...]:
        """Feature shape of a value, whose first dimension must be the batch."""
        return self._features(node, self.meta(node))

    pooled = shape

    def _features(self, node: fx.Node, found: Tensor) -> tuple[int, ...]:
        sizes = tuple(found.shape)
        first = sizes[0] if sizes else None
        if (
            not isinstance(first, torch.SymInt)
            or first.node.expr != self._batch.node.expr
            or not all(type(n) is int for n in sizes[1:])
        ):
            raise UnsupportedOpError(
                self.label(node), "the first dimension must stay the batch; this operation moves, mixes or removes it"
            )
        if found.dtype != self._dtype:
            raise UnsupportedOpError(
                self.label(node),
                f"it gives {found.dtype} where the network computes in {self._dtype}; use one precision",
            )
        return cast("tuple[int, ...]", sizes[1:])

    def label(self, node: fx.Node) -> str:
        """A unique name: the path of the layer of torch.nn that computes the value, or the name of its operation."""
        if node not in self._labels:
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            path, kind = stack[-1] if stack else ("", "")
            kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            own = str(node.args[1]) if getattr(node.target, "namespace", "") == "ldlt" else ""
            packet = getattr(node.target, "_overloadpacket", None)
            if own and not own.startswith("="):
                path, kind = own, "torch.nn.modules."
            name = path.replace(".", "_") if kind.startswith("torch.nn.modules.") and "container" not in kind else ""
            name = f"{name}__pad" if name and packet is torch.ops.aten.pad else name
            name = name or (own[1:].rsplit("_", 1)[0] if own else packet.__name__ if packet else node.name)
            name = f"_{name}" if name[0].isdigit() else name
            unique, again = name, 0
            while unique in self._taken:
                again += 1
                unique = f"{name}_{again}"
            self._taken.add(unique)
            self._labels[node] = unique
        return self._labels[node]

    def free(self, arg: Any) -> str | None:
        """Path of a trained parameter that is read here and nowhere else; None for any other tensor."""
        attr = self.constant(arg)
        if attr.path in self.constants:
            return None
        tensor = lookup(self.module, attr.path)
        plain = isinstance(tensor, nn.Parameter) and tensor.requires_grad and self._uses[id(tensor)] == 1
        return attr.path if plain else None

    def plain(self, arg: Any) -> str:
        """Path of a tensor."""
        return self.constant(arg).path

    def constant(self, arg: Any) -> Attr:
        """A tensor that does not depend on the input, which is computed when the graph is run."""
        if isinstance(arg, fx.Node) and arg not in self._attrs and _alias_of(arg) is not None:
            self._attrs[arg] = self.constant(_alias_of(arg))
        if arg not in self._attrs:
            if not isinstance(arg, fx.Node) or arg.op != "call_function" or self.is_live(arg):
                raise UnsupportedOpError(str(arg), "a constant tensor is expected here")
            target, select, source = arg.target, None, arg
            if getattr(target, "__name__", "") == "getitem":
                source, select = cast(Any, arg.args)
                target = source.target
            if not isinstance(target, torch._ops.OpOverload):
                raise UnsupportedOpError(arg.name, f"'{target}' is no operation on tensors")
            if target.namespace != "aten":
                raise UnsupportedOpError(
                    self.label(arg),
                    "a layer is applied to a constant tensor; call the function instead, torch.relu for nn.ReLU",
                )
            if torch.Tag.nondeterministic_seeded in target.tags:
                raise UnsupportedOpError(arg.name, "it is random; draw noise outside of the network")
            self._refuse_counting(source)
            args = tuple(self._template(a, None, source) for a in source.args)
            kwargs = tuple(
                (k, self._template(v, None, source))
                for k, v in source.kwargs.items()
                if k not in ("device", "pin_memory", "layout")
            )
            self._attrs[arg] = self.keep(f"={self.label(arg)}", Constant(str(target), args, kwargs, select))
        return self._attrs[arg]

    def _refuse_counting(self, node: fx.Node) -> None:
        """Refuse a constant that is computed from the number of samples, or tells them apart."""
        own = node.target._overloadpacket.__name__  # type: ignore[union-attr]
        rows = [v.shape[:1] for v in map(self._value, _occurrences(node)) if isinstance(v, Tensor)]
        if any(isinstance(n, torch.SymInt) for shape in rows for n in shape):
            if own not in _SPREAD:
                raise UnsupportedOpError(
                    self.label(node), "it is computed from a tensor with one row per sample; make it for one sample"
                )
            self._refuse_batch_axis(node)

    def _template(self, arg: Any, parents: list[str] | None, node: fx.Node, inside: bool = False) -> Any:
        """An argument with references instead of values; without parents, that of a constant of one sample."""
        if isinstance(arg, fx.Node):
            if parents is not None and self.is_live(arg):
                parents.append(self.name(arg))
                return Ref(len(parents) - 1)
            value = arg.meta.get("val")
            if isinstance(value, torch.SymInt):
                own = node.target._overloadpacket.__name__  # type: ignore[union-attr]
                plain = arg.target is torch.ops.aten.sym_size.int and value.node.expr == self._batch.node.expr
                if plain and inside and own in _SIZED | _CREATED:
                    return 1 if parents is None else BATCH
                raise UnsupportedOpError(
                    arg.name, "the size of the batch is computed with; it may appear in shapes only, as it is"
                )
            if isinstance(value, (int, float, bool)):
                return value
            first = value.shape[0] if isinstance(value, Tensor) and value.ndim else None
            spread = isinstance(first, torch.SymInt) and parents is not None
            return Attr(self.constant(arg).path, spread)
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise UnsupportedOpError(str(arg), "the size of the batch may appear in shapes only")
        if isinstance(arg, (tuple, list)):
            return [self._template(a, parents, node, True) for a in arg]
        return arg

    # -- what rules make -----------------------------------------------------------------------------------------------

    def put(self, value: Node) -> str:
        """Add a value to the graph."""
        if value.name in self.nodes:
            raise GraphError(f"two values are called '{value.name}'; rename a layer")
        self.nodes[value.name] = value
        self._taken.add(value.name)
        return value.name

    def add(self, node: fx.Node, value: Node) -> None:
        """Add the value of a node."""
        self._live[node] = self.put(value)

    def place(self, node: fx.Node, name: str) -> None:
        """Say which value of the graph a node is."""
        self._live[node] = name

    def elements(self, node: fx.Node, element: Callable[[int], str]) -> None:
        """Say which values the elements of a tuple are."""
        self._tuples[node] = element

    def result(self, node: fx.Node, name: str) -> None:
        """Say which value a node is, or the first element of its tuple."""
        if isinstance(node.meta["val"], (tuple, list)):
            self.elements(node, lambda index: name if index == 0 else self._indices(node))
        else:
            self.place(node, name)

    def _indices(self, node: fx.Node) -> str:
        raise UnsupportedOpError(node.name, "indices are not a continuous function of the input")

    def keep(self, path: str, constant: Constant) -> Attr:
        """Add a constant to the graph."""
        path = path if path.startswith("=") else f"={path}"  # no path of a module starts like that
        unique, again = path, 0
        while unique in self.constants:
            again += 1
            unique = f"{path}_{again}"
        self.constants[unique] = constant
        return Attr(unique)

    def wire(
        self, node: fx.Node, role: str, scales: Sequence[float] = (), spread: tuple[int, ...] | None = None
    ) -> None:
        """Add a linear operation.

        Args:
            node: The operation.
            role: See :class:`Wire`.
            scales: Of the parents of a sum.
            spread: Shape that all parents are expanded to first.
        """
        parents: list[str] = []
        args = tuple(self._template(a, parents, node) for a in node.args)
        kwargs = tuple((k, self._template(v, parents, node)) for k, v in node.kwargs.items())
        kwargs = tuple((k, v) for k, v in kwargs if k not in ("memory_format", "device", "pin_memory"))
        target, label = str(node.target), self.label(node)
        if spread is not None:
            parents = [self._expanded(p, spread) for p in parents]
        if isinstance(node.meta["val"], (tuple, list)):
            values = node.meta["val"]

            def element(index: int) -> str:
                name = f"{label}_{index}" if len(values) > 1 else label
                if name not in self.nodes:
                    shape = self._features(node, values[index])
                    self.put(self._ordered(Wire(name, shape, tuple(parents), target, args, kwargs, index, role)))
                return name

            self.elements(node, element)
            return
        wire = Wire(label, self.shape(node), tuple(parents), target, args, kwargs, None, role, tuple(scales))
        self.add(node, self._ordered(wire))

    def _expanded(self, name: str, shape: tuple[int, ...]) -> str:
        value = self.nodes[name]
        if value.shape == shape:
            return name
        if len(value.shape) != len(shape):
            raise UnsupportedOpError(
                name, f"features of shape {value.shape} do not spread to {shape}; add dimensions of size 1"
            )
        wide, again = f"{name}__wide", 0
        while wide in self.nodes:
            again += 1
            wide = f"{name}__wide{again}"
        return self.put(Wire(wide, shape, (name,), "aten.expand.default", (Ref(0), [BATCH, *shape]), role="rearrange"))

    def _ordered(self, wire: Wire) -> Wire:
        """Mark rearrangements that only change the shape."""
        if wire.role != "rearrange" or len(wire.parents) != 1:
            return wire
        parent = self.nodes[wire.parents[0]]
        same = wire.features == parent.features and bool(
            (index_map(self.nodes, wire, self._tensors) == torch.arange(parent.features)).all()
        )
        args = (Ref(0), [BATCH, *wire.shape])  # however it is written
        return Wire(wire.name, wire.shape, wire.parents, "aten.view.default", args, role="order") if same else wire

    def split(
        self, node: fx.Node, fixed: Sequence[int] = (), numbers: Sequence[int] = (), role: str = "linear"
    ) -> None:
        """Add an operation that is linear in all of its tensors together as a linear one and a constant.

        Args:
            node: The operation.
            fixed: Places of arguments that are no summands, such as a weight or a mask.
            numbers: Places of numbers that are summands.
            role: Of the operation if it has no constants.
        """
        parents: list[str] = []
        args = [self._template(a, parents, node) for a in node.args]
        kwargs = tuple((k, self._template(v, parents, node)) for k, v in node.kwargs.items())
        kwargs = tuple((k, v) for k, v in kwargs if k not in ("memory_format", "device", "pin_memory"))
        label, shape, target = self.label(node), self.shape(node), str(node.target)
        if (
            not parents
            or any(_holds(args[i], Ref) for i in fixed if i < len(args))
            or _holds(dict(kwargs), (Ref, Attr))
        ):
            raise UnsupportedOpError(label, "it multiplies two functions of the input, or names its tensors")
        places = [i for i, a in enumerate(args) if i not in fixed and _holds(a, Attr)]
        places += [i for i in numbers if i < len(args) and isinstance(args[i], (int, float)) and args[i] != 0]
        if not places:
            self.add(node, self._ordered(Wire(label, shape, tuple(parents), target, tuple(args), kwargs, role=role)))
            return
        like = next((a for a in _members(args) if isinstance(a, Attr) and self._real(a)), None)

        def none(arg: Any) -> Any:
            if not isinstance(arg, Attr):
                return 0.0 if isinstance(arg, (int, float)) else arg
            return Attr(self.keep(f"{label}.none", Constant("aten.zeros_like.default", (arg,))).path, arg.spread)

        def zeros(arg: Any) -> Any:
            if not isinstance(arg, Ref):
                return 1 if arg is BATCH else arg
            shape = [1, *self.nodes[parents[arg.index]].shape]
            if like is None:
                return self.keep(f"{label}.zeros", Constant("aten.full.default", (shape, 0.0)))
            return self.keep(f"{label}.zeros", Constant("aten.new_zeros.default", (like, shape)))

        inner = [_map(none, a) if i in places else a for i, a in enumerate(args)]
        if node.target in _BIASED:
            inner[2] = None
        shift = self.keep(f"{label}.shift", Constant(target, tuple(_map(zeros, a) for a in args), kwargs))
        first = self.put(Wire(f"{label}__map", shape, tuple(parents), target, tuple(inner), kwargs))
        self.add(node, Wire(label, shape, (first,), "aten.add.Tensor", (Ref(0), shift), role="sum", scales=(1.0,)))

    def _real(self, attr: Attr) -> bool:
        return self._tensors(attr.path).is_floating_point()

    def circular(self, source: Any, node: fx.Node, dims: int) -> tuple[fx.Node, tuple[int, ...]] | None:
        """The image that a circular padding continues for this convolution alone, and by how much."""
        pad = source
        if not isinstance(pad, fx.Node) or pad.target is not torch.ops.aten.pad.default or len(pad.users) != 1:
            return None
        mode = pad.args[2] if len(pad.args) > 2 else None
        border = cast("list[int]", pad.args[1])
        if mode != "circular" or len(border) != 2 * dims or not self.is_live(pad.args[0]):
            return None
        return cast(fx.Node, pad.args[0]), tuple(border)

    def activation(self, node: fx.Node, source: Any, module: nn.Module | None = None, path: str | None = None) -> None:
        """Add a nonlinearity."""
        name, label = self.name(source), self.label(node)
        shape = self.nodes[name].shape
        activation = Activation(label, self.shape(node), (name,), module=module, path=path)
        try:
            activations.sector(activation.resolve(self.module), shape[0] if shape else 1)
            activations.mixed(activation.resolve(self.module), shape)
        except LdltError as error:
            raise UnsupportedOpError(label, str(error)) from error
        self.add(node, activation)


_BIASED = {
    torch.ops.aten.linear.default,
    *(getattr(packet, overload) for packet, overload in (
        (getattr(torch.ops.aten, f"conv{t}{d}d"), o) for d in (1, 2, 3) for t in ("", "_transpose")
        for o in getattr(torch.ops.aten, f"conv{t}{d}d").overloads()
    )),
}  # fmt: skip
"""Operations whose third argument is a bias that may be missing."""


def _map(function: Callable[[Any], Any], arg: Any) -> Any:
    """An argument template with a function applied to each of its members."""
    return [_map(function, a) for a in arg] if isinstance(arg, (tuple, list)) else function(arg)


def _members(arg: Any) -> Iterator[Any]:
    if isinstance(arg, (tuple, list)):
        for a in arg:
            yield from _members(a)
    elif isinstance(arg, dict):
        yield from _members(list(arg.values()))
    else:
        yield arg


def _holds(arg: Any, kinds: Any) -> bool:
    return any(isinstance(a, kinds) for a in _members(arg))


def _alias_of(node: fx.Node) -> fx.Node | None:
    """The node whose numbers a node has, in the same precision; None if it computes something."""
    name = getattr(getattr(node.target, "_overloadpacket", None), "__name__", "")
    if name not in _ALIASES or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    same = [getattr(n.meta.get("val"), "dtype", None) for n in (node, source)]
    return source if same[0] == same[1] else None


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
    require_finite(module)
    (program, made), (trained, others) = (_program(module, input_shape, mode) for mode in (False, True))
    if not (_settled(program) and _settled(trained)):
        program, trained = (_decomposed(module, input_shape, p) for p in (program, trained))
    same = _says(program, made) == _says(trained, others)
    graph = Reader(module, program, made, input_shape).read()
    if not same and not _alike(graph, Reader(module, trained, others, input_shape).read()):
        raise GraphError(
            "the module computes another function in training than in evaluation (besides dropout and batch "
            "normalisation); it must not depend on self.training"
        )
    check_graph(module, graph)
    return graph


def check_graph(module: nn.Module, graph: Graph) -> None:
    """Refuse a graph that does not suit the engine, or is not what the module computes.

    Raises:
        GraphError: With the reason.
    """
    _require_images(graph)
    tensors = graph.tensors(module)
    for path in graph.constants:
        value = tensors(path).detach()
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise GraphError(f"the constant '{path[1:]}' has entries that are not finite; no bound holds for them")
    _check(module, graph)


def _alike(a: Graph, b: Graph) -> bool:
    def plain(node: Node) -> Any:
        if not isinstance(node, Activation) or node.module is None:
            return node
        return node.name, node.shape, node.parents, repr(node.module)

    return (a.output, dict(a.constants)) == (b.output, dict(b.constants)) and [*map(plain, a.nodes)] == [
        *map(plain, b.nodes)
    ]


def require_finite(module: nn.Module) -> None:
    """Refuse parameters and buffers with entries that are not finite.

    Raises:
        GraphError: With the name of the tensor.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and not tensor.is_meta and not bool(tensor.detach().isfinite().all()):
            raise GraphError(f"'{name}' has entries that are infinite or not a number; no bound holds for them")


def hooks_of(module: nn.Module) -> list[str]:
    """What runs beside or instead of the forward functions: a graph is only that of a module with the same of these."""
    shared: Any = nn.modules.module
    tables = [("", shared._global_forward_hooks), ("", shared._global_forward_pre_hooks)]
    found = []
    for path, m in module.named_modules():
        tables += [(path, m._forward_hooks), (path, m._forward_pre_hooks)]
        if "forward" in m.__dict__:
            found.append(f"{path} forward")
    for path, table in tables:
        found += [f"{path} {getattr(hook, '__qualname__', type(hook).__name__)}" for hook in table.values()]
    return found


def _require_images(graph: Graph) -> None:
    """Refuse outputs that are no vectors, unless the whole network is about images."""
    if len(graph[graph.output].shape) != 1 and not graph.has_images:
        raise GraphError(
            f"the output must have shape (batch, k), not (batch, {', '.join(map(str, graph[graph.output].shape))}): "
            "flatten it"
        )


def _check(module: nn.Module, graph: Graph) -> None:
    """Run the graph beside the module itself, in batches and alone, in both modes."""
    try:
        twin = copy.deepcopy(module).double().cpu()
    except Exception as error:
        raise GraphError(f"{type(module).__name__} cannot be copied: {error}") from error
    generator = torch.Generator().manual_seed(0)
    usual = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(torch.set_default_dtype, usual)
        torch.set_default_dtype(torch.float64)  # of the tensors that forward makes
        for p in twin.parameters():
            if p.is_floating_point():
                width = max(1, p.shape[-1]) if p.ndim else 1
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / width**0.5)
        x = 2 * torch.randn(4, *graph.input.shape, generator=generator, dtype=torch.float64)
        for training in (False, True):
            twin.train(training)
            for m in twin.modules():
                if isinstance(m, (*_DROPOUT, nn.RReLU, nn.modules.batchnorm._BatchNorm)):
                    m.eval()
            try:
                with _Known(functions=False, training=training):
                    together = twin(x.clone())
                    apart = torch.cat([twin(x[i : i + 1].clone()) for i in range(len(x))])
                expected = evaluate(graph, twin, x.clone())
                strewn = expected
                with (
                    contextlib.suppress(RuntimeError),
                    _Known(functions=False, training=training),
                ):  # a view that such an input has not
                    strewn = twin(x.movedim(0, -1).contiguous().movedim(-1, 0))
            except LdltError:
                raise
            except Exception as error:
                raise GraphError(
                    f"the module cannot be run in double precision, one sample at a time: {error}"
                ) from error
            for found, reason in (
                (together, "look for a hook, an overwritten tensor, randomness or a use of self.training"),
                (apart, "samples of a batch influence each other, or a batch of one is treated differently"),
                (strewn, "it depends on how its input lies in memory"),
            ):
                size = float(expected.abs().max()) if expected.numel() else 0.0
                close = (found.shape, found.dtype) == (expected.shape, expected.dtype) and torch.allclose(
                    found, expected, rtol=1e-9, atol=1e-9 * (1 + size)
                )
                if not close:
                    mode = "training" if training else "evaluation"
                    raise GraphError(f"the traced graph is not what the module computes in {mode} mode: {reason}")
