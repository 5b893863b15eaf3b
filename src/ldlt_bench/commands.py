"""Command line of the study: ``bench``, ``starts``, ``data``, ``report`` and ``tables``.

``python -m ldlt_bench`` runs them; the command ``ldlt`` finds them by the entry points ``ldlt.commands``.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ldlt.errors import LdltError
from ldlt_bench import require_extra

if TYPE_CHECKING:
    from ldlt_bench.data import Archive, Collection
    from ldlt_bench.study.run import Summary

__all__ = ["app", "bench", "data", "main", "report", "starts", "tables"]

OUT = Path("ldlt-bench")
EXTRA_SETS = ("digits",)
"""Embedded sets that run only when asked for: not among the study's 121 (``digits`` is a part of ``optical``)."""

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__.partition("\n")[0])
data = typer.Typer(no_args_is_help=True, help="List, check or fetch the data sets of the study.")


class _Protocol(StrEnum):
    paper = "paper"
    tuned = "tuned"
    both = "both"


class _Backend(StrEnum):
    loky = "loky"
    ray = "ray"
    dask = "dask"


class _Form(StrEnum):
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


_Json = Annotated[bool, typer.Option("--json", help="Print the outcome for machines.")]


@app.command()
def bench(
    archive: Annotated[str, typer.Option("--data", help="Archive (zip or folder), or 'embedded'.")] = "embedded",
    protocol: Annotated[_Protocol, typer.Option(help="How to train.")] = _Protocol.paper,
    families: Annotated[list[str] | None, typer.Option(help="Families, or 'all'; default: those of the paper.")] = None,
    sets: Annotated[list[str] | None, typer.Option(help="Data sets; default: all of the 121 that are there.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Use seeds 0 .. N-1.")] = 1,
    epochs: Annotated[int | None, typer.Option(min=1, help="At most N epochs: a quick look, marked as such.")] = None,
    backend: Annotated[_Backend, typer.Option(help="Worker processes, or a cluster of Ray or Dask.")] = _Backend.loky,
    workers: Annotated[int | None, typer.Option(min=1, help="Default: one per processor; 1: this process.")] = None,
    address: Annotated[str | None, typer.Option(help="Address of a running cluster.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of results.")] = OUT,
    starts: Annotated[Path | None, typer.Option(help="Start values for 'tuned', as `ldlt starts` writes them.")] = None,
    add: Annotated[list[Path] | None, typer.Option(help="Rows of other runs, not to be computed again.")] = None,
    as_json: _Json = False,
) -> None:
    """Train every family of networks on every data set and compare them.

    Names are separated by commas: --sets iris,wine --families ldlt-r,sandwich,ldlt-r:cayley. Rows are stored as
    they come; a run that was stopped, killed or failed goes on with the same command. Exit codes: 0 all is there, 1
    some failed (see failures.txt in the folder; the same command tries them again), 2 an error, 130 interrupted.
    """
    require_extra()
    from ldlt_bench.data import Archive, Embedded, locate  # noqa: PLC0415
    from ldlt_bench.study.family import FAMILIES, STUDY_FAMILIES, find_family  # noqa: PLC0415
    from ldlt_bench.study.protocol import PROTOCOLS, read_starts, shortened  # noqa: PLC0415
    from ldlt_bench.study.run import Study  # noqa: PLC0415

    names = ["paper", "tuned"] if protocol is _Protocol.both else [protocol.value]
    known = dict(PROTOCOLS)
    if starts is not None:
        known["tuned"] = replace(known["tuned"], starts=read_starts(starts))
    protocols = [known[name] if epochs is None else shortened(known[name], epochs) for name in names]
    where = None if archive == "embedded" else locate(archive)
    source: Collection = Embedded() if where is None else Archive(where)
    chosen = _names(sets) or (None if where else [name for name in source.names() if name not in EXTRA_SETS])
    wanted = _names(families) or list(STUDY_FAMILIES)
    study = Study(
        protocols,
        FAMILIES if wanted == ["all"] else [find_family(name).name for name in wanted],
        chosen,
        range(seeds),
        source,
        out,
        command=shlex.join(["ldlt", *sys.argv[1:]]),
        shortened=any(one != known[one.name] for one in protocols),
        add=add or [],
    )
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries say must not mix with the result
            summary = study.run(backend.value, workers, address)
    except KeyboardInterrupt:
        typer.echo(
            f"\nldlt: interrupted: {study.safe} of {study.total} units are safe; the same command goes on", err=True
        )
        raise typer.Exit(130) from None
    _finish(summary, names, study.shortened, as_json)
    raise typer.Exit(0 if summary.ok else 1)


