"""Statistics of the study: published tables, other libraries as oracles, properties, edges, tables."""

from __future__ import annotations

import math
from itertools import product

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from scipy import stats

from ldlt.errors import OptionError
from ldlt_bench.statistics import (
    METRICS,
    ScoreError,
    average_ranks,
    bayesian_signed_rank,
    compare,
    critical_difference,
    friedman,
    friedman_from_ranks,
    holm,
    metric_results,
    nemenyi,
    normal_signed_rank,
    outcomes,
    rank_groups,
    score_frames,
    signed_rank,
    standings,
    summarise,
)
from ldlt_bench.tables import compare_runs, format_number, format_p, make_tables, render, write_tables

# -------------------- published tables (N = 121)
# A, B, wins A, wins B, ties, win rate A, median A - B, W, p, p Holm within, p Holm global, r
N = 121
PAIRS = """\
# accuracy
AOL LDLT-L 16 105 0 0.1322 -0.0568 412 2.3e-17 3.4e-16 0 0.7708
AOL Sandwich 18 103 0 0.1488 -0.0595 518 2.3e-16 0 0 0.7459
AOL SLL 22 99 0 0.1818 -0.0351 806 0 0 0 0.6782
AOL Orthogonal 27 94 0 0.2231 -0.0265 971 0 0 1.0e-10 0.6394
AOL LDLT-R 25 96 0 0.2066 -0.0313 1013 0 0 2.0e-10 0.6295
Orthogonal Sandwich 31 89 1 0.2603 -0.0126 1269 6.0e-10 6.3e-09 2.2e-08 0.5643
LDLT-L Orthogonal 94 27 0 0.7769 0.0139 1309 7.0e-10 6.6e-09 2.5e-08 0.5599
LDLT-L SLL 86 35 0 0.7107 0.0111 1503 1.5e-08 1.2e-07 4.9e-07 0.5143
LDLT-L LDLT-R 87 33 1 0.7231 0.0108 1689 3.7e-07 2.6e-06 1.1e-05 0.4639
Sandwich SLL 83 38 0 0.6860 0.0090 1789 8.8e-07 5.3e-06 2.3e-05 0.4470
LDLT-R Sandwich 43 78 0 0.3554 -0.0068 2364 6.0e-04 3.0e-03 7.2e-03 0.3118
LDLT-R SLL 66 54 1 0.5496 0.0019 3070 1.4e-01 5.7e-01 8.7e-01 0.1338
LDLT-R Orthogonal 71 50 0 0.5868 0.0025 3138 1.5e-01 5.7e-01 8.7e-01 0.1298
Orthogonal SLL 60 61 0 0.4959 -0.0004 3623 8.6e-01 1.0e+00 1.0e+00 0.0158
LDLT-L Sandwich 59 62 0 0.4876 -0.0002 3624 8.6e-01 1.0e+00 1.0e+00 0.0155
# cert_36
AOL LDLT-R 6 115 0 0.0496 -0.2319 84 1.1e-20 1.6e-19 7.7e-19 0.8479
AOL Sandwich 6 115 0 0.0496 -0.2436 88 1.2e-20 1.7e-19 8.4e-19 0.8470
AOL SLL 6 115 0 0.0496 -0.1912 145 4.8e-20 6.2e-19 3.2e-18 0.8336
AOL Orthogonal 10 111 0 0.0826 -0.2187 196 1.6e-19 1.9e-18 1.0e-17 0.8216
AOL LDLT-L 16 105 0 0.1322 -0.1218 579 8.5e-16 0 0 0.7315
LDLT-L Sandwich 28 93 0 0.2314 -0.0511 884 0 0 0 0.6598
Orthogonal Sandwich 24 96 1 0.2025 -0.0275 1002 0 0 2.0e-10 0.6282
Sandwich SLL 97 24 0 0.8017 0.0199 1005 0 0 2.0e-10 0.6314
LDLT-L LDLT-R 39 82 0 0.3223 -0.0372 1356 1.6e-09 1.1e-08 5.2e-08 0.5488
LDLT-L Orthogonal 47 74 0 0.3884 -0.0190 1855 2.1e-06 1.2e-05 4.8e-05 0.4315
LDLT-R SLL 81 39 1 0.6736 0.0118 2104 6.5e-05 2.5e-04 1.0e-03 0.3647
LDLT-L SLL 49 72 0 0.4050 -0.0075 2119 4.8e-05 2.4e-04 9.2e-04 0.3694
LDLT-R Sandwich 41 80 0 0.3388 -0.0168 2142 6.2e-05 2.5e-04 1.0e-03 0.3640
LDLT-R Orthogonal 78 43 0 0.6446 0.0126 2429 1.1e-03 2.2e-03 1.1e-02 0.2965
Orthogonal SLL 60 61 0 0.4959 -0.0004 3076 1.1e-01 1.1e-01 8.7e-01 0.1444
# cert_72
AOL Sandwich 7 114 0 0.0579 -0.2614 107 1.9e-20 2.9e-19 1.3e-18 0.8425
AOL LDLT-R 5 116 0 0.0413 -0.2327 116 2.4e-20 3.3e-19 1.6e-18 0.8404
AOL SLL 5 116 0 0.0413 -0.1928 162 7.1e-20 9.3e-19 4.6e-18 0.8296
AOL Orthogonal 11 110 0 0.0909 -0.2064 214 2.4e-19 2.9e-18 1.5e-17 0.8174
AOL LDLT-L 19 100 2 0.1653 -0.1250 557 0 0 0 0.7323
Orthogonal Sandwich 19 101 1 0.1612 -0.0346 601 0 0 0 0.7240
LDLT-L Sandwich 20 101 0 0.1653 -0.0772 607 0 0 0 0.7250
Sandwich SLL 95 25 1 0.7893 0.0393 801 0 0 0 0.6762
LDLT-L LDLT-R 30 91 0 0.2479 -0.0627 930 0 0 0 0.6490
LDLT-L Orthogonal 42 79 0 0.3471 -0.0210 1696 2.5e-07 1.5e-06 7.5e-06 0.4689
LDLT-L SLL 42 79 0 0.3471 -0.0213 1776 7.4e-07 3.7e-06 2.0e-05 0.4501
LDLT-R SLL 83 38 0 0.6860 0.0192 1938 5.9e-06 2.3e-05 1.3e-04 0.4120
LDLT-R Sandwich 40 81 0 0.3306 -0.0197 2062 2.5e-05 7.6e-05 5.2e-04 0.3828
LDLT-R Orthogonal 78 43 0 0.6446 0.0178 2306 3.4e-04 6.9e-04 4.5e-03 0.3254
Orthogonal SLL 66 55 0 0.5455 0.0041 3178 1.9e-01 1.9e-01 8.7e-01 0.1204
# cert_108
AOL LDLT-R 1 120 0 0.0083 -0.2229 11 1.8e-21 2.7e-20 1.3e-19 0.8651
AOL SLL 4 117 0 0.0331 -0.1616 33 3.1e-21 4.3e-20 2.3e-19 0.8599
AOL Orthogonal 6 115 0 0.0496 -0.1829 54 5.2e-21 6.8e-20 3.8e-19 0.8550
AOL Sandwich 5 116 0 0.0413 -0.2530 63 6.5e-21 7.8e-20 4.7e-19 0.8529
AOL LDLT-L 15 102 4 0.1405 -0.0795 265 4.5e-18 5.0e-17 2.7e-16 0.8011
LDLT-L Sandwich 16 104 1 0.1364 -0.0911 469 1.3e-16 0 0 0.7556
Orthogonal Sandwich 15 106 0 0.1240 -0.0411 634 0 0 0 0.7186
Sandwich SLL 95 25 1 0.7893 0.0391 769 0 0 0 0.6839
LDLT-L LDLT-R 28 93 0 0.2314 -0.0559 854 0 0 0 0.6669
LDLT-L Orthogonal 39 82 0 0.3223 -0.0289 1595 6.0e-08 3.6e-07 1.9e-06 0.4926
LDLT-L SLL 37 82 2 0.3140 -0.0231 1675 5.1e-07 2.5e-06 1.4e-05 0.4605
LDLT-R SLL 83 38 0 0.6860 0.0187 2059 2.5e-05 9.8e-05 5.2e-04 0.3835
LDLT-R Sandwich 43 78 0 0.3554 -0.0213 2138 6.0e-05 1.8e-04 1.0e-03 0.3649
LDLT-R Orthogonal 77 44 0 0.6364 0.0182 2506 2.2e-03 4.4e-03 2.0e-02 0.2784
Orthogonal SLL 65 56 0 0.5372 0.0038 3069 1.1e-01 1.1e-01 8.7e-01 0.1460
# cert_255
AOL LDLT-R 1 111 9 0.0455 -0.0570 10 5.4e-20 8.2e-19 3.6e-18 0.8651
AOL SLL 3 104 14 0.0826 -0.0476 23 5.3e-19 6.9e-18 3.2e-17 0.8610
AOL Sandwich 2 112 7 0.0455 -0.0803 62 9.9e-20 1.4e-18 6.3e-18 0.8514
AOL Orthogonal 5 105 11 0.0868 -0.0363 122 2.4e-18 2.8e-17 1.4e-16 0.8331
AOL LDLT-L 8 85 28 0.1818 -0.0160 182 0 0 0 0.7958
Orthogonal Sandwich 11 103 7 0.1198 -0.0313 258 1.4e-17 1.5e-16 8.1e-16 0.7995
LDLT-L Sandwich 12 102 7 0.1281 -0.0397 342 1.1e-16 0 0 0.7772
LDLT-L LDLT-R 23 89 9 0.2273 -0.0242 927 1.0e-10 6.0e-10 3.0e-09 0.6135
Sandwich SLL 90 25 6 0.7686 0.0240 977 0 4.0e-10 1.7e-09 0.6135
LDLT-L SLL 27 79 15 0.2851 -0.0091 1323 1.9e-06 9.4e-06 4.5e-05 0.4629
LDLT-R SLL 80 35 6 0.6860 0.0175 1603 1.4e-06 8.1e-06 3.4e-05 0.4506
LDLT-L Orthogonal 36 75 10 0.3388 -0.0085 1741 5.8e-05 2.3e-04 1.0e-03 0.3816
LDLT-R Orthogonal 77 40 4 0.6529 0.0132 1982 6.5e-05 2.3e-04 1.0e-03 0.3694
LDLT-R Sandwich 45 73 3 0.3843 -0.0078 2234 6.1e-04 1.2e-03 7.2e-03 0.3154
Orthogonal SLL 55 58 8 0.4876 0.0000 3068 6.6e-01 6.6e-01 1.0e+00 0.0410
"""

