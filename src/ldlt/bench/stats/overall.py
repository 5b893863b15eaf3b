"""Significant wins and losses of every algorithm, from the tests of the pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ldlt.bench.stats.scores import ScoreError, check_alpha, need_columns
from ldlt.errors import OptionError

__all__ = ["outcomes", "standings"]

_P_COLUMNS = ("p", "p_holm", "p_holm_global")


def outcomes(
    pairs: pd.DataFrame,
    algorithms: Sequence[str] | None = None,
    *,
    alpha: float = 0.05,
    p_column: str = "p_holm",
) -> pd.DataFrame:
    """Square table, row against column: 1 a significant win, −1 a significant loss, 0 neither.

    A pair is significant if its p-value is at most α. The winner is the one that the ranks of the differences
    speak for, not the one with the better median.

    Args:
        pairs: Tests of one metric, as made by :func:`~ldlt.bench.stats.pairwise.compare`.
        algorithms: Order of rows and columns; alphabetical by default.
        alpha: Level of significance.
        p_column: ``p``, ``p_holm`` or ``p_holm_global``.
    """
    if p_column not in _P_COLUMNS:
        raise OptionError(f"p_column must be one of {_P_COLUMNS}, not '{p_column}'")
    need_columns(pairs, ["a", "b", "sign", p_column], "the table of pairs")
    present = {*pairs["a"], *pairs["b"]}
    names = sorted(present, key=lambda name: (name.casefold(), name)) if algorithms is None else list(algorithms)
    count = len(names)
    if set(names) != present or len(pairs) != count * (count - 1) // 2:
        raise ScoreError("every two algorithms must be paired once: give the pairs of one metric and all their names")
    signs = np.where(pairs[p_column].to_numpy() <= check_alpha(alpha), pairs["sign"].to_numpy(), 0)
    table = pd.DataFrame(0, index=names, columns=names)
    for a, b, sign in zip(pairs["a"], pairs["b"], signs, strict=True):
        table.loc[a, b], table.loc[b, a] = int(sign), -int(sign)
    return table


def standings(means: pd.Series, pairs: pd.DataFrame, *, alpha: float = 0.05, p_column: str = "p_holm") -> pd.DataFrame:
    """Average rank, significant wins and losses, and their strength, best average rank first.

    Args:
        means: Average ranks, as made by :func:`~ldlt.bench.stats.ranks.average_ranks`.
        pairs: Tests of the same metric, as made by :func:`~ldlt.bench.stats.pairwise.compare`.
        alpha: Level of significance.
        p_column: ``p``, ``p_holm`` or ``p_holm_global``.

    Returns:
        One row per algorithm: ``algorithm``, ``average_rank``, ``wins``, ``losses``, ``net_wins``,
        ``win_share`` (wins over the k − 1 opponents) and ``mean_r`` (mean effect size of the significant
        wins, zero without any).
    """
    need_columns(pairs, ["r"], "the table of pairs")
    ordered = means.sort_values(kind="stable")
    names = [str(name) for name in ordered.index]
    table = outcomes(pairs, names, alpha=alpha, p_column=p_column)
    effect = pd.DataFrame(0.0, index=names, columns=names)
    for a, b, r in zip(pairs["a"], pairs["b"], pairs["r"], strict=True):
        effect.loc[a, b] = effect.loc[b, a] = float(r)
    won = table.to_numpy() > 0
    wins, losses = won.sum(axis=1), (table.to_numpy() < 0).sum(axis=1)
    return pd.DataFrame(
        {
            "algorithm": names,
            "average_rank": ordered.to_numpy(dtype=np.float64),
            "wins": wins,
            "losses": losses,
            "net_wins": wins - losses,
            "win_share": wins / (len(names) - 1),
            "mean_r": np.where(won, effect.to_numpy(), 0.0).sum(axis=1) / np.maximum(wins, 1),
        }
    )
