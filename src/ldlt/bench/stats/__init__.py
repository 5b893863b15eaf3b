"""Statistics that compare algorithms over many data sets.

The input is always a table of scores, higher is better, with one row per data set and one column per
algorithm, or a dictionary from a metric to such a table; :func:`score_frames` makes them from the long table
of runs. Every result is a tidy ``DataFrame`` or a small frozen dataclass, and
:mod:`~ldlt.bench.stats.tables` shows it as Markdown, LaTeX or CSV.

* :mod:`~ldlt.bench.stats.summary`: mean ± standard deviation, ranges of the model sizes;
* :mod:`~ldlt.bench.stats.ranks`: average ranks, Friedman, Iman–Davenport and Nemenyi tests;
* :mod:`~ldlt.bench.stats.pairwise`: Wilcoxon signed-rank tests with Holm's correction and effect sizes;
* :mod:`~ldlt.bench.stats.overall`: significant wins and losses;
* :mod:`~ldlt.bench.stats.metrics`: all of these, for every metric.

References:
    J. Demšar, *Statistical comparisons of classifiers over multiple data sets*, JMLR 7 (2006) 1-30.
    R. L. Iman and J. M. Davenport, *Approximations of the critical region of the Friedman statistic*,
    Communications in Statistics A9 (1980) 571-595.
    S. Holm, *A simple sequentially rejective multiple test procedure*, Scandinavian Journal of Statistics 6
    (1979) 65-70.
"""

from __future__ import annotations

from importlib.util import find_spec

from ldlt.errors import MissingExtraError

# Before the modules below, which import these at their head.
for _package in ("pandas", "scipy", "statsmodels"):
    if find_spec(_package) is None:
        raise MissingExtraError(_package, "bench")

from ldlt.bench.stats.metrics import MetricResult, metric_results  # noqa: E402
from ldlt.bench.stats.overall import outcomes, standings  # noqa: E402
from ldlt.bench.stats.pairwise import (  # noqa: E402
    SignedRank,
    compare,
    compare_all,
    holm,
    normal_signed_rank,
    signed_rank,
)
from ldlt.bench.stats.ranks import (  # noqa: E402
    Friedman,
    average_ranks,
    critical_difference,
    friedman,
    friedman_from_ranks,
    nemenyi,
    rank_groups,
    rank_table,
)
from ldlt.bench.stats.scores import METRICS, ScoreError, Scores, score_frames  # noqa: E402
from ldlt.bench.stats.summary import RANGES, model_ranges, summarise  # noqa: E402
from ldlt.bench.stats.tables import (  # noqa: E402
    Cell,
    Table,
    friedman_table,
    metric_label,
    outcomes_table,
    overall_table,
    pairwise_table,
    ranges_table,
    render,
    summary_table,
    write,
)

__all__ = [
    "METRICS",
    "RANGES",
    "Cell",
    "Friedman",
    "MetricResult",
    "ScoreError",
    "Scores",
    "SignedRank",
    "Table",
    "average_ranks",
    "compare",
    "compare_all",
    "critical_difference",
    "friedman",
    "friedman_from_ranks",
    "friedman_table",
    "holm",
    "metric_label",
    "metric_results",
    "model_ranges",
    "nemenyi",
    "normal_signed_rank",
    "outcomes",
    "outcomes_table",
    "overall_table",
    "pairwise_table",
    "ranges_table",
    "rank_groups",
    "rank_table",
    "render",
    "score_frames",
    "signed_rank",
    "standings",
    "summarise",
    "summary_table",
    "write",
]