# Algorithm, average rank, significant wins, losses, net wins, win share, mean r; and the published F
OVERALL = {
    "accuracy": (
        44.33,
        """\
LDLT-L 2.434 4 0 4 0.800 0.577
Sandwich 2.566 4 0 4 0.800 0.517
LDLT-R 3.438 1 2 -1 0.200 0.629
SLL 3.624 1 2 -1 0.200 0.678
Orthogonal 3.831 1 2 -1 0.200 0.639
AOL 5.107 0 5 -5 0.000 0.000""",
    ),
    "cert_36": (
        89.22,
        """\
Sandwich 2.021 5 0 5 1.000 0.626
LDLT-R 2.715 4 1 3 0.800 0.514
Orthogonal 3.417 2 2 0 0.400 0.627
SLL 3.426 2 2 0 0.400 0.602
LDLT-L 3.785 1 4 -3 0.200 0.732
AOL 5.636 0 5 -5 0.000 0.000""",
    ),
    "cert_72": (
        101.00,
        """\
Sandwich 1.926 5 0 5 1.000 0.670
LDLT-R 2.628 4 1 3 0.800 0.557
Orthogonal 3.376 2 2 0 0.400 0.643
SLL 3.409 2 2 0 0.400 0.640
LDLT-L 4.058 1 4 -3 0.200 0.732
AOL 5.603 0 5 -5 0.000 0.000""",
    ),
    "cert_108": (
        125.70,
        """\
Sandwich 1.868 5 0 5 1.000 0.675
LDLT-R 2.562 4 1 3 0.800 0.548
Orthogonal 3.347 2 2 0 0.400 0.674
SLL 3.360 2 2 0 0.400 0.660
LDLT-L 4.136 1 4 -3 0.200 0.801
AOL 5.727 0 5 -5 0.000 0.000""",
    ),
    "cert_255": (
        105.79,
        """\
Sandwich 1.909 5 0 5 1.000 0.671
LDLT-R 2.550 4 1 3 0.800 0.575
SLL 3.310 2 2 0 0.400 0.662
Orthogonal 3.471 2 2 0 0.400 0.607
LDLT-L 4.202 1 4 -3 0.200 0.796
AOL 5.558 0 5 -5 0.000 0.000""",
    ),
}

