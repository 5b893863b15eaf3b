"""Interleaved timing: every candidate runs once per round and medians are compared, so load hits all alike."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleave(candidates: Mapping[str, Callable[[], object]], rounds: int, warm: int = 3) -> dict[str, float]:
    """Median time of each candidate in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for r in range(rounds + warm):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if r >= warm:
                times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(t) for name, t in times.items()}


def machine() -> str:
    """One line about where the figures come from."""
    return (
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}, "
        f"Python {platform.python_version()}"
    )
