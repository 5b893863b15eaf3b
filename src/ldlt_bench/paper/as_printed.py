r"""The residual construction exactly as the paper prints it. It is **not** :math:`\ell`-Lipschitz.

It is kept for comparison only, so that the errata (``docs/errata.md``) can be checked by running them.
Nothing else in the library uses it; :func:`~ldlt_bench.paper.corrected_block` is the construction that holds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ldlt.check import choice, positive
from ldlt.errors import BoundError, ShapeError
from ldlt_bench.paper.block import ResidualBlock
from ldlt_bench.paper.roots import Alpha, Root, alpha_values, check_chain, contraction, left_solve

__all__ = ["AsPrintedResidual", "AsPrintedWarning", "PrintedForm", "as_printed_block"]

PrintedForm = Literal["symmetric", "cholesky", "scalar"]


class AsPrintedWarning(UserWarning):
    """A network without the Lipschitz bound that it states."""


def as_printed_block(
    W_A: Tensor,
    W: Sequence[Tensor],
    W_B: Tensor,
    *,
    alpha: Alpha = 1.0,
    bound: float = 1.0,
    form: PrintedForm = "symmetric",
) -> ResidualBlock:
    r"""Residual block as printed: ReLU, identity multipliers, output map without its cross terms.

    .. math::
        A &= \ell\, W_A (\alpha_A I + W_A^\top W_A)^{-1/2}, \qquad
        D_1 = \ell^2 \alpha_A (\alpha_A I + W_A^\top W_A)^{-1}, \\
        C_j &= \sqrt 2\, W_j (\alpha_j I + W_j^\top W_j)^{-1/2} D_j^{1/2}, \qquad
        D_{j+1} = 2 \alpha_j (\alpha_j I + W_j W_j^\top)^{-1}, \\
        B &= (I + A \Sigma A^\top)^{-1/2} W_B (\alpha_B I + W_B^\top W_B)^{-1/2}
             (2 I - C_n D_n^{-1} C_n^\top)^{1/2} .

    The form ``"cholesky"`` puts the triangular roots of the same matrices in the places where the paper puts
    them, :math:`A = \ell W_A R_A^{-1}`, :math:`C_1 = \ell \sqrt{2\alpha_A}\, W_1 R_1^{-1} R_A^{-\top}`,
    :math:`B = \sqrt{2\alpha_n}\, R_\Sigma^{-1} W_B R_B^{-1} R_n^{-\top}`; ``"scalar"`` replaces the last root
    by the number :math:`c = \sqrt{\|2\alpha_n(\alpha_n I + W_n W_n^\top)^{-1}\|}`. Where the paper's text
    cannot be evaluated for lack of matching shapes (erratum 3), :math:`R_j` is read as a root of
    :math:`\alpha_j I + W_j^\top W_j` where it divides :math:`W_j`, and of :math:`\alpha_j I + W_j W_j^\top`
    where it is a factor of :math:`D_{j+1}`.

    Args:
        W_A: Free matrix of the skip, shape ``(d_out, d_0)``.
        W: Free matrices of the hidden maps, the ``j``-th of shape ``(d_j, d_{j-1})``.
        W_B: Free matrix of the output map, shape ``(d_out, d_n)``.
        alpha: One positive number for all free matrices, or one for each in the order of the arguments. Zero
            is allowed for the last if ``W_B`` has full column rank; it is the supremum of what the paper
            allows.
        bound: The bound :math:`\ell` that the paper claims.
        form: ``"symmetric"`` roots, their ``"cholesky"`` variant, or the ``"scalar"`` variant of the latter.

    Returns:
        The explicit block, with the claimed bound. Its matrix inequality does not hold in general.

    Raises:
        LdltError: If an argument is out of its range or does not fit the others.
    """
    check_chain(W_A, W, W_B)
    choice("form", form, get_args(PrintedForm))
    positive("bound", bound, BoundError)
    kind: Root = "symmetric" if form == "symmetric" else "cholesky"
    alphas = alpha_values(alpha, len(W) + 2, W_A)

    unit, gram = contraction(W_A, alphas[0], kind)
    A = bound * unit
    V = gram / (bound * alphas[0].sqrt())  # the paper's D_1^{-1} is V'V
    gamma = torch.eye(W_A.shape[1], dtype=W_A.dtype, device=W_A.device)
    spread: list[Tensor] = []
    C: list[Tensor] = []
    for weight, a in zip(W, alphas[1:-1], strict=True):
        unit, _ = contraction(weight, a, kind)
        C.append(math.sqrt(2) * left_solve(V, unit.mT, kind).mT)
        spread.append(A @ gamma @ V.mT)
        gamma = gamma @ V.mT @ V @ C[-1].mT
        V = contraction(weight.mT, a, kind)[1] / (2 * a).sqrt()
    skip = torch.eye(W_A.shape[0], dtype=W_A.dtype, device=W_A.device)
    _, S = contraction(torch.cat(spread, dim=1).mT, skip.new_ones(()), kind)
    unit, _ = contraction(W_B, alphas[-1], kind)
    if form == "scalar":
        B = left_solve(S, unit, kind) / torch.linalg.svdvals(V)[-1]
    else:
        B = left_solve(S, left_solve(V, unit.mT, kind).mT, kind)
    ones = tuple(weight.new_ones(weight.shape[0]) for weight in W)
    return ResidualBlock(A, B, tuple(C), ones, ((0.0, 1.0),) * len(W), bound)


class AsPrintedResidual(nn.Module):
    r"""Trainable residual block as printed in the paper. It does **not** obey its bound.

    :func:`as_printed_block` turns free parameters into explicit weights at every call; the scalars
    :math:`\alpha` are trained through their logarithms, the activation is ReLU.

    Args:
        in_features: Size ``d_0`` of the input.
        hidden: Sizes ``d_1, ..., d_n`` of the hidden layers; at least one.
        out_features: Size of the output.
        bound: The Lipschitz bound that the paper claims for it.
        form: Variant of the construction, see :func:`as_printed_block`.
        dtype: Floating point type of the parameters.

    Warns:
        AsPrintedWarning: On construction, since the network is not Lipschitz with its bound.
    """

    certified: bool = False

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        bound: float = 1.0,
        *,
        form: PrintedForm = "symmetric",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = [in_features, *hidden]
        if not hidden or min(*sizes, out_features) < 1:
            raise ShapeError(f"sizes {in_features}, {list(hidden)}, {out_features} do not form a residual block")
        self.form: PrintedForm = choice("form", form, get_args(PrintedForm))
        self.bound = positive("bound", bound, BoundError)
        warnings.warn(
            "AsPrintedResidual follows the paper to the letter and is therefore NOT Lipschitz with its "
            "bound; use it for comparison only and see erratum 1 in docs/errata.md",
            AsPrintedWarning,
            stacklevel=2,
        )

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(nn.init.xavier_normal_(torch.empty(rows, columns, dtype=dtype)))

        self.W_A = matrix(out_features, in_features)
        self.W = nn.ParameterList([matrix(q, p) for p, q in zip(sizes, hidden, strict=False)])
        self.W_B = matrix(out_features, sizes[-1])
        self.log_alpha = nn.Parameter(torch.zeros(len(sizes) + 1, dtype=dtype))
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(q, dtype=dtype)) for q in hidden])

    def explicit(self) -> ResidualBlock:
        """Explicit weights as a differentiable function of the free parameters."""
        return as_printed_block(
            self.W_A, list(self.W), self.W_B, alpha=self.log_alpha.exp().unbind(), bound=self.bound, form=self.form
        )

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate the block on inputs of shape ``(..., in_features)``."""
        return self.explicit().forward(x, torch.relu, list(self.biases))