# Rows and columns AOL, LDLT-L, LDLT-R, Orthogonal, Sandwich, SLL; one pattern for the four certified metrics.
CLEAN_OUTCOMES = [".-----", "+.++.+", "+-..-.", "+-..-.", "+.++.+", "+-..-."]
CERTIFIED_OUTCOMES = [".-----", "+.----", "++.+-+", "++-.-.", "++++.+", "++-.-."]


def published() -> pd.DataFrame:
    rows, metric = [], ""
    for line in PAIRS.splitlines():
        if line.startswith("#"):
            metric = line[2:]
            continue
        a, b, *rest = line.split()
        rows.append((metric, a, b, *rest))
    fields = ["metric", "a", "b", "wins_a", "wins_b", "ties", "rate", "median", "w", "p", "within", "world", "r"]
    table = pd.DataFrame(rows, columns=fields)
    return table.astype({"wins_a": int, "wins_b": int, "ties": int, "w": int})


PUBLISHED = published()


def as_printed(p: float) -> str:
    """The paper's print of p: ten decimals, so that 1e-15 < p < 5e-11 shows as 0; full below 1e-15."""
    p = p if p < 1e-15 else round(p, 10)
    return "0" if p == 0 else f"{p:.1e}"


def ranks_of_losses(metric: str) -> pd.Series:
    """Average ranks from counts of pairs: 1 + Σ over opponents of (losses + ties/2)/N."""
    part = PUBLISHED[PUBLISHED.metric == metric]
    lost = dict.fromkeys(sorted({*part.a, *part.b}), 0.0)
    for row in part.itertuples():
        lost[row.a] += row.wins_b + row.ties / 2
        lost[row.b] += row.wins_a + row.ties / 2
    return 1 + pd.Series(lost) / N


def differences(row) -> np.ndarray:
    """Differences of distinct sizes with the published wins, ties and W, on the side with fewer wins."""
    n = row.wins_a + row.wins_b
    few = min(row.wins_a, row.wins_b)
    ranks = list(range(1, few + 1))  # raise the largest first until the sum is W
    gap = row.w - sum(ranks)
    for place in reversed(range(few)):
        step = min(gap, n - few)
        ranks[place] += step
        gap -= step
    assert gap == 0
    sign = 1 if row.wins_a == few else -1
    diff = np.array([sign * k if k in set(ranks) else -sign * k for k in range(1, n + 1)], dtype=float)
    return np.concatenate([diff, np.zeros(row.ties)]) / 1000


