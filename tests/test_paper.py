"""The paper's residual block: inequality, factors, corrected and printed constructions, figures."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ldlt.errors import BoundError, InfeasibleError, OptionError, ShapeError, SlopeError
from ldlt_bench.paper import (
    AsPrintedResidual,
    AsPrintedWarning,
    ResidualBlock,
    as_printed_block,
    block_ldlt,
    closed_form_factors,
    corrected_block,
    printed_last_pivot,
    scalar_counterexample,
    violation,
)
from ldlt_bench.paper.roots import contraction, gram_root

F64 = torch.float64
ROOTS = ("symmetric", "cholesky")
SLOPES = [(0.0, 1.0), (-0.2, 1.1), (0.25, 1.0), (-1.0, 1.0), (-0.9, 0.3), (0.01, 1.0), (0.0, 0.25)]
quick = settings(max_examples=20, deadline=None, database=None)


def randn(*shape: int, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, dtype=F64, generator=generator)


def free_matrices(sizes, out, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = [randn(q, p, generator=g, scale=scale) for p, q in pairwise(sizes)]
    return (randn(out, sizes[0], generator=g, scale=scale), hidden, randn(out, sizes[-1], generator=g, scale=scale))


@st.composite
def free(draw):
    """Free parameters of a random block as keyword arguments of ``corrected_block``."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    out, seed = draw(st.integers(1, 5)), draw(st.integers(0, 2**20))
    W_A, W, W_B = free_matrices(sizes, out, seed, draw(st.sampled_from([0.1, 0.5, 1.0, 2.0])))
    g = torch.Generator().manual_seed(seed + 1)
    return {
        "W_A": W_A,
        "W": W,
        "W_B": W_B,
        "multipliers": [randn(w.shape[0], generator=g).exp() for w in W],
        "slopes": draw(st.lists(st.sampled_from(SLOPES), min_size=len(W), max_size=len(W))),
        "alpha": draw(st.lists(st.floats(0.2, 3.0), min_size=len(W) + 2, max_size=len(W) + 2)),
        "bound": draw(st.floats(0.3, 3.0)),
        "root": draw(st.sampled_from(ROOTS)),
    }


def relu_block(A, B, C, bound=1.0):
    return ResidualBlock(A, B, C, [c.new_ones(c.shape[0]) for c in C], [(0.0, 1.0)] * len(C), bound)


# The block and its inequality


@quick
@given(free(), st.integers(0, 1000))
def test_lmi_is_the_quadratic_form_of_the_claim(parameters, seed):
    """z'Mz = ℓ²|x|² - |y|² + Σ 2 (w - Lv)'Λ(w - mv), evaluated without any matrix of the inequality."""
    block = corrected_block(**parameters)
    g = torch.Generator().manual_seed(seed)
    parts = [randn(size, generator=g) for size in block.sizes]
    expected = block.bound**2 * parts[0].square().sum()
    expected -= (block.A @ parts[0] + block.B @ parts[-1]).square().sum()
    for weight, lam, (low, high), before, after in zip(
        block.C, block.multipliers, block.slopes, parts, parts[1:], strict=False
    ):
        v = weight @ before
        expected += 2 * ((after - high * v) * lam * (after - low * v)).sum()
    z = torch.cat(parts)
    M = block.lmi()
    assert torch.equal(M, M.mT)
    torch.testing.assert_close(z @ M @ z, expected, rtol=1e-10, atol=1e-10)


def test_block_forward_matches_a_plain_network():
    W_A, W, W_B = free_matrices([3, 4, 2], 5, 0)
    block = corrected_block(W_A, W, W_B, bound=2.0)
    assert block.sizes == (3, 4, 2)
    assert block.depth == 2
    x, biases = torch.randn(6, 7, 3, dtype=F64), [torch.randn(4, dtype=F64), None]
    hidden = torch.tanh(torch.relu(x @ block.C[0].T + biases[0]) @ block.C[1].T)
    torch.testing.assert_close(block.forward(x, [torch.relu, torch.tanh], biases), x @ block.A.T + hidden @ block.B.T)
    assert block(x).shape == (6, 7, 5)


