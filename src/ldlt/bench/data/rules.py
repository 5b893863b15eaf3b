"""Data sets of the benchmark that a published rule determines completely: every row, every label."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

__all__ = ["balance_scale", "monks", "tic_tac_toe"]

Table = tuple[NDArray[np.float64], NDArray[np.int64], tuple[int | str, ...]]
"""Features (N, d), labels (N,) in 0 .. k - 1, original labels (k)."""

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
MONK_VALUES = (3, 3, 2, 3, 4, 2)


def balance_scale() -> Table:
    """All 625 states of a balance with left weight, left distance, right weight, right distance in 1 .. 5.

    The class is the side that goes down: B (balanced), L or R, by the larger product of weight and distance.
    """
    states = np.array(list(product(range(1, 6), repeat=4)))
    tilt = np.sign(states[:, 0] * states[:, 1] - states[:, 2] * states[:, 3])
    labels = np.select([tilt == 0, tilt > 0], [0, 1], 2)
    return states.astype(np.float64), labels.astype(np.int64), ("B", "L", "R")


def monks(problem: int) -> Table:
    """All 432 robots and the rule of one of the three MONK's problems.

    1. head shape equals body shape, or the jacket is red: ``a1 = a2 or a5 = 1``;
    2. exactly two of the six attributes have their first value;
    3. ``(a5 = 3 and a4 = 1) or (a5 ≠ 4 and a2 ≠ 3)``. The published training sample flips 5 % of these
       labels at random; the labels here are the rule's, without noise.

    Args:
        problem: 1, 2 or 3.
    """
    robots = np.array(list(product(*(range(1, count + 1) for count in MONK_VALUES))))
    a1, a2, _, a4, a5, _ = robots.T
    rules = {
        1: (a1 == a2) | (a5 == 1),
        2: (robots == 1).sum(axis=1) == 2,
        3: ((a5 == 3) & (a4 == 1)) | ((a5 != 4) & (a2 != 3)),
    }
    return robots.astype(np.float64), rules[problem].astype(np.int64), (0, 1)


def tic_tac_toe() -> Table:
    """All 958 boards at the end of a game in which x moves first; positive if x has three in a row.

    Squares row by row, in the archive's order of values: x = 0, blank = 1, o = 2.
    """
    boards = np.array(list(product(range(3), repeat=9)))
    x, o = boards == 0, boards == 2
    x_wins, o_wins = (np.any([side[:, line].all(axis=1) for line in LINES], axis=0) for side in (x, o))
    lead = x.sum(axis=1) - o.sum(axis=1)
    won = x_wins & ~o_wins & (lead == 1)
    lost = o_wins & ~x_wins & (lead == 0)
    drawn = ~x_wins & ~o_wins & (boards != 1).all(axis=1) & (lead == 1)
    ended = won | lost | drawn
    return boards[ended].astype(np.float64), won[ended].astype(np.int64), ("negative", "positive")
