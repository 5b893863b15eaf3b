"""Sections of the page. Every function returns HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ldlt.bench.report.analysis import AS_PRINTED, MetricResult, Study
from ldlt.bench.report.erratum import Measured
from ldlt.bench.report.figures import cd_diagram, cone, span_bar
from ldlt.bench.report.markup import Families, cell, duration, escape, head, number, p_value, percent, table
from ldlt.bench.stats import METRICS, RANGES, metric_label, model_ranges

__all__ = ["SECTIONS", "TEXTS", "erratum", "masthead", "panel", "protocol_label", "provenance", "toc"]

SECTIONS = (
    ("findings", "Key findings"),
    ("means", "Mean scores"),
    ("ranks", "Ranks"),
    ("pairs", "Pairs"),
    ("standings", "Wins and losses"),
    ("curves", "Robustness curves"),
    ("heat", "Data sets"),
    ("size", "Time and size"),
)
"""Sections that every protocol has: id and title."""

TEXTS = (("erratum", "The printed block"), ("reading", "How to read"), ("provenance", "Provenance"))
"""Sections that the page has once."""

_SETUP = ("epochs", "learning_rate", "loss", "batch_size", "bound", "dtype", "source")
_VERSIONS = ("ldlt_version", "torch_version", "numpy_version", "python_version", "machine", "dtype", "source")


def protocol_label(name: str) -> str:
    """Title of a protocol, in plain text."""
    return {"paper": "Paper protocol", "tuned": "Tuned protocol"}.get(name, f"Protocol {name}")


def _plural(count: int, noun: str) -> str:
    return f"{number(count, 0)} {noun}{'' if count == 1 else 's'}"


def _families(count: int) -> str:
    return f"{count} {'family' if count == 1 else 'families'}"


def _phrase(metric: str) -> str:
    """A metric inside a sentence, as HTML."""
    match = re.fullmatch(r"cert_(\d+)", metric)
    return f"accuracy certified at {match[1]}/255" if match else escape(metric_label(metric).lower())


def _listed(names: Sequence[str]) -> str:
    """Names, which are HTML, as an enumeration."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _unique(frame: pd.DataFrame, column: str, limit: int = 6) -> str:
    """Distinct values of a column as HTML, or their range if they are many."""
    if column not in frame.columns:
        return "–"
    values = list(frame[column].dropna().unique())
    try:
        values = sorted(values)
    except TypeError:
        values = sorted(values, key=str)
    if not values:
        return "–"
    shown = [f"{value:g}" if isinstance(value, (float, np.floating)) else str(value) for value in values]
    if len(shown) > limit:
        return f"{escape(shown[0])} to {escape(shown[-1])} <small>({len(shown)} values)</small>"
    return ", ".join(f"<bdi>{escape(text)}</bdi>" for text in shown)


def masthead(studies: Sequence[Study], frame: pd.DataFrame, settings: Mapping[str, Any]) -> str:
    """What was run."""
    datasets = {name for study in studies for name in study.datasets}
    families = {name for study in studies for name in study.families}
    extra = {name for study in studies for name in study.uncertified}
    seconds = pd.to_numeric(frame["seconds"], errors="coerce").sum() if "seconds" in frame.columns else math.nan
    units = {(fold, seed) for fold, seed in zip(frame["fold"], frame["seed"], strict=True)}
    facts = [
        (number(len(frame), 0), "training runs"),
        (number(len(datasets), 0), "data sets" if len(datasets) != 1 else "data set"),
        (str(len(families)), "certified families" if len(families) != 1 else "certified family"),
        (str(len(studies)), "protocols" if len(studies) != 1 else "protocol"),
        (str(len({fold for fold, _ in units})), "folds"),
        (duration(float(seconds)), "of training"),
    ]
    items = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for value, label in facts)
    title = escape(settings.get("title", "Certified accuracy of Lipschitz networks"))
    others = ""
    if extra:
        verb = "is" if len(extra) == 1 else "are"
        names = _listed([f"<em>{escape(name)}</em>" for name in sorted(extra)])
        others = f" {names} {verb} shown for comparison, but not certified and not ranked."
    cautions = []
    if settings.get("shortened"):
        cautions.append("This is a quick look: training was cut short, so its figures compare with no other study.")
    if "finished_at" in settings and not settings["finished_at"]:
        cautions.append("The study is not finished.")
    named = settings.get("families")
    absent = [str(name) for name in named if str(name) not in families | extra] if isinstance(named, list) else []
    if absent:
        cautions.append(f"Planned, but without runs so far: {escape(', '.join(absent))}.")
    caution = f'<p class="caution">{" ".join(cautions)}</p>' if cautions else ""
    complete = "; ".join(
        f"{len(study.complete)} of {len(study.datasets)} data sets complete ({escape(protocol_label(study.protocol))})"
        for study in studies
    )
    return (
        f'<p class="kicker">ldlt benchmark report</p><h1>{title}</h1>'
        f"<p class=lede>{_families(len(families))} of networks that are Lipschitz by construction, compared on "
        f"{_plural(len(datasets), 'data set')} by accuracy and by accuracy certified at four radii.{others}</p>"
        f'<dl class="facts">{items}</dl>{caution}<p class="note">{complete}.</p>'
    )


