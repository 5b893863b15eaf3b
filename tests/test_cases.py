"""Every entry of the tables as a case of the public conformance suite, and what strangers add to the tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ldlt
from ldlt import activations, testing
from ldlt.graph.operations import mixes, register_operation
from ldlt.graph.trace import trace


@pytest.mark.parametrize("case", testing.all_cases(), ids=str)
def test_conformance(case):
    case.check()


class Snake(nn.Module):
    def forward(self, x):
        return x + x.sin() ** 2


def snake(slopes=(0.0, 2.0), formula=lambda m, x, f: x + f.sin(x) * f.sin(x), slopes_on=None):
    activations.register(Snake, lambda module: slopes, enclose=formula, slopes_on=slopes_on)
    return next(c for c in testing.all_cases() if c.name == "Snake")


def test_a_strangers_activation_is_checked_and_drawn():
    """Five lines: its slopes and its formula. It is proven, it has a rounding, and hostile modules have it."""
    snake().check()
    (case,) = (c for c in testing.all_cases() if c.name == "Snake")
    testing.NetworkCase(
        "proven", lambda: nn.Sequential(nn.Linear(3, 4), Snake(), nn.Linear(4, 2)), (3,), certified=True
    ).proof()
    model = nn.Sequential(nn.Linear(3, 4), case.make(), nn.Linear(4, 2))
    assert bool((ldlt.forward_error(model, torch.randn(5, 3))[1] < 1e-5).all())
    drawn = [m for seed in range(80) for m in testing.hostile_module(seed).moves]
    assert "activation/Snake" in drawn


@pytest.mark.parametrize(
    "wrong",
    [
        {"slopes": (0.0, 1.5)},
        {"formula": lambda m, x, f: x + f.sin(x)},
        {"slopes_on": lambda m, low, high: (low * 0 + 0.9, low * 0 + 1.1)},
    ],
)
def test_a_wrong_law_is_found(wrong):
    with pytest.raises(AssertionError, match="Snake"):
        snake(**wrong).check()


class Overlap(nn.Module):
    def forward(self, x):  # adds up overlapping windows
        return nn.functional.fold(x, (3, 3), (2, 2))


def test_a_strangers_operation_is_checked_and_drawn():
    register_operation("col2im", mixes)
    move = testing.register_move("mixing", "overlap", lambda rng, shape: Overlap() if shape == (4, 4) else None)
    case = next(c for c in testing.all_cases() if c.name == move.name)
    testing.OperationCase(case.name, case.move, accepted=True).check()
    assert move in testing.MOVES


@torch.library.custom_op("stranger::relu", mutates_args=())
def _squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


@_squared.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operation_of_another_library_is_not_taken_for_that_of_torch():
    class Net(nn.Module):
        def forward(self, x):
            return torch.ops.stranger.relu(x)

    model = nn.Sequential(nn.Linear(3, 4), Net(), nn.Linear(4, 2))
    with pytest.raises(ldlt.UnsupportedOpError, match="stranger::relu"):
        ldlt.Lipschitz(model, input_shape=3)
    register_operation("stranger::relu", mixes)  # a lie: it squares
    with pytest.raises(ldlt.GraphError, match="not linear"):
        trace(model, (3,))


@pytest.mark.parametrize(
    "call",
    [
        lambda: testing.register_move("", "name", lambda rng, shape: None),
        lambda: testing.register_move("mixing", "name", None),
        lambda: testing.register_move("mixing", "name", lambda rng, shape: None, 3),
        lambda: testing.OperationCase("name"),
        lambda: testing.OperationCase("name", testing.MOVES[0], draws=0),
        lambda: testing.ActivationCase("name", nn.ReLU()) and testing.ActivationCase("name", "relu"),
        lambda: testing.NetworkCase("name", kinds=("unknown",)),
        lambda: testing.run_certificates(7),
        lambda: testing.run_certificates(["seed"]),
        lambda: testing.run_hostile(range(1), kinds=["unknown"]),
        lambda: testing.run_hostile(range(1), kinds=0),
        lambda: register_operation("col2im", mixes, roundings=-1),
    ],
)
def test_wrong_arguments_are_refused(call):
    with pytest.raises(ldlt.OptionError):
        call()