def test_block_refuses_what_does_not_fit():
    one, two, unit = torch.ones(1, 1), torch.ones(2, 2), (0.0, 1.0)
    good = {"A": one, "B": one, "C": [one], "multipliers": [torch.ones(1)], "slopes": [unit], "bound": 1.0}
    ResidualBlock(**good)
    for change in (
        {"C": []},
        {"slopes": []},
        {"B": two},
        {"A": torch.ones(1)},
        {"C": [two]},
        {"multipliers": [torch.ones(2)]},
        {"B": one.double()},
        {"A": torch.ones(1, 1, dtype=torch.int64)},
    ):
        with pytest.raises(ShapeError):
            ResidualBlock(**{**good, **change})
    for slopes in ((1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(SlopeError):
            ResidualBlock(**{**good, "slopes": [slopes]})
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(BoundError):
            ResidualBlock(**{**good, "bound": bound})
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(OptionError):
            ResidualBlock(**{**good, "multipliers": [torch.full((1,), value)]})
    block = ResidualBlock(**good)
    with pytest.raises(ShapeError):
        block.forward(torch.ones(3, 2))
    with pytest.raises(ShapeError):
        block.forward(torch.ones(3, 1), [torch.relu, torch.relu])
    with pytest.raises(ShapeError):
        block.forward(torch.ones(3, 1), torch.relu, [])


# Factors


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@quick
@given(free())
def test_closed_forms_are_the_block_factorisation(parameters):
    block = corrected_block(**parameters)
    M = block.lmi()
    closed, generic = closed_form_factors(block), block_ldlt(M, block.sizes)
    inner = sum(block.sizes[:-1])  # everything that is inverted on the way
    condition = float(torch.linalg.cond(M[:inner, :inner]))
    tolerance = 1e-12 * max(1.0, condition / 100)
    assert closed.sizes == generic.sizes == block.sizes
    for ours, theirs in zip(closed.dense(), generic.dense(), strict=True):
        assert relative(ours, theirs) < tolerance
    assert relative(closed.product(), M) < tolerance
    assert relative(generic.product(), M) < tolerance


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2, 4), (2, 4, 3, 5)])
def test_closed_forms_need_no_feasibility(sizes):
    """Random explicit weights: the matrix is indefinite, the factors are still right, to 1e-12."""
    g = torch.Generator().manual_seed(3)
    block = ResidualBlock(
        randn(2, sizes[0], generator=g),
        randn(2, sizes[-1], generator=g),
        [randn(q, p, generator=g) for p, q in pairwise(sizes)],
        [randn(q, generator=g).exp() for q in sizes[1:]],
        SLOPES[1 : len(sizes)],
        1.5,
    )
    assert block.smallest_eigenvalue() < 0
    closed, generic = closed_form_factors(block), block_ldlt(block.lmi(), sizes)
    for ours, theirs in zip(closed.dense(), generic.dense(), strict=True):
        assert relative(ours, theirs) < 1e-12
    assert relative(closed.product(), block.lmi()) < 1e-12


def test_factor_structure_of_the_lower_factor():
    block = corrected_block(*free_matrices([2, 3, 4, 5, 3], 2, 0))
    L = closed_form_factors(block).L
    for i, row in enumerate(L):
        assert torch.equal(row[i], torch.eye(block.sizes[i], dtype=F64))
        for j, entry in enumerate(row[:-1]):
            assert (i in (j + 1, block.depth)) == bool(entry.abs().max() > 0)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 1000))
