"""Cayley's transform and Gram matrices: closed forms, gradients, extreme sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ldlt import errors
from ldlt.cayley import CayleyMap, cayley, gram
from ldlt_bench.families.orthogonal import cayley_rows, wide_map

F64 = torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@given(q=st.integers(1, 6), p=st.integers(0, 6), stack=st.sampled_from([(), (3,)]), seed=st.integers(0, 2**31))
def test_cayley_of_complex_matrices(q, p, stack, seed):
    """As the rule uses it, one matrix per frequency: orthonormal rows, and the gradient of the formula."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(*stack, rows, q, dtype=torch.complex128, generator=generator) for rows in (q, p))
    leaves = [t.clone().requires_grad_() for t in (x, y)]
    a, b = cayley(*leaves)
    eye = torch.eye(q, dtype=x.dtype)
    assert torch.allclose(a @ a.mH + b @ b.mH, eye.expand(*stack, q, q), atol=1e-10)
    plain = [t.clone().requires_grad_() for t in (x, y)]
    z = plain[0].mH - plain[0] + plain[1].mH @ plain[1]
    want = torch.linalg.solve(eye + z, torch.cat((eye - z, -2 * plain[1].mH), -1))
    got = torch.cat((a, b), -1)
    assert torch.allclose(got, want, atol=1e-10)
    weight = torch.randn(want.shape, dtype=x.dtype, generator=generator)
    for ours, theirs in zip(
        torch.autograd.grad((got * weight).real.sum(), leaves),
        torch.autograd.grad((want * weight).real.sum(), plain),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-7, atol=1e-8)


def test_wrong_cayley_shapes_are_refused():
    for x, y in (((3, 4), (2, 4)), ((3, 3), (2, 4)), ((3,), (2, 3))):
        with pytest.raises(errors.ShapeError):
            cayley(torch.zeros(x), torch.zeros(y))


def test_cayley_map_has_second_derivatives() -> None:
    free = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    v, u = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda w: wide_map(w).apply(v), free)
    assert torch.autograd.gradgradcheck(lambda w: wide_map(w).adjoint(u), free)


@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_cayley_map_on_vectors_is_its_matrices(dtype, stack):
    torch.manual_seed(3)
    x, y = torch.randn(*stack, 4, 4, dtype=dtype), torch.randn(*stack, 6, 4, dtype=dtype)
    found = CayleyMap(x, y)
    a, b = found.a(), found.b()
    rhs, wide = torch.randn(*stack, 4, 3, dtype=dtype), torch.randn(*stack, 6, 3, dtype=dtype)
    torch.testing.assert_close(a @ a.mH + b @ b.mH, torch.eye(4, dtype=dtype).expand_as(a))
    if not dtype.is_complex:
        torch.testing.assert_close(found.apply_a(rhs.mT), (a @ rhs).mT)
        torch.testing.assert_close(found.apply_b(wide.mT), (b @ wide).mT)
        torch.testing.assert_close(found.adjoint_a(rhs.mT), (a.mT @ rhs).mT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_cayley_matrices_have_second_derivatives(dtype):
    torch.manual_seed(4)
    x, y = (torch.randn(n, 3, dtype=dtype, requires_grad=True) for n in (3, 2))
    assert torch.autograd.gradgradcheck(lambda x, y: CayleyMap(x, y).b(), (x, y))
    assert torch.autograd.gradgradcheck(lambda x, y: CayleyMap(x, y).a(), (x, y))


@pytest.mark.parametrize("share", [0.2, 5.0])
def test_large_cayley_parts_are_scaled_down(share):
    """The limit is on both parts, and the rows stay orthonormal."""
    torch.manual_seed(5)
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    found = CayleyMap(1e6 * x, 1e6 * y, share)
    assert float(found.shift.norm()) <= 2 * share
    a, b = found.a(), found.b()
    torch.testing.assert_close(a @ a.mT + b @ b.mT, torch.eye(4, dtype=torch.float64))


def test_gram_and_its_gradients():
    """Equal to the plain product with all its derivatives, also for gradients that are not symmetric, and stacked."""
    torch.manual_seed(0)
    w = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    left = torch.randn(5, 5, dtype=torch.float64)
    torch.testing.assert_close(gram(w), w.mT @ w)
    (found,) = torch.autograd.grad((gram(w) * left).sum(), w)
    (expected,) = torch.autograd.grad((w.mT @ w * left).sum(), w)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda m: (gram(m) * left).sum()))(w), expected)
    assert torch.autograd.gradcheck(gram, w)
    assert torch.autograd.gradgradcheck(gram, w)


@pytest.mark.parametrize("stacked", [False, True])
def test_cayley_map_with_pivots(stacked):
    """Rows are exchanged in the factorisation; solves with M and M' agree with the dense map."""
    torch.manual_seed(1)
    free = 30 * torch.randn(2, 6, 9, dtype=torch.float64)
    pivoted = wide_map(free[0])
    pivoted.a()
    assert bool((pivoted.plus.factors[1] != torch.arange(6)).any())
    v, u = torch.randn(2, 4, 9, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)

    def both(weight, v, u):
        found = wide_map(weight)
        return found.apply(v), found.adjoint(u)

    rows = torch.stack([cayley_rows(m) for m in free])
    found = (
        torch.func.vmap(both)(free, v, u)
        if stacked
        else [torch.stack(t) for t in zip(*map(both, free, v, u), strict=True)]
    )
    torch.testing.assert_close(found[0], v @ rows.mT)
    torch.testing.assert_close(found[1], u @ rows)
