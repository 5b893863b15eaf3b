"""Data sets of a published rule (every row and label determined) or generator (same law, own sample)."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from ldlt_bench.data.folds import Stream

__all__ = ["Table", "balance_scale", "led_display", "monks", "ringnorm", "tic_tac_toe", "twonorm", "waveform", "waves"]

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


SHIFT = 2.0 / np.sqrt(20.0)

SEGMENTS = np.array(
    [[int(segment) for segment in digit] for digit in (
        "1110111", "0010010", "1011101", "1011011", "0111010",
        "1101011", "1101111", "1010010", "1111111", "1111011",
    )]
)  # fmt: skip
"""(10, 7) lit segments: top, upper left, upper right, middle, lower left, lower right, bottom."""

MIXTURES = np.array([[1, 2], [0, 2], [0, 1]])
"""(3, 2) the two waves that each class mixes, in the archive's order of classes."""


def twonorm(rows: int = 7400) -> Table:
    r"""Classes :math:`N(\pm a (1, \dots, 1), I)` in 20 dimensions, :math:`a = 2/\sqrt{20}`."""
    stream = Stream("generator", "twonorm")
    labels = stream.integers(2, rows)
    return stream.normal(rows, 20) + SHIFT * (1.0 - 2.0 * labels[:, None]), labels, (0, 1)


def ringnorm(rows: int = 7400) -> Table:
    r"""Classes :math:`N(0, 4 I)`, :math:`N(a (1, \dots, 1), I)` in 20 dimensions, :math:`a = 2/\sqrt{20}`."""
    stream = Stream("generator", "ringnorm")
    labels = stream.integers(2, rows)
    noise = stream.normal(rows, 20)
    return np.where(labels[:, None] == 0, 2.0 * noise, noise + SHIFT), labels, (0, 1)


def waves() -> NDArray[np.float64]:
    r"""The three waves (3, 21): :math:`h(i) = \max(6 - |i - 11|, 0)`, :math:`h(i - 4)`, :math:`h(i + 4)`."""
    places = np.arange(1, 22)
    return np.stack([np.maximum(6.0 - np.abs(places - centre), 0.0) for centre in (11, 15, 7)])


def waveform(noise_columns: int = 0, rows: int = 5000) -> Table:
    r"""Random combinations :math:`u h_m + (1 - u) h_n` of two of the three waves, plus unit normal noise.

    Args:
        noise_columns: Columns of nothing but unit normal noise after the 21 (19 in ``waveform-noise``).
        rows: Number of rows.
    """
    stream = Stream("generator", "waveform", noise_columns)
    labels = stream.integers(3, rows)
    share = stream.uniform(rows, 1)
    first, second = waves()[MIXTURES[labels]].transpose(1, 0, 2)
    noise = stream.normal(rows, 21 + noise_columns)
    noise[:, :21] += share * first + (1.0 - share) * second
    return noise, labels, (0, 1, 2)


def led_display(rows: int = 1000) -> Table:
    """Digits on a seven-segment display whose segments each show the opposite with probability 0.1."""
    stream = Stream("generator", "led-display")
    labels = stream.integers(10, rows)
    flipped = stream.uniform(rows, 7) < 0.1
    return (SEGMENTS[labels] ^ flipped).astype(np.float64), labels, tuple(range(10))