@quick
def test_block_ldlt_of_any_definite_matrix(sizes, seed):
    g = torch.Generator().manual_seed(seed)
    X = randn(sum(sizes), sum(sizes), generator=g)
    M = X @ X.T + torch.eye(sum(sizes), dtype=F64)
    factors = block_ldlt(M, sizes)
    assert relative(factors.product(), M) < 1e-12
    assert all(torch.linalg.eigvalsh(pivot)[0] > 0 for pivot in factors.D)
    lower, _ = factors.dense()
    assert torch.equal(lower, lower.tril())


def test_block_ldlt_refuses():
    eye = torch.eye(3, dtype=F64)
    for matrix, sizes in (
        (eye[:2], [1, 2]),
        (eye, [1, 1]),
        (eye, []),
        (eye, [0, 3]),
        (eye.long(), [1, 2]),
        (eye + torch.triu(eye + 1, 1), [1, 2]),
    ):
        with pytest.raises(ShapeError):
            block_ldlt(matrix, sizes)
    singular = torch.diag(torch.tensor([1.0, 0.0, 1.0], dtype=F64))
    with pytest.raises(InfeasibleError, match="pivot 1"):
        block_ldlt(singular, [2, 1])
    assert block_ldlt(singular, [1, 2]).D[1].diagonal().tolist() == [0.0, 1.0]  # the last one may be singular
    with pytest.raises(InfeasibleError):
        closed_form_factors(relu_block(eye[:1, :1], eye[:1, :1], [eye[:1, :1]]))


# Roots


@pytest.mark.parametrize("kind", ROOTS)
def test_roots_and_their_derivatives(kind):
    g = torch.Generator().manual_seed(0)
    G = randn(5, 3, generator=g)
    R = gram_root(G, kind)
    torch.testing.assert_close(R.mT @ R, G.mT @ G)
    assert torch.linalg.eigvals(R).real.min() > 0
    if kind == "symmetric":
        torch.testing.assert_close(R, R.mT)
    else:
        assert torch.equal(R, R.triu())
    assert torch.autograd.gradcheck(lambda x: gram_root(x, kind), G.requires_grad_())
    equal = torch.eye(3, dtype=F64).requires_grad_()  # all singular values equal
    assert torch.autograd.gradcheck(lambda x: gram_root(x, kind), equal)


@pytest.mark.parametrize("kind", ROOTS)
@pytest.mark.parametrize("shape", [(2, 5), (4, 4), (5, 2)])
def test_contraction_has_the_norm_that_the_paper_states(kind, shape):
    W, alpha = randn(*shape, generator=torch.Generator().manual_seed(1)), torch.tensor(0.7, dtype=F64)
    U, R = contraction(W, alpha, kind)
    top = torch.linalg.matrix_norm(W, 2) ** 2
    torch.testing.assert_close(torch.linalg.matrix_norm(U, 2) ** 2, top / (alpha + top))
    torch.testing.assert_close(U @ R, W)
    torch.testing.assert_close(R.mT @ R, alpha * torch.eye(shape[1], dtype=F64) + W.mT @ W)


def test_roots_refuse():
    with pytest.raises(OptionError):
        gram_root(torch.eye(2), "polar")
    for generator in (torch.ones(2), torch.ones(1, 2)):
        with pytest.raises(ShapeError):
            gram_root(generator)


# The corrected construction


def scaled_eigenvalues(block: ResidualBlock) -> torch.Tensor:
    values = torch.linalg.eigvalsh(block.lmi())
    return values / values.abs().max()


@settings(quick, max_examples=50)
@given(free())
def test_corrected_block_is_feasible(parameters):
    assert scaled_eigenvalues(corrected_block(**parameters))[0] > 0


@settings(quick, max_examples=50)
@given(free())
def test_corrected_block_is_tight_with_an_orthogonal_output(parameters):
    block = corrected_block(**parameters, tight=True)
    values = scaled_eigenvalues(block)
    assert values[0] > -1e-10
    assert values[0] < 1e-9
    # any smaller bound fails with the same multipliers
    smaller = ResidualBlock(block.A, block.B, block.C, block.multipliers, block.slopes, block.bound * (1 - 1e-3))
    assert smaller.smallest_eigenvalue() < 0