def toc() -> str:
    """Links to all sections; those of protocols point into the first one, the script moves them along."""
    inner = "".join(f'<li><a href="#p0-{key}" data-section="{key}">{title}</a></li>' for key, title in SECTIONS)
    outer = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title in TEXTS)
    return f"<ol>{inner}{outer}</ol>"


def _section(prefix: str, key: str, lead: str, body: str) -> str:
    title = dict(SECTIONS)[key]
    ident = f"{prefix}-{key}"
    return (
        f'<section id="{ident}" aria-labelledby="{ident}-h"><h2 id="{ident}-h">{title}</h2>'
        f"<p class=lead>{lead}</p>{body}</section>"
    )


def _empty(text: str) -> str:
    return f'<p class="empty">{text}</p>'


def _by_metric(blocks: Mapping[str, str]) -> str:
    """One block per metric; the script shows the chosen one, without it all are shown."""
    return "".join(f'<div data-metric="{metric}">{block}</div>' for metric, block in blocks.items())


# -------------------- findings


def _card(metric: str, result: MetricResult, families: Families) -> str:
    ranks = result.ranks
    best = str(ranks.index[0])
    leaders = [str(name) for name in ranks.index[ranks == ranks.iloc[0]]]
    if result.test is None or result.cd is None:
        verdict = "too few families or data sets to test"
    elif result.test.f_p > 0.05:
        verdict = "no significant difference among families"
    else:
        near = [str(name) for name in ranks.index if ranks[name] - ranks.iloc[0] < result.cd and name not in leaders]
        verdict = (
            f"not distinguished from {_listed([escape(name) for name in near])}" if near else "ahead of all others"
        )
    names = " ".join(families.label(name) for name in leaders[:2])
    return (
        f'<button type="button" class="card" data-pick="{metric}" aria-pressed="false">'
        f'<span class="card-metric">{escape(metric_label(metric))}</span><span class="card-name">{names}</span>'
        f'<span class="card-rank" data-v="{float(ranks[best])!r}">average rank {number(float(ranks[best]), 2)}</span>'
        f'<span class="card-verdict">{verdict}</span></button>'
    )


def _findings(study: Study, others: Sequence[Study], families: Families, prefix: str) -> str:
    done = f"{len(study.complete)} of {len(study.datasets)}"
    lead = (
        f"Best average rank for each metric over the {done} data sets that every family completed. "
        "Choose a card to look at that metric below."
    )
    if study.scores is None:
        body = _empty("No data set has all runs of all certified families yet, so there is nothing to compare.")
        return _section(prefix, "findings", "What the data say so far.", body + _dropped(study))
    cards = "".join(_card(metric, result, families) for metric, result in study.metrics.items())
    points: list[str] = []
    best = study.summary[study.summary["best"].astype(bool)]
    for metric in (METRICS[0], METRICS[-1]):
        rows = best[best["metric"] == metric]
        names = _listed([families.label(str(name)) for name in rows["algorithm"]])
        points.append(
            f"Highest mean {_phrase(metric)}: {names} with <b>{percent(float(rows['mean'].iloc[0]))}&#160;%</b>."
        )
    tables = [result.standings for result in study.metrics.values() if result.standings is not None]
    if tables:
        net = pd.concat(tables).groupby("algorithm", sort=False)["net_wins"].sum().sort_values(ascending=False)
        top = [families.label(str(name)) for name in net.index[net == net.iloc[0]]]
        if net.iloc[0] > 0:
            points.append(
                f"Most significant pairwise wins over all metrics: {_listed(top)}, "
                f"net <b>{number(int(net.iloc[0]), 0, signed=True)}</b> of at most {len(tables) * (len(net) - 1)}."
            )
        else:
            points.append("No family has more significant pairwise wins than losses over all metrics.")
    if "seconds" in study.runs.columns:
        runs = study.runs[study.runs["family"].isin(study.families)]
        seconds = pd.to_numeric(runs["seconds"], errors="coerce")
        medians = seconds.groupby(runs["family"]).median().dropna().sort_values()
        if len(medians) > 1:
            low, high = str(medians.index[0]), str(medians.index[-1])
            points.append(
                f"Median training time runs from <b>{duration(float(medians.iloc[0]))}</b> ({families.label(low)}) to "
                f"<b>{duration(float(medians.iloc[-1]))}</b> ({families.label(high)})."
            )
    points += [_against(study, other) for other in others if other.scores is not None]
    body = f'<div class="cards">{cards}</div><ul class="points">{"".join(f"<li>{p}</li>" for p in points if p)}</ul>'
    return _section(prefix, "findings", lead, body + _dropped(study))


