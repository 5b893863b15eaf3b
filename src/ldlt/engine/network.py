"""The class that takes an ordinary module and makes it L-Lipschitz by construction."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.func import functional_call

from ldlt.check import choice, finite, sample_shape
from ldlt.check import positive as positive_number
from ldlt.engine.bound import Bound
from ldlt.engine.contraction import chosen
from ldlt.engine.invert import load_explicit
from ldlt.engine.linalg import bounded, full_precision, smallest, unbounded
from ldlt.engine.local import LocalSweep, check_heads
from ldlt.engine.plan import LARGEST, Group, Plan, largest_dense, make_plan
from ldlt.engine.start import initialise
from ldlt.engine.sweep import Blueprint, Explicit, Free, Sweep
from ldlt.errors import BoundError, GraphError, LdltError, OptionError, ShapeError
from ldlt.evaluation import normalising, running_statistics
from ldlt.graph import Affine, Convolution, Graph, Input, Wire
from ldlt.graph.direct import known_graph
from ldlt.graph.trace import hooks_of, trace
from ldlt.images.convolutions import CirculantWeight, CircularConv
from ldlt.images.grids import Fold, Layout, operator_norm, row_norms
from ldlt.images.torus import Torus, on_torus
from ldlt.joined import Joined, Metric, promised

if TYPE_CHECKING:
    from ldlt.certificates.certificate import Certificate

ROUNDING = 4
"""Rounding units of an output's magnitude that constants of outputs and of their differences allow for."""


class Scaled(nn.Module):
    """``gain · module(x)``: the frozen form of a network whose output has no free map."""

    gain: Tensor

    def __init__(self, module: nn.Module, gain: Tensor) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("gain", gain)

    def forward(self, x: Tensor) -> Tensor:
        """The scaled output (batch, k)."""
        return self.gain * self.module(x)