@quick
@given(free())
def test_corrected_pivots_follow_the_recursion(parameters):
    """C_j, P_j and D_j from their definitions, with plain inverses."""
    block = corrected_block(**parameters)
    P = block.bound**2 * torch.eye(block.sizes[0], dtype=F64) - block.A.mT @ block.A
    D = closed_form_factors(block).D
    for weight, lam, (low, high), a, free_w, pivot in zip(
        block.C, block.multipliers, block.slopes, parameters["alpha"][1:], parameters["W"], D, strict=False
    ):
        U = (high - low) / math.sqrt(2) * lam.sqrt().unsqueeze(-1) * weight  # = U_j P_j^{1/2}
        gram = U @ torch.linalg.solve(P, U.mT)
        unit = free_w @ torch.linalg.solve(a * torch.eye(free_w.shape[1], dtype=F64) + free_w.mT @ free_w, free_w.mT)
        torch.testing.assert_close(gram, unit, rtol=1e-6, atol=1e-6)
        scaled = lam.unsqueeze(-1) * weight
        torch.testing.assert_close(pivot, P + 2 * low * high * weight.mT @ scaled, rtol=1e-6, atol=1e-6)
        P = 2 * torch.diag(lam) - (low + high) ** 2 * scaled @ torch.linalg.solve(pivot, scaled.mT)
        rho = (high + low) / (high - low)
        inner = a * torch.eye(len(lam), dtype=F64) + rho**2 * free_w @ free_w.mT
        simplified = 2 * a * lam.sqrt().unsqueeze(-1) * torch.linalg.inv(inner) * lam.sqrt()
        torch.testing.assert_close(P, simplified, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("tight", [False, True])
def test_corrected_block_is_differentiable(root, tight):
    W_A, W, W_B = free_matrices([2, 3, 2], 2, 5)
    lam = [torch.tensor([0.5, 1.0, 2.0], dtype=F64), torch.tensor([1.5, 0.7], dtype=F64)]
    alpha = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=F64)

    def weights(*tensors):
        a, w1, w2, b, l1, l2, log_alpha = tensors
        block = corrected_block(
            a,
            [w1, w2],
            b,
            multipliers=[l1, l2],
            slopes=SLOPES[1:3],
            alpha=log_alpha.exp().unbind(),
            root=root,
            tight=tight,
        )
        return block.A, block.B, *block.C

    inputs = [t.requires_grad_() for t in (W_A, *W, W_B, *lam, alpha.log())]
    assert torch.autograd.gradcheck(weights, inputs)


def test_both_roots_give_the_same_pivots_without_a_skip():
    W_A, W, W_B = free_matrices([2, 3, 4], 2, 5)
    blocks = [corrected_block(0 * W_A, W, 0 * W_B, root=root) for root in ROOTS]
    first, second = (closed_form_factors(block).D for block in blocks)
    torch.testing.assert_close(first[-1], second[-1])
    assert not torch.allclose(blocks[0].C[1], blocks[1].C[1])


