"""From the rows of a study to its tables, as Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from ldlt.errors import OptionError
from ldlt_bench.statistics import (
    DECIMALS,
    METRICS,
    POSTERIOR,
    RANGES,
    ROPE,
    MetricResult,
    ScoreError,
    Scores,
    metric_results,
    model_ranges,
    score_frames,
    summarise,
)
from ldlt_bench.study.family import AS_LDLT, AS_PRINTED
from ldlt_bench.study.results import write_whole

__all__ = [
    "Comparison",
    "Table",
    "bold",
    "compare_runs",
    "family_order",
    "format_number",
    "format_p",
    "lead",
    "make_tables",
    "metric_label",
    "render",
    "write_tables",
]

STARS = "* p ≤ 0.05, ** p ≤ 0.01, *** p ≤ 0.001"

_SIZES = ("input_dim", "output_dim", "train_rows", "validation_rows", "test_rows")
_ORDER = ("LDLT-R", "LDLT-L", "Sandwich", "SLL", "AOL", "Orthogonal", "CPL", "Spectral", AS_LDLT, AS_PRINTED)
_LATEX = {
    "±": r"$\pm$",
    "χ²": r"$\chi^2$",
    "≤": r"$\le$",
    "Δ": r"$\Delta$",
    "−": "$-$",
    "–": "--",
    "↓": r"$\downarrow$",
}
_LATEX |= {"▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$", "·": r"$\cdot$", "∞": r"$\infty$"}


def family_order(names: Iterable[str]) -> list[str]:
    """Known families in a fixed order, so that a family keeps its colour; others behind, alphabetically."""
    known = {name: index for index, name in enumerate(_ORDER)}
    return sorted(set(names), key=lambda name: (known.get(name, len(known)), name.casefold(), name))


@dataclass(frozen=True)
class Comparison:
    """Everything that is compared in the rows of one protocol.

    Attributes:
        families: Families that are compared.
        excluded: Families without a proven bound or without runs, which enter no statistic -> why.
        runs: The rows of both.
        scores, summary, results: Over the complete data sets, if there are any.
        notes: What was left out, and why.
    """

    families: list[str]
    excluded: dict[str, str]
    runs: pd.DataFrame = field(repr=False)
    scores: Scores | None = None
    summary: pd.DataFrame | None = None
    results: dict[str, MetricResult] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def rigorous(self) -> bool:
        """Whether the radii of all rows account for rounding: only then they are called certified."""
        return "rigorous" in self.runs and bool(len(self.runs)) and bool((self.runs["rigorous"] == True).all())  # noqa: E712

    @property
    def sets(self) -> list[str]:
        """The data sets that enter the statistics."""
        return [] if self.scores is None else [str(name) for name in self.scores.frames[METRICS[0]].index]

    def label(self, metric: str) -> str:
        """Name of a metric for people."""
        return metric_label(metric, self.rigorous)


def compare_runs(
    runs: pd.DataFrame, families: Sequence[str] | None = None, sets: Callable[[str], bool] | None = None
) -> Comparison:
    """Compare the families in the rows of one protocol, over the data sets with all runs of all families.

    What cannot be compared is left out with a note, never a reason to fail after hours of work.

    Args:
        runs: Rows of one protocol.
        families: Families to compare, in this order; by default those of the rows.
        sets: Which data sets, by their name; by default all.
    """
    if sets is not None:
        runs = runs[runs["dataset"].map(sets).astype(bool)].reset_index(drop=True)
    names = family_order(runs["family"].unique()) if families is None else list(families)
    excluded = {}
    for name in names:
        part = runs[runs["family"] == name]
        if part.empty:
            excluded[name] = "no results"
        elif name == AS_PRINTED or ("certified" in part and not (part["certified"] == True).all()):  # noqa: E712
            excluded[name] = "the construction does not keep its bound"
    shown = [name for name in names if name not in excluded]
    notes = [f"{name}: not compared ({reason})" for name, reason in excluded.items()]
    runs = runs[runs["family"].isin(names)]
    if not shown:
        return Comparison(shown, excluded, runs, notes=(*notes, "nothing to compare"))
    try:
        scores = score_frames(runs, algorithms=shown)
    except ScoreError as error:
        return Comparison(shown, excluded, runs, notes=(*notes, str(error)))
    notes += [f"{name}: not compared ({reason})" for name, reason in scores.dropped.items()]
    summary, results = summarise(scores.frames), metric_results(scores.frames)
    if any(result.test is None for result in results.values()):
        notes.append("no tests: at least two data sets and two families are needed")
    return Comparison(shown, excluded, runs, scores, summary, results, tuple(notes))


@dataclass(frozen=True)
class Table:
    """A result in full precision (what CSV prints), its cells as text with titles, and a line below them."""

    data: pd.DataFrame
    shown: pd.DataFrame
    caption: str
    note: str = ""


def make_tables(comparison: Comparison) -> dict[str, Table]:
    """All tables of a comparison by name; none if there is nothing to compare."""
    c = comparison
    if c.scores is None or c.summary is None:
        return {}
    complete = c.runs[c.runs["dataset"].isin(c.sets) & c.runs["family"].isin(c.families)]
    tables = {"summary": _summary(c)}
    if set(RANGES) <= set(complete.columns):
        tables["ranges"] = _ranges(model_ranges(complete))
    if "edge" in complete:
        tables["search"] = _search(complete)
    if len(c.families) > 1 and set(_SIZES) <= set(complete.columns):
        sets = lead(c)
        tables["sets"], tables["where"] = _sets(sets), _where(sets, c)
    tested = {metric: result for metric, result in c.results.items() if result.test is not None}
    if not tested:
        return tables
    for metric, result in tested.items():
        tables[f"overall-{metric}"] = _overall(result, c.label(metric))
        tables[f"outcomes-{metric}"] = _outcomes(result, c.label(metric))
    tables["friedman"] = _friedman(tested, c.label)
    tables["pairwise"] = _pairs(pd.concat([r.pairs for r in tested.values()], ignore_index=True), c.label)
    return tables


def metric_label(metric: str, rigorous: bool = False) -> str:
    """Readable name of a metric; *certified* is said only of radii that account for rounding.

    Example:
        >>> metric_label("cert_36"), metric_label("cert_36", rigorous=True), metric_label("accuracy")
        ('Robust 36/255', 'Certified 36/255', 'Accuracy')
    """
    match = re.fullmatch(r"cert_(\d+)", metric)
    return f"{'Certified' if rigorous else 'Robust'} {match[1]}/255" if match else metric.replace("_", " ").capitalize()


def format_p(p: float) -> str:
    """Show a p-value with its stars: three decimals, or two digits and an exponent below 0.001; never a bare zero.

    Example:
        >>> format_p(0.0312), format_p(2.26e-17), format_p(0.0)
        ('0.031*', '2.3e-17***', '<1.0e-300***')
    """
    text = "<1.0e-300" if p < 1e-300 else f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"
    return text + "*" * sum(p <= level for level in (0.05, 0.01, 0.001))


def format_number(value: float, digits: int) -> str:
    """A number with fixed digits; no minus sign before a zero; signs for what is no number."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def bold(text: str, stands_out: bool = True) -> str:
    """Text of a cell, marked if it stands out; every form shows the marks in its own way."""
    return f"\x02{text}\x03" if stands_out else text


