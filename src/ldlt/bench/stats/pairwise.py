r"""Wilcoxon's signed-rank test of every pair of algorithms, with Holm's correction.

Zero differences are dropped; the n that remain are ranked by size, equal sizes sharing the mean rank; W is
the smaller of the two sums of ranks. The standardised statistic has a continuity correction of one half and
the usual correction for equal sizes, and the effect size is taken over the n differences that entered:

.. math::

    |Z| = \frac{n(n+1)/4 - W - 1/2}{\sqrt{n(n+1)(2n+1)/24 - \sum_g (t_g^3 - t_g)/48}},
    \qquad r = |Z| / \sqrt{n} .
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.multitest import multipletests

from ldlt.bench.stats.scores import DECIMALS, ScoreError, check_frames, check_scores
from ldlt.errors import OptionError

__all__ = ["SignedRank", "compare", "compare_all", "holm", "normal_signed_rank", "signed_rank"]

_METHODS = ("auto", "normal", "exact")
_EXACT_UP_TO = 50  # non-zero differences


@dataclass(frozen=True)
class SignedRank:
    """Comparison of two algorithms A and B over data sets, two-sided.

    Attributes:
        n: Number of data sets.
        wins_a: Data sets on which A is better.
        wins_b: Data sets on which B is better.
        ties: Data sets with equal scores; they do not enter W, z, p and r.
        win_rate_a: ``(wins_a + ties / 2) / n``.
        median_diff: Median of A − B over all data sets, ties included.
        w: Smaller of the two sums of ranks.
        z: Standardised statistic, positive if A is better.
        p: p-value.
        r: Effect size ``|z| / sqrt(n - ties)``; zero if all are ties.
        sign: 1 if the ranks speak for A, −1 for B, 0 for neither.
    """

    n: int
    wins_a: int
    wins_b: int
    ties: int
    win_rate_a: float
    median_diff: float
    w: float
    z: float
    p: float
    r: float
    sign: int


def _exact_p(ranks: np.ndarray, w: float) -> float:
    """Two-sided p-value of W given the ranks, equal ones included, when every sign is a fair coin."""
    chance = np.zeros(round(2 * ranks.sum()) + 1)  # of every sum of doubled ranks, which are whole numbers
    chance[0] = 1.0
    for step in np.rint(2 * ranks).astype(int):
        moved = np.zeros_like(chance)
        moved[step:] = chance[:-step]
        chance = (chance + moved) / 2
    return min(1.0, 2 * float(chance[: round(2 * w) + 1].sum()))


def signed_rank(a: Sequence[float], b: Sequence[float], *, method: str = "auto") -> SignedRank:
    """Compare the scores of two algorithms on the same data sets.

    Args:
        a: Scores of A, one per data set.
        b: Scores of B.
        method: How p is found. ``normal``: from z. ``exact``: from the distribution of W when every sign is a
            fair coin, given the sizes of the differences, equal ones included. ``auto``: exact for at most 50
            non-zero differences, else normal.

    Example:
        >>> result = signed_rank([0.9, 0.8, 0.7, 0.6, 0.5], [0.8, 0.6, 0.4, 0.2, 0.5])
        >>> result.wins_a, result.ties, result.w, result.p
        (4, 1, 0.0, 0.125)
    """
    if method not in _METHODS:
        raise OptionError(f"method must be one of {_METHODS}, not '{method}'")
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or not len(x):
        raise ScoreError(f"two lists of scores of one length needed, shapes {x.shape} and {y.shape} given")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ScoreError("scores are missing or not finite")
    diff = np.round(x - y, DECIMALS) + 0.0
    moved = diff[diff != 0]
    total, n = len(diff), len(moved)
    wins_a, wins_b = int((diff > 0).sum()), int((diff < 0).sum())
    w, z, p, sign = 0.0, 0.0, 1.0, 0
    if n:
        normal = stats.wilcoxon(moved, correction=True, method="asymptotic")
        ranks = stats.rankdata(np.abs(moved))
        sign = int(np.sign(ranks[moved > 0].sum() - ranks[moved < 0].sum()))
        w, z = float(normal.statistic), sign * abs(float(normal.zstatistic))
        exact = method == "exact" or (method == "auto" and n <= _EXACT_UP_TO)
        p = _exact_p(ranks, w) if exact else float(normal.pvalue)
    return SignedRank(
        n=total,
        wins_a=wins_a,
        wins_b=wins_b,
        ties=total - n,
        win_rate_a=(wins_a + (total - n) / 2) / total,
        median_diff=float(np.median(diff)),
        w=w,
        z=z,
        p=p,
        r=abs(z) / math.sqrt(n) if n else 0.0,
        sign=sign,
    )


def normal_signed_rank(w: float, n: int) -> tuple[float, float, float]:
    """``(|z|, p, r)`` of W over n non-zero differences of distinct sizes, by the normal approximation.

    Example:
        >>> _, p, r = normal_signed_rank(412, 121)
        >>> f"{p:.1e} {r:.4f}"
        '2.3e-17 0.7708'
    """
    if n < 1 or not 0 <= w <= n * (n + 1) / 4:
        raise ScoreError(f"W lies between 0 and n(n+1)/4 for n >= 1, not W = {w}, n = {n}")
    gap = max(n * (n + 1) / 4 - w - 0.5, 0.0)
    z = gap / math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    return z, float(2 * stats.norm.sf(z)), z / math.sqrt(n)


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's adjusted p-values, in the order given.

    Rejecting those that are at most α keeps the chance of any false rejection at most α.

    Example:
        >>> holm([0.01, 0.04, 0.03]).round(10).tolist()
        [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise ScoreError("p-values must be a list of numbers between 0 and 1")
    return multipletests(values, method="holm")[1] if len(values) else values


def compare(scores: pd.DataFrame, *, method: str = "auto") -> pd.DataFrame:
    """Test every pair of columns.

    Args:
        scores: One row per data set, one column per algorithm (at least two).
        method: See :func:`signed_rank`.

    Returns:
        One row per pair, smallest p first: ``a``, ``b`` (in the order of the columns), the fields of
        :class:`SignedRank`, and ``p_holm``, corrected over the pairs of this table.
    """
    frame = check_scores(scores, algorithms=2)
    rows = [
        {"a": a, "b": b, **asdict(signed_rank(frame[a], frame[b], method=method))}
        for a, b in combinations(frame.columns, 2)
    ]
    table = pd.DataFrame(rows)
    table.insert(table.columns.get_loc("p") + 1, "p_holm", holm(table["p"].to_numpy()))
    return table.sort_values(["p", "w"], kind="stable", ignore_index=True)


def compare_all(frames: Mapping[str, pd.DataFrame], *, method: str = "auto") -> pd.DataFrame:
    """Test every pair for every metric.

    Args:
        frames: Metric -> scores, with the same data sets and algorithms.
        method: See :func:`signed_rank`.

    Returns:
        The tables of :func:`compare` below each other, with ``metric`` in front and, behind ``p_holm``,
        ``p_holm_global``, corrected over all pairs of all metrics.
    """
    checked = check_frames(frames, algorithms=2)
    parts = []
    for metric, frame in checked.items():
        part = compare(frame, method=method)
        part.insert(0, "metric", metric)
        parts.append(part)
    table = pd.concat(parts, ignore_index=True)
    table.insert(table.columns.get_loc("p_holm") + 1, "p_holm_global", holm(table["p"].to_numpy()))
    return table
