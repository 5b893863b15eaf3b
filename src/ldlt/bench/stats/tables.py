"""Tables as Markdown, LaTeX (booktabs) and CSV.

A :class:`Table` holds the result itself, in full precision, and the cells that show it. Markdown and LaTeX
print the cells; CSV prints the result. Names are escaped, so that any name of an algorithm or a metric is
safe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ldlt.bench.stats.ranks import Friedman
from ldlt.bench.stats.scores import check_alpha, need_columns
from ldlt.errors import OptionError

__all__ = [
    "Cell",
    "Table",
    "escape_latex",
    "escape_markdown",
    "format_p",
    "friedman_table",
    "metric_label",
    "outcomes_table",
    "overall_table",
    "pairwise_table",
    "ranges_table",
    "render",
    "stars",
    "summary_table",
    "write",
]

STARS_NOTE = "* p ≤ 0.05, ** p ≤ 0.01, *** p ≤ 0.001"

_FORMATS = {".md": "markdown", ".tex": "latex", ".csv": "csv"}
_LATEX = {
    "\\": r"\textbackslash{}",
    **{char: f"\\{char}" for char in "{}$&#_%"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after a line break LaTeX would read [..] and * as arguments
    "]": "{]}",
    "*": "{*}",
    "±": r"$\pm$",
    "≤": r"$\le$",
    "−": "$-$",
    "–": "--",
    "×": r"$\times$",
    "χ": r"$\chi$",
    "²": r"$^2$",
    "α": r"$\alpha$",
    "Δ": r"$\Delta$",
    "↓": r"$\downarrow$",
    "▲": r"$\blacktriangle$",
    "▼": r"$\blacktriangledown$",
    "·": r"$\cdot$",
    "∞": r"$\infty$",
}


@dataclass(frozen=True)
class Cell:
    """One shown cell.

    Attributes:
        text: What it says, not escaped.
        bold: Whether it stands out.
        stars: Number of stars of significance behind it.
    """

    text: str
    bold: bool = False
    stars: int = 0


@dataclass(frozen=True)
class Table:
    """A result and how it is shown.

    Attributes:
        data: The result in full precision; what CSV prints.
        header: Titles of the shown columns.
        body: Shown rows.
        align: One of ``l``, ``r``, ``c`` per column.
        caption: Title of the table; may be empty.
        note: Line below the table; may be empty.
    """

    data: pd.DataFrame
    header: tuple[str, ...]
    body: tuple[tuple[Cell, ...], ...]
    align: str
    caption: str = ""
    note: str = ""


def metric_label(metric: str) -> str:
    """Readable name of a metric.

    Example:
        >>> metric_label("cert_36"), metric_label("accuracy")
        ('Certified 36/255', 'Accuracy')
    """
    match = re.fullmatch(r"cert_(\d+)", metric)
    return f"Certified {match[1]}/255" if match else metric.replace("_", " ").capitalize()


def stars(p: float) -> int:
    """Stars of significance: one for p ≤ 0.05, two for p ≤ 0.01, three for p ≤ 0.001."""
    return sum(p <= level for level in (0.05, 0.01, 0.001))


def format_p(p: float) -> str:
    """Show a p-value: three decimals, or two digits and an exponent below 0.001; never a bare zero.

    Example:
        >>> format_p(0.0312), format_p(2.26e-17), format_p(0.0)
        ('0.031', '2.3e-17', '<1.0e-300')
    """
    if p < 1e-300:
        return "<1.0e-300"
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def escape_markdown(text: str) -> str:
    r"""Escape what Markdown would interpret inside a table.

    Example:
        >>> print(escape_markdown("a_b|c"))
        a\_b\|c
    """
    return re.sub(r"([\\`*_\[\]<>|~$&#])", r"\\\1", " ".join(text.split()))


def escape_latex(text: str) -> str:
    r"""Escape what LaTeX would interpret, and set numbers with an exponent or a minus sign as such.

    Example:
        >>> print(escape_latex("50% of A_1"), escape_latex("2.3e-17"), escape_latex("-0.5"))
        50\% of A\_1 $2.3\times10^{-17}$ $-0.5$
    """
    text = " ".join(text.split())
    number = re.fullmatch(r"(<?)(-?\d+(?:\.\d+)?)(?:e([+-]\d+))?", text)
    if number and (number[1] or number[2].startswith("-") or number[3]):
        power = rf"\times10^{{{int(number[3])}}}" if number[3] else ""
        return f"${number[1]}{number[2]}{power}$"
    broken = re.sub("-(?=-)", "-\0", text)  # keeps two hyphens from becoming a dash
    return "".join(_LATEX.get(char, char) for char in broken).replace("\0", "{}")


def _markdown(table: Table) -> str:
    def show(cell: Cell) -> str:
        text = escape_markdown(cell.text)
        return (f"**{text}**" if cell.bold and text else text) + r"\*" * cell.stars

    rule = {"l": ":--", "r": "--:", "c": ":-:"}
    lines = [[escape_markdown(title) for title in table.header], [rule[side] for side in table.align]]
    lines += [[show(cell) for cell in row] for row in table.body]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts = [escape_markdown(table.caption), grid, escape_markdown(table.note)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _latex(table: Table) -> str:
    def show(cell: Cell) -> str:
        text = escape_latex(cell.text)
        text = rf"\textbf{{{text}}}" if cell.bold and text else text
        return text + (f"$^{{{'*' * cell.stars}}}$" if cell.stars else "")

    rows = ["    " + " & ".join(show(cell) for cell in row) + r" \\" for row in table.body]
    lines = [
        r"\begin{table}[htb]",
        r"  \centering",
        *([rf"  \caption{{{escape_latex(table.caption)}}}"] if table.caption else []),
        rf"  \begin{{tabular}}{{@{{}}{table.align}@{{}}}}",
        r"    \toprule",
        "    " + " & ".join(escape_latex(title) for title in table.header) + r" \\",
        r"    \midrule",
        *rows,
        r"    \bottomrule",
        r"  \end{tabular}",
        *([r"  \par\smallskip", rf"  {{\footnotesize {escape_latex(table.note)}}}"] if table.note else []),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def render(table: Table, form: str = "markdown") -> str:
    """Text of a table.

    Args:
        table: The table.
        form: ``markdown``, ``latex`` (needs the packages ``booktabs`` and, for triangles, ``amssymb``) or
            ``csv``.
    """
    if form == "markdown":
        return _markdown(table)
    if form == "latex":
        return _latex(table)
    if form == "csv":
        return table.data.to_csv(index=False, lineterminator="\n")
    raise OptionError(f"form must be one of {tuple(_FORMATS.values())}, not '{form}'")


def write(table: Table, path: str | Path) -> Path:
    """Write a table in the form that the ending of the path names: ``.md``, ``.tex`` or ``.csv``."""
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise OptionError(f"the path must end in one of {tuple(_FORMATS)}, not '{path.suffix}'")
    path.write_text(render(table, _FORMATS[path.suffix]), encoding="utf-8", newline="\n")
    return path


def _number(value: float, digits: int) -> str:
    """A number with fixed digits; no minus sign before a zero; words for what is no number."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _integer(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def summary_table(
    result: pd.DataFrame, *, labels: Mapping[str, str] | None = None, caption: str = "", digits: int = 4
) -> Table:
    """Show :func:`~ldlt.bench.stats.summary.summarise`: mean ± deviation, best mean per metric in bold.

    Args:
        result: The summary.
        labels: Metric -> column title; :func:`metric_label` by default.
        caption: Title of the table.
        digits: Decimals.
    """
    need_columns(result, ["algorithm", "metric", "n", "mean", "sd", "best"], "the summary")
    metrics = list(dict.fromkeys(result["metric"]))
    cells: dict[tuple[str, str], Cell] = {}
    for row in result.itertuples():
        text = f"{_number(row.mean, digits)} ± {_number(row.sd, digits)}"
        cells[row.algorithm, row.metric] = Cell(text, bold=bool(row.best))
    sizes = dict(zip(result["algorithm"], result["n"], strict=True))
    body = tuple((Cell(name), Cell(str(sizes[name])), *(cells[name, metric] for metric in metrics)) for name in sizes)
    titles = [(labels or {}).get(metric, metric_label(metric)) for metric in metrics]
    return Table(result, ("Algorithm", "N", *titles), body, "lr" + "r" * len(metrics), caption)