def render(table: Table, form: str = "markdown") -> str:
    """Text of a table.

    Args:
        table: The table.
        form: ``markdown``, ``latex`` (needs the packages ``booktabs`` and, for triangles, ``amssymb``) or ``csv``.

    Raises:
        OptionError: If there is no such form.
    """
    if form == "csv":
        return str(table.data.to_csv(index=False, lineterminator="\n"))
    if form == "markdown":
        clean = table.shown.map(_markdown).rename(columns=_markdown)
        align = ["left" if kind == "l" else "right" for kind in _alignment(table)]
        grid = clean.to_markdown(index=False, disable_numparse=True, colalign=align)
        return "\n\n".join(part for part in (_markdown(table.caption), grid, _markdown(table.note)) if part) + "\n"
    if form == "latex":
        text = table.shown.to_latex(
            index=False, escape=True, caption=_tex(table.caption), position="htb", column_format=_alignment(table)
        )
        text = text.replace("\x02", r"\textbf{").replace("\x03", "}")
        for character, command in _LATEX.items():
            text = text.replace(character, command)
        note = "\n".join([r"\par\smallskip", rf"{{\footnotesize {_tex(table.note)}}}", r"\end{table}"])
        return str(text.replace(r"\end{table}", note) if table.note else text)
    raise OptionError(f"form must be markdown, latex or csv, not '{form}'")


