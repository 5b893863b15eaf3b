r"""Lower bounds on what any multipliers can achieve, from vectors.

The dual of the problem asks for one vector per coordinate of ``z`` (rows of ``Z``, any length k) such that

.. math::

    \|w_j - c_jv_j\| \le r_j\|v_j\| \quad\text{for every neuron (jointly over a group)},
    \qquad v_i = \sum_b V_{ib} z_b ,

and maximises ``‖Y Z‖_F² / ‖Z_x‖_F²``. Every feasible ``Z`` is a lower bound on the best ``ℓ²`` of the matrix inequality
(not on the Lipschitz constant itself). Vectors that break a constraint a little are repaired from the input to the
output by shortening ``w_j − c_jv_j``, so a nearly optimal solution gives a nearly sharp bound at the cost of one
forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ldlt.certificates.elimination import apply
from ldlt.certificates.problem import Problem

__all__ = ["lower_bound_squared"]


def lower_bound_squared(problem: Problem, vectors: dict[str, Tensor]) -> float:
    """Repair the vectors and return ``‖YZ‖² / ‖Z_x‖²``, a lower bound on ``min ℓ²``.

    Args:
        problem: The problem.
        vectors: ``Z`` by block, (size, k); missing blocks are zero.
    """
    start = vectors.get(problem.input)
    if start is None:
        return 0.0
    norm = float(start.square().sum())
    if not 0 < norm < float("inf"):
        return 0.0
    fixed = {problem.input: start}
    for layer in problem.layers:
        v = apply(layer, fixed)
        center = layer.center[:, None]
        middle = center * v
        given = vectors.get(layer.name)
        if given is None:
            fixed[layer.name] = middle
            continue
        # The residual of the vectors as they were given keeps its direction. Its length is cut where it is too long.
        residual = given - (middle if set(layer.inputs) <= {problem.input} else center * apply(layer, vectors))
        have, may = residual.square().sum(1), layer.radius**2 * v.square().sum(1)
        if layer.count < layer.size:
            zeros = torch.zeros(layer.count, dtype=torch.float64)
            have, may = (zeros.index_add(0, layer.shared, t)[layer.shared] for t in (have, may))
        factor = (may / have.clamp(min=1e-300)).sqrt().nan_to_num(0.0).clamp(max=1.0)
        fixed[layer.name] = torch.addcmul(middle, factor[:, None], residual)
    y = sum((m @ fixed[b] for b, m in problem.output.items() if b in fixed), torch.zeros(()).double())
    found = float(y.square().sum()) / norm
    return found if found < float("inf") else 0.0