def _against(study: Study, other: Study) -> str:
    """Mean change of accuracy against another protocol, over what both have."""
    if study.scores is None or other.scores is None:
        return ""
    parts = []
    count = 0
    for metric in (METRICS[0], METRICS[3]):
        ours, theirs = study.scores.frames[metric], other.scores.frames[metric]
        sets, names = ours.index.intersection(theirs.index), ours.columns.intersection(theirs.columns)
        if not len(sets) or not len(names):
            return ""
        gap = float((ours.loc[sets, names] - theirs.loc[sets, names]).to_numpy().mean())
        count = len(sets)
        parts.append(f"{_phrase(metric)} <b>{percent(gap, 1, signed=True)}</b>")
    return (
        f"Against the {escape(protocol_label(other.protocol).lower())}, mean over families and "
        f"{_plural(count, 'data set')} complete in both: {_listed(parts)} percentage points."
    )


def _dropped(study: Study) -> str:
    notes = []
    if study.failed:
        notes.append(f'<p class="note">{_plural(study.failed, "run")} without usable metrics counted as missing.</p>')
    done = study.runs[study.runs["dataset"].isin(study.complete)]
    units = done.drop_duplicates(["dataset", "fold", "seed"]).groupby("dataset").size()
    fewer = int((units < units.max()).sum())
    if fewer:
        notes.append(
            f'<p class="note">{_plural(fewer, "complete data set")} with fewer folds or seeds than others; each is '
            "compared on the same runs of all families.</p>"
        )
    if study.dropped:
        items = "".join(
            f"<li><b><bdi>{escape(name)}</bdi></b>: {escape(reason)}</li>"
            for name, reason in sorted(study.dropped.items())
        )
        notes.append(
            f'<details class="dropped"><summary>{_plural(len(study.dropped), "data set")} left out of the statistics'
            f"</summary><ul>{items}</ul></details>"
        )
    return "".join(notes)


# -------------------- tables


def _means(study: Study, families: Families, prefix: str) -> str:
    lead = (
        f"Mean ± standard deviation over {_plural(len(study.complete), 'complete data set')}, in percent; the best "
        "mean of each metric is bold. The deviation shows how much data sets differ. It is no error bar of a "
        "comparison, because all families share the data sets."
    )
    if study.scores is None:
        return _section(prefix, "means", lead, _empty("No complete data set."))
    rows = []
    for name in [*study.families, *study.uncertified]:
        mine = study.summary[study.summary["algorithm"] == name].set_index("metric")
        if mine.empty:
            continue
        refused = name in study.uncertified
        short = (
            f" <small>{int(mine['n'].iloc[0])} sets</small>" if int(mine["n"].iloc[0]) != len(study.complete) else ""
        )
        cells = [cell(families.label(name) + short, tag="th")]
        for metric in METRICS:
            row = mine.loc[metric]
            mean, sd = float(row["mean"]), float(row["sd"])
            text = percent(mean)
            text = f"<b>{text}</b>" if bool(row["best"]) else text
            deviation = "" if math.isnan(sd) else f'<span class="sd">± {percent(sd)}</span>'
            cells.append(cell(f"{text}{deviation}", value=mean, kind="num", attributes=f' data-m="{metric}"'))
        kind = ' class="refused"' if refused else ""
        rows.append(f'<tr{kind} data-fams="{families.index(name)}">{"".join(cells)}</tr>')
    note = "".join(
        f'<span data-fams="{families.index(name)}">{families.label(name)}: its certified figures use the bound that '
        "the construction claims and does not keep. They are shown below the line and ranked nowhere.</span>"
        for name in study.uncertified
        if name in set(study.summary["algorithm"])
    )
    heads = head(["Family", *(escape(metric_label(metric)) for metric in METRICS)])
    return _section(prefix, "means", lead, table("Mean scores in percent", heads, rows, kind="means", note=note))


