r"""Proofs that a stored network has a Lipschitz bound, in spite of rounding.

:func:`prove` assembles the matrix ``M(G)`` of :mod:`ldlt.certificates.form` from the exact stored weights with error
bounds and applies the test of :mod:`ldlt.certificates.definite`. A proof holds for the network
evaluated in real arithmetic.

**Tight networks.** A network built here has ``Q ⪰ 0`` with a smallest eigenvalue near zero, and its weights were
rounded once after that. :func:`prove_smallest` looks for a near ``(Λ, ℓ)`` that can be proven. Raising ℓ alone does
not do: it lifts the directions of ``x`` only. With ``S_i`` the constraint of activation ``i`` (linear in ``Λ_i``),
``S_0 = ℓ²‖x‖²`` and ``P = Σ_i S_i``, two moves lift everything else:

1. *Output.* Scaling ``Λ`` and ``ℓ²`` by ``t > 1`` turns ``Q`` into ``tP − Y'Y = tQ + (t − 1)Y'Y``, and whenever
   ``P ≻ 0`` there is a ``t`` that makes it positive definite, the least one being ``t = λ_max(YP^{-1}Y')``. This is
   the exact optimum along that ray, found with one factorisation.
2. *Hidden layers* (``P`` itself singular: contractions of norm one). Let ``i`` have level ``d_i``, the number of
   activations on the longest path to it, ``d`` the largest level, and take ``P_ε = Σ_i (1 + ε)^{d − d_i} S_i``, which
   raises ℓ² by ``(1 + ε)^d`` and each multiplier by less than those before it. If ``P ⪰ 0`` then ``P_ε ≻ 0``.

   *Proof.* Let ``P^{(j)}`` be the sum of the ``S_i`` up to level ``j``. Summation by parts gives
   ``P_ε = P + Σ_{j<d} ((1 + ε)^{d−j} − (1 + ε)^{d−j−1}) P^{(j)}`` with positive weights. ``P^{(j)} ⪰ 0``: it does
   not depend on later coordinates; set them to ``w = cv`` in turn, which makes later ``S_i = −2r²‖v‖²_Λ ≤ 0``, so
   ``P^{(j)}(z) ≥ P(z) ≥ 0``. If ``P_ε(z) = 0`` then all ``P^{(j)}(z) = 0``, hence level by level ``S_j(z) = 0``
   with ``x = 0``, then ``v_1 = 0``, then ``w_1 = 0``, and so on: ``z = 0``. ∎

The factor on ℓ is then ``√(t (1 + ε)^d)``; ε is chosen to make it small. If the multipliers are of another scale than
the bound (those of a network whose single outputs were bounded, say), the weight of ``S_0`` relative to the others is
searched, too; the inequality is convex in ``(Λ, ℓ²)``, so this has one minimum. The search is ordinary floating
point. The numbers it ends with, rounded as they are, go through :func:`prove`, which alone decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ldlt.certificates.ball import Array, arithmetic_is_ieee
from ldlt.certificates.definite import is_semidefinite
from ldlt.certificates.form import bordered
from ldlt.certificates.linear import Network
from ldlt.certificates.search import Search
from ldlt.errors import LdltError
from ldlt.graph import Graph

__all__ = ["LARGEST", "Proof", "prove", "prove_gram", "prove_smallest"]

LARGEST = 12_000
"""Largest size of the matrix, coordinates and outputs together; the proof holds three such matrices in float64."""

# What is found here must pass on other machines, too, whose rounding errors differ a little.
_SAFETY = 1.5
_SLACKS = (1.0, 3.0, 10.0, 100.0)  # factors on the estimate of the rounding errors

Given = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Proof:
    """Outcome of a proof.

    Attributes:
        holds: Whether the bound is proven. If not, nothing is known.
        bound: ℓ, the bound that the proof is about.
        margin: Proven lower bound of the smallest eigenvalue of the matrix, scaled to a diagonal near one; -inf if
            there is no proof.
        reason: Why there is no proof; empty if it holds.
        multipliers: ``Λ`` of the proof, float64, by activation.
        gram: ``G`` of the proof, float64 (k, k), or None for the identity.
    """

    holds: bool
    bound: float
    margin: float
    reason: str = ""
    multipliers: dict[str, Tensor] = field(default_factory=dict)
    gram: Tensor | None = None


def prove(
    graph: Graph,
    module: nn.Module,
    multipliers: Mapping[str, Tensor],
    bound: float,
    *,
    gram: Tensor | None = None,
    slopes: Given | None = None,
) -> Proof:
    r"""Try to prove ``‖Δy‖ ≤ ℓ‖Δx‖``, or :math:`|a'Δy| \le ℓ\sqrt{a'Ga}\,\|Δx\|` for all ``a`` if ``G`` is given.

    Args:
        graph: What :func:`ldlt.graph.trace.trace` returned for the module.
        module: The stored network.
        multipliers: ``Λ`` by activation node, (features,), positive; equal within a group that is mixed. Infinity
            leaves out a neuron whose slope is one number or whose input is constant.
        bound: ℓ.
        gram: ``G``, (k, k) symmetric; the identity by default.
        slopes: Slopes ``(m, L)`` of some activations, (features,) each, that hold on a region of inputs and that the
            caller has proven; the proof is then about that region.

    Returns:
        A proof that holds, or one with a reason. Nothing is raised for a network or numbers that do not fit.
    """
    return _Prover(graph, module, slopes).prove(multipliers, bound, gram)


def prove_smallest(
    graph: Graph,
    module: nn.Module,
    multipliers: Mapping[str, Tensor],
    bound: float,
    largest: float = 1 + 1e-3,
    *,
    least: float = 1.0,
    slopes: Given | None = None,
) -> Proof:
    """Prove the smallest bound found near a given one, with multipliers moved as little as needed.

    Args:
        graph: As in :func:`prove`.
        module: As in :func:`prove`.
        multipliers: As in :func:`prove`; the start.
        bound: ℓ, the start.
        largest: Largest factor on ℓ.
        least: Smallest factor on ℓ; below 1 the bound may turn out smaller than the given one.
        slopes: As in :func:`prove`.

    Returns:
        A proof whose ``bound`` and ``multipliers`` are the ones proven; or the failed proof of the given ones.
    """
    return _Prover(graph, module, slopes).smallest(multipliers, bound, largest, least)


def prove_gram(
    graph: Graph,
    module: nn.Module,
    multipliers: Mapping[str, Tensor],
    bound: float,
    *,
    slopes: Given | None = None,
) -> Proof:
    """Prove the smallest ``G`` found for these multipliers: a constant for every direction of the output.

    The bound must be one that can be proven, as :func:`prove_smallest` returns it.

    Returns:
        A proof with :attr:`Proof.gram`.
    """
    return _Prover(graph, module, slopes).grams(multipliers, bound)


class _Refused(Exception):
    """A reason why there is no proof."""


class _Prover:
    """The network, its linear maps (made once) and the three searches."""

    def __init__(self, graph: Graph, module: nn.Module, slopes: Given | None) -> None:
        self.graph, self.module, self.slopes = graph, module, slopes
        self.made: tuple[bytes, Network] | None = None

    def prove(self, multipliers: Mapping[str, Tensor], bound: float, gram: Tensor | None, safety: float = 1.0) -> Proof:
        stated = math.nan
        try:
            with np.errstate(all="ignore"):  # overflow is looked for where it matters
                stated = _bound(bound)
                values = self._values(multipliers)
                network = self._network(values)
                border = self._gram(network, gram)
                found = is_semidefinite(bordered(network, values, stated, border), safety)
        except (_Refused, LdltError, OverflowError) as error:
            return Proof(False, stated, -math.inf, str(error))
        kept = {n: torch.from_numpy(v.copy()) for n, v in values.items()}
        stored = None if gram is None else torch.from_numpy(border)
        reason = "" if found.holds else f"not proven for the bound {stated:.9g}: {found.reason}"
        return Proof(found.holds, stated, found.margin, reason, kept, stored)

    def smallest(self, multipliers: Mapping[str, Tensor], bound: float, largest: float, least: float) -> Proof:
        best = first = self.prove(multipliers, bound, None, _SAFETY)
        search = None if first.holds and least >= 1 else self._search(first)
        if search is None:
            return first
        for slack in _SLACKS:
            with np.errstate(all="ignore"):
                found = search.run(slack, least < 1)
            if found is None:
                continue
            scaled, ell = found
            if ell > largest * first.bound:
                break
            ell = max(ell, least * first.bound)
            proof = self.prove({n: torch.from_numpy(v) for n, v in scaled.items()}, ell, None, _SAFETY)
            if proof.holds:
                return proof if not best.holds or proof.bound < best.bound else best
        return best

    def grams(self, multipliers: Mapping[str, Tensor], bound: float) -> Proof:
        first = self.prove(multipliers, bound, None)
        search = self._search(first)
        if search is None:
            return first
        for slack in _SLACKS:
            with np.errstate(all="ignore"):
                gram = search.gram(slack)
            if gram is not None:
                proof = self.prove(multipliers, bound, torch.from_numpy(gram), _SAFETY)
                if proof.holds:
                    return proof
        return Proof(False, first.bound, -math.inf, first.reason or "no constants of directions could be proven")

    def _search(self, first: Proof) -> Search | None:
        """A search from the numbers of a proof that was tried; None if they were refused."""
        if self.made is None or len(first.multipliers) != len(self.graph.activations) or math.isnan(first.bound):
            return None
        values = {n: v.numpy() for n, v in first.multipliers.items()}
        return Search(self.made[1], values, first.bound)

    def _values(self, multipliers: Mapping[str, Tensor]) -> dict[str, Array]:
        """Multipliers as float64 arrays, checked."""
        names = [a.name for a in self.graph.activations]
        for name in multipliers:
            if name not in names:
                raise _Refused(f"there is a multiplier for '{name}', which is no activation of the network")
        found = {}
        for name in names:
            given = multipliers.get(name)
            size = self.graph[name].features
            if not isinstance(given, Tensor) or not given.is_floating_point():
                raise _Refused(f"there is no multiplier for the activation '{name}'")
            if given.numel() != size:
                raise _Refused(f"the activation '{name}' has {size} neurons but {given.numel()} multipliers")
            value = given.detach().double().cpu().numpy().reshape(-1).copy()
            if not (value > 0).all():  # NaN, too
                place = int(np.flatnonzero(~(value > 0))[0])
                raise _Refused(f"multiplier {place} of '{name}' is {value[place]:g}, not a positive number")
            found[name] = value
        return found

    def _network(self, values: Mapping[str, Array]) -> Network:
        """The linear maps; they depend on the multipliers only through which of them are infinite."""
        drop = {n: np.isinf(v) for n, v in values.items()}
        key = b"".join(d.tobytes() for d in drop.values())
        if self.made is None or self.made[0] != key:
            if not arithmetic_is_ieee():
                raise _Refused("the processor does not round to nearest, or flushes small numbers to zero")
            size = sum(n.features for n in (self.graph.input, *self.graph.activations, self.graph[self.graph.output]))
            if size > LARGEST:
                raise _Refused(f"the matrix has size {size}, above {LARGEST}: too large for a proof in memory")
            self.made = key, Network(self.graph, self.module, drop, self.slopes)
        network = self.made[1]
        for name, slopes in network.slopes.items():
            if slopes.mixed is not None:
                _, first = np.unique(slopes.mixed, return_index=True)
                if not (values[name] == values[name][first][slopes.mixed]).all():
                    raise _Refused(f"'{name}' mixes entries in groups, whose multipliers must be equal")
        return network

    @staticmethod
    def _gram(network: Network, gram: Tensor | None) -> Array:
        k = network.outputs
        if gram is None:
            return np.eye(k)
        if tuple(gram.shape) != (k, k):
            raise _Refused(f"G must have shape ({k}, {k}), not {tuple(gram.shape)}")
        value: Array = gram.detach().double().cpu().numpy().copy()
        if not np.isfinite(value).all() or not (value == value.T).all():
            raise _Refused("G must be symmetric with finite entries")
        return value


def _bound(bound: float) -> float:
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise _Refused(f"the bound must be a number, not {type(bound).__name__}")
    if not (math.isfinite(bound) and bound > 0):
        raise _Refused(f"the bound must be positive and finite, not {bound:g}")
    return float(bound)
