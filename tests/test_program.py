"""Recorded programs, and AdamW on the rows of a matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ldlt.adamw import adamw
from ldlt.program import ProgramError, record


def test_record_replays_on_other_values() -> None:
    constant = torch.randn(3)

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = (x @ y).clone()
        z.diagonal().add_(constant)  # in place, through a view
        q, r = torch.linalg.qr(z)
        return q @ r + x.sum(), torch.stack(z.unbind(0)).relu()

    program = record(function, torch.randn(3, 4), torch.randn(4, 3))
    for _ in range(3):
        x, y = torch.randn(3, 4), torch.randn(4, 3)
        for ours, theirs in zip(program(x, y), function(x, y), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_record_takes_backward_passes() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaf = x.detach().requires_grad_()
        return (torch.autograd.grad(leaf.tanh().pow(3).sum(), leaf)[0],)

    program = record(function, torch.randn(5))
    x = torch.randn(5)
    torch.testing.assert_close(program(x)[0], 3 * x.tanh() ** 2 * (1 - x.tanh() ** 2))
    assert not program(x)[0].requires_grad


def test_record_at_a_kink() -> None:
    """Where rounding decides on a gradient, a recorded program may decide otherwise and is none the worse."""
    calls = []

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        noise = 1e-9 * (-1.0) ** len(calls)  # another sign in every call, as of another rounding
        return ((x[0] - x[1] + noise).sign(),)

    program = record(function, torch.ones(2))
    assert float(program(torch.tensor([2.0, 1.0]))[0]) == 1.0
    assert float(program(torch.tensor([1.0, 2.0]))[0]) == -1.0


def test_record_refuses_what_it_cannot_replay() -> None:
    def impure(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * torch.rand(3),)

    with pytest.raises(ProgramError, match="do not reproduce"):
        record(impure, torch.ones(3))


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1000), st.integers(1, 12))
def test_adamw_is_torchs(seed: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    rates = [1e-3, 1e-2, 0.3]
    leaves = [start[i].clone().requires_grad_() for i in range(3)]
    theirs = [torch.optim.AdamW([leaf], lr=rate, weight_decay=0.02) for leaf, rate in zip(leaves, rates, strict=True)]
    flat, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    rate = torch.tensor(rates, dtype=torch.float64)[:, None]
    for step in range(1, steps + 1):
        grads = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        for i, optimiser in enumerate(theirs):
            leaves[i].grad = grads[i].clone()
            optimiser.step()
        adamw(flat, grads, first, second, rate, step, 0.02)
    torch.testing.assert_close(flat, torch.stack([leaf.detach() for leaf in leaves]))