def ranges_table(result: pd.DataFrame, *, labels: Mapping[str, str] | None = None, caption: str = "") -> Table:
    """Show :func:`~ldlt.bench.stats.summary.model_ranges`: min–max per algorithm and quantity.

    Args:
        result: The ranges.
        labels: Quantity -> column title.
        caption: Title of the table.
    """
    need_columns(result, ["algorithm", "quantity", "min", "max"], "the table of ranges")
    quantities = list(dict.fromkeys(result["quantity"]))
    cells = {
        (row.algorithm, row.quantity): Cell(f"{_integer(row.min)}–{_integer(row.max)}") for row in result.itertuples()
    }
    names = list(dict.fromkeys(result["algorithm"]))
    body = tuple((Cell(name), *(cells[name, quantity] for quantity in quantities)) for name in names)
    titles = [(labels or {}).get(quantity, quantity.replace("_", " ").capitalize()) for quantity in quantities]
    return Table(result, ("Algorithm", *titles), body, "l" + "r" * len(quantities), caption)


def friedman_table(
    results: Mapping[str, Friedman],
    critical: Mapping[str, float],
    bars: Mapping[str, Sequence[tuple[str, ...]]] | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    caption: str = "",
) -> Table:
    """Show the tests on ranks, one row per metric.

    Args:
        results: Metric -> :func:`~ldlt.bench.stats.ranks.friedman`.
        critical: Metric -> :func:`~ldlt.bench.stats.ranks.critical_difference`.
        bars: Metric -> :func:`~ldlt.bench.stats.ranks.rank_groups`, if they are to be listed.
        labels: Metric -> title of the row.
        caption: Title of the table.
    """
    bars = bars or {}
    rows, body = [], []
    for metric, test in results.items():
        row = {
            "metric": metric,
            "datasets": test.datasets,
            "algorithms": test.algorithms,
            "chi2": test.chi2,
            "chi2_df": test.chi2_df,
            "chi2_p": test.chi2_p,
            "f": test.f,
            "f_df1": test.f_df[0],
            "f_df2": test.f_df[1],
            "f_p": test.f_p,
            "critical_difference": critical[metric],
        }
        shown = [
            Cell((labels or {}).get(metric, metric_label(metric))),
            Cell(_number(test.chi2, 2)),
            Cell(format_p(test.chi2_p), stars=stars(test.chi2_p)),
            Cell(_number(test.f, 2)),
            Cell(f"{test.f_df[0]}, {test.f_df[1]}"),
            Cell(format_p(test.f_p), stars=stars(test.f_p)),
            Cell(_number(critical[metric], 3)),
        ]
        if bars:
            joined = "; ".join(", ".join(group) for group in bars.get(metric, []))
            row["groups"] = joined
            shown.append(Cell(joined or "–"))
        rows.append(row)
        body.append(tuple(shown))
    header = ("Metric", "χ²", "p(χ²)", "F", "df", "p(F)", "CD") + (("Not distinguished",) if bars else ())
    align = "lrrrrrr" + "l" * bool(bars)
    return Table(pd.DataFrame(rows), header, tuple(body), align, caption, STARS_NOTE)