def _ranks(study: Study, families: Families, prefix: str) -> str:
    lead = (
        "On every data set the families are ranked, 1 the best. Bars join families whose average ranks differ by less "
        "than the critical difference (Nemenyi, α = 0.05): the data do not tell them apart."
    )
    if study.scores is None or len(study.families) < 2 or len(study.complete) < 2:
        what = "Ranks are tested from two families and two complete data sets on."
        return _section(prefix, "ranks", lead, _empty(what))
    blocks = {}
    for index, (metric, result) in enumerate(study.metrics.items()):
        test, cd = result.test, result.cd
        if test is None or cd is None:
            continue
        label = metric_label(metric)
        svg = cd_diagram(
            result.ranks,
            cd,
            result.groups,
            families,
            title=f"Critical-difference diagram: {label}",
            ident=f"{prefix}-cd{index}",
        )
        tests = (
            '<dl class="tests">'
            f'<div><dt>Friedman χ²<sub>{test.chi2_df}</sub></dt><dd data-v="{test.chi2!r}">{number(test.chi2, 2)}</dd>'
            f"<dd>p = {p_value(test.chi2_p)}</dd></div>"
            f'<div><dt>Iman–Davenport F<sub>{test.f_df[0]}, {test.f_df[1]}</sub></dt><dd data-v="{test.f!r}">'
            f"{number(test.f, 2)}</dd><dd>p = {p_value(test.f_p)}</dd></div>"
            f'<div><dt>Nemenyi critical difference</dt><dd data-v="{cd!r}">{number(cd, 3)}</dd>'
            f"<dd>N = {test.datasets}, k = {test.algorithms}</dd></div></dl>"
        ).replace("p = &lt;", "p &lt; ")
        caution = (
            '<p class="note">The Iman–Davenport test is not significant at 0.05: do not read differences into the '
            "ranks.</p>"
            if test.f_p > 0.05
            else ""
        )
        blocks[metric] = (
            f'<figure class="diagram"><figcaption class="title">Critical-difference diagram: {escape(label)}'
            "</figcaption>"
            f'<div class="scroll" role="region" tabindex="0" '
            f'aria-label="{escape(f"Critical-difference diagram, {label}")}">{svg}</div></figure>{tests}{caution}'
        )
    rows = []
    for name in study.families:
        cells = [cell(families.label(name), tag="th")]
        for metric, result in study.metrics.items():
            value = float(result.ranks[name])
            text = number(value, 2)
            text = f"<b>{text}</b>" if value == float(result.ranks.iloc[0]) else text
            cells.append(cell(text, value=value, kind="num", attributes=f' data-m="{metric}"'))
        rows.append(f'<tr data-fams="{families.index(name)}">{"".join(cells)}</tr>')
    heads = head(["Family", *(escape(metric_label(metric)) for metric in METRICS)])
    overview = table("Average ranks of all metrics, 1 the best", heads, rows, kind="ranks")
    return _section(prefix, "ranks", lead, _by_metric(blocks) + overview)


def _pairs(study: Study, families: Families, prefix: str) -> str:
    lead = (
        "Wilcoxon’s signed-rank test of every two families, two-sided, with Holm’s correction over the pairs of the "
        "metric. Bold marks the winner of a significant pair (p ≤ 0.05). The effect size r lies between 0 and 1."
    )
    if study.scores is None or len(study.families) < 2:
        return _section(prefix, "pairs", lead, _empty("Pairs need two families and one complete data set."))
    blocks = {}
    for metric, result in study.metrics.items():
        if result.pairs is None:
            continue
        rows = []
        for row in result.pairs.itertuples():
            a, b = families.label(str(row.a)), families.label(str(row.b))
            if row.p_holm <= 0.05 and row.sign:
                a, b = (f"<b>{a}</b>", b) if row.sign > 0 else (a, f"<b>{b}</b>")
            split = (
                f'<span class="split" aria-hidden="true" style="--w:{100 * row.wins_a / row.n:.2f}%;'
                f'--t:{100 * row.ties / row.n:.2f}%"><i></i></span>'
            )
            which = f"{families.index(str(row.a))} {families.index(str(row.b))}"
            rows.append(
                f'<tr data-fams="{which}">{cell(a, tag="th")}{cell(b)}'
                + cell(f"{row.wins_a} / {row.ties} / {row.wins_b}{split}", kind="num wtl")
                + cell(percent(row.median_diff, 2, signed=True), value=float(row.median_diff), kind="num")
                + cell(p_value(row.p_holm), value=float(row.p_holm), kind="num p")
                + cell(number(row.r, 3), value=float(row.r), kind="num")
                + "</tr>"
            )
        heads = head(["A", "B", "A wins / ties / B wins", "Median A − B, points", "p (Holm)", "r"], left=2)
        note = "* p ≤ 0.05, ** p ≤ 0.01, *** p ≤ 0.001. Points are percentage points."
        caption = f"Pairs of families: {escape(metric_label(metric))}"
        blocks[metric] = table(caption, heads, rows, kind="pairs", note=note)
    return _section(prefix, "pairs", lead, _by_metric(blocks))


