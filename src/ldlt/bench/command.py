"""What ``ldlt bench`` and ``ldlt report`` do."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldlt.errors import LdltError, OptionError

if TYPE_CHECKING:
    import pandas as pd

    from ldlt.bench.study import Summary

__all__ = ["add_bench", "add_report", "format_summary", "run_bench", "run_report"]

OUT = "ldlt-bench"
"""Default folder of results."""

EXTRA_SETS = ("digits",)
"""Embedded sets that run only when asked for: not among the study's 121 (``digits`` is a part of ``optical``)."""

_BENCH = """Train every family of networks on every data set and compare their certified accuracy.

Results are stored unit by unit (one protocol, data set and family). A run that was stopped, killed or failed
goes on with the same command; nothing that is finished is computed again."""

_BENCH_EXAMPLES = """examples:
  ldlt bench --sets iris wine --epochs 5           a first look, in a minute
  ldlt bench                                       the paper's six families on the embedded sets
  ldlt bench --data data_py.zip --out uci          on the UCI archive (ldlt data fetch data_py.zip)
  ldlt bench --data data_py.zip --protocol both --families all --seeds 3
  ldlt bench --engine ray --ray-address auto       on a ray cluster
  ldlt report uci                                  the page, also of a run that is not finished

exit codes: 0 all units are there, 1 some failed (see failures/ in the folder; the same command tries them
again), 2 an error, 130 interrupted (the same command goes on)
"""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


_positive.__name__, _count.__name__ = "number (at least 1)", "number"  # what argparse calls them in messages


def add_bench(commands: Any) -> None:
    """Add the command ``bench`` to the command line."""
    parser: ArgumentParser = commands.add_parser(
        "bench",
        help="run the benchmark",
        description=_BENCH,
        epilog=_BENCH_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", default="embedded", metavar="PATH", help="archive (zip or folder); default: embedded")
    parser.add_argument("--protocol", choices=["paper", "tuned", "both"], default="paper", help="default: paper")
    parser.add_argument(
        "--families", nargs="+", metavar="NAME", help="families, or 'all'; default: the six of the paper"
    )
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="data sets (ldlt data list); default: all of the 121")
    parser.add_argument("--seeds", type=_positive, default=1, metavar="N", help="use seeds 0 .. N-1; default: 1")
    parser.add_argument("--epochs", type=_positive, metavar="N", help="at most N epochs: a quick look, marked as such")
    parser.add_argument("--engine", choices=["process", "serial", "ray"], default="process", help="default: process")
    parser.add_argument("--workers", type=_count, metavar="N", help="default: one per processor; 0: in this process")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="address of a ray cluster; default: this machine")
    parser.add_argument("--out", default=OUT, metavar="DIR", help=f"folder of results; default: {OUT}")
    parser.add_argument(
        "--add", nargs="+", default=[], metavar="FILE", help="results.parquet of other runs, not to be computed again"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome for machines")
    parser.set_defaults(run=run_bench)


def add_report(commands: Any) -> None:
    """Add the command ``report`` to the command line."""
    parser: ArgumentParser = commands.add_parser("report", help="make the page of a benchmark's results")
    parser.add_argument("folder", nargs="?", default=OUT, metavar="DIR", help=f"folder of results; default: {OUT}")
    parser.add_argument("--out", metavar="FILE", help="page to write; default: report.html in the folder")
    parser.add_argument("--json", action="store_true", help="print the page's path for machines")
    parser.set_defaults(run=run_report)


def run_bench(arguments: Namespace) -> int:
    """Run a benchmark.

    Returns:
        0 if all units are there, 1 if some failed, 130 if interrupted.
    """
    from ldlt.bench.data import Archive, Embedded, locate  # noqa: PLC0415
    from ldlt.bench.engines import make_engine  # noqa: PLC0415
    from ldlt.bench.protocol import PROTOCOLS, shortened  # noqa: PLC0415
    from ldlt.bench.results import require_extras  # noqa: PLC0415
    from ldlt.bench.study import Study  # noqa: PLC0415

    require_extras()
    names = ["paper", "tuned"] if arguments.protocol == "both" else [arguments.protocol]
    protocols = [PROTOCOLS[name] for name in names]
    if arguments.epochs is not None:
        protocols = [shortened(protocol, arguments.epochs) for protocol in protocols]
    cut = any(protocol != PROTOCOLS[protocol.name] for protocol in protocols)
    where = None if arguments.data == "embedded" else locate(arguments.data)
    sets = arguments.sets
    if where is None and not sets:
        sets = [name for name in Embedded().names() if name not in EXTRA_SETS]
    study = Study(
        protocols,
        _families(arguments.families),
        sets,
        range(arguments.seeds),
        Embedded() if where is None else Archive(where),
        arguments.out,
        module=getattr(arguments, "module", "ldlt.bench.unit"),
        command=getattr(arguments, "command_line", ""),
        shortened=cut,
        add=arguments.add,
    )
    engine = make_engine(arguments.engine, arguments.workers, arguments.ray_address)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries say must not mix with the result
            summary = study.run(engine)
    except KeyboardInterrupt:
        safe = f"{study.safe} of {study.total} units are safe; " if study.total else ""
        print(f"\nldlt: interrupted: {safe}the same command goes on", file=sys.stderr)
        return 130
    page, trouble = _page(summary.frame, Path(arguments.out) / "report.html", arguments.out)
    if arguments.json:
        print(json.dumps(_machine(summary, page, cut)))
    else:
        print(_text(summary, page, cut))
    for line in _troubles(summary, trouble):
        print(f"ldlt: {line}", file=sys.stderr)
    return 0 if summary.ok else 1


def run_report(arguments: Namespace) -> int:
    """Write the page of a folder of results, finished or not."""
    from ldlt.bench.report import write_report  # noqa: PLC0415
    from ldlt.bench.study import load_study  # noqa: PLC0415

    frame, settings = load_study(arguments.folder)
    path = Path(arguments.out) if arguments.out else Path(arguments.folder) / "report.html"
    try:
        page = write_report(frame, path, settings=settings or None)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}") from error
    print(json.dumps({"report": str(page)}) if arguments.json else page)
    return 0