def pairwise_table(pairs: pd.DataFrame, *, labels: Mapping[str, str] | None = None, caption: str = "") -> Table:
    """Show the tests of pairs, of one metric or of all.

    Args:
        pairs: Result of :func:`~ldlt.bench.stats.pairwise.compare` or ``compare_all``; its global column and
            its metrics are shown if it has them.
        labels: Metric -> what its rows say.
        caption: Title of the table.
    """
    fields = ["a", "b", "n", "wins_a", "wins_b", "ties", "win_rate_a", "median_diff", "w", "p", "p_holm", "r"]
    need_columns(pairs, fields, "the table of pairs")
    several, world = "metric" in pairs.columns, "p_holm_global" in pairs.columns
    body = []
    for row in pairs.itertuples():
        p_values = [row.p, row.p_holm, *([row.p_holm_global] if world else [])]
        metric = [Cell((labels or {}).get(row.metric, metric_label(row.metric)))] if several else []
        counts = [Cell(str(value)) for value in (row.n, row.wins_a, row.wins_b, row.ties)]
        body.append(
            (
                *metric,
                Cell(row.a),
                Cell(row.b),
                *counts,
                Cell(_number(row.win_rate_a, 4)),
                Cell(_number(row.median_diff, 4)),
                Cell(_integer(row.w)),
                *(Cell(format_p(p), stars=stars(p)) for p in p_values),
                Cell(_number(row.r, 4)),
            )
        )
    header = (
        *(("Metric",) if several else ()),
        *(
            "A",
            "B",
            "n",
            "Wins A",
            "Wins B",
            "Ties",
            "Win rate A",
            "Median Δ(A−B)",
            "W",
            "p",
            "p Holm within",
        ),
        *(("p Holm global",) if world else ()),
        "r",
    )
    align = "l" * (2 + several) + "r" * (10 + world)
    return Table(pairs, header, tuple(body), align, caption, STARS_NOTE)