def _standings(study: Study, families: Families, prefix: str) -> str:
    lead = (
        "Significant wins and losses against the other families (Wilcoxon, Holm, α = 0.05). Win share is wins over the "
        "number of opponents; mean r is the mean effect size of the wins."
    )
    if study.scores is None or len(study.families) < 2:
        return _section(prefix, "standings", lead, _empty("Wins need two families and one complete data set."))
    blocks = {}
    signs = {1: ('<span class="win">▲</span>', "win"), -1: ('<span class="loss">▼</span>', "loss"), 0: ("·", "neither")}
    for metric, result in study.metrics.items():
        if result.standings is None or result.outcomes is None:
            continue
        label = escape(metric_label(metric))
        rows = []
        for row in result.standings.itertuples():
            name = str(row.algorithm)
            rows.append(
                f'<tr data-fams="{families.index(name)}">{cell(families.label(name), tag="th")}'
                + cell(number(row.average_rank, 2), value=float(row.average_rank), kind="num")
                + cell(str(row.wins), value=int(row.wins), kind="num")
                + cell(str(row.losses), value=int(row.losses), kind="num")
                + cell(number(row.net_wins, 0, signed=True), value=int(row.net_wins), kind="num strong")
                + cell(f"{percent(row.win_share, 0)} %", value=float(row.win_share), kind="num")
                + cell(number(row.mean_r, 2) if row.wins else "–", value=float(row.mean_r), kind="num")
                + "</tr>"
            )
        heads = head(["Family", "Average rank", "Wins", "Losses", "Net", "Win share", "Mean r"])
        first = table(f"Significant wins and losses: {label}", heads, rows, kind="standings")
        order = [str(name) for name in result.outcomes.index]
        corner = '<th scope="col"><span class="sr">Family</span></th>'
        titles = "".join(
            f'<th scope="col" class="turn" data-fams="{families.index(name)}"><span>{escape(name)}</span></th>'
            for name in order
        )
        grid = []
        for name in order:
            cells = [cell(families.label(name), tag="th")]
            for rival in order:
                value = int(result.outcomes.loc[name, rival])
                text, word = ("", "itself") if rival == name else signs[value]
                about = f' data-fams="{families.index(rival)}" aria-label="{word}"'
                cells.append(cell(text, kind="mark self" if rival == name else "mark", attributes=about))
            grid.append(f'<tr data-fams="{families.index(name)}">{"".join(cells)}</tr>')
        second = table(
            f"Row against column: {label}",
            f"<tr>{corner}{titles}</tr>",
            grid,
            kind="matrix",
            note="▲ significant win, ▼ significant loss, · neither.",
        )
        blocks[metric] = f'<div class="pair-of"><div>{first}</div><div>{second}</div></div>'
    return _section(prefix, "standings", lead, _by_metric(blocks))


def _curves(prefix: str) -> str:
    lead = (
        "Share of test points that are classified correctly and certified within a radius (Euclidean norm of "
        "the network’s input), averaged over data sets. The curves follow the filter of data sets and families."
    )
    body = (
        '<figure class="curves"><div class="plot" data-plot></div><div class="readout"><p class="readout-title" '
        'data-radius></p><ul data-readout></ul></div><figcaption class="note" data-curves-note>The curves are drawn '
        "by the script of this page.</figcaption></figure>"
    )
    return _section(prefix, "curves", lead, body)


