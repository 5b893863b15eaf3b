"""Putting the page together: results from :mod:`ldlt_bench.tables`, pictures from matplotlib, a template of jinja2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ldlt_bench.paper import scalar_counterexample, violation
from ldlt_bench.report.figures import cone, curves, leads, rank_diagram
from ldlt_bench.statistics import METRICS, ScoreError
from ldlt_bench.study.results import KEYS, write_whole
from ldlt_bench.tables import Comparison, Table, bold, compare_runs, format_number, lead, make_tables

__all__ = ["build_report", "write_report"]

_VERSIONS = ("ldlt_version", "torch_version", "numpy_version", "python_version", "machine", "dtype", "source")
_UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # what HTML or UTF-8 cannot hold


def build_report(frame: pd.DataFrame, settings: Mapping[str, Any] | None = None) -> str:
    """Build the page.

    Args:
        frame: One row per protocol, data set, family, fold and seed, with the five metrics; any other column may be
            missing. Only data sets that every family with a proven bound completed enter the statistics.
        settings: What the page shows under provenance, such as the command and the versions. ``title`` replaces the
            title; ``datasets`` and ``families`` say what was planned; ``shortened`` marks a quick look.

    Returns:
        The page as HTML, the same for the same input.
    """
    settings = dict(settings or {})
    missing = [name for name in (*KEYS, *METRICS) if name not in frame.columns]
    if missing or frame.empty or frame[KEYS].isna().any(axis=None) or frame.duplicated(KEYS).any():
        raise ScoreError(f"the rows are empty, lack a column or key {missing}, or have a run twice")
    text = [name for name, kind in frame.dtypes.items() if not pd.api.types.is_numeric_dtype(kind) and name != "curve"]
    frame = frame.assign(**{str(n): frame[n].map(lambda v: _clean(v) if isinstance(v, str) else v) for n in text})
    comparisons = {
        str(name): compare_runs(part.reset_index(drop=True)) for name, part in frame.groupby("protocol", sort=True)
    }
    environment = Environment(
        loader=PackageLoader("ldlt_bench", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["mark"] = _mark
    scalar = scalar_counterexample()
    return environment.get_template("page.html.j2").render(
        title=_clean(settings.pop("title", "Lipschitz networks compared")),
        cautions=_cautions(frame, settings),
        facts=_facts(frame, comparisons),
        studies=[_study(name, comparison) for name, comparison in comparisons.items()],
        rigorous=all(comparison.rigorous for comparison in comparisons.values()),
        scalar=scalar,
        found=violation(scalar.block, starts=16, steps=40),
        cone=cone(scalar),
        provenance={_clean(key): _value(value) for key, value in settings.items()}
        | {f"{name} (of the rows)": _unique(frame[name]) for name in _VERSIONS if name in frame},
    )


def write_report(frame: pd.DataFrame, path: str | Path, *, settings: Mapping[str, Any] | None = None) -> Path:
    """Write the page of :func:`build_report` to a file, making its folder if needed; returns the path."""
    return write_whole(Path(path), build_report(frame, settings).encode())


def _study(name: str, c: Comparison) -> dict[str, Any]:
    """What the page shows of one protocol."""
    tables = make_tables(c)
    metrics = []
    for metric, result in c.results.items():
        if result.test is None or c.scores is None:
            continue
        pairs = tables["pairwise"]
        mine = pairs.shown[pairs.shown["Metric"] == c.label(metric)].drop(columns="Metric")
        metrics.append(
            {
                "label": c.label(metric),
                "diagram": rank_diagram(c.scores.frames[metric]),
                "overall": tables[f"overall-{metric}"],
                "outcomes": tables[f"outcomes-{metric}"],
                "pairs": Table(pairs.data, mine, f"Pairs of families: {c.label(metric)}", pairs.note),
            }
        )
    return {
        "name": name,
        "complete": len(c.sets),
        "sets": c.runs["dataset"].nunique(),
        "tables": tables,
        "metrics": metrics,
        "curves": curves(c),
        "leads": leads(lead(c)) if "sets" in tables else None,
        "scores": [] if c.scores is None else [_scores(c, m, f) for m, f in c.scores.frames.items()],
        "costs": _costs(c.runs),
        "notes": c.notes,
    }


def _scores(c: Comparison, metric: str, frame: pd.DataFrame) -> Table:
    best = frame.max(axis=1)
    cells = {
        str(name): [bold(f"{100 * v:.1f}", v == b) for v, b in zip(frame[name], best, strict=True)] for name in frame
    }
    shown = pd.DataFrame({"Data set": frame.index.astype(str), **cells})
    return Table(frame, shown, f"{c.label(metric)}, in % of the test rows, mean over folds and seeds; best in bold")


def _costs(runs: pd.DataFrame) -> Table | None:
    """Time and size of one run."""
    if not {"seconds", "parameters"} <= set(runs.columns):
        return None
    numbers = runs[["seconds", "parameters"]].apply(pd.to_numeric, errors="coerce").groupby(runs["family"])
    low, middle, high, total = numbers.min(), numbers.median(), numbers.max(), numbers.sum()
    shown = pd.DataFrame(
        {
            "Algorithm": middle.index,
            "Median s": [f"{v:.3g}" for v in middle["seconds"]],
            "Range s": [f"{a:.2g}–{b:.2g}" for a, b in zip(low["seconds"], high["seconds"], strict=True)],
            "Total s": [f"{v:.1f}" for v in total["seconds"]],
            "Median parameters": [f"{v:,.0f}" for v in middle["parameters"]],
            "Runs": numbers.size().astype(str).to_list(),
        }
    )
    note = "s: seconds of training for one fold and seed, searches included. Parameters: trained numbers."
    return Table(shown, shown, "Time and size of one run", note)


def _facts(frame: pd.DataFrame, comparisons: Mapping[str, Comparison]) -> list[str]:
    shown = {name for c in comparisons.values() for name in c.families}
    facts = [
        f"{len(frame):,} training runs",
        f"{frame['dataset'].nunique()} data sets",
        f"{len(shown)} families with a proven bound",
        f"{frame['fold'].nunique()} folds, {frame['seed'].nunique()} seeds",
    ]
    if "seconds" in frame:
        facts.append(
            f"{format_number(pd.to_numeric(frame['seconds'], errors='coerce').sum() / 3600, 2)} hours of training"
        )
    return facts


def _cautions(frame: pd.DataFrame, settings: Mapping[str, Any]) -> list[str]:
    found = []
    if settings.get("shortened"):
        found.append("A quick look: training was cut short, so these figures compare with no other study.")
    if "finished_at" in settings and not settings["finished_at"]:
        found.append("The study is not finished.")
    for key, column in (("datasets", "dataset"), ("families", "family")):
        absent = [_clean(name) for name in settings.get(key) or [] if str(name) not in set(frame[column].astype(str))]
        if absent:
            found.append(f"Planned, but without runs so far: {', '.join(absent)}.")
    bad = int((~np.isfinite(frame[list(METRICS)].apply(pd.to_numeric, errors="coerce"))).any(axis=1).sum())
    if bad:
        found.append(f"{bad} runs without usable metrics count as missing.")
    return found


def _clean(value: Any) -> str:
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", str(value))


def _unique(column: pd.Series) -> str:
    values = sorted({_clean(value) for value in column.dropna()})
    return ", ".join(values) if len(values) < 7 else f"{values[0]} to {values[-1]} ({len(values)} values)"


def _value(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return _clean(json.dumps(value, ensure_ascii=False, default=str, indent=1))
    return _clean(value)


def _mark(cell: Any) -> Markup:
    """A cell as HTML, what stands out in bold."""
    return Markup(str(escape(cell)).replace("\x02", "<b>").replace("\x03", "</b>"))
