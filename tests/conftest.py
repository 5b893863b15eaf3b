"""Shared settings of the tests."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from ldlt import activations
from ldlt.engine.contraction import CONTRACTIONS, HEADS
from ldlt.graph.operations import TABLE
from ldlt.testing import MOVES

torch.set_num_threads(1)  # batched LAPACK with several threads on a busy machine is far slower than with one

settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _tables():
    """What a test registers is forgotten: what is drawn for a seed depends on the tables."""
    kept = [(table, dict(table)) for table in (activations.TABLE, TABLE, CONTRACTIONS, HEADS)]
    moves = [*MOVES]
    yield
    MOVES[:] = moves
    for table, before in kept:
        table.clear()
        table.update(before)


@pytest.fixture
def double():
    """Float64 as the default dtype."""
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(old)


os.environ.setdefault("OMP_NUM_THREADS", "1")