def _finish(summary: Summary, protocols: list[str], cut: bool, as_json: bool) -> None:
    """Write tables and page, and say what came out."""
    from ldlt_bench.report import write_report  # noqa: PLC0415
    from ldlt_bench.study.results import read_settings  # noqa: PLC0415
    from ldlt_bench.tables import compare_runs, make_tables, render  # noqa: PLC0415

    settings, page, found = read_settings(summary.out), "", {}
    for name in protocols:
        rows = summary.frame[summary.frame["protocol"] == name]
        comparison = compare_runs(rows, settings.get("families"))
        _write(rows, summary.out / "tables" / name)
        found[name] = [] if comparison.summary is None else json.loads(comparison.summary.to_json(orient="records"))
        if not as_json:
            typer.echo(f"protocol {name}{', SHORTENED training' if cut else ''}\n")
            typer.echo("\n".join([*(render(t) for n, t in make_tables(comparison).items() if n == "summary")]))
            typer.echo("\n".join(comparison.notes))
    if not summary.frame.empty:
        page = str(write_report(summary.frame, summary.out / "report.html", settings=settings))
    if as_json:
        failed = [{**unit._asdict(), "reason": reason} for unit, reason in summary.failures.items()]
        told = {"out": str(summary.out), "units": summary.total, "computed": summary.computed, "failed": failed}
        told |= {"skipped": summary.skipped, "damaged": summary.damaged, "seconds": summary.seconds, "shortened": cut}
        typer.echo(json.dumps({**told, "rows": len(summary.frame), "summary": found, "report": page}))
    else:
        done = summary.total - len(summary.failures)
        typer.echo(f"{done} of {summary.total} units, {summary.seconds:.0f} s; rows and tables in {summary.out}")
        typer.echo(f"report: {page or 'none, as there are no rows'}")
    for name, reason in {**summary.skipped, **summary.damaged}.items():
        typer.echo(f"ldlt: data set {name} took no part: {reason}", err=True)
    for unit, reason in summary.failures.items():
        typer.echo(f"ldlt: failed: {unit.family} on {unit.dataset} ({unit.protocol}): {reason}", err=True)
    if summary.failures:
        typer.echo(f"ldlt: see {summary.out / 'failures.txt'}; the same command tries them again", err=True)