def test_corrected_block_refuses():
    W_A, W, W_B = free_matrices([2, 3, 4], 2, 0)
    for arguments in ((W_A, [], W_B), (W_A, W[::-1], W_B), (W_A, W, W_B.mT), (W_A[0], W, W_B), (W_A[:1], W, W_B)):
        with pytest.raises(ShapeError):
            corrected_block(*arguments)
        with pytest.raises(ShapeError):
            as_printed_block(*arguments)
    for build in (corrected_block, as_printed_block):
        with pytest.raises(ShapeError):
            build(W_A, W, W_B, alpha=[1.0, 1.0])
        for alpha in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(OptionError):
                build(W_A, W, W_B, alpha=alpha)
        with pytest.raises(BoundError):
            build(W_A, W, W_B, bound=0.0)
    with pytest.raises(ShapeError):
        corrected_block(W_A, W, W_B, slopes=[(0.0, 1.0)])
    with pytest.raises(SlopeError):
        corrected_block(W_A, W, W_B, slopes=[(1.0, 1.0)] * 2)
    with pytest.raises(OptionError):
        corrected_block(W_A, W, W_B, root="polar")
    with pytest.raises(OptionError):
        corrected_block(W_A, W, W_B, multipliers=[torch.zeros(3, dtype=F64), torch.ones(4, dtype=F64)])
    with pytest.raises(OptionError):
        as_printed_block(W_A, W, W_B, form="polar")


# The printed construction