class Lipschitz(nn.Module):
    r"""An ordinary module, made ℓ-Lipschitz in the Euclidean norm for every value of its parameters.

    The module is traced once. Its ``weight`` parameters become *free*; :meth:`explicit` maps them to the *explicit*
    weights, for which the linear matrix inequality of LipSDP holds with the multipliers of :meth:`multipliers`;
    ``forward`` runs the user's own module with those. For fixed multipliers this reaches every network of that
    architecture for which the inequality holds strictly, and no other (where all activations have free maps; a given
    map bounds its multiplier by Gershgorin's theorem).

    Args:
        module: Any module that ``torch.export`` can read, made of linear operations, convolutions, activations with
            known slopes, pools, and constants. It becomes a part of the network (it is not copied), and its free
            weights are initialised anew.
        bound: ℓ > 0. With ``train_bound=True`` the start value of a trained bound. One number per output, by order or
            name, gives each its own constant: outputs are those of the module if it returns several tensors, else the
            features of its one output; the whole map has the larger :attr:`bound` that is reported. A
            :class:`ldlt.Metric` bounds the network in another norm of its input.
        input_shape: Shape of one sample, without the batch dimension; an int is a vector of that size. For a module of
            several inputs a list of shapes, or a dictionary by name.
        contraction: ``"cholesky"``, ``"symmetric"`` or ``"cayley"``.
        head: ``"joint"``: the whole map has the bound. ``"orthogonal"``: likewise, and the inequality is tight.
            ``"rows"``: every output has the bound, pairs of outputs have :meth:`pair_bounds`, the whole map has the
            larger :attr:`bound` that is reported.
        output: ``"free"``: the output must be a sum or a concatenation of free maps (end the module with
            ``nn.Linear``). ``"scale"``: any output; the network multiplies it by one number so that the bound holds.
        conditions: Inputs, by number or name, in which the network need not be Lipschitz, such as the goal of a policy:
            the bound holds between inputs that share them. What is computed from them may be added to other values.
        train_multipliers: Whether the multipliers are trained (needed for full generality unless all activations are
            positively homogeneous).
        train_bound: Whether ℓ is trained.
        bound_floor: Smallest value of a trained bound.
        bound_ceiling: Largest value of a trained bound.
        alpha: Start value of α, the scale of the free matrices: they start at norm ``gain·√α``, so a small α means
            that a step of an optimiser such as Adam moves further.
        init: ``"default"``, ``"orthogonal"`` or ``"keep"`` (see :mod:`ldlt.engine.start`).
        gain: Norm of the free matrices at the start, in units of ``√α`` (``cayley``, which has no α: such that the
            contractions start at norm ``gain/√(1 + gain²)`` as well).
        convolutions: ``"local"``: convolutions keep their kernels, whatever their padding, and multipliers are bounded
            (``docs/images.md``). ``"normalised"``: circular ones are normalised per frequency, others are kept densely.
            By default local where some convolution is not circular and the network allows it.
        power: Of local convolutions: which power of a covariance bounds the multipliers, 1, 2, 4 or 8. Higher ones are
            tighter and cost more.
        placing: Where ``init="default"`` puts the means of the pre-activations, in units of the place that lets half of
            the signal through: 0 centres them, so that a ReLU network starts less linear and less alive.

    Shape:
        Input (batch, \*input_shape), output (batch, k) or what the module returns. Any leading dimensions, or none, may
        stand in the place of the batch.

    Example:
        >>> net = Lipschitz(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), bound=2.0, input_shape=8)
        >>> net(torch.randn(5, 8)).shape
        torch.Size([5, 3])
        >>> net.bound
        2.0
    """

    def __init__(
        self,
        module: nn.Module,
        bound: float | Sequence[float] | Mapping[str, float] | Metric = 1.0,
        *,
        input_shape: int | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Sequence[int]],
        contraction: str = "cholesky",
        head: str = "joint",
        output: str = "free",
        conditions: Sequence[int | str] = (),
        train_multipliers: bool = True,
        train_bound: bool = False,
        bound_floor: float | None = None,
        bound_ceiling: float | None = None,
        alpha: float = 0.01,
        init: str = "default",
        gain: float = 1.0,
        placing: float = 1.0,
        convolutions: str | None = None,
        power: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise GraphError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        if any(isinstance(m, CircularConv | Lipschitz) for m in module.modules()):
            raise GraphError("a part of the module is a constrained or frozen network already; wrap the plain module")
        promise = promised(module, bound, input_shape, conditions)
        if promise.joined is not None:
            module = promise.joined
            if output == "scale":
                raise OptionError("output='scale' is for one input, one output and one bound in the Euclidean norm")
            if promise.scales is not None:
                head = head if promise.apart else "rows"
        shape = sample_shape(input_shape if promise.joined is None else promise.joined.features)
        alpha, gain = positive_number("alpha", alpha), positive_number("gain", gain)
        placing = finite("placing", placing)
        choice("output", output, ("free", "scale"))
        like = _reference(module)
        contracting, heading = chosen(contraction, head, torch.finfo(like.dtype).eps)
        graph = known_graph(module, shape) or trace(module, shape)
        if not graph.affines:
            raise GraphError("the module has no Linear layer and no convolution: there is nothing to make Lipschitz")
        if promise.joined is not None:
            promise.joined.check(graph)
        graph, plan, torus = _planned(graph, module, convolutions)
        if not plan.output.free and output == "free":
            raise GraphError(
                f"the output '{graph.output}' is not a free linear map, so its scale cannot be set by weights: end "
                "the module with nn.Linear, or pass output='scale' to multiply the output by a certified factor"
            )
        entries, where = (0, "") if torus is not None else largest_dense(plan, graph)
        if entries > LARGEST:
            raise GraphError(
                f"value '{where}' would be described by {entries:.2g} numbers at once, more than {LARGEST:.2g}: let "
                "convolutions on large images pad circularly (padding_mode='circular'), use fewer maps that are not "
                "normalised, or smaller images"
            )
        self.module = module
        self.input_shape = shape
        self._hooks: list[str] = []
        self._normalises = bool(normalising(module))
        self._cache: _Cache | None = None
        self._blueprint = Blueprint(graph, plan, contracting, heading, promise.scales, promise.apart, torus, power)
        self._blueprint.resolve(module)
        self._bound = Bound(promise.bound, train_bound, bound_floor, bound_ceiling, like.dtype)
        self._roles: list[str] = []
        for group in plan.all_groups:
            self._add_parameters(group, alpha, train_multipliers)
        self.to(dtype=like.dtype, device=like.device)
        self._hooks = hooks_of(self)
        initialise(self, init, gain, alpha, placing)

    def _add_parameters(self, group: Group, alpha: float, train_multipliers: bool) -> None:
        count, roles = self.plan.places[group.name].count, {}
        if group.free:
            roles = self._blueprint.normaliser(group).initial(self._count(group), alpha)
        if group.free and not group.is_output:
            roles["log_multiplier"] = torch.zeros(count or group.size)
        if not group.free and not group.is_output:
            roles["log_balance"] = torch.zeros((count if group.node in self.plan.images else 0) or group.size)
            roles["margin"] = torch.tensor(3.0 if self._blueprint.torus is None else 0.0)  # θ = 0.95, or 1/2
        for role, value in roles.items():
            if role not in self._roles:
                self._roles.append(role)
                self.add_module(role, nn.ParameterDict())
            trained = train_multipliers or role not in ("log_multiplier", "log_balance", "margin")
            getattr(self, role)[_key(group.name)] = nn.Parameter(value, requires_grad=trained)

    def _count(self, group: Group) -> int:
        """Number of rows of a group, or of channels if its maps are convolutions."""
        shape = self.graph[group.value].shape
        if len(shape) == 1 or not all(isinstance(self.graph[t.affine], Convolution) for t in group.terms):
            return group.size
        pixels = math.prod(shape[1:])
        return len({r // pixels for r in (range(math.prod(shape)) if group.rows is None else group.rows)})

    @property
    def graph(self) -> Graph:
        """The traced graph."""
        return self._blueprint.graph

    @property
    def plan(self) -> Plan:
        """Which maps are normalised, and in which order."""
        return self._blueprint.plan

    def _free(self, dtype: torch.dtype | None = None) -> Free:
        def cast(p: Tensor) -> Tensor:
            return p if dtype is None or not p.is_floating_point() else p.to(dtype)

        if self._bound().dtype in (torch.half, torch.bfloat16):
            raise GraphError("factorisations need float32 or float64; train mixed precision with autocast instead")
        held = {role: getattr(self, role) for role in self._roles}
        keys = {g.name: _key(g.name) for g in self.plan.all_groups}
        extra = {g: {role: cast(t[key]) for role, t in held.items() if key in t} for g, key in keys.items()}
        return Free({n: cast(p) for n, p in self.module.named_parameters()}, cast(self._bound()), extra)

    def _sweep(self, dtype: torch.dtype | None = None, batch: int | None = None, watch: str | None = None) -> Explicit:
        if not torch.compiler.is_compiling() and hooks_of(self) != self._hooks:
            raise GraphError(
                "hooks were added to the network, or taken from it, since it was made, so that its graph is another "
                "one: remove them (handle.remove()), or register them before the module is wrapped"
            )
        free = self._free(dtype)
        with full_precision(free.bound):
            kind = Sweep if self._blueprint.torus is None else LocalSweep
            return kind(self._blueprint, self.module, free, batch, watch).run()

    def explicit(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All parameters of the user's module in explicit form, by name; differentiable.

        Args:
            dtype: Precision in which the map is evaluated (and returned); that of the parameters by default.
        """
        return {**self._free(dtype).weights, **self._sweep(dtype).weights}

    def multipliers(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """``Λ`` of every activation node, one number per neuron, in the order of the flattened features.

        Args:
            dtype: As in :meth:`explicit`.
        """
        found = self._sweep(dtype).multipliers
        return {a.name: self.plan.join(a.name, found) for a in self.graph.activations}

    @property
    def joined(self) -> Joined | None:
        """The one map of vectors that a module of several inputs or outputs, or of another metric, was turned into."""
        return self.module if isinstance(self.module, Joined) else None

    def forward(self, *x: Tensor, **named: Tensor) -> Any:
        """The network's output (batch, k) for x (batch, *input_shape); for several of them as the module has them."""
        joined = self.joined
        if joined is None and (len(x) != 1 or named):
            raise ShapeError(f"the network has one input, not {len(x) + len(named)}")
        z, given = (x[0], {}) if joined is None else joined.join(*x, **named)
        if not isinstance(z, Tensor):
            raise ShapeError(f"the input must be a tensor, not {type(z).__name__}")
        shape, ahead = self.input_shape, z.ndim - len(self.input_shape)
        if ahead < 0 or tuple(z.shape[ahead:]) != shape:
            raise ShapeError(f"the input must have shape {('batch', *shape)}, not {tuple(z.shape)}")
        y, found = self._evaluate(z if ahead == 1 else z.reshape(-1, *shape), self.module, given=given)
        y = y if self.plan.output.free else y * self._gain(found)
        y = y if ahead == 1 else y.reshape(*z.shape[:ahead], *y.shape[1:])
        return y if joined is None else joined.restore(y)

    def _evaluate(
        self, x: Tensor, module: nn.Module, prefix: str = "", given: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Explicit]:
        """Run a module with the explicit weights, which it knows by their names behind a prefix."""
        if self._cache is not None:
            self._refuse_training()
            found = self._cache.explicit(self)
        else:  # compilers and function transforms get plain matrices
            transformed = isinstance(x, FakeTensor) or torch._C._are_functorch_transforms_active()
            found = self._sweep(batch=None if torch.compiler.is_compiling() or transformed else x.shape[0])
        weights = {prefix + n: w for n, w in found.weights.items()} | dict(given or {})
        if not (self.training and self._normalises):
            return functional_call(module, weights, (x,)), found
        with running_statistics(module) as statistics:
            return functional_call(module, {**weights, **statistics}, (x,)), found

    def function(self) -> Callable[[Tensor], Tensor]:
        """The network as a function of its input, whose explicit weights are computed once, now; differentiable.

        For what calls a network many times in one step: a recurrence over time, a solver, a Jacobian.

        Raises:
            GraphError: Batch normalisation in training mode updates its statistics in every call.

        Example:
            >>> net = Lipschitz(nn.Sequential(nn.Linear(4, 4)), input_shape=4)
            >>> f = net.function()
            >>> f(f(torch.randn(2, 4))).shape
            torch.Size([2, 4])
        """
        if self.training and self._normalises:
            raise GraphError("batch normalisation updates its statistics in every call: call net.eval() first")
        found = self._sweep()
        gain = None if self.plan.output.free else self._gain(found)

        def run(x: Tensor) -> Tensor:
            y: Tensor = functional_call(self.module, found.weights, (x,))
            return y if gain is None else gain * y

        return run

    @contextlib.contextmanager
    def cached(self) -> Iterator[None]:
        """Within this context the explicit weights are computed once, for rollouts and evaluation.

        Changed parameters are noticed by their version counters, and the weights are computed anew. Nothing is kept
        afterwards.

        Raises:
            LdltError: The network is in training mode, or a gradient could flow to its parameters: such gradients
                would be lost.

        Example:
            >>> net = Lipschitz(nn.Sequential(nn.Linear(4, 3)), input_shape=4).eval()
            >>> with torch.no_grad(), net.cached():
            ...     y = net(torch.randn(2, 4))
        """
        if self._cache is not None:
            yield
            return
        self._refuse_training()
        self._cache = _Cache()
        try:
            yield
        finally:
            self._cache = None

    def _refuse_training(self) -> None:
        flows = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if self.training or flows:
            raise LdltError(
                "weights that are computed once have no gradients: with cached() call net.eval() and use "
                "torch.no_grad(), or net.requires_grad_(False) for gradients of the input"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}

    def output_gain(self, dtype: torch.dtype | None = None) -> float:
        """The factor of the output: 1 unless it has no free map (``output="scale"``)."""
        if self.plan.output.free:
            return 1.0
        with torch.no_grad():
            return float(self._gain(self._sweep(dtype)))

    def _gain(self, found: Explicit) -> Tensor:
        """``1/‖F_y‖``: the factor that makes a given output satisfy the bound.

        The norm counts at least a share of what it would be if nothing cancelled: where everything does, what is left
        is rounding, and a constant output needs no factor.
        """
        unit = self._blueprint.contraction.unit
        matrix, magnitude = found.output()
        return 1 / torch.hypot(operator_norm(matrix), unit ** (2 / 3) * magnitude.norm() + smallest(unit))

    def _output_maps(self) -> Iterator[tuple[Tensor, Tensor, float, Layout, Tensor | None]]:
        """Of the certified map ``F_y`` (k, q), its error (k,), ℓ, and how the output lies on a grid, in float64."""
        own = self._bound().dtype
        # Frozen weights come from the first sweep, live ones from the second: each is right for its own.
        unit = ROUNDING * torch.finfo(own).eps
        for dtype in dict.fromkeys((torch.float64, own)):
            with torch.no_grad():
                found = self._sweep(dtype)
                gain = 1.0 if self.plan.output.free else self._gain(found).double()
                matrix, magnitude = found.output()
                matrix = matrix.to(torch.complex128 if matrix.is_complex() else torch.float64) * gain
                yield matrix, unit * gain * magnitude.double(), float(found.bound), found.layout, found.window

    @property
    def bound(self) -> float:
        """The certified Lipschitz constant of the whole map, in the Euclidean norm."""
        if not self._joint_bound:
            return max(ell * float(operator_norm(matrix)) for matrix, _, ell, *_ in self._output_maps())
        return self.declared_bound

    @property
    def _joint_bound(self) -> bool:
        """Whether the declared bound is that of the whole map."""
        return (self._blueprint.head.joint and not self._blueprint.apart) or not self.plan.output.free

    @property
    def declared_bound(self) -> float:
        """ℓ: equal to :attr:`bound` except for the head ``"rows"``, where it is the constant of every single output."""
        with torch.no_grad():
            return self._bound.value()

    def output_bounds(self) -> Tensor:
        """Constant of every single output (k,), float64; those of an image in the order of its flattened pixels."""
        found = []
        for matrix, error, ell, layout, window in self._output_maps():
            norms = row_norms(matrix, layout.cells) + error
            if layout.cells is not None:
                norms = Fold(layout.cells, None).vector(norms, layout.parts)
            found.append(ell * (norms if window is None else norms[window]))
        return _largest(found, self.declared_bound)

    def bound_of(self, value: str) -> float:
        r"""Certified Lipschitz constant of the map from the input to an intermediate value, :math:`ℓ\|F_t\|`.

        Args:
            value: Name of a node of :attr:`graph`: an activation, or a sum, concatenation and the like that the rule
                passes through.

        Raises:
            GraphError: There is no such value, or the rule does not need its covariance (the output of a free map that
                goes straight into an activation: ask for the activation).
        """
        if value not in self.graph.index:
            raise GraphError(f"'{value}' is not a value of the graph: {', '.join(self.graph.index)}")
        node = self.graph[value]
        while isinstance(node, Wire) and node.role == "order":
            node = self.graph[node.parents[0]]
        if isinstance(node, Input):
            return 1.0
        with torch.no_grad():
            found = self._sweep(torch.float64, watch=node.name)
        if found.watched is None:
            raise GraphError(f"the covariance of '{value}' is not needed by the rule; ask for an activation")
        return float(found.bound) * float(operator_norm(found.watched))

    def pair_bounds(self) -> Tensor:
        r"""Constant :math:`ℓ\|U'(e_c − e_j)\|` of ``y_c − y_j`` for every pair of outputs, (k, k) in float64.

        The difference of two nearly equal rows is rounding of the stored weights: a few rounding units of the rows'
        magnitudes are part of the constant.
        """
        exact = "donot_use_mm_for_euclid_dist"  # differences, not a Gram matrix
        found = []
        for matrix, error, ell, layout, window in self._output_maps():
            rows, spare = matrix, error
            if layout.cells is not None:
                fold = Fold(layout.cells, None)
                rows = fold.both(matrix, layout.parts, (1,) * len(layout.parts))
                spare = fold.vector(error, layout.parts)
            rows, spare = (rows, spare) if window is None else (rows[window], spare[window])
            found.append(ell * (torch.cdist(rows, rows, compute_mode=exact) + spare[:, None] + spare))
        # Whatever the errors: no pair is worse than two outputs of opposite directions in a map of the joint constant.
        most = math.sqrt(2) * self.bound if self._joint_bound else 2 * self.declared_bound
        return _largest(found, most).fill_diagonal_(0)

    def freeze(self) -> nn.Module:
        """An ordinary copy of the user's module with plain weights and the same outputs.

        The weights are computed in float64 and rounded once. Training mode is kept. With ``output="scale"`` the copy
        is wrapped into :class:`Scaled`.
        """
        plain = self.frozen_map()
        return plain.module if isinstance(plain, Joined) else plain

    def frozen_map(self) -> nn.Module:
        """As :meth:`freeze`, as the one map of vectors that certificates, attacks and files are about.

        For a module of several inputs or outputs, or of another metric: all inputs side by side, in units of the
        metric, to all outputs side by side (:class:`~ldlt.joined.Joined`).
        """
        with torch.no_grad():
            found = self._sweep(torch.float64)
            plain = self.plain(found.weights)
            if self.plan.output.free:
                return plain
            like = next(p for p in plain.parameters() if p.is_floating_point())
            return Scaled(plain, self._gain(found).to(like)).train(self.training)

    def plain(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """A copy of the user's module with these explicit parameters, by name.

        A convolution whose map is given as a :class:`~ldlt.images.convolutions.CirculantWeight` becomes a
        :class:`~ldlt.images.convolutions.CircularConv`.
        """
        whole = nn.ModuleList([copy.deepcopy(self.module)])  # the module may be a single convolution
        with torch.no_grad():
            for name, weight in weights.items():
                target, (path, _, _) = whole[0].get_parameter(name), name.rpartition(".")
                if not isinstance(weight, CirculantWeight):
                    target.copy_(weight)
                    continue
                layer = whole[0].get_submodule(path)
                bias = weights.get(f"{path}.bias", cast(Tensor | None, layer.bias))
                whole.set_submodule(
                    f"0.{path}".rstrip("."), CircularConv.of(weight, bias, target).train(layer.training)
                )
        return whole[0]

    def set_bound(self, bound: float) -> None:
        r"""Change ℓ, multiplying the whole network by ``bound / declared_bound``.

        With the multipliers scaled by the square of that factor all hidden weights stay as they are and the output maps
        and biases are multiplied by it, so classes that were predicted stay predicted. For training under a bound that
        is lowered step by step.

        Args:
            bound: The new ℓ.

        Raises:
            OptionError: The bound is trained.
        """
        if self._bound.trained:
            raise OptionError("the bound is trained: bound_floor and bound_ceiling limit it, it cannot be set")
        value = positive_number("bound", bound, BoundError)
        factor = value / self.declared_bound
        with torch.no_grad():
            self._bound.assign(value)
            for group in self.plan.groups.values():
                if group.free:  # those of given maps follow from ℓ
                    stored = self._parameter("log_multiplier", group.name)
                    stored.copy_(unbounded(bounded(stored) + 2 * math.log(factor)))
            for term in (t for g in self.plan.heads for t in g.terms):
                affine = cast(Affine, self.graph[term.affine])
                if affine.bias is not None:
                    whole = term.rows is None or isinstance(affine, Convolution)
                    self.module.get_parameter(affine.bias)[slice(None) if whole else list(term.rows or ())] *= factor

    @staticmethod
    def from_trained(
        model: nn.Module,
        bound: float | None = None,
        *,
        input_shape: int | Sequence[int] | None = None,
        slack: float = 1e-3,
        certificate: Certificate | None = None,
        time_limit: float | None = None,
        **options: Any,
    ) -> Lipschitz:
        """A constrained network that starts at the weights of an ordinary one, which is copied.

        The model is certified, and the parameterisation is inverted at its weights. Lower the bound while training on
        with :meth:`set_bound`.

        Args:
            model: A plain network whose activations all read free linear maps.
            bound: ℓ at the start; by default ``(1 + slack)`` times the certified bound of the given weights.
            input_shape: Shape of one sample; by default a vector of the first linear layer's size.
            slack: Room between the certified bound and ℓ: on the boundary itself the free parameters are infinite. With
                less room they are large, and float32 rounds them (see the guide for figures).
            certificate: Of this model, if there is one already.
            time_limit: Seconds for the search of a certificate.
            **options: Passed to :class:`Lipschitz`: ``contraction``, ``head``, ``train_multipliers``.

        Raises:
            BoundError: The bound is below what can be certified for these weights.
            InfeasibleError: An activation has a given map, or nothing can be certified.

        Example:
            >>> _ = torch.manual_seed(0)
            >>> plain = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).double()
            >>> net = Lipschitz.from_trained(plain)
            >>> x = torch.randn(5, 4).double()
            >>> bool(torch.allclose(net(x), plain(x), atol=1e-9))
            True
        """
        from ldlt.certificates.trained import constrain  # noqa: PLC0415 (certificates are built on networks)

        named: dict[str, Any] = {"input_shape": input_shape, "slack": slack, "time_limit": time_limit}
        return constrain(model, bound, certificate=certificate, **named, **options)

    def load_explicit(self, weights: Mapping[str, Tensor], multipliers: Mapping[str, Tensor]) -> None:
        """Invert the parameterisation: set the free parameters so that the network has these explicit weights.

        Args:
            weights: Explicit parameters by name, as :meth:`explicit` returns them.
            multipliers: ``Λ`` by activation node, as :meth:`multipliers` returns them.

        Raises:
            InfeasibleError: The matrix inequality does not hold strictly for these weights, multipliers and bound; or
                an activation has a given map, whose multiplier is not free.
        """
        load_explicit(self, weights, multipliers)

    def _parameter(self, role: str, group: str) -> nn.Parameter:
        found: nn.Parameter = getattr(self, role)[_key(group)]
        return found

    def extra_repr(self) -> str:
        """Summary for ``repr``."""
        name, head = self._blueprint.contraction.name, self._blueprint.head.name
        return f"bound={self.declared_bound:g}, input_shape={self.input_shape}, contraction={name}, head={head}"


@dataclass
class _Cache:
    versions: Any = None
    found: Explicit | None = None

    def explicit(self, net: Lipschitz) -> Explicit:
        tensors = [*net.parameters(), *net.buffers()]
        versions = [(id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
        if self.found is None or versions != self.versions or hooks_of(net) != net._hooks:
            self.versions, self.found = versions, net._sweep()
        return self.found


def _largest(found: Sequence[Tensor], most: float) -> Tensor:
    """The largest of several bounds, not above one that holds whatever they are: they may have overflowed."""
    return torch.nan_to_num(torch.stack(list(found)), nan=math.inf).amax(0).clamp(max=most)


def _planned(graph: Graph, module: nn.Module, convolutions: str | None) -> tuple[Graph, Plan, Torus | None]:
    """The plan of a graph, on a torus if convolutions keep their kernels."""
    if convolutions is not None:
        choice("convolutions", convolutions, ("local", "normalised"))
    if convolutions == "local" or (convolutions is None and _keeps_border(graph)):
        try:
            torus = on_torus(graph, module)
            plan = make_plan(torus.graph, module, torus)
            check_heads(plan, torus)
            return torus.graph, plan, torus
        except GraphError as error:
            if convolutions is not None:
                raise GraphError(f"convolutions='local' is not possible: {error}") from error
    return graph, make_plan(graph, module), None


def _keeps_border(graph: Graph) -> bool:
    """Whether some convolution of images is no circular one."""
    return any(isinstance(n, Wire) and n.operation.startswith("conv") for n in graph.nodes)


def _key(group: str) -> str:
    """Name of a group's parameters; prefixed, because a node may be called ``values`` or ``pop``."""
    return f"at_{group}"


def _reference(module: nn.Module) -> Tensor:
    """A parameter that tells precision and device; refuses what factorisations cannot be done in."""
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    if like is None:
        raise GraphError("the module has no Linear layer and no convolution: there is nothing to make Lipschitz")
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if not kinds <= {torch.float32, torch.float64} or len(kinds) > 1:
        raise GraphError(
            "the parameters must all be float32 or all be float64; train mixed precision with autocast instead"
        )
    if like.is_meta:
        raise GraphError("the module is on the meta device; wrap it first, then move the network")
    return like
