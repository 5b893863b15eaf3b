"""Data sets of the benchmark that come from a published random generator: same law, own sample."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ldlt.bench.data.rules import Table
from ldlt.bench.data.stream import Stream

__all__ = ["led_display", "ringnorm", "twonorm", "waveform"]

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