def test_published_pairs_from_w_and_ties():
    """All 75 published rows hold: r to four digits, p to the two digits that are printed; corrected p-values, too."""
    p = np.array([normal_signed_rank(row.w, N - row.ties)[1] for row in PUBLISHED.itertuples()])
    assert [f"{normal_signed_rank(row.w, N - row.ties)[2]:.4f}" for row in PUBLISHED.itertuples()] == list(PUBLISHED.r)
    assert [as_printed(v) for v in p] == list(PUBLISHED.p)
    assert [as_printed(v) for v in holm(p)] == list(PUBLISHED.world)
    for metric in METRICS:
        here = (PUBLISHED.metric == metric).to_numpy()
        assert [as_printed(v) for v in holm(p[here])] == list(PUBLISHED.within[here])


@pytest.mark.parametrize("metric", METRICS)
def test_published_pairs_from_scores(metric):
    """The whole path, from scores with the published wins, ties and W, gives the published rows."""
    for row in PUBLISHED[PUBLISHED.metric == metric].itertuples():
        got = signed_rank(0.5 + differences(row), np.full(N, 0.5))
        assert (got["n"], got["wins_a"], got["wins_b"], got["ties"]) == (N, row.wins_a, row.wins_b, row.ties)
        assert (f"{got['win_rate_a']:.4f}", got["w"], f"{got['r']:.4f}") == (row.rate, row.w, row.r)
        assert as_printed(got["p"]) == row.p
        if stats.norm.sf(abs(got["z"])) * 2 < 0.05:
            assert got["sign"] == np.sign(float(row.median)) == np.sign(got["z"])


@pytest.mark.parametrize("metric", METRICS)
def test_published_ranks_f_and_critical_difference(metric):
    f, text = OVERALL[metric]
    rounded = pd.Series({line.split()[0]: float(line.split()[1]) for line in text.splitlines()})
    means = ranks_of_losses(metric)
    assert means.round(3).to_dict() == pytest.approx(rounded.to_dict(), abs=1e-9)
    exact = friedman_from_ranks(means, N)
    assert f"{exact.f:.2f}" == f"{f:.2f}"  # no correction for ties
    assert exact.f_df == (5, 600)
    assert exact.f_p < 1e-30  # printed as 1.11e-16 = 1 - cdf, the rounding unit
    assert friedman_from_ranks(rounded, N).f == pytest.approx(f, rel=1e-3)  # ranks of three decimals
    assert f"{critical_difference(6, N):.3f}" == "0.685"


def test_published_f_is_not_corrected_for_ties():
    """144 pairs tie at radius 255/255; even if no three tie at once, the correction lifts F to 113.02."""
    chi2 = friedman_from_ranks(ranks_of_losses("cert_255"), N).chi2
    ties = int(PUBLISHED.ties[PUBLISHED.metric == "cert_255"].sum())
    corrected = chi2 / (1 - 6 * ties / (N * (6**3 - 6)))
    assert ties == 144
    assert (N - 1) * corrected / (N * 5 - corrected) == pytest.approx(113.02, abs=0.01)


def published_pairs(metric: str) -> pd.DataFrame:
    part = PUBLISHED[PUBLISHED.metric == metric]
    triples = [normal_signed_rank(row.w, N - row.ties) for row in part.itertuples()]
    p = np.array([t[1] for t in triples])
    sign = np.sign(part.wins_a - part.wins_b).to_numpy()
    return pd.DataFrame(
        {"a": part.a, "b": part.b, "sign": sign, "p": p, "p_holm": holm(p), "r": [t[2] for t in triples]}
    )


@pytest.mark.parametrize("metric", METRICS)
def test_published_standings(metric):
    got = standings(ranks_of_losses(metric), published_pairs(metric))
    lines = [
        f"{row.algorithm} {row.average_rank:.3f} {row.wins} {row.losses} {row.net_wins} "
        f"{row.win_share:.3f} {row.mean_r:.3f}"
        for row in got.itertuples()
    ]
    assert lines == OVERALL[metric][1].splitlines()


@pytest.mark.parametrize("metric", METRICS)
def test_published_outcomes(metric):
    names = ["AOL", "LDLT-L", "LDLT-R", "Orthogonal", "Sandwich", "SLL"]
    got = outcomes(published_pairs(metric), names)
    assert list(got.columns) == list(got.index) == names
    signs = ["".join({1: "+", -1: "-", 0: "."}[v] for v in row) for row in got.to_numpy()]
    assert signs == (CLEAN_OUTCOMES if metric == "accuracy" else CERTIFIED_OUTCOMES)


# -------------------- against other libraries


def grid(rows, columns, levels=20):
    """Tables of scores on a grid, so that ties are common and exact."""
    return st.integers(*rows).flatmap(
        lambda n: st.integers(*columns).flatmap(
            lambda k: st.lists(st.lists(st.integers(0, levels), min_size=k, max_size=k), min_size=n, max_size=n).map(
                lambda v: pd.DataFrame(np.array(v) / levels, columns=list("ABCDEFGH")[:k])
            )
        )
    )


fast = settings(max_examples=20, deadline=None)