def inverse_sqrt(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.rsqrt()) @ vectors.mT


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3, 4), (3, 5, 2, 4)])
def test_as_printed_block_is_the_printed_text(sizes):
    """The formulas of the paper, with dense inverses and eigendecompositions and nothing clever."""
    W_A, W, W_B = free_matrices(sizes, 3, 7)
    bound, alphas = 1.7, [0.5, *([0.8] * len(W)), 1.3]
    eye = [torch.eye(size, dtype=F64) for size in sizes]
    A = bound * W_A @ inverse_sqrt(alphas[0] * eye[0] + W_A.mT @ W_A)
    D = bound**2 * eye[0] - A.mT @ A
    gamma, sigma, C = eye[0], 0, []
    for j, weight in enumerate(W):
        C.append(
            math.sqrt(2) * weight @ inverse_sqrt(0.8 * eye[j] + weight.mT @ weight) @ torch.linalg.inv(inverse_sqrt(D))
        )
        sigma = sigma + gamma @ torch.linalg.inv(D) @ gamma.mT
        gamma = gamma @ torch.linalg.inv(D) @ C[-1].mT
        D = 2 * eye[j + 1] - C[-1] @ torch.linalg.inv(D) @ C[-1].mT
    S = torch.eye(3, dtype=F64) + A @ sigma @ A.mT
    B = inverse_sqrt(S) @ W_B @ inverse_sqrt(1.3 * eye[-1] + W_B.mT @ W_B) @ torch.linalg.inv(inverse_sqrt(D))
    block = as_printed_block(W_A, W, W_B, alpha=alphas, bound=bound)
    for ours, theirs in zip((block.A, *block.C, block.B), (A, *C, B), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    # what the paper calls the last pivot is indeed positive: the error is in what it calls so
    assert torch.linalg.eigvalsh(printed_last_pivot(block))[0] > 0
    assert block.smallest_eigenvalue() < 0


def test_cholesky_forms_are_the_printed_lemmas():
    W_A, W, W_B = free_matrices((3, 4, 2), 3, 8)
    aA, a1, a2, aB = alphas = [0.5, 0.8, 1.1, 1.3]

    def upper(X, alpha):
        return torch.linalg.cholesky(alpha * torch.eye(X.shape[1], dtype=F64) + X.mT @ X).mT

    inv = torch.linalg.inv
    RA = upper(W_A, aA)
    A = 2.0 * W_A @ inv(RA)
    C1 = math.sqrt(2) * W[0] @ inv(upper(W[0], a1)) @ (2.0 * math.sqrt(aA) * inv(RA).mT)
    R1, R2 = upper(W[0].mT, a1), upper(W[1].mT, a2)
    C2 = math.sqrt(2) * W[1] @ inv(upper(W[1], a2)) @ (math.sqrt(2 * a1) * inv(R1).mT)
    D1, D2 = 4.0 * aA * inv(RA.mT @ RA), 2 * a1 * inv(R1.mT @ R1)
    gamma = inv(D1) @ C1.mT
    S = torch.eye(3, dtype=F64) + A @ (inv(D1) + gamma @ inv(D2) @ gamma.mT) @ A.mT
    tail = inv(torch.linalg.cholesky(S).mT) @ W_B @ inv(upper(W_B, aB))
    c = torch.linalg.matrix_norm(2 * a2 * inv(R2.mT @ R2), 2).sqrt()
    for form, B in (("cholesky", math.sqrt(2 * a2) * tail @ inv(R2).mT), ("scalar", c * tail)):
        block = as_printed_block(W_A, W, W_B, alpha=alphas, bound=2.0, form=form)
        for ours, theirs in zip((block.A, *block.C, block.B), (A, C1, C2, B), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_printed_cholesky_form_misplaces_the_root_of_the_skip():
    """‖C₁ D₁^{-1/2}‖² ≤ 2 is the paper's own condition; it holds with symmetric roots only."""
    W_A, W, W_B = free_matrices((3, 4), 3, 2, scale=3.0)
    norms = {}
    for form in ("symmetric", "cholesky"):
        block = as_printed_block(W_A, W, 0 * W_B, form=form)
        pivot = torch.eye(3, dtype=F64) - block.A.mT @ block.A
        norms[form] = float(torch.linalg.matrix_norm(block.C[0] @ torch.linalg.solve(pivot, block.C[0].mT), 2))
    assert norms["symmetric"] < 2 < norms["cholesky"]
    block = corrected_block(W_A, W, 0 * W_B, alpha=torch.tensor(1.0, dtype=F64), root="cholesky")
    assert torch.linalg.eigvalsh(closed_form_factors(block).D[-1])[0] > 0


@quick
@given(free())
def test_printed_last_pivot_lacks_exactly_the_cross_terms(parameters):
    block = corrected_block(**parameters)
    missing = printed_last_pivot(block) - closed_form_factors(block).D[-1]
    gamma = torch.eye(block.sizes[0], dtype=F64)
    for pivot, weight, lam, (low, high) in zip(
        closed_form_factors(block).D, block.C, block.multipliers, block.slopes, strict=False
    ):
        gamma = (low + high) * gamma @ torch.linalg.inv(pivot) @ weight.mT @ torch.diag(lam)
    cross = block.B.mT @ block.A @ gamma
    torch.testing.assert_close(missing, cross + cross.mT, rtol=1e-6, atol=1e-7)


def test_without_a_skip_the_printed_block_is_the_corrected_one():
    W_A, W, W_B = free_matrices([3, 4, 2], 2, 1)
    for kind in ROOTS:
        printed = as_printed_block(0 * W_A, W, W_B, form=kind)
        right = corrected_block(0 * W_A, W, W_B, root=kind)
        torch.testing.assert_close(printed.B, right.B)
        assert printed.smallest_eigenvalue() > 0


def test_scalar_counterexample():
    example = scalar_counterexample()
    assert example.slope == Fraction(5, 4)
    assert example.c_squared == example.b_squared == Fraction(3, 4)
    assert example.determinant == Fraction(-3, 4)
    assert example.measured_slope == pytest.approx(1.25, abs=1e-14)
    assert example.smallest_eigenvalue == pytest.approx(1 - math.sqrt(7) / 2, abs=1e-14)
    assert example.block.smallest_eigenvalue() == pytest.approx(example.smallest_eigenvalue, abs=1e-13)
    found = violation(example.block, starts=8, steps=20)
    assert found.exceeds
    assert found.ratio == pytest.approx(1.25, abs=1e-9)
    # strictly inside what the paper allows (every alpha one), the slope still exceeds one
    w = torch.ones(1, 1, dtype=F64)
    assert violation(as_printed_block(w / math.sqrt(3), [w], w), starts=8, steps=20).ratio > 1.03


@pytest.mark.parametrize("sizes", [(4, 8), (8, 16), (4, 16, 16), (8, 32, 32, 32)])
@pytest.mark.parametrize("form", ["symmetric", "cholesky", "scalar"])
def test_random_printed_blocks_fail_the_inequality(sizes, form):
    for seed in range(10):
        W_A, W, W_B = free_matrices(sizes, 4, seed)
        assert as_printed_block(W_A, W, W_B, form=form).smallest_eigenvalue() < -1e-6
        assert corrected_block(W_A, W, W_B).smallest_eigenvalue() > 0


def printed_module(*args, **kwargs) -> AsPrintedResidual:
    with pytest.warns(AsPrintedWarning, match=r"NOT Lipschitz.*docs/errata\.md"):
        return AsPrintedResidual(*args, **kwargs)


def push_apart(outputs, parameters, bound):
    """Hostile training: large steps that raise the steepest of a batch of slopes."""
    g = torch.Generator().manual_seed(0)
    x = randn(32, 3, generator=g)
    y = x + randn(32, 3, generator=g, scale=0.3)
    optimiser = torch.optim.Adam(parameters, lr=0.1)
    for _ in range(150):
        optimiser.zero_grad()
        ratios = (outputs(x) - outputs(y)).norm(dim=1) / (x - y).norm(dim=1) / bound
        (-torch.logsumexp(5 * ratios, 0)).backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in parameters)
        optimiser.step()


@pytest.mark.parametrize(
    ("hidden", "form", "least"),
    [([6], "symmetric", 1.2), ([6], "cholesky", 1.3), ([6], "scalar", 1.6), ([6, 6], "symmetric", 1.15)],
)
def test_trained_printed_module_breaks_its_bound(hidden, form, least):
    torch.manual_seed(0)
    module = printed_module(3, hidden, 3, bound=2.0, form=form, dtype=F64)
    assert module.certified is False
    push_apart(module, list(module.parameters()), 2.0)
    found = violation(module, starts=32, steps=50)
    assert found.exceeds
    assert found.ratio > least
    with torch.no_grad():  # the witness is a pair of actual outputs
        rise = (module(found.y) - module(found.x)).norm() / (found.y - found.x).norm()
    assert float(rise) == pytest.approx(found.slope, rel=1e-6)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("hidden", [[6], [6, 6]])
def test_trained_corrected_block_obeys_its_bound(root, hidden):
    W_A, W, W_B = free_matrices([3, *hidden], 3, 0)
    parameters = [t.requires_grad_() for t in (W_A, *W, W_B, torch.zeros(len(W) + 2, dtype=F64))]
    biases = [torch.zeros(size, dtype=F64, requires_grad=True) for size in hidden]

    def build() -> ResidualBlock:
        return corrected_block(
            parameters[0], parameters[1:-2], parameters[-2], alpha=parameters[-1].exp().unbind(), bound=2.0, root=root
        )

    push_apart(lambda x: build()(x, torch.relu, biases), [*parameters, *biases], 2.0)
    found = violation(build(), biases=biases, starts=32, steps=50)
    assert not found.exceeds
    assert found.ratio > 0.99  # and the bound is not a loose one
    assert build().smallest_eigenvalue() > -1e-10


@quick
@given(free(), st.booleans())
def test_corrected_block_obeys_its_bound_on_random_pairs(parameters, tight):
    """Activations at the very ends of their slope intervals: piecewise linear with slopes m and L."""
    block = corrected_block(**parameters, tight=tight)
    functions = [lambda v, m=m, L=L: torch.where(v > 0, L * v, m * v) for m, L in block.slopes]
    assert not violation(block, activations=functions, starts=8, steps=10).exceeds


def test_printed_module_refuses():
    for arguments in ((3, [], 2), (0, [2], 2), (3, [0], 2)):
        with pytest.raises(ShapeError):
            AsPrintedResidual(*arguments)
    with pytest.raises(BoundError):
        AsPrintedResidual(3, [2], 2, -1.0)
    with pytest.raises(OptionError):
        AsPrintedResidual(3, [2], 2, form="polar")
