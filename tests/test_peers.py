"""Our families against the layers of installed peers, with the same weights. Skipped where a peer is not installed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ldlt_bench.families import AOL, SLL, Spectral, aol, cayley

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))


@given(shape=SHAPES)
def test_sll_is_orthogoniums_dense_layer(shape):
    peer = pytest.importorskip("orthogonium.layers.conv.SLL.sll_layer").SDPBasedLipschitzDense
    width, neurons, seed = shape
    torch.manual_seed(seed)
    theirs, ours = peer(width, width, neurons).double(), SLL(width, neurons).double()
    with torch.no_grad():
        ours.weight.copy_(theirs.weight.mT)
        ours.bias.copy_(theirs.bias[0])
        ours.log_q.copy_(theirs.q)
    x = torch.randn(5, width).double()
    assert torch.allclose(ours(x), theirs(x), rtol=1e-9, atol=1e-12)


@given(shape=SHAPES)
def test_aol_is_orthogoniums_reparametrisation(shape):
    """Theirs scales the outputs of a 1 × 1 convolution; ours the inputs of a matrix: one is the other's transpose."""
    peer = pytest.importorskip("orthogonium.layers.conv.AOL.aol").AOLReparametrizer
    rows, columns, seed = shape
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns).double()
    theirs = peer(columns, groups=1).double()(weight.mT[..., None, None])[..., 0, 0].mT
    assert torch.allclose(aol(weight), theirs, rtol=1e-9, atol=1e-12)
    layer = AOL(columns, rows).double()
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()
    x = torch.randn(5, columns).double()
    assert torch.allclose(layer(x), (x @ theirs.mT).relu(), rtol=1e-9, atol=1e-12)


@given(shape=SHAPES)
def test_cayley_is_orthogoniums_transform(shape):
    pytest.importorskip("einops")
    peer = pytest.importorskip("orthogonium.legacy.cayley_ortho_conv").cayley_func
    q, p, seed = shape
    torch.manual_seed(seed)
    x, y = torch.randn(q, q).double(), torch.randn(p, q).double()
    theirs = peer(torch.cat((x, y)))  # (q + p, q): A' above B'
    a, b = cayley(x, y)
    assert torch.allclose(torch.cat((a, b), dim=1).mT, theirs, rtol=1e-8, atol=1e-10)


@given(shape=SHAPES)
def test_spectral_is_torchlips_without_bjorck(shape):
    """Theirs takes a step of a power iteration whenever its weight is read, and is above the bound until it is done."""
    torchlip = pytest.importorskip("deel.torchlip")
    rows, columns, seed = shape
    torch.manual_seed(seed)
    ours = Spectral(columns, rows).double()
    theirs = torchlip.SpectralLinear(columns, rows, eps_bjorck=None).double()
    with torch.no_grad():
        ours.weight.copy_(torch.randn(rows, columns))
        theirs.parametrizations.weight.original.copy_(ours.weight)
        for _ in range(50):
            weight = theirs.weight
        inner = ours.explicit().inner
        assert torch.linalg.matrix_norm(inner, 2) <= 1 + 1e-12
        assert torch.allclose(inner, weight / torch.linalg.matrix_norm(weight, 2), atol=1e-9)