@fast
@given(grid((2, 12), (3, 6)))
def test_friedman_equals_scipy(scores):
    got = friedman(scores)
    if ((-scores).rank(axis=1).nunique(axis=1) == 1).all():
        assert (got.chi2, got.chi2_p, got.f, got.f_p) == (0, 1, 0, 1)
        return
    want = stats.friedmanchisquare(*scores.to_numpy().T)
    assert got.chi2 == pytest.approx(want.statistic, abs=1e-9)
    assert got.chi2_p == pytest.approx(want.pvalue, abs=1e-9)


@fast
@given(grid((2, 12), (2, 6)))
def test_iman_davenport_is_the_analysis_of_variance_of_ranks(scores):
    n, k = scores.shape
    got, ranks = friedman(scores), (-scores).rank(axis=1).to_numpy()
    between = n * ((ranks.mean(axis=0) - (k + 1) / 2) ** 2).sum()
    within = ((ranks - (k + 1) / 2) ** 2).sum() - between
    if within < 1e-9:
        assert math.isinf(got.f) or got.f == 0
    else:
        assert got.f == pytest.approx(between * (n - 1) / within, rel=1e-6, abs=1e-9)
    plain = friedman(scores, tie_correction=False)
    assert plain.chi2 <= got.chi2 + 1e-9
    assert plain.chi2 == pytest.approx(friedman_from_ranks(average_ranks(scores), n).chi2, abs=1e-9)


@fast
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_from_its_definition(p):
    """Each p-value times the number of those that are not smaller in their order, made monotone."""
    place = {i: rank for rank, i in enumerate(sorted(range(len(p)), key=lambda i: (p[i], i)))}
    for i, got in enumerate(holm(p)):
        assert got == pytest.approx(max(min(1.0, (len(p) - place[j]) * p[j]) for j in place if place[j] <= place[i]))


def test_nemenyi_agrees_with_the_critical_difference():
    scores = pd.DataFrame(np.random.default_rng(1).random((30, 6)) + np.arange(6) / 12, columns=list("ABCDEF"))
    p, means, cd = nemenyi(scores), (-scores).rank(axis=1).mean(), critical_difference(6, 30)
    far = np.abs(np.subtract.outer(means.to_numpy(), means.to_numpy())) >= cd
    assert far.any()
    assert np.array_equal(p.to_numpy() <= 0.05, far)


@pytest.mark.parametrize(
    ("alpha", "table"),
    [
        (0.05, [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]),
        (0.10, [1.645, 2.052, 2.291, 2.459, 2.589, 2.693, 2.780, 2.855, 2.920]),
    ],
)
def test_critical_values_of_demsar(alpha, table):
    """Table 5 of Demšar (2006); printed values differ by up to one unit in the last digit."""
    for k, q in enumerate(table, start=2):
        assert critical_difference(k, 10, alpha) / math.sqrt(k * (k + 1) / 60) == pytest.approx(q, abs=1.1e-3)


def test_worked_example_of_demsar():
    """Demšar (2006), section 3.2.2: average ranks of four algorithms over 14 data sets."""
    got = friedman_from_ranks([3.143, 2.000, 2.893, 1.964], 14)
    assert got.chi2 == pytest.approx(9.28, abs=0.02)
    assert got.f == pytest.approx(3.69, abs=0.02)
    assert got.f_df == (3, 39)
    assert critical_difference(4, 14, 0.10) == pytest.approx(1.12, abs=0.01)


# -------------------- probabilities


def test_bayesian_signed_rank_is_its_definition():
    """All differences equal and beyond the region: only the two pseudo-observations together are equal to nothing."""
    n, strength = 3, 0.5
    weight = stats.beta(strength, n)  # of the prior: Dir(s, 1, ..., 1) summed up
    want = weight.cdf(math.sqrt(0.5))  # 1 - w² is larger than w²
    better, equal, worse = bayesian_signed_rank([0.5] * n, [0.0] * n, draws=40_000)
    assert worse == 0
    assert better == pytest.approx(want, abs=0.01)
    assert equal == pytest.approx(1 - want, abs=0.01)


@settings(max_examples=10, deadline=None, database=None)
@given(st.lists(st.sampled_from([-0.2, -0.02, -0.01, 0.0, 0.005, 0.015, 0.02, 0.3]), min_size=2, max_size=6))
def test_bayesian_signed_rank_from_its_sums(z):
    """The same sums, pair by pair, with draws of the weights from exponential and gamma variables."""
    rng, points, counts = np.random.default_rng(7), [0.0, *z], np.zeros(3)
    for _ in range(1500):
        w = np.array([rng.gamma(0.5), *rng.exponential(size=len(z))])
        w /= w.sum()
        theta = np.zeros(3)
        for (a, x), (b, y) in product(zip(w, points, strict=True), repeat=2):
            theta[0 if x + y > 0.02 + 1e-12 else 2 if x + y < -0.02 - 1e-12 else 1] += a * b
        counts[theta.argmax()] += 1
    np.testing.assert_allclose(bayesian_signed_rank(z, np.zeros(len(z))), counts / 1500, atol=0.06)
    flipped = bayesian_signed_rank(np.zeros(len(z)), z)
    np.testing.assert_allclose(bayesian_signed_rank(z, np.zeros(len(z))), flipped[::-1], atol=1e-12)


# -------------------- properties