def _heat(prefix: str) -> str:
    lead = (
        "One row per data set, means over folds in percent. Sort by choosing a column head; the last rows "
        "summarise the data sets that are shown."
    )
    body = (
        '<div class="heat-tools"><fieldset class="segments"><legend>Colour</legend>'
        f'<label><input type="radio" name="{prefix}-tone" value="value" checked><span>Score</span></label>'
        f'<label><input type="radio" name="{prefix}-tone" value="gap"><span>Distance to best</span></label></fieldset>'
        '<p class="scale" data-scale aria-hidden="true"></p></div>'
        '<div class="scroll tall" role="region" tabindex="0" aria-label="Scores of all data sets" data-heat>'
        '<p class="empty">The table is drawn by the script of this page.</p></div>'
        '<p class="note" data-heat-note></p>'
    )
    return _section(prefix, "heat", lead, body)


def _quantiles(values: pd.Series) -> tuple[float, float, float, float, float]:
    low, first, middle, third, high = (float(values.quantile(q)) for q in (0.0, 0.25, 0.5, 0.75, 1.0))
    return low, first, middle, third, high


def _size(study: Study, families: Families, prefix: str) -> str:
    lead = (
        "Cost of one run, over all runs of this protocol: the dot is the median, the thick bar spans the quartiles, "
        "the thin one the range, on a logarithmic scale."
    )
    shown = [name for name in [*study.families, *study.uncertified] if name in set(study.runs["family"])]
    columns = [("seconds", "Training time", duration), ("parameters", "Parameters", lambda v: number(v, 0))]
    data: dict[str, dict[str, pd.Series]] = {}
    for column, _, _ in columns:
        if column in study.runs.columns:
            values = pd.to_numeric(study.runs[column], errors="coerce")
            values = values[np.isfinite(values) & (values > 0)]
            found = {name: values[study.runs.loc[values.index, "family"] == name] for name in shown}
            data[column] = {name: part for name, part in found.items() if len(part)}
    rows = []
    for name in shown:
        cells = [cell(families.label(name), tag="th")]
        for column, _, form in columns:
            parts = data.get(column, {})
            if name not in parts:
                cells += [cell("–", kind="num"), cell("")]
                continue
            ends = (min(p.min() for p in parts.values()), max(p.max() for p in parts.values()))
            five = _quantiles(parts[name])
            words = f'<span class="sr">from {form(five[0])} to {form(five[4])}</span>'
            cells += [cell(form(five[2]), value=five[2], kind="num"), cell(span_bar(*five, ends) + words, kind="spans")]
        total = data.get("seconds", {}).get(name)
        cells.append(cell("–" if total is None else duration(float(total.sum())), kind="num"))
        mine = study.runs[study.runs["family"] == name]
        cells.append(cell(number(len(mine), 0), value=len(mine), kind="num"))
        rows.append(f'<tr data-fams="{families.index(name)}">{"".join(cells)}</tr>')
    titles = (
        '<tr><th scope="col">Family</th><th scope="col" class="num">Time, median</th>'
        '<th scope="col">Range of times</th>'
        '<th scope="col" class="num">Parameters, median</th><th scope="col">Range of sizes</th>'
        '<th scope="col" class="num">Total time</th><th scope="col" class="num">Runs</th></tr>'
    )
    body = table("Time and parameters per run", titles, rows, kind="costs") + _ranges(study, shown, families)
    setup = "".join(
        f"<div><dt>{escape(column.replace('_', ' ').capitalize())}</dt><dd>{_unique(study.runs, column)}</dd></div>"
        for column in _SETUP
        if column in study.runs.columns
    )
    if "rigorous" in study.runs.columns:
        held = study.runs[study.runs["family"].isin(study.families)]
        count = int(held["rigorous"].map(lambda v: str(v).casefold() in {"true", "1", "1.0"}).sum())
        setup += (
            f"<div><dt>Rigorous bound</dt><dd>{number(count, 0)} of {number(len(held), 0)} certified runs</dd></div>"
        )
    facts = f'<h3>Training set-up</h3><dl class="setup">{setup}</dl>' if setup else ""
    return _section(prefix, "size", lead, body + facts)