@app.command()
def starts(
    archive: Annotated[str, typer.Option("--data", help="Archive (zip or folder), or 'embedded'.")] = "embedded",
    families: Annotated[list[str] | None, typer.Option(help="Families; default: all.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="At most N epochs: a quick look.")] = None,
    most_rows: Annotated[int, typer.Option(min=1, help="Larger data sets take no part.")] = 1000,
    backend: Annotated[_Backend, typer.Option(help="Worker processes, or a cluster of Ray or Dask.")] = _Backend.loky,
    workers: Annotated[int | None, typer.Option(min=1, help="Default: one per processor.")] = None,
    out: Annotated[Path, typer.Option(help="File of starts to write, for bench --starts.")] = Path("starts.json"),
) -> None:
    """Choose the start values of every family by the same search.

    On a third of the data sets, on held-out training rows: test rows take no part. Gives the file for `bench
    --protocol tuned --starts`, and a table of all that was tried.
    """
    require_extra()
    from ldlt_bench.data import Archive, Embedded, locate  # noqa: PLC0415
    from ldlt_bench.study.choose import choose  # noqa: PLC0415
    from ldlt_bench.study.family import GRIDS  # noqa: PLC0415
    from ldlt_bench.study.protocol import PROTOCOLS, shortened  # noqa: PLC0415
    from ldlt_bench.study.results import write_whole  # noqa: PLC0415

    where = None if archive == "embedded" else locate(archive)
    protocol = PROTOCOLS["tuned"] if epochs is None else shortened(PROTOCOLS["tuned"], epochs)
    found = choose(
        protocol,
        _names(families) or list(GRIDS),
        Embedded() if where is None else Archive(where),
        most_rows=most_rows,
        backend=backend.value,
        workers=workers,
        say=lambda line: typer.echo(f"ldlt: {line}", err=True),
    )
    content: dict[str, object] = {
        "starts": {name: asdict(start) for name, start in found.starts.items()},
        "sets": found.sets,
    }
    content |= {"epochs": protocol.epochs, "tried": found.tried.to_dict("records")}
    write_whole(out, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")
    typer.echo(found.tried.drop(columns="kept")[found.tried["kept"]].to_markdown(index=False, floatfmt=".4f"))
    typer.echo(f"{out}: start values of {len(found.starts)} families, chosen on {len(found.sets)} data sets")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of results, or a file of rows.")] = OUT,
    out: Annotated[Path | None, typer.Option(help="Page to write; default: report.html in the folder.")] = None,
    as_json: _Json = False,
) -> None:
    """Make the page of a study's results, also of one that is not finished."""
    from ldlt_bench.report import write_report  # noqa: PLC0415
    from ldlt_bench.study.results import read_settings  # noqa: PLC0415

    inside = folder if folder.is_dir() else folder.parent
    page = write_report(_rows(folder), out or inside / "report.html", settings=read_settings(folder))
    typer.echo(json.dumps({"report": str(page)}) if as_json else page)


@app.command()
def tables(
    folder: Annotated[Path, typer.Argument(help="Folder of results, or a file of rows.")] = OUT,
    form: Annotated[_Form, typer.Option(help="How to print them.")] = _Form.markdown,
    only: Annotated[list[str] | None, typer.Option(help="Names of tables, such as summary; default: all.")] = None,
    rest: Annotated[bool, typer.Option(help="Only sets that starts are not chosen on: two thirds.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write all in all forms into this folder instead.")] = None,
) -> None:
    """Print every table of a study from its rows: ``ldlt tables results/tuned.parquet``."""
    from ldlt.errors import OptionError  # noqa: PLC0415
    from ldlt_bench.study.choose import chosen_on  # noqa: PLC0415
    from ldlt_bench.tables import compare_runs, make_tables, render  # noqa: PLC0415

    for name, part in _rows(folder).groupby("protocol"):
        if out is not None:
            _write(part, out / str(name))
            continue
        comparison = compare_runs(part, sets=(lambda one: not chosen_on(one)) if rest else None)
        found = make_tables(comparison)
        unknown = [one for one in _names(only) if one not in found]
        if unknown:
            raise OptionError(f"no table {', '.join(unknown)}; there are {', '.join(found) or 'none'}")
        for one in _names(only) or found:
            typer.echo(render(found[one], form.value))
        for note in comparison.notes:
            typer.echo(note, err=True)
    if out is not None:
        typer.echo(out)


def _write(rows: Any, folder: Path) -> None:
    """All tables in all forms; below ``rest/`` of the sets that starts are not chosen on."""
    from ldlt_bench.study.choose import chosen_on  # noqa: PLC0415
    from ldlt_bench.tables import compare_runs, write_tables  # noqa: PLC0415

    write_tables(compare_runs(rows), folder)
    write_tables(compare_runs(rows, sets=lambda one: not chosen_on(one)), folder / "rest")


@data.command("list")
def list_sets(
    path: Annotated[str | None, typer.Argument(help="Archive, or 'embedded'; default: both.")] = None,
    as_json: _Json = False,
) -> None:
    """Names, sizes and states of all data sets; without a path also of an archive in LDLT_UCI or the user's cache."""
    require_extra()
    import pandas as pd  # noqa: PLC0415

    from ldlt_bench.data import RECIPES, DataError, Embedded  # noqa: PLC0415

    archive = _archive(path)
    rows = []
    for source in ([] if archive and path else [Embedded()]) + ([archive] if archive else []):
        missing = source.unavailable()
        for name in sorted([*source.names(), *missing]):
            kind = "archive" if source is archive else RECIPES[name].kind
            row: dict[str, object] = {"name": name, "kind": kind, "status": "ok"}
            try:
                size = source.summary(name)
                row |= {"rows": size.rows, "columns": size.columns, "classes": size.classes}
            except DataError as error:
                row["status"] = str(error)
            rows.append(row)
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        shown = pd.DataFrame(rows, columns=["name", "rows", "columns", "classes", "kind", "status"]).astype("object")
        typer.echo(shown.where(shown.notna(), "–").to_string(index=False))


@data.command()
def check(
    path: Annotated[str | None, typer.Argument(help="Archive, or 'embedded'; default: LDLT_UCI or the cache.")] = None,
    as_json: _Json = False,
) -> None:
    """Read every data set completely and report all that is wrong or odd; exit code 1 if one is damaged."""
    from ldlt_bench.data import Embedded  # noqa: PLC0415

    source: Collection = _archive(path) or Embedded()
    names = sorted({*source.names(), *source.unavailable()})
    found = [finding for name in names for finding in source.check(name)]
    broken = {finding.name for finding in found if finding.level in ("error", "unavailable")}
    good = not any(finding.level == "error" for finding in found)
    if as_json:
        findings = [finding._asdict() for finding in found]
        typer.echo(
            json.dumps({"checked": len(names), "sound": len(names) - len(broken), "findings": findings, "ok": good})
        )
    else:
        for finding in found:
            if finding.level != "note":
                typer.echo(f"{finding.level}: {finding.name}: {finding.message}")
        typer.echo(f"{len(names) - len(broken)} of {len(names)} data sets can be used")
    raise typer.Exit(0 if good else 1)


@data.command()
def fetch(
    path: Annotated[Path | None, typer.Argument(help="File to make; default: in the user's cache.")] = None,
    sha256: Annotated[str | None, typer.Option(help="Refuse a file with another checksum.")] = None,
    as_json: _Json = False,
) -> None:
    """Download the UCI archive, verified."""
    from ldlt_bench.data import fetch_sets  # noqa: PLC0415

    archive = fetch_sets(path, sha256=sha256, progress=sys.stderr.isatty() and not as_json)
    count, where = len(archive), str(archive.path)
    typer.echo(json.dumps({"sets": count, "archive": where}) if as_json else f"{count} data sets in {where}")


app.add_typer(data, name="data")


def _names(given: list[str] | None) -> list[str]:
    return [name.strip() for text in given or [] for name in text.split(",") if name.strip()]


def _archive(path: str | None) -> Archive | None:
    from ldlt_bench.data import Archive, locate  # noqa: PLC0415

    where = None if path == "embedded" else locate(path)
    return None if where is None else Archive(where)


def _rows(place: Path) -> Any:
    """The rows of a file, or of all files of a folder."""
    import pandas as pd  # noqa: PLC0415

    from ldlt_bench.study.results import BenchError, latest, read_rows  # noqa: PLC0415

    files = sorted(place.glob("*.parquet")) if place.is_dir() else [place]
    parts = [part for part in map(read_rows, files) if len(part)]
    if not parts:
        raise BenchError(f"no results in {place}: make some with  ldlt bench --out {place}")
    return latest(pd.concat(parts, ignore_index=True))


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0 on success, 1 if a check failed, 2 on an error, 130 when interrupted."""
    try:
        return int(app(arguments, prog_name="ldlt_bench", standalone_mode=False) or 0)
    except LdltError as error:
        typer.echo(f"ldlt: {error}", err=True)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("ldlt: interrupted", err=True)
        return 130
    except Exception as error:
        if not hasattr(error, "exit_code"):
            raise
        error.show()  # type: ignore[attr-defined]
        return int(error.exit_code)