@fast
@given(grid((2, 10), (2, 5)), st.randoms(use_true_random=False))
def test_order_of_rows_and_columns_does_not_matter(scores, random):
    rows, columns = list(scores.index), list(scores.columns)
    random.shuffle(rows)
    random.shuffle(columns)
    other = scores.loc[rows, columns]
    assert average_ranks(other).to_dict() == pytest.approx(average_ranks(scores).to_dict())
    one, two = friedman(scores), friedman(other)
    assert (two.chi2, two.f_p) == pytest.approx((one.chi2, one.f_p), abs=1e-9)
    first, second = compare({"x": scores}, method="normal"), compare({"x": other}, method="normal")
    key = {frozenset((row.a, row.b)): row for row in first.itertuples()}
    for row in second.itertuples():
        same = key[frozenset((row.a, row.b))]
        flip = 1 if row.a == same.a else -1
        assert (row.w, row.ties, row.r) == pytest.approx((same.w, same.ties, same.r))
        assert (row.p, row.p_holm) == pytest.approx((same.p, same.p_holm))
        assert (row.sign, row.z, row.median_diff) == pytest.approx(
            (flip * same.sign, flip * same.z, flip * same.median_diff)
        )


@fast
@given(grid((1, 14), (2, 2)))
def test_pairs_are_antisymmetric_and_agree_with_scipy(scores):
    a, b = scores["A"], scores["B"]
    one, two = signed_rank(a, b), signed_rank(b, a)
    assert [one[key] for key in ("wins_a", "wins_b", "ties", "w")] == [
        two[k] for k in ("wins_b", "wins_a", "ties", "w")
    ]
    assert (one["p"], one["r"]) == pytest.approx((two["p"], two["r"]))
    flipped = [-two[key] for key in ("sign", "z", "median_diff")]
    assert [one[key] for key in ("sign", "z", "median_diff")] == pytest.approx(flipped)
    assert 0 <= one["p"] <= 1
    assert 0 <= one["r"] <= 1
    if one["n"] > one["ties"]:
        want = stats.wilcoxon(np.round(a - b, 12), zero_method="wilcox", correction=True, method="asymptotic")
        normal = signed_rank(a, b, method="normal")
        assert (normal["w"], normal["p"]) == pytest.approx((want.statistic, want.pvalue))


@fast
@given(grid((2, 8), (2, 5)), st.floats(0.01, 0.99))
def test_standings_add_up(scores, alpha):
    pairs = compare({"x": scores}, method="normal")
    table = outcomes(pairs, list(scores.columns), alpha=alpha)
    assert (table.to_numpy() == -table.to_numpy().T).all()
    got = standings(average_ranks(scores), pairs, alpha=alpha)
    assert (
        got.wins.sum()
        == got.losses.sum()
        == (pairs.p_holm <= alpha).sum() - ((pairs.p_holm <= alpha) & (pairs.sign == 0)).sum()
    )
    assert got.net_wins.sum() == 0
    assert got.average_rank.is_monotonic_increasing
    assert (got.mean_r[got.wins == 0] == 0).all()


@fast
@given(st.lists(st.floats(1, 10), min_size=1, max_size=8), st.floats(0.01, 5))
def test_rank_groups_are_maximal(values, cd):
    means = pd.Series(values, index=[f"m{i}" for i in range(len(values))])
    found = [set(group) for group in rank_groups(means, cd)]
    for group in found:
        assert len(group) > 1
        assert means[list(group)].max() - means[list(group)].min() < cd
        assert not any(group < other for other in found)
    for i in means.index:
        for j in means.index:
            if i < j and abs(means[i] - means[j]) < cd * (1 - 1e-9):
                assert any({i, j} <= group for group in found)


# -------------------- edges


def frame(**columns):
    return pd.DataFrame(columns, index=[f"d{i}" for i in range(len(next(iter(columns.values()))))])


def test_ties_and_rounding_errors():
    scores = frame(A=[0.1 + 0.2, 0.5, 0.7], B=[0.3, 0.5, 0.1 * 7])
    test, row = friedman(scores), compare({"x": scores}).iloc[0]
    assert (test.chi2, test.f, test.chi2_p, test.f_p) == (0, 0, 1, 1)
    assert (row.ties, row.w, row.z, row.p, row.p_holm, row.r, row.sign) == (3, 0, 0, 1, 1, 0, 0)
    assert outcomes(compare({"x": scores}), ["A", "B"]).to_numpy().tolist() == [[0, 0], [0, 0]]
    assert nemenyi(scores).to_numpy() == pytest.approx(np.ones((2, 2)))
    # equal sizes of differences, too: 0.3 - 0.2 and 0.2 - 0.1 are not the same number
    assert signed_rank([0.3, 0.1], [0.2, 0.2])["w"] == 1.5


def test_all_data_sets_agree():
    """F is infinite; its p-value is the chance of the agreement, k!^{-(N-1)}, not zero."""
    test = friedman(frame(A=[3, 6], B=[2, 5], C=[1, 4]))
    assert (test.f, test.f_p) == (math.inf, pytest.approx(1 / 6))
    assert friedman_from_ranks([1, 2, 3], 2).f_p == pytest.approx(1 / 6)
    tied = friedman(frame(A=[3, 6, 5], B=[2, 5, 1], C=[2, 5, 1]))
    assert (tied.f, tied.f_p) == (math.inf, pytest.approx((1 / 3) ** 2))