def _ranges(study: Study, shown: Sequence[str], families: Families) -> str:
    quantities = [name for name in RANGES if name in study.runs.columns]
    sizes = study.runs[["family", *quantities]].dropna()
    present = [name for name in shown if name in set(sizes["family"])]
    if not quantities or not present:
        return _empty("No model sizes were recorded.")
    ranges = model_ranges(sizes, quantities, algorithms=present).set_index(["algorithm", "quantity"])
    rows = []
    for name in present:
        cells = [cell(families.label(name), tag="th")]
        for quantity in quantities:
            low, high = (float(ranges.loc[(name, quantity), side]) for side in ("min", "max"))
            text = number(low, 0) if low == high else f"{number(low, 0)}–{number(high, 0)}"
            cells.append(cell(text, kind="num", attributes=f' data-low="{low!r}" data-high="{high!r}"'))
        rows.append(f'<tr data-fams="{families.index(name)}">{"".join(cells)}</tr>')
    titles = ["Family", *(escape(q.replace("_dim", " dimension").capitalize()) for q in quantities)]
    return table("Model range: smallest to largest value over all runs", head(titles), rows, kind="model-range")


def panel(study: Study, others: Sequence[Study], families: Families, index: int) -> str:
    """All sections of one protocol."""
    prefix = f"p{index}"
    parts = [
        _findings(study, others, families, prefix),
        _means(study, families, prefix),
        _ranks(study, families, prefix),
        _pairs(study, families, prefix),
        _standings(study, families, prefix),
        _curves(prefix),
        _heat(prefix),
        _size(study, families, prefix),
    ]
    title = escape(protocol_label(study.protocol))
    return (
        f'<div class="panel" role="tabpanel" id="{prefix}" aria-labelledby="{prefix}-tab" data-panel="{index}">'
        f'<p class="panel-title">{title}</p>{"".join(parts)}</div>'
    )


# -------------------- once per page


def erratum(studies: Sequence[Study], families: Families, facts: Measured) -> str:
    """The block as printed: its counterexample, and what was measured with it."""
    scalar, found = facts.scalar, facts.found
    figure = cone(
        facts.points,
        found.bound,
        title="The printed block leaves the cone of its bound",
        description=f"For positive x the function has slope {number(scalar.measured_slope, 4)}; the bound is "
        f"{number(found.bound, 0)}.",
        ident="erratum-cone",
    )
    lines = [
        ("Claimed bound", number(found.bound, 0), f"{found.bound!r}"),
        ("Exact slope on paper", f"{scalar.slope}", f"{float(scalar.slope)!r}"),
        ("Steepest slope found by search", number(found.slope, 6), f"{found.slope!r}"),
        (
            "Determinant of the matrix inequality",
            f"{scalar.determinant}".replace("-", "−"),
            f"{float(scalar.determinant)!r}",
        ),
        ("Its smallest eigenvalue", number(scalar.smallest_eigenvalue, 6), f"{scalar.smallest_eigenvalue!r}"),
        (
            "Steepest slope found in the corrected block, same parameters",
            number(facts.corrected.slope, 6),
            f"{facts.corrected.slope!r}",
        ),
        (
            "Gaussian blocks 4-8-4 that break the inequality, as printed",
            f"{facts.failing} of {facts.draws}",
            str(facts.failing),
        ),
        ("The same, corrected", f"{facts.failing_corrected} of {facts.draws}", str(facts.failing_corrected)),
    ]
    rows = [
        f'<tr><th scope="row">{name}</th><td class="num" data-v="{raw}">{text}</td></tr>' for name, text, raw in lines
    ]
    numbers = table(
        "Computed when this page was built",
        '<tr><th scope="col">Quantity</th><th scope="col" class="num">Value</th></tr>',
        rows,
        kind="facts-table",
    )
    verdict = (
        f"With one input, one ReLU and one output the printed formulas give a network of slope "
        f"<b>{number(scalar.measured_slope, 2)}</b> for the bound {number(found.bound, 0)}"
        if found.exceeds
        else "The search found no pair above the bound"
    )
    return (
        '<section id="erratum" aria-labelledby="erratum-h"><h2 id="erratum-h">The residual block as printed is not '
        "Lipschitz</h2><p class=lead>The residual construction of Juston et al. (2025) drops the cross terms of its "
        "last pivot. "
        f"{verdict}. Radii derived from that bound are not certificates; families marked "
        '<span class="badge">not certified</span> are therefore kept out of all ranks and tests.</p>'
        f'<div class="pair-of"><figure class="boxed">{figure}<figcaption class="note">The printed block (line) and '
        f"what the bound allows (shaded).</figcaption></figure><div>{numbers}</div></div>"
        f"{_printed_runs(studies, families)}</section>"
    )


