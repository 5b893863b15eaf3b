"""Putting the page together."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from ldlt.bench.report import sections
from ldlt.bench.report.analysis import RADII, analyse, embed, family_order
from ldlt.bench.report.erratum import measure
from ldlt.bench.report.markup import Families, escape, script_json
from ldlt.bench.stats import METRICS, metric_label
from ldlt.files import write_whole

__all__ = ["build_report", "write_report"]


def _asset(name: str) -> str:
    return (files("ldlt.bench.report") / name).read_text(encoding="utf-8")


def _radius(metric: str) -> float:
    return int(metric.removeprefix("cert_")) / 255 if metric.startswith("cert_") else 0.0


def _short(metric: str) -> str:
    return metric_label(metric).removeprefix("Certified ")


def build_report(frame: pd.DataFrame, settings: Mapping[str, Any] | None = None) -> str:
    """Build the page.

    Args:
        frame: One row per protocol, data set, family, fold and seed. Needed are these and the five metrics; any
            other column may be missing. Only data sets that every certified family completed enter the
            statistics.
        settings: What the page shows under provenance, such as the command and the versions. A ``title``
            replaces the title of the page; ``datasets`` and ``families`` say what was planned, so that the
            page can tell what is missing; ``shortened`` marks a quick look.

    Returns:
        The page as HTML, the same for the same input.

    Raises:
        ScoreError: If the table is empty, lacks a needed column or has a run twice.
    """
    settings = dict(settings or {})
    planned = settings.get("datasets")
    studies = analyse(frame, [str(name) for name in planned] if isinstance(planned, (list, tuple)) else ())
    order = family_order(name for study in studies for name in [*study.families, *study.uncertified])
    families = Families(order, frozenset(name for study in studies for name in study.uncertified))
    panels = [
        sections.panel(study, [other for other in studies if other is not study], families, index)
        for index, study in enumerate(studies)
    ]
    tabs = "".join(
        f'<button type="button" role="tab" id="p{index}-tab" aria-controls="p{index}" data-tab="{index}" '
        f'aria-selected="{"true" if not index else "false"}" tabindex="{0 if not index else -1}">'
        f"{escape(sections.protocol_label(study.protocol))}</button>"
        for index, study in enumerate(studies)
    )
    metrics = "".join(
        f'<label><input type="radio" name="metric" value="{metric}"{"" if index else " checked"}'
        f' aria-label="{escape(metric_label(metric))}"><span>{escape(_short(metric))}</span></label>'
        for index, metric in enumerate(METRICS)
    )
    boxes = "".join(
        f'<label class="chip s{families.slot(name)}"><input type="checkbox" data-family="{index}"'
        f"{'' if name in families.refused else ' checked'}><span>{families.label(name)}</span></label>"
        for index, name in enumerate(order)
    )
    data = {
        "metrics": [{"key": metric, "label": metric_label(metric), "radius": _radius(metric)} for metric in METRICS],
        "families": [
            {"name": name, "slot": families.slot(name), "certified": name not in families.refused} for name in order
        ],
        "radii": [round(float(radius), 4) for radius in RADII],
        "protocols": embed(studies, order),
    }
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = settings.get("title", "Certified accuracy of Lipschitz networks")
    return Template(_asset("template.html")).substitute(
        title=escape(title),
        # Only this script may run and nothing may be loaded, whatever a name in the data contains.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        style=_asset("style.css"),
        masthead=sections.masthead(studies, frame, settings),
        toc=sections.toc(),
        tabs=tabs,
        metrics=metrics,
        families=boxes,
        panels="".join(panels),
        erratum=sections.erratum(studies, families, measure()),
        provenance=sections.provenance(frame, settings),
        data=script_json(data),
        script=script,
    )


def write_report(frame: pd.DataFrame, path: str | Path, *, settings: Mapping[str, Any] | None = None) -> Path:
    """Write the page of :func:`build_report` to a file, making its folder if needed.

    Args:
        frame: Table of runs.
        path: File to write.
        settings: What the page shows under provenance.

    Returns:
        The path.
    """
    path = Path(path)
    page = build_report(frame, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode())
    return path