def overall_table(
    result: pd.DataFrame,
    test: Friedman | None = None,
    cd: float | None = None,
    *,
    alpha: float = 0.05,
    caption: str = "",
) -> Table:
    """Show :func:`~ldlt.bench.stats.overall.standings`, with the tests on ranks in the note.

    Args:
        result: Significant wins and losses.
        test: Friedman's and Iman and Davenport's test of the same metric.
        cd: Nemenyi's critical difference.
        alpha: Level at which ``result`` and ``cd`` were made; it is only printed.
        caption: Title of the table.
    """
    fields = ["algorithm", "average_rank", "wins", "losses", "net_wins", "win_share", "mean_r"]
    need_columns(result, fields, "the overall table")
    body = tuple(
        (
            Cell(row.algorithm),
            Cell(_number(row.average_rank, 3)),
            *(Cell(str(value)) for value in (row.wins, row.losses, row.net_wins)),
            Cell(_number(row.win_share, 3)),
            Cell(_number(row.mean_r, 3)),
        )
        for row in result.itertuples()
    )
    header = ("Algorithm", "Avg rank ↓", "Sig. wins", "Sig. losses", "Net wins", "Win share", "Mean r")
    note = [f"Significance at α = {check_alpha(alpha):g}"]
    if test is not None:
        df = f"({test.f_df[0]}, {test.f_df[1]})"
        sign = "" if test.f_p < 1e-300 else "= "
        note.append(f"Iman–Davenport F{df} = {_number(test.f, 2)}, p {sign}{format_p(test.f_p)}")
    if cd is not None:
        note.append(f"Nemenyi CD = {_number(cd, 3)}")
    return Table(result, header, body, "lrrrrrr", caption, "; ".join(note))


def outcomes_table(result: pd.DataFrame, *, caption: str = "") -> Table:
    """Show :func:`~ldlt.bench.stats.overall.outcomes`: ▲ win, ▼ loss, · neither, row against column."""
    signs = {1: "▲", -1: "▼", 0: "·"}
    names = [str(name) for name in result.index]
    body = tuple(
        (Cell(name), *(Cell(signs[int(value)]) for value in row))
        for name, row in zip(names, result.to_numpy(), strict=True)
    )
    data = result.copy()
    data.insert(0, "algorithm", names, allow_duplicates=True)
    note = "Row against column: ▲ significant win, ▼ significant loss, · neither"
    return Table(data, ("", *names), body, "l" + "c" * len(names), caption, note)