def test_one_data_set_or_one_algorithm():
    one = frame(A=[0.1], B=[0.2])
    assert average_ranks(one).to_dict() == {"B": 1.0, "A": 2.0}
    assert summarise({"x": one}).sd.isna().all()
    assert metric_results({"x": one})["x"].test is None
    for function in (friedman, nemenyi):
        for bad in (one, frame(A=[0.1, 0.2])):
            with pytest.raises(ScoreError):
                function(bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
@pytest.mark.parametrize(
    "function", [average_ranks, friedman, nemenyi, lambda s: compare({"x": s}), lambda s: summarise({"x": s})]
)
def test_missing_scores_are_refused_by_name(function, bad):
    with pytest.raises(ScoreError, match="B on d1"):
        function(frame(A=[0.1, 0.2, 0.3], B=[0.1, bad, 0.3], C=[0.3, 0.1, 0.2]))


def test_other_refusals():
    good = frame(A=[0.1, 0.2, 0.3], B=[0.1, 0.4, 0.3])
    pairs = compare({"x": good})
    for call in (
        lambda: average_ranks(good.set_axis(["A", "A"], axis=1)),
        lambda: average_ranks(good.to_numpy()),
        lambda: average_ranks(frame(A=["x", "y"], B=[1, 2])),
        lambda: compare({}),
        lambda: compare({"x": good, "y": good.iloc[:2]}),
        lambda: signed_rank([math.nan], [1.0]),
        lambda: normal_signed_rank(8, 5),
        lambda: friedman_from_ranks([1.0, 1.0], 10),
        lambda: holm([1.5]),
        lambda: outcomes(pairs, ["A", "C"]),
    ):
        with pytest.raises(ScoreError):
            call()
    for call in (
        lambda: compare({"x": good}, method="pratt"),
        lambda: critical_difference(3, 10, alpha=1.0),
        lambda: critical_difference(1, 10),
        lambda: outcomes(pairs, ["A", "B"], p_column="q"),
    ):
        with pytest.raises(OptionError):
            call()


def test_method_of_p():
    rng = np.random.default_rng(3)
    a = rng.random(60)
    b = a + rng.normal(0.05, 0.2, 60)
    for n in (1, 2, 10, 50):
        assert signed_rank(a[:n], b[:n])["p"] == pytest.approx(stats.wilcoxon(a[:n] - b[:n], method="exact").pvalue)
    want = stats.wilcoxon(a - b, correction=True, method="asymptotic").pvalue
    assert signed_rank(a, b)["p"] == signed_rank(a, b, method="normal")["p"] == pytest.approx(want)
    # equal sizes: all sign patterns of [1, 1, 1, 1], of which 2 of 16 are as extreme; zeros change nothing
    assert signed_rank([1, 1, 1, 1, 0], [0, 0, 0, 0, 0])["p"] == pytest.approx(2 / 16)
    diff = np.array([3.0, -1, 2, 2, -1, 4, 1, -2])
    want = stats.wilcoxon(diff, method=stats.PermutationMethod(n_resamples=2**9)).pvalue
    assert signed_rank(diff, np.zeros(8))["p"] == pytest.approx(want)


def test_compare_orders_and_corrects_over_all_metrics():
    rng = np.random.default_rng(5)
    frames = {name: pd.DataFrame(rng.random((20, 4)), columns=list("ABCD")) for name in ("x", "y")}
    frames["y"] = frames["y"].iloc[::-1, ::-1]  # the order of the first metric counts
    table = compare(frames)
    assert table.p_holm_global.to_numpy() == pytest.approx(holm(table.p))
    assert (table.p_holm_global >= table.p_holm).all()
    for _, part in table.groupby("metric"):
        assert (part.a < part.b).all()
        assert part.p.is_monotonic_increasing
        assert part.p_holm.to_numpy() == pytest.approx(holm(part.p))


# -------------------- from runs to scores and tables


def runs(datasets=("iris", "wine", "seeds"), families=("b", "A"), folds=4, seeds=2) -> pd.DataFrame:
    table = pd.DataFrame(
        product(datasets, families, range(folds), range(seeds)), columns=["dataset", "family", "fold", "seed"]
    )
    rng = np.random.default_rng(0)
    for metric in METRICS:
        table[metric] = rng.random(len(table))
    return table.assign(width=32, depth=4, parameters=1e6, padding=0, input_dim=4, output_dim=3)


def test_scores_are_means_over_folds_and_seeds():
    table = runs()
    scores = score_frames(table.sample(frac=1, random_state=1))
    assert list(scores.frames["accuracy"].columns) == ["A", "b"]  # whatever the case
    for metric, got in scores.frames.items():
        for (dataset, family), part in table.groupby(["dataset", "family"]):
            assert got.loc[dataset, family] == pytest.approx(part[metric].mean())


def test_incomplete_data_sets_are_left_out_with_a_reason():
    table = runs().drop(index=3)
    table.loc[30, "cert_36"] = math.inf
    scores = score_frames(table)
    assert list(scores.frames["accuracy"].index) == ["seeds"]
    assert set(scores.dropped) == {"iris", "wine"}
    assert "b: 1 of 8" in scores.dropped["iris"]
    for bad in (
        runs()[lambda t: t.family == "A"][:0],
        runs().drop(columns="cert_36"),
        pd.concat([runs(), runs()]),
        runs().assign(fold=math.nan),
    ):
        with pytest.raises(ScoreError):
            score_frames(bad)


def test_what_cannot_be_compared_is_said():
    table = runs(families=("A", "b", "LDLT-R as printed")).assign(certified=True)
    table.loc[table.family == "b", "certified"] = False
    comparison = compare_runs(table, ["A", "b", "LDLT-R as printed", "nobody"])
    assert comparison.families == ["A"]
    assert set(comparison.excluded) == {"b", "LDLT-R as printed", "nobody"}
    assert "pairwise" not in make_tables(comparison)
    assert make_tables(compare_runs(table[table.family == "b"])) == {}
    assert make_tables(compare_runs(runs().drop(index=[0, 20, 40]))) == {}


def test_a_refuted_family_is_one_marked_row():
    table = runs(families=("A", "LDLT-R as printed")).assign(certified=lambda t: t.family == "A")
    table["violation"] = np.where(table["certified"], math.nan, 1.25)
    summary = make_tables(compare_runs(table))["summary"]
    assert summary.shown["Algorithm"].tolist() == ["A", "LDLT-R as printed †"]
    assert summary.shown.iloc[1, 3:].tolist() == ["–"] * 4
    assert "1.25" in summary.note
    assert set(summary.data["algorithm"]) == {"A"}


def test_where_a_family_wins_and_loses():
    table = runs(datasets=[f"set {i}" for i in range(6)], families=("LDLT-L", "A", "B"), folds=1, seeds=1)
    place = table["dataset"].str[-1].astype(int)
    table = table.assign(train_rows=60 * (place + 1), validation_rows=20, test_rows=20, edge=(place == 5).astype(int))
    table[list(METRICS)] = 0.5
    table.loc[(table.family == "A") & (place < 2), list(METRICS)] = 0.75  # LDLT-L loses on the two smallest
    table.loc[table.family == "B", list(METRICS)] = 0.25
    found = make_tables(compare_runs(table))
    sets = found["sets"].data
    assert sets["difference"].tolist() == [-0.25, -0.25, 0, 0, 0, 0]
    assert sets["rows"].tolist()[:2] == [100, 160]
    assert sets.loc[0, "other"] == "A"
    against = found["where"].data.set_index(["group", "other"])
    assert against.loc[("all", "A"), ["wins", "losses"]].tolist() == [0, 2]
    assert against.loc[("all", "B"), ["wins", "losses"]].tolist() == [6, 0]
    smallest = next(group for group, _ in against.index if group.startswith("rows ≤"))
    assert against.loc[(smallest, "A"), ["n", "losses"]].tolist() == [2, 2]
    assert found["search"].data["largest"].tolist() == pytest.approx([1 / 6] * 3)
    rest = compare_runs(table, sets=lambda name: name != "set 0")
    assert rest.sets == [f"set {i}" for i in range(1, 6)]


HOSTILE = ("A|b_1", "50% & {x}\\y *z* <i> $a^2$")


def test_every_table_in_every_form(tmp_path):
    comparison = compare_runs(runs(families=HOSTILE))
    found = make_tables(comparison)
    assert {"summary", "ranges", "friedman", "pairwise", "overall-cert_36", "outcomes-accuracy"} <= set(found)
    for table in found.values():
        lines = [line for line in render(table).splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
        assert not any("\x02" in render(table, form) for form in ("markdown", "latex", "csv"))
        latex = render(table, "latex")
        body = latex[latex.index(r"\midrule") : latex.index(r"\bottomrule")]
        assert {line.replace(r"\&", "").count("&") for line in body.splitlines()[1:]} == {table.shown.shape[1] - 1}
    written = write_tables(comparison, tmp_path / "new")
    back = pd.read_csv(tmp_path / "new" / "pairwise.csv")
    pd.testing.assert_frame_equal(back, found["pairwise"].data, check_exact=True, check_dtype=False)
    assert len(written) == 3 * len(found)
    write_tables(compare_runs(runs()[:1]), tmp_path / "new")  # tables of an earlier call would contradict
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["summary.md"] or not list(
        (tmp_path / "new").glob("pairwise.*")
    )
    with pytest.raises(OptionError):
        render(found["summary"], "html")


def test_the_word_certified_is_kept_for_rigorous_rows():
    assert "Certified" not in render(make_tables(compare_runs(runs().assign(rigorous=False)))["summary"])
    assert "Certified 36/255" in render(make_tables(compare_runs(runs().assign(rigorous=True)))["summary"])


@given(st.floats(0, 1))
def test_p_values_are_never_zero(p):
    text = format_p(p).rstrip("*")
    assert float(text.lstrip("<")) > 0
    assert format_p(p).count("*") == (p <= 0.05) + (p <= 0.01) + (p <= 0.001)


def test_numbers():
    values = (0.12345, -0.00001, math.nan, math.inf)
    assert [format_number(v, 3) for v in values] == ["0.123", "0.000", "–", "∞"]
