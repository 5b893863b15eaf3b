r"""Block Cholesky of the sparse form, one block per activation, from the last activation back to the input.

Blocks are eliminated in reverse topological order, so that fill-in joins only blocks that are read together. A chain
has none at all: its cost is one Cholesky, one triangular solve and one product per layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ldlt.certificates.problem import Layer, Problem

__all__ = ["Factor", "apply", "apply_adjoint", "bound_squared", "eliminate"]

Vectors = dict[str, Tensor]  # block -> (size, k)
Pairs = dict[tuple[str, str], Tensor]  # (later, earlier) -> block of a symmetric matrix
Choose = Callable[[Layer, Tensor | None], Tensor]


class Factor:
    """The factor ``R`` of ``Q = R'R``, upper block triangular in the order of elimination.

    Attributes:
        order: Names of the blocks, in the order of elimination.
        pivots: Lower Cholesky factors of the pivots; a vector stands for a diagonal.
        rows: ``L^{-1} Q_ab`` by eliminated block a and remaining block b.
    """

    def __init__(self, order: list[str], pivots: dict[str, Tensor], rows: dict[str, dict[str, Tensor]]) -> None:
        self.order, self.pivots, self.rows = order, pivots, rows

    def half(self, right: Vectors) -> Vectors:
        """``R^{-T} right``: forward substitution."""
        rest, found = dict(right), {}
        for a in self.order:
            if a not in rest:
                continue
            found[a] = _divide(self.pivots[a], rest[a])
            for b, row in self.rows[a].items():
                change = row.T @ found[a]
                rest[b] = rest[b] - change if b in rest else -change
        return found

    def back(self, half: Vectors) -> Vectors:
        """``R^{-1} half``: back substitution."""
        found: Vectors = {}
        for a in reversed(self.order):
            total = half.get(a)
            for b, row in self.rows[a].items():
                if b in found:
                    change = row @ found[b]
                    total = -change if total is None else total - change
            if total is not None:
                found[a] = _divide_adjoint(self.pivots[a], total)
        return found

    def solve(self, right: Vectors) -> Vectors:
        """``Q^{-1} right``."""
        return self.back(self.half(right))

    def selected_inverse(self) -> Pairs:
        """Blocks of ``Q^{-1}`` on the pattern of the factor, (earlier in the order, later) and the diagonal.

        Going backwards, with ``K_ab = L_a^{-T} row_ab``: ``Σ_ab = −Σ_c K_ac Σ_cb``, and on the diagonal
        ``Σ_aa = (L_aL_a')^{-1} − Σ_c K_ac Σ_ca``.
        """
        found: Pairs = {}

        def block(a: str, b: str) -> Tensor:
            return found[a, b] if (a, b) in found else found[b, a].T

        for a in reversed(self.order):
            pivot = self.pivots[a]
            solved = {b: _divide_adjoint(pivot, row) for b, row in self.rows[a].items()}
            for b in solved:
                total = torch.zeros((), dtype=torch.float64)
                for c, k in solved.items():
                    total = total - k @ block(c, b)
                found[a, b] = total
            own = torch.diag(pivot**-2) if pivot.ndim == 1 else torch.cholesky_inverse(pivot)
            for c, k in solved.items():
                own = own - k @ found[a, c].T
            found[a, a] = (own + own.T) / 2
        return found


def _divide(pivot: Tensor, right: Tensor) -> Tensor:
    if pivot.ndim == 1:
        return right / pivot[:, None]
    return torch.linalg.solve_triangular(pivot, right, upper=False)


def _divide_adjoint(pivot: Tensor, right: Tensor) -> Tensor:
    if pivot.ndim == 1:
        return right / pivot[:, None]
    return torch.linalg.solve_triangular(pivot.mT, right, upper=True)


def eliminate(
    problem: Problem, multipliers: Tensor | Choose, *, scale: float = 0.0, last: bool = True
) -> tuple[Factor | None, Tensor | None, Tensor]:
    """Factorise ``Q_0(Λ) − scale · Y'Y``.

    Args:
        problem: The problem.
        multipliers: One entry per multiplier, or a function that chooses those of a layer when its turn comes: from
            the layer and the part ``S`` (n, n) of its pivot ``2Λ + S`` that children have left (None if it is zero).
        scale: Factor of the output term.
        last: Whether to factorise the input block, too. If not, its part without the identity is returned.

    Returns:
        The factor (None if the matrix is not positive definite), the remaining input block ``S_xx`` with
        ``Q / Q_hh = I + S_xx`` (None if ``last``, or if it is zero), and the multipliers.
    """
    order = [*(layer.name for layer in reversed(problem.layers)), problem.input]
    rank = {name: i for i, name in enumerate(order)}
    pairs: Pairs = {}

    def add(a: str, b: str, block: Tensor) -> None:
        if rank[a] > rank[b]:
            a, b, block = b, a, block.T
        pairs[a, b] = pairs[a, b] + block if (a, b) in pairs else block

    def add_form(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
        """Add the blocks of ``left' right``, which is symmetric."""
        for a, one in left.items():
            for b, two in right.items():
                if rank[a] <= rank[b]:
                    add(a, b, one.T @ two)

    if scale:
        add_form({b: -scale * y for b, y in problem.output.items()}, problem.output)
    given = None if callable(multipliers) else problem.split(multipliers)
    pivots: dict[str, Tensor] = {}
    rows: dict[str, dict[str, Tensor]] = {}
    used: list[Tensor] = []
    for layer in reversed(problem.layers):
        a = layer.name
        rest = pairs.pop((a, a), None)
        chosen = given[a] if given is not None else multipliers(layer, rest)  # type: ignore[operator]
        used.append(chosen)
        weight = 2 * chosen[layer.shared]
        if bool((layer.product != 0).any()):
            scaled = (weight * layer.product)[:, None]
            add_form({b: scaled * v for b, v in layer.inputs.items()}, layer.inputs)
        for b, v in layer.inputs.items():
            add(a, b, -(weight * layer.center)[:, None] * v)  # also if it is zero: it belongs to the pattern
        pivot = weight if rest is None else rest + torch.diag(weight)
        factor = _cholesky(pivot)
        if factor is None:
            return None, None, problem_flat(used)
        pivots[a] = factor
        rows[a] = {b: _divide(factor, pairs.pop((a, b))) for b in order[rank[a] + 1 :] if (a, b) in pairs}
        add_form({b: -row for b, row in rows[a].items()}, rows[a])
    flat = problem_flat(used)
    rest = pairs.pop((problem.input, problem.input), None)
    if not last:
        return Factor(order[:-1], pivots, rows), rest, flat
    one = torch.ones(problem.inputs, dtype=torch.float64)
    factor = _cholesky(one if rest is None else rest + torch.diag(one))
    if factor is None:
        return None, None, flat
    pivots[problem.input], rows[problem.input] = factor, {}
    return Factor(order, pivots, rows), None, flat


def problem_flat(reversed_parts: list[Tensor]) -> Tensor:
    """Join the parts of layers that were visited backwards."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *reversed_parts[::-1]])


def _cholesky(pivot: Tensor) -> Tensor | None:
    """Lower factor, for a vector its square root; None if the pivot is not positive definite."""
    if pivot.ndim == 1:
        good = bool((pivot > 0).all()) and bool(pivot.isfinite().all())
        return pivot.sqrt() if good else None
    factor, info = torch.linalg.cholesky_ex((pivot + pivot.T) / 2)
    return factor if int(info) == 0 and bool(factor.diagonal().isfinite().all()) else None


def bound_squared(problem: Problem, multipliers: Tensor | Choose) -> tuple[float, Tensor]:
    """``ℓ²(Λ) = λ_max(Q_xh Q_hh^{-1} Q_hx − Q_xx)`` for the full inequality; infinite if ``Q_hh`` is not positive.

    Returns:
        The bound squared, and the multipliers.
    """
    found, rest, flat = eliminate(problem, multipliers, scale=1.0, last=False)
    if found is None:
        return float("inf"), flat
    if rest is None:
        return 0.0, flat
    if not bool(rest.isfinite().all()):
        return float("inf"), flat
    return max(0.0, float(torch.linalg.eigvalsh(-(rest + rest.T) / 2)[-1])), flat


def apply(layer: Layer, z: Vectors) -> Tensor:
    """``v = Σ_b V_b z_b``, (n, k)."""
    total = None
    for b, v in layer.inputs.items():
        if b in z:
            total = v @ z[b] if total is None else torch.addmm(total, v, z[b])
    return total if total is not None else torch.zeros(layer.size, next(iter(z.values())).shape[1], dtype=torch.float64)


def apply_adjoint(layer: Layer, right: Tensor, into: Vectors) -> None:
    """Add ``V_b' right`` to each block of ``into``."""
    for b, v in layer.inputs.items():
        change = v.T @ right
        into[b] = into[b] + change if b in into else change
