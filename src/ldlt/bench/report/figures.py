"""Inline SVG that is drawn when the page is built."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from ldlt.bench.report.markup import Families, escape, number

__all__ = ["cd_diagram", "cone", "span_bar"]

_LONGEST = 22  # characters of a name beside a diagram


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def cd_diagram(
    ranks: pd.Series, cd: float, groups: Sequence[tuple[str, ...]], families: Families, *, title: str, ident: str
) -> str:
    """Critical-difference diagram after Demšar (2006), best rank on the left.

    Args:
        ranks: Average ranks, best first.
        cd: Critical difference.
        groups: Families that are not distinguished; each becomes a bar.
        families: Colours.
        title: What the diagram shows, in plain text.
        ident: Unique prefix of the element ids.
    """
    names = [str(name) for name in ranks.index]
    values = [float(value) for value in ranks]
    k = len(names)
    width, left, right, axis = 760.0, 175.0, 585.0, 66.0
    half = (k + 1) // 2
    by_name = dict(zip(names, values, strict=True))
    spans = [(min(by_name[name] for name in group), max(by_name[name] for name in group)) for group in groups]
    levels: list[float] = []  # right end of the last bar on every level; bars that do not meet share one
    rows = []
    for low, high in spans:
        level = next((index for index, last in enumerate(levels) if low - last > 0.3), len(levels))
        levels[level : level + 1] = [high]
        rows.append(level)
    bars_end = axis + 12 + 11 * len(levels)
    first, step = bars_end + 14, 25.0
    height = first + step * (half - 1) + 16

    def x(rank: float) -> float:
        return left + (rank - 1) / (k - 1) * (right - left)

    words = [f"{name} {number(value, 2)}" for name, value in zip(names, values, strict=True)]
    joined = "; ".join(", ".join(group) for group in groups) or "none"
    told = f"Average ranks: {', '.join(words)}. Critical difference {number(cd, 3)}. Not distinguished: {joined}."
    parts = [
        f'<svg class="cd" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-labelledby="{ident}-t {ident}-d"><title id="{ident}-t">{escape(title)}</title>'
        f'<desc id="{ident}-d">{escape(told)}</desc>'
    ]
    # Ruler. It starts at rank 1 and may be longer than the axis when there are few data sets.
    end = min(x(1 + cd), width - 20)
    parts += [
        _line(left, 22, end, 22, "cd-rule"),
        _line(left, 17, left, 27, "cd-rule"),
        _line(end, 17, end, 27, "cd-rule") if end == x(1 + cd) else _text(end + 8, 26, "…", "cd-note"),
        _text(min((left + end) / 2, width / 2), 12, f"CD = {number(cd, 3)}", "cd-note"),
        _line(left, axis, right, axis, "cd-axis"),
    ]
    for rank in range(1, k + 1):
        parts.append(_line(x(rank), axis - 7, x(rank), axis, "cd-axis"))
        parts.append(_text(x(rank), axis - 13, str(rank), "cd-tick"))
        if rank < k:
            parts.append(_line(x(rank + 0.5), axis - 4, x(rank + 0.5), axis, "cd-axis"))
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        before = index < half
        # Outermost names on top: no line crosses another.
        y = first + step * (index if before else k - 1 - index)
        edge = left - 22 if before else right + 22
        shown, rank_text = escape(_short(name)), number(value, 2)
        slot, family = families.slot(name), families.index(name)
        label = f'<tspan class="cd-name">{shown}</tspan>'
        score = f'<tspan class="cd-rank">{rank_text}</tspan>'
        parts.append(
            f'<g class="s{slot}" data-dim="{family}"><path class="cd-lead" '
            f'd="M{x(value):.1f} {axis:.1f}V{y:.1f}H{edge:.1f}"/>'
            f'<circle class="cd-dot" cx="{x(value):.1f}" cy="{axis:.1f}" r="4"/>'
            + _text(
                edge + (-7 if before else 7),
                y + 4,
                f"{label}&#160; {score}" if before else f"{score}&#160; {label}",
                "cd-label",
                "end" if before else "start",
            )
            + "</g>"
        )
    for row, (low, high) in zip(rows, spans, strict=True):
        y = axis + 13 + 11 * row
        parts.append(_line(x(low) - 5, y, x(high) + 5, y, "cd-bar"))
    return "".join(parts) + "</svg>"


def cone(points: Sequence[tuple[float, float]], bound: float, *, title: str, description: str, ident: str) -> str:
    """A scalar function through the origin and the cone that its bound leaves to it.

    Args:
        points: Points of the function on [−1, 1].
        bound: Its claimed Lipschitz constant.
        title: Title in plain text.
        description: What it shows, in plain text.
        ident: Unique prefix of the element ids.
    """
    size, middle, unit = 300.0, 150.0, 96.0

    def place(px: float, py: float) -> str:
        return f"{middle + unit * px:.1f} {middle - unit * py:.1f}"

    wedge = "".join(
        f'<path class="cone" d="M{place(0, 0)}L{place(side, side * bound)}L{place(side, -side * bound)}Z"/>'
        for side in (1.0, -1.0)
    )
    curve = "L".join(place(px, py) for px, py in points)
    end = points[-1]
    slope = end[1] / end[0]
    return (
        f'<svg class="cone-figure" viewBox="0 0 {size:.0f} {size - 20:.0f}" role="img" aria-labelledby="{ident}-t '
        f'{ident}-d"><title id="{ident}-t">{escape(title)}</title><desc id="{ident}-d">{escape(description)}</desc>'
        f"{wedge}{_line(30, middle, 270, middle, 'axis')}{_line(middle, 20, middle, 270, 'axis')}"
        f'<path class="breach" d="M{curve}"/>'
        + _text(middle + unit * end[0] - 6, middle - unit * end[1] - 8, f"slope {number(slope, 2)}", "hot", "end")
        + _text(middle + unit + 6, middle - unit * bound + 4, f"bound {number(bound, 0)}", "cd-note", "start")
        + _text(272, middle + 16, "x", "cd-note", "end")
        + _text(middle - 8, 28, "f(x)", "cd-note", "end")
        + "</svg>"
    )


def span_bar(low: float, first: float, middle: float, third: float, high: float, ends: tuple[float, float]) -> str:
    """Range, quartiles and median on a logarithmic scale that all rows of a table share."""
    a, b = (math.log(max(end, 1e-12)) for end in ends)

    def at(value: float) -> str:
        return f"{100 * (math.log(max(value, 1e-12)) - a) / (b - a) if b > a else 50:.1f}%"

    places = zip("abcde", (low, first, middle, third, high), strict=True)
    style = ";".join(f"--{key}:{at(value)}" for key, value in places)
    return f'<span class="span" style="{style}" aria-hidden="true"><i></i><b></b><u></u></span>'