def _printed_runs(studies: Sequence[Study], families: Families) -> str:
    """Figures of runs without a certificate next to the corrected block."""
    rows = []
    for study in studies:
        for name in study.uncertified:
            mine = study.runs[study.runs["family"] == name]
            if mine.empty:
                continue
            both = [name]
            twin = "LDLT-R" if name == AS_PRINTED else None
            if twin in study.families:
                both.append(twin)
            keys = ["dataset", "fold", "seed"]
            shared = mine[keys].drop_duplicates()
            for family in both[1:]:
                shared = shared.merge(study.runs.loc[study.runs["family"] == family, keys].drop_duplicates(), on=keys)
            for family in both:
                part = study.runs[study.runs["family"] == family].merge(shared, on=keys)
                if part.empty:
                    continue
                means = part.groupby("dataset")[list(METRICS)].mean().mean()
                cells = [cell(escape(protocol_label(study.protocol)), tag="th"), cell(families.label(family))]
                cells += [cell(number(part["dataset"].nunique(), 0), kind="num")]
                cells += [
                    cell(
                        percent(float(means[m])),
                        value=float(means[m]),
                        kind="num" + (" struck" if family == name and m != METRICS[0] else ""),
                    )
                    for m in METRICS
                ]
                rows.append(f"<tr{' class=refused' if family == name else ''}>{''.join(cells)}</tr>")
    if not rows:
        return '<p class="note">No runs of the printed block are in this study.</p>'
    titles = ["Protocol", "Family", "Data sets", *(escape(metric_label(metric)) for metric in METRICS)]
    return "<h3>What it would have claimed</h3>" + table(
        "Printed and corrected block on the runs that both have, mean in percent",
        head(titles, left=2),
        rows,
        kind="claims",
        note="Struck figures are claims that the construction does not support; accuracy is an ordinary measurement.",
    )


def _value(key: str, value: Any) -> str:
    """Any value of the settings as HTML; long ones are folded."""
    if value is None or (isinstance(value, (Mapping, list, tuple, set, frozenset)) and not value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        items = "".join(f"<li>{escape(k)}: {_value(str(k), v)}</li>" for k, v in value.items())
        shown = f"<ul>{items}</ul>"
        return shown if len(shown) < 300 else _folded(len(value), shown)
    if isinstance(value, (list, tuple, set, frozenset)):
        shown = ", ".join(_value(key, item) for item in value)
        return shown if len(shown) < 300 else _folded(len(value), shown)
    if isinstance(value, (int, float)) and key.endswith("seconds"):
        return duration(float(value))
    if "command" in key:
        return f"<code>{escape(value)}</code>"
    return f"<bdi>{escape(value)}</bdi>"


def _folded(count: int, shown: str) -> str:
    entries = "entry" if count == 1 else "entries"
    return f"<details><summary>{number(count, 0)} {entries}</summary>{shown}</details>"


def provenance(frame: pd.DataFrame, settings: Mapping[str, Any] | None) -> str:
    """Versions, machine, command, seeds, rows."""
    items: list[tuple[str, str]] = []
    # The runs know better: a study may be resumed elsewhere, and settings hold the last call only.
    told = [column for column in _VERSIONS if column in frame.columns]
    for key, value in (settings or {}).items():
        if key != "title" and (key == "source" or key not in told):
            title = re.sub("_seconds$", " time", str(key).removesuffix("_version")).replace("_", " ").capitalize()
            items.append((escape(title), _value(str(key), value)))
    for column in told:
        title = {"source": "Sources of data"}.get(column, column.removesuffix("_version").capitalize())
        items.append((title, _unique(frame, column)))
    if "seeds" not in (settings or {}):
        items.append(("Seeds", _unique(frame, "seed", 12)))
    items.append(("Folds", _unique(frame, "fold", 12)))
    if "fingerprint" in frame.columns:
        items.append(("Run fingerprints", f"{number(frame['fingerprint'].nunique(), 0)} distinct"))
    if "finished_at" in frame.columns and frame["finished_at"].notna().any():
        times = sorted(str(value) for value in frame["finished_at"].dropna())
        items.append(("Runs finished", f"{escape(times[0])} to {escape(times[-1])}"))
    rows = "".join(
        f"<div{' class=full' if '<code>' in value else ''}><dt>{name}</dt><dd>{value}</dd></div>"
        for name, value in items
    )
    missing = (
        ""
        if settings
        else '<p class="note">No settings were handed to the report; the figures below are from the runs.</p>'
    )
    return f'{missing}<dl class="setup wide">{rows}</dl>'