def write_tables(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Write all tables in all forms, and what was left out into ``notes.txt``; older ones are replaced."""
    folder = Path(folder)
    texts = {
        f"{name}.{ending}": render(table, form)
        for name, table in make_tables(comparison).items()
        for ending, form in (("md", "markdown"), ("tex", "latex"), ("csv", "csv"))
    }
    if comparison.notes:
        texts["notes.txt"] = "\n".join(comparison.notes) + "\n"
    for old in folder.glob("*.*"):
        if old.name not in texts and old.suffix in (".md", ".tex", ".csv", ".txt"):
            old.unlink(missing_ok=True)
    return [write_whole(folder / name, text.encode()) for name, text in texts.items()]


def _alignment(table: Table) -> str:
    words = {"Algorithm", "Metric", "A", "B", "Not distinguished", "Data set", "Data sets", "Best other", ""}
    return "".join("l" if str(title) in words else "r" for title in table.shown.columns)


def _markdown(text: Any) -> str:
    escaped = re.sub(r"([\\`*_\[\]<>|~$&#])", r"\\\1", " ".join(str(text).split()))
    return escaped.replace("\x02", "**").replace("\x03", "**")


def _tex(text: str) -> str:
    for character, command in _LATEX.items():
        text = text.replace(character, command)
    return text


def _summary(c: Comparison) -> Table:
    assert c.summary is not None
    cells = c.summary.assign(
        text=[
            bold(f"{format_number(row.mean, 4)} ± {format_number(row.sd, 4)}", row.best)
            for row in c.summary.itertuples()
        ]
    )
    shown = cells.pivot(index="algorithm", columns="metric", values="text").loc[c.families, list(METRICS)]
    shown = shown.rename(columns=c.label).rename_axis(None, axis=1).reset_index(names="Algorithm")
    shown.insert(1, "N", str(len(c.sets)))
    note = "" if c.rigorous else "Robust: right with a margin for the radius, in real arithmetic; rounding not charged"
    for name in c.excluded:  # accuracy is an ordinary measurement; radii would be claims that do not hold
        rows = c.runs[(c.runs["family"] == name) & c.runs["dataset"].isin(c.sets)]
        if len(rows):
            means = rows.groupby("dataset")["accuracy"].mean()
            spread = f"{format_number(means.mean(), 4)} ± {format_number(means.std(), 4)}"
            shown.loc[len(shown)] = [f"{name} †", str(len(means)), spread, *["–"] * (len(METRICS) - 1)]
            note += f". † {name}: no proven bound, in no comparison{_broken(rows)}"
    note = note.removeprefix(". ")
    return Table(c.summary, shown, f"Mean ± standard deviation over {len(c.sets)} data sets", note)


def _broken(rows: pd.DataFrame) -> str:
    """What a search found of a bound that is only claimed."""
    found = rows["violation"].dropna() if "violation" in rows else pd.Series(dtype=float)
    if found.empty:
        return ""
    broken = int((found > 1 + 1e-9).sum())
    return f"; a search breaks the bound it claims in {broken} of {len(found)} networks: up to {found.max():.2f} times"


def lead(c: Comparison) -> pd.DataFrame:
    """Where the first of the families LDLT-L, LDLT-R, … is ahead and where not, by the mean of the five metrics.

    Returns:
        One row per data set, the largest loss first: ``dataset``, ``rows``, ``features``, ``classes``, ``family``,
        ``score``, ``other`` (the best of the others), ``other_score``, ``difference`` and one column per other family.
    """
    assert c.scores is not None
    mine = next((name for name in ("LDLT-L", "LDLT-R") if name in c.families), c.families[0])
    means = sum(c.scores.frames.values()) / len(c.scores.frames)
    others = means.drop(columns=mine)
    sizes = c.runs.groupby("dataset")[["input_dim", "output_dim"]].first()
    rows = c.runs.groupby("dataset")[["train_rows", "validation_rows", "test_rows"]].first().sum(axis=1)
    found = pd.DataFrame(
        {
            "rows": rows,
            "features": sizes["input_dim"],
            "classes": sizes["output_dim"],
            "family": mine,
            "score": means[mine],
            "other": others.idxmax(axis=1),
            "other_score": others.max(axis=1),
            "difference": means[mine] - others.max(axis=1),
        }
    ).loc[means.index]
    gaps = others.rsub(means[mine], axis=0).round(DECIMALS)
    return found.join(gaps).sort_values("difference", kind="stable").reset_index(names="dataset")


def _sets(sets: pd.DataFrame) -> Table:
    mine = sets["family"].iloc[0]
    shown = pd.DataFrame({"Data set": sets["dataset"].astype(str)})
    for title in ("rows", "features", "classes"):
        shown[title.capitalize()] = sets[title].astype(int).astype(str)
    shown[f"{mine} in %"] = sets["score"].map(_percent)
    shown["Best other"], shown["Its %"] = sets["other"], sets["other_score"].map(_percent)
    shown["Points"] = [bold(_points(v), v < 0) for v in sets["difference"]]
    note = "Mean of the five metrics; points: percentage points ahead of the best other family, behind it in bold"
    return Table(sets, shown, f"{mine} on every data set, the largest loss first", note)


def _where(sets: pd.DataFrame, c: Comparison) -> Table:
    mine = sets["family"].iloc[0]
    groups = {"all": sets.index >= 0}
    for size in ("rows", "features", "classes"):
        edges = [-math.inf, *sorted(set(sets[size].quantile([1 / 3, 2 / 3]))), math.inf]
        for low, high in pairwise(edges):
            text = f"{size} ≤ {high:g}" if low == -math.inf else f"{size} > {low:g}"
            inside = (sets[size] > low) & (sets[size] <= high)
            if inside.any():
                groups[text if math.inf in (high, -low) else f"{low:g} < {size} ≤ {high:g}"] = inside
    data, shown = [], []
    for name, inside in groups.items():
        line = {"Data sets": name, "N": str(int(inside.sum()))}
        for other in (family for family in c.families if family != mine):
            gap = sets.loc[inside, other]
            wins, losses = int((gap > 0).sum()), int((gap < 0).sum())
            data.append(
                {"group": name, "n": len(gap), "other": other, "wins": wins, "losses": losses, "mean": gap.mean()}
            )
            line[other] = f"{wins} : {losses} ({_points(gap.mean())})"
        shown.append(line)
    note = f"Sets on which {mine} is ahead : behind, by the mean of the five metrics (mean difference in points)"
    return Table(pd.DataFrame(data), pd.DataFrame(shown), f"Where {mine} wins and loses", note)


def _search(runs: pd.DataFrame) -> Table:
    """How often the search over step sizes ended at its edge."""
    shares = pd.DataFrame({name: runs["edge"] == side for name, side in (("smallest", -1), ("largest", 1))})
    data = shares.groupby(runs["family"]).mean().assign(networks=runs.groupby("family").size())
    data = data.loc[family_order(data.index)].reset_index(names="algorithm")
    shown = pd.DataFrame({"Algorithm": data["algorithm"], "Networks": data["networks"].astype(str)})
    for name in shares:
        shown[f"{str(name).capitalize()} in %"] = [bold(_percent(v), v > 0.1) for v in data[name]]
    return Table(data, shown, "Step sizes at an edge of the search", "Bold: more than one network in ten")


def _percent(value: float) -> str:
    return format_number(100 * value, 1)


def _points(value: float) -> str:
    text = format_number(100 * value, 1)
    return text if text.startswith("-") or float(text) == 0 else f"+{text}"


def _ranges(result: pd.DataFrame) -> Table:
    def span(row: Any) -> str:
        return f"{row['min']:g}–{row['max']:g}" if row["max"] < 1e5 else f"{row['min']:.0f}–{row['max']:.0f}"

    cells = result.assign(text=result.apply(span, axis=1))
    shown = cells.pivot(index="algorithm", columns="quantity", values="text")[list(RANGES)]
    shown = shown.rename(columns=lambda name: name.replace("_", " ").capitalize()).rename_axis(None, axis=1)
    return Table(result, shown.reset_index(names="Algorithm"), "Sizes of the models")


def _overall(result: MetricResult, caption: str) -> Table:
    data, test = result.standings, result.test
    assert data is not None and test is not None and result.cd is not None  # noqa: PT018
    shown = _shown(
        data,
        {"Algorithm": "algorithm", "Sig. wins": "wins", "Sig. losses": "losses", "Net wins": "net_wins"},
        {"Win share": "win_share", "Mean r": "mean_r"},
        3,
    )
    shown.insert(1, "Avg rank ↓", data["average_rank"].map(lambda v: format_number(v, 3)))
    note = (
        f"Significance at α = 0.05; Iman–Davenport F{test.f_df} = {format_number(test.f, 2)}, "
        f"p = {format_p(test.f_p).rstrip('*')}; Nemenyi CD = {format_number(result.cd, 3)}"
    ).replace("p = <", "p < ")
    return Table(data, shown, caption, note)


def _outcomes(result: MetricResult, caption: str) -> Table:
    assert result.outcomes is not None
    shown = result.outcomes.map({1: "▲", -1: "▼", 0: "·"}.__getitem__).reset_index(names="")
    data = result.outcomes.reset_index(names="algorithm")
    return Table(data, shown, caption, "Row against column: ▲ significant win, ▼ significant loss, · neither")


def _friedman(results: dict[str, MetricResult], label: Callable[[str], str]) -> Table:
    data, shown = [], []
    for metric, result in results.items():
        test, cd = result.test, result.cd
        assert test is not None and cd is not None  # noqa: PT018
        groups = "; ".join(", ".join(group) for group in result.groups)
        data.append({"metric": metric, **vars(test), "critical_difference": cd, "groups": groups})
        shown.append(
            {
                "Metric": label(metric),
                "χ²": format_number(test.chi2, 2),
                "p(χ²)": format_p(test.chi2_p),
                "F": format_number(test.f, 2),
                "df": ", ".join(map(str, test.f_df)),
                "p(F)": format_p(test.f_p),
                "CD": format_number(cd, 3),
                "Not distinguished": groups or "–",
            }
        )
    return Table(pd.DataFrame(data), pd.DataFrame(shown), "Tests on ranks", STARS)


def _pairs(pairs: pd.DataFrame, label: Callable[[str], str]) -> Table:
    whole = {"A": "a", "B": "b", "n": "n", "Wins A": "wins_a", "Wins B": "wins_b", "Ties": "ties"}
    shown = _shown(pairs, whole, {"Win rate A": "win_rate_a", "Median Δ(A−B)": "median_diff"}, 4)
    shown.insert(0, "Metric", pairs["metric"].map(label))
    shown["W"] = pairs["w"].map("{:g}".format)
    for title, name in {"p": "p", "p Holm within": "p_holm", "p Holm global": "p_holm_global"}.items():
        shown[title] = pairs[name].map(format_p)
    shown["r"] = pairs["r"].map(lambda v: format_number(v, 4))
    for title, name in zip(("P(A>B)", "P(A=B)", "P(A<B)"), POSTERIOR, strict=True):
        shown[title] = pairs[name].map(lambda v: format_number(v, 3))
    note = f"{STARS}; P: Bayesian signed-rank test, '=' within {100 * ROPE:g} percentage point"
    return Table(pairs, shown, "Signed-rank tests", note)


def _shown(data: pd.DataFrame, plain: dict[str, str], numbers: dict[str, str], digits: int) -> pd.DataFrame:
    """Columns by their titles: some as they are, some as numbers with fixed digits."""
    columns = {title: data[name].astype(str) for title, name in plain.items()}
    columns |= {title: data[name].map(lambda v: format_number(v, digits)) for title, name in numbers.items()}
    return pd.DataFrame(columns)