def format_summary(summary: pd.DataFrame) -> str:
    """Mean ± deviation per family and metric, aligned for a terminal; a star marks the best mean.

    Example:
        >>> import pandas as pd
        >>> from ldlt.bench.stats import summarise
        >>> print(format_summary(summarise({"accuracy": pd.DataFrame({"A": [0.5, 0.7], "B": [0.5, 0.5]})})))
                    accuracy
        A   0.6000 ± 0.1414*
        B   0.5000 ± 0.0000
    """
    metrics = list(dict.fromkeys(summary["metric"]))
    cells = {
        (row.algorithm, row.metric): f"{row.mean:.4f}"
        + ("" if math.isnan(row.sd) else f" ± {row.sd:.4f}")
        + ("*" if row.best else " ")
        for row in summary.itertuples()
    }
    titles = [f"{metric} " for metric in metrics]
    rows = [["", *titles]]
    rows += [[name, *(cells[name, metric] for metric in metrics)] for name in dict.fromkeys(summary["algorithm"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _families(given: Sequence[str] | None) -> tuple[str, ...]:
    """Families by name, whatever the case; a name that does not exist is an error before any work."""
    from ldlt.bench.family import FAMILIES, STUDY_FAMILIES, canonical  # noqa: PLC0415

    if not given:
        return STUDY_FAMILIES
    if [name.casefold() for name in given] == ["all"]:
        return FAMILIES
    return tuple(dict.fromkeys(canonical(name) for name in given))


def _page(frame: pd.DataFrame, path: Path, out: str) -> tuple[Path | None, str]:
    """Write the page, or say why not: it is no reason to fail after hours of work."""
    from ldlt.bench.study import read_settings  # noqa: PLC0415

    if frame.empty:
        return None, ""
    try:
        from ldlt.bench.report import write_report  # noqa: PLC0415

        return write_report(frame, path, settings=read_settings(out)), ""
    except (LdltError, ImportError, OSError, ValueError) as error:
        return None, f"no page: {error} (try  ldlt report {out})"


def _troubles(summary: Summary, trouble: str) -> list[str]:
    lines = [f"data set {name} took no part: {reason}" for name, reason in summary.skipped.items()]
    lines += [f"data set {name} is damaged: {reason}" for name, reason in summary.damaged.items()]
    if summary.failures:
        count = len(summary.failures)
        lines.append(f"{count} unit{'s' * (count > 1)} failed, see {summary.out / 'failures'}:")
        lines += [
            f"  {unit.family} on {unit.dataset} ({unit.protocol}): {reason}"
            for unit, reason in summary.failures.items()
        ]
        lines.append("the same command tries them again")
    return [*lines, trouble] if trouble else lines


def _text(summary: Summary, page: Path | None, cut: bool) -> str:
    from ldlt.bench.progress import clock  # noqa: PLC0415

    blocks = []
    for name, tables in summary.tables.items():
        if tables.summary is not None:
            count = int(tables.summary["n"].max())
            note = ", SHORTENED training" if cut else ""
            blocks.append(
                f"protocol {name}: mean ± deviation over {count} data set{'s' * (count > 1)}{note}\n"
                f"{format_summary(tables.summary)}"
            )
        blocks += [f"protocol {name}: {note}" for note in tables.notes]
    blocks.append(
        f"{summary.total - len(summary.failures)} of {summary.total} units, {clock(summary.seconds)} in all, "
        f"rows in {summary.out / 'results.parquet'}, tables in {summary.out / 'tables'}"
    )
    if page is not None:
        blocks.append(f"report: {page}")
    return "\n\n".join(blocks)


def _machine(summary: Summary, page: Path | None, cut: bool) -> dict[str, Any]:
    def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
        records = json.loads(frame.to_json(orient="records", double_precision=15))
        return [dict(record) for record in records]

    return {
        "out": str(summary.out),
        "units": summary.total,
        "computed": summary.computed,
        "failed": [
            {"protocol": unit.protocol, "dataset": unit.dataset, "family": unit.family, "reason": reason}
            for unit, reason in summary.failures.items()
        ],
        "skipped": summary.skipped,
        "damaged": summary.damaged,
        "seconds": summary.seconds,
        "shortened": cut,
        "rows": len(summary.frame),
        "summary": {
            name: [] if tables.summary is None else plain(tables.summary) for name, tables in summary.tables.items()
        },
        "notes": {name: list(tables.notes) for name, tables in summary.tables.items()},
        "report": None if page is None else str(page),
    }
