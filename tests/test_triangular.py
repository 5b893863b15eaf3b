"""The fused Cholesky contraction: values, first and second derivatives, vmap, breakdown."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from ldlt.engine import linalg as triangular
from ldlt.engine.linalg import gram_cholesky


@pytest.fixture(params=[3, 256])
def _block(request, monkeypatch):
    monkeypatch.setattr(triangular, "_BLOCK", request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (3, 7), (9, 9)])
@pytest.mark.usefixtures("_block")
def test_factor_and_contraction_satisfy_their_definition(dtype, n, k):
    weight = torch.randn(n, k, dtype=dtype)
    alpha = torch.tensor(0.3, dtype=torch.float64)
    matrix, factor, used, _ = gram_cholesky(weight, alpha)
    lower = factor.dense()
    eye = torch.eye(n, dtype=dtype)
    assert torch.equal(lower, lower.tril())
    torch.testing.assert_close(lower @ lower.mH, used * eye + weight @ weight.mH, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lower @ matrix, weight, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        eye - matrix @ matrix.mH, used * torch.linalg.inv(lower.mH @ lower), rtol=1e-11, atol=1e-12
    )
    assert 0 <= float(used - alpha) < 1e-13 * float(weight.abs().square().sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.usefixtures("_block")
def test_first_and_second_derivatives(dtype):
    weight = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    alpha = torch.rand((), dtype=torch.float64).add(0.3).requires_grad_()
    rhs = torch.randn(5, 2, dtype=dtype, requires_grad=True)

    def use(weight, alpha, rhs):
        matrix, factor, used, _ = gram_cholesky(weight, alpha)
        energy = (matrix @ matrix.mH).real.sin().sum()
        return energy, factor.solve(rhs), factor.solve_adjoint(rhs), factor.dense() @ rhs, used.sqrt()

    assert gradcheck(use, (weight, alpha, rhs))
    assert gradgradcheck(use, (weight, alpha, rhs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_product_with_a_batch_has_the_same_derivatives(dtype):
    weight = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    alpha = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 3, dtype=dtype, requires_grad=True)

    def use(weight, alpha, x):
        found = gram_cholesky(weight, alpha)
        return found.apply(x), found.factor.solve(found.apply(x).mH)

    def mixed(weight, alpha, x):
        found = gram_cholesky(weight, alpha)
        return found.apply(x) + x @ found.matrix.mH

    for function in (use, mixed):
        assert gradcheck(function, (weight, alpha, x))
    (first,) = torch.autograd.grad(mixed(weight, alpha, x).abs().square().sum(), weight)
    (second,) = torch.autograd.grad((2 * x @ gram_cholesky(weight, alpha).matrix.mH).abs().square().sum(), weight)
    torch.testing.assert_close(first, second)


def test_vmap_equals_a_loop():
    weights, alphas = torch.randn(4, 5, 3, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.5

    def loss(weight, alpha):
        matrix, factor, used, _ = gram_cholesky(weight, alpha)
        return factor.solve_adjoint(matrix).square().sum() + factor.dense().sum() + used

    together = vmap(grad(loss, argnums=(0, 1)))(weights, alphas)
    for i in range(4):
        single = grad(loss, argnums=(0, 1))(weights[i], alphas[i])
        torch.testing.assert_close(together[0][i], single[0])
        torch.testing.assert_close(together[1][i], single[1])


@pytest.mark.parametrize("size", [1.0, 1e6, 1e15])
def test_no_breakdown_however_large_the_free_matrix(size):
    """Float32, far beyond where αI + WW' is numerically singular."""
    matrix, factor, _, _ = gram_cholesky(size * torch.randn(64, 8), torch.tensor(1.0))
    assert torch.isfinite(factor.value).all()
    assert float(torch.linalg.matrix_norm(matrix.double(), 2)) < 1 + 1e-5


def test_nan_in_nan_out():
    weight = torch.randn(4, 3)
    weight[1, 1] = torch.nan
    matrix, _, _, _ = gram_cholesky(weight, torch.tensor(1.0))
    assert torch.isnan(matrix).any()
