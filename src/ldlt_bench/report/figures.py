"""Pictures of the page, drawn by matplotlib as SVG, each as an address that holds the whole picture."""

from __future__ import annotations

import base64
import io
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import scikit_posthocs
import torch
from matplotlib.figure import Figure

from ldlt_bench.paper import ScalarCounterexample
from ldlt_bench.statistics import average_ranks, nemenyi
from ldlt_bench.study.protocol import CURVE
from ldlt_bench.tables import Comparison, family_order

__all__ = ["cone", "curves", "leads", "rank_diagram"]

_COLOURS = matplotlib.color_sequences["tab10"]


def _address(figure: Figure) -> str:
    """The figure as SVG in an address; the same figure gives the same address."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ldlt", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _plain(name: str) -> str:
    """A name without what matplotlib would read as a formula."""
    return name.replace("$", r"\$")


def _colour(names: list[str], name: str) -> Any:
    return _COLOURS[family_order(names).index(name) % len(_COLOURS)]


def rank_diagram(scores: pd.DataFrame) -> str:
    """Critical-difference diagram after Demšar (2006): bars join families that Nemenyi's test does not distinguish."""
    scores = scores.rename(columns=_plain)
    figure = Figure(figsize=(7.6, 0.9 + 0.27 * scores.shape[1]), layout="constrained")
    names = list(scores.columns)
    scikit_posthocs.critical_difference_diagram(
        average_ranks(scores),
        nemenyi(scores),
        ax=figure.subplots(),
        label_fmt_left="{label} ({rank:.2f})",
        label_fmt_right="({rank:.2f}) {label}",
        color_palette={name: _colour(names, name) for name in names},
    )
    return _address(figure)


def curves(comparison: Comparison) -> str | None:
    """Share of test rows that are right with a margin for a radius, mean over the complete data sets, or None."""
    runs = comparison.runs
    if "curve" not in runs or not comparison.sets:
        return None
    runs = runs[runs["dataset"].isin(comparison.sets) & runs["family"].isin(comparison.families)]
    whole = runs[runs["curve"].map(lambda c: np.shape(c) == (len(CURVE),))]
    if len(whole) < len(runs):
        return None
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in comparison.families:
        mine = whole[whole["family"] == name].groupby("dataset")["curve"].apply(lambda c: np.mean(list(c), axis=0))
        axes.plot(
            CURVE, 100 * np.mean(list(mine), axis=0), label=_plain(name), color=_colour(comparison.families, name)
        )
    axes.set(
        xlabel="radius (Euclidean, in standardised units)", ylabel="share of test rows in %", ylim=(0, 100), xlim=(0, 2)
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper right")
    return _address(figure)


def leads(sets: pd.DataFrame) -> str:
    """How far a family is ahead of the best other one, against sizes of data sets (:func:`~ldlt_bench.tables.lead`)."""
    figure = Figure(figsize=(7.6, 3.0), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, size in zip(panels, ("rows", "features", "classes"), strict=True):
        axes.scatter(sets[size], 100 * sets["difference"], s=12, alpha=0.7)
        axes.axhline(0.0, color="#57606a", linewidth=0.8)
        axes.set(xlabel=f"{size} of the data set", xscale="log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"{_plain(sets['family'].iloc[0])} ahead of the best other,\npercentage points")
    return _address(figure)


def cone(example: ScalarCounterexample) -> str:
    """The printed block with one input, one ReLU and one output, beside what its bound allows."""
    figure = Figure(figsize=(4.2, 3.4), layout="constrained")
    axes = figure.subplots()
    x = torch.linspace(-1.0, 1.0, 21, dtype=torch.float64)
    axes.fill_between(x, -x.abs(), x.abs(), alpha=0.2, label="bound 1")
    y = example.block.forward(x[:, None])[:, 0]
    axes.plot(x, y, color="#c0392b", label=f"printed block, slope {example.measured_slope:.2f}")
    axes.set(xlabel="input x", ylabel="output f(x)")
    axes.legend(frameon=False, loc="upper center")
    return _address(figure)
