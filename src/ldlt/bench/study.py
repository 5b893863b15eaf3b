"""A study: protocols × families × data sets, planned, computed, stored, and turned into tables.

A study is a function of its arguments and its folder. What the folder already holds is not computed again, so that
the same call goes on where the last one stopped, for whatever reason it stopped.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ldlt.bench.data import Archive, Collection, DataError, Embedded, UnknownSetError
from ldlt.bench.engines import Engine, Work, provenance
from ldlt.bench.lock import Lock
from ldlt.bench.progress import Pace, Progress
from ldlt.bench.results import (
    BenchError,
    Store,
    Stored,
    StoreError,
    UnitKey,
    require_extras,
    unit_name,
    write_atomically,
)
from ldlt.errors import OptionError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Plan", "Study", "Summary", "Tables", "load_study", "make_tables"]

_SAVE_EVERY = 10.0


class Settings(Protocol):
    """What a study needs to know of a training protocol."""

    @property
    def name(self) -> str:
        """Its name."""

    def fingerprint(self, family: str) -> str:
        """Hash of all its settings that concern a family."""


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        units: All units of the study.
        todo: Those still to compute, in the order in which they are begun.
        costs: Estimated cost of each unit.
        labels: Data set -> label of the data, stored with the results.
        skipped: Data set -> why it takes no part.
        damaged: Data set -> what is wrong with its files.
    """

    units: tuple[UnitKey, ...]
    todo: tuple[UnitKey, ...]
    costs: Mapping[UnitKey, float]
    labels: Mapping[str, str]
    skipped: Mapping[str, str]
    damaged: Mapping[str, str]


@dataclass(frozen=True)
class Tables:
    """The statistics of one protocol.

    Attributes:
        summary: Mean, deviation and best per family and metric, or None if there is nothing to compare.
        texts: File name -> content.
        notes: What was left out, and why.
    """

    summary: pd.DataFrame | None
    texts: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """What became of a study.

    Attributes:
        out: Its folder.
        total: Number of its units.
        computed: Units computed by this call.
        failures: Unit -> last line of what it raised; the whole is in the folder ``failures``.
        skipped: Data set -> why it takes no part.
        damaged: Data set -> what is wrong with its files.
        seconds: Time of all calls for this study together.
        tables: Protocol -> statistics.
        frame: All rows.
    """

    out: Path
    total: int
    computed: int
    failures: dict[UnitKey, str]
    skipped: dict[str, str]
    damaged: dict[str, str]
    seconds: float
    tables: dict[str, Tables]
    frame: pd.DataFrame = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether every unit is there."""
        return not self.failures and not self.damaged


class Study:
    """A benchmark in a folder.

    Args:
        protocols: How to train; with different names.
        families: Names of families of networks.
        datasets: Names of data sets, or None for all of the source.
        seeds: Seeds of every unit.
        source: Where the data come from.
        out: Folder of the results.
        module: Module with ``Unit``, ``run_unit`` and ``estimate_cost``.
        command: The command that asked for this, for the record.
        shortened: Whether the settings were cut for a quick look; for the record.
        add: Files ``results.parquet`` of other runs, whose units need not be computed again.

    Raises:
        OptionError: If there is nothing to do, or a protocol is given twice.
        MissingExtraError: If a package is missing that would be needed in the end.
    """

    def __init__(
        self,
        protocols: Sequence[Settings],
        families: Sequence[str],
        datasets: Sequence[str] | None,
        seeds: Sequence[int],
        source: Collection,
        out: str | Path,
        *,
        module: str = "ldlt.bench.unit",
        command: str = "",
        shortened: bool = False,
        add: Sequence[str | Path] = (),
    ) -> None:
        require_extras()
        self.protocols = {protocol.name: protocol for protocol in protocols}
        self.families = tuple(dict.fromkeys(families))
        self.datasets = None if datasets is None else tuple(dict.fromkeys(datasets))
        self.seeds = tuple(sorted(set(seeds)))
        if len(self.protocols) != len(protocols):
            raise OptionError("protocols must have different names")
        for what, given in (("protocol", protocols), ("family", self.families), ("seed", self.seeds)):
            if not given:
                raise OptionError(f"at least one {what} is needed")
        if not isinstance(source, Archive | Embedded):
            raise OptionError("the source must be an Archive or Embedded(), which workers can open for themselves")
        self.source = source
        self.out = Path(out)
        self.module = module
        self.command = command
        self.shortened = shortened
        self.add = tuple(add)
        self.safe = 0
        """Units that are stored; with :attr:`total`, what to say when interrupted."""
        self.total = 0
        self.messages: list[str] = []
        """What was set aside, in words."""
        self.store = Store(self.out, self.messages.append)

    def run(self, engine: Engine, *, show: bool = True) -> Summary:
        """Compute what is missing, store each unit as it is finished, and write the tables.

        Args:
            engine: Who computes.
            show: Whether to show progress on standard error.

        Raises:
            UnknownSetError: If a data set does not exist; before anything is done.
            BenchError: If another run works in the folder, or a file cannot be written. Finished units are safe.
        """
        begun = time.monotonic()
        chosen, skipped = self._choose()
        with self._alone():
            self.store.clean()
            plan = self._plan(chosen, skipped)  # first, as it sets aside what would keep a unit from being taken over
            for path in self.add:
                self.messages.append(f"{self.store.add(path)} units taken over from {path}")
            if self.add:
                plan = replace(plan, todo=self._todo(plan.costs, plan.labels))
            record = _Record(self, plan, begun)
            try:
                record.save()
                failures = self._compute(engine, plan, record, show)
                return self._finish(plan, failures, record)
            except BaseException as error:
                # Counted on the disk: an interruption may come between the writing of a unit and its counting.
                self.safe = sum(self.store.path(unit).exists() for unit in plan.units)
                if isinstance(error, StoreError):
                    raise BenchError(f"{error}; {self.safe} of {self.total} units are safe") from error
                raise

    def plan(self) -> Plan:
        """What :meth:`run` would do. Files of other settings are set aside, as in a run.

        Raises:
            UnknownSetError: If a data set does not exist.
            BenchError: If no data set is left, or another run works in the folder.
        """
        chosen, skipped = self._choose()
        with self._alone():
            return self._plan(chosen, skipped)

    def _alone(self) -> Lock:
        """The right to write into the folder."""
        busy = f"another run works in {self.out}"
        return Lock(self.out / "run.lock", busy, BenchError)

    def _choose(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Data sets that can take part, and why others cannot; an unknown one is an error."""
        missing = self.source.unavailable()
        names = self.source.names()
        wanted = (*names, *missing) if self.datasets is None else self.datasets
        unknown = []
        for name in wanted:
            if name not in names and name not in missing:
                near = difflib.get_close_matches(name, [*names, *missing], n=3)
                unknown.append(f"'{name}'" + (f" (do you mean {' or '.join(near)}?)" if near else ""))
        if unknown:
            where = self.source.path if isinstance(self.source, Archive) else "the embedded sets"
            raise UnknownSetError(f"{where}: no data set {', '.join(unknown)}; see  ldlt data list")
        skipped = {name: missing[name] for name in wanted if name in missing}
        chosen = tuple(name for name in wanted if name in names)
        if not chosen:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            raise BenchError(f"no data set to work on{f' ({reasons})' if reasons else ''}")
        return chosen, skipped

    def _plan(self, chosen: Sequence[str], skipped: dict[str, str]) -> Plan:
        work = import_module(self.module)
        kind = "embedded" if isinstance(self.source, Embedded) else "archive"
        labels: dict[str, str] = {}
        damaged: dict[str, str] = {}
        costs: dict[UnitKey, float] = {}
        for name in chosen:
            try:
                size, digest = self.source.summary(name), self.source.digest(name)
            except DataError as error:
                damaged[name] = str(error)
                continue
            labels[name] = f"{kind} {size.rows}x{size.columns}x{size.classes} {digest}"
            for protocol in self.protocols.values():
                for family in self.families:
                    unit = work.Unit(protocol.name, name, family)
                    costs[unit] = float(work.estimate_cost(unit, protocol, size.rows, size.columns, size.classes))
        return Plan(tuple(costs), self._todo(costs, labels), costs, labels, skipped, damaged)

    def _todo(self, costs: Mapping[UnitKey, float], labels: Mapping[str, str]) -> tuple[UnitKey, ...]:
        """The units that are not stored, in the order in which they are begun."""
        todo = [
            u
            for u in costs
            if not self.store.done(u, self.protocols[u.protocol].fingerprint(u.family), self.seeds, labels[u.dataset])
        ]
        self.total, self.safe = len(costs), len(costs) - len(todo)
        return tuple(_order(todo, costs))

    def _compute(self, engine: Engine, plan: Plan, record: _Record, show: bool) -> dict[UnitKey, str]:
        """Compute and store; returns what failed."""
        failures: dict[UnitKey, str] = {}
        pace = Pace({unit: plan.costs[unit] for unit in plan.todo}, self.safe, lambda: engine.slots)
        progress = Progress(pace)
        archive = str(self.source.path.resolve()) if isinstance(self.source, Archive) else None
        work = Work(self.protocols, self.seeds, archive, self.module)
        with contextlib.ExitStack() as stack:
            if show:
                stack.enter_context(progress)
                for text in self.messages:
                    progress.message(text)
                for name, reason in {**plan.skipped, **plan.damaged}.items():
                    progress.message(f"data set {name} takes no part: {reason}")
            # Closed by hand: an exception below must end the workers now, not when the iterator is collected.
            outcomes = stack.enter_context(contextlib.closing(engine.map(work, plan.todo, progress.start)))  # type: ignore[type-var]
            for outcome in outcomes:
                unit, failure = outcome.unit, outcome.failure
                if outcome.rows is not None:
                    try:
                        self.store.write(unit, outcome.rows, plan.labels[unit.dataset])
                    except StoreError:
                        raise
                    except BenchError as error:  # rows that do not fit are a fault of the unit
                        failure = str(error)
                place = self.out / "failures" / f"{unit_name(unit)}.txt"
                if failure:
                    failures[unit] = failure.strip().splitlines()[-1]
                    title = f"{unit.family} on {unit.dataset}, protocol {unit.protocol}"
                    write_atomically(place, f"{title}\n{_now()}\n\n{failure}\n".encode())
                    if show:
                        progress.message(f"failed: {title}: {failures[unit]}")
                else:
                    self.safe += 1
                    with contextlib.suppress(OSError):
                        place.unlink(missing_ok=True)
                progress.finish(unit, outcome.seconds, not failure)
                record.save_now_and_then()
        return failures

    def _finish(self, plan: Plan, failures: dict[UnitKey, str], record: _Record) -> Summary:
        """Merge what is there and write tables."""
        ours = {(unit.protocol, unit.dataset, unit.family) for unit in plan.units}
        self.store.merge(self.out / "results.parquet", lambda stored: stored.key in ours)
        frame = self.store.load(lambda stored: stored.key in ours)
        tables = {}
        for name in self.protocols:
            tables[name] = made = make_tables(frame[frame["protocol"] == name], self.families)
            folder = self.out / "tables" / re.sub(r"[^A-Za-z0-9+=-]+", "_", name)
            for file, text in made.texts.items():
                write_atomically(folder / file, text.encode())
            for path in folder.glob("*.*"):  # tables of an earlier call that would contradict these
                if path.name not in made.texts and path.suffix in (".md", ".tex", ".csv", ".txt"):
                    path.unlink(missing_ok=True)
        record.failed = len(failures)
        record.content["processor_seconds"] = round(float(frame["cpu_seconds"].sum()), 3)
        seconds = record.save(finished=True)
        return Summary(
            self.out,
            len(plan.units),
            len(plan.todo) - len(failures),
            failures,
            dict(plan.skipped),
            dict(plan.damaged),
            seconds,
            tables,
            frame,
        )


class _Record:
    """``settings.json``: what was asked for, with what, and how long it took over all calls."""

    def __init__(self, study: Study, plan: Plan, begun: float) -> None:
        self.path = study.out / "settings.json"
        self.begun = begun
        self.saved = begun
        self.failed = 0
        protocols = {
            name: {
                "fingerprints": {family: protocol.fingerprint(family) for family in study.families},
                "settings": asdict(protocol) if is_dataclass(protocol) else {},  # type: ignore[arg-type]
            }
            for name, protocol in study.protocols.items()
        }
        versions = provenance()
        versions.pop("finished_at")
        earlier = read_settings(study.out)
        same = earlier.get("protocols", {}).keys() == protocols.keys() and all(
            earlier["protocols"][name].get("fingerprints") == entry["fingerprints"] for name, entry in protocols.items()
        )
        same = same and earlier.get("seeds") == list(study.seeds)
        self.before = float(earlier.get("wall_seconds", 0.0)) if same else 0.0
        self.content: dict[str, Any] = {
            "command": study.command,
            **versions,
            "protocols": protocols,
            "families": list(study.families),
            "datasets": sorted(plan.labels),
            "data": dict(plan.labels),
            "skipped": dict(plan.skipped),
            "damaged": dict(plan.damaged),
            "seeds": list(study.seeds),
            "source": str(study.source.path) if isinstance(study.source, Archive) else "embedded",
            "shortened": study.shortened,
            "units": len(plan.units),
            "started_at": earlier.get("started_at", _now()) if same else _now(),
            "calls": int(earlier.get("calls", 0)) + 1 if same else 1,
        }

    def save(self, finished: bool = False) -> float:
        """Write it; returns the seconds of all calls."""
        seconds = self.before + time.monotonic() - self.begun
        self.saved = time.monotonic()
        content = {
            **self.content,
            "wall_seconds": round(seconds, 3),
            "failed": self.failed,
            "finished_at": _now() if finished else None,
        }
        write_atomically(self.path, json.dumps(content, indent=2, default=str, ensure_ascii=False).encode() + b"\n")
        return seconds

    def save_now_and_then(self) -> None:
        """Write it if the last time is a while ago, so that the time of a killed run counts."""
        if time.monotonic() - self.saved > _SAVE_EVERY:
            self.save()


def read_settings(out: str | Path) -> dict[str, Any]:
    """``settings.json`` of a folder, or nothing if it is not there or cannot be read."""
    try:
        content = json.loads((Path(out) / "settings.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def load_study(out: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Rows and settings of a study, finished or not; nothing in its folder is changed.

    Raises:
        BenchError: If there are no results in the folder.
    """
    require_extras()
    out = Path(out)
    settings = read_settings(out)
    protocols, data = settings.get("protocols", {}), settings.get("data", {})

    def current(protocol: str, family: str, fingerprint: str) -> bool:
        return not settings or protocols.get(protocol, {}).get("fingerprints", {}).get(family) == fingerprint

    def ours(stored: Stored) -> bool:
        protocol, dataset, family = stored.key
        return not settings or (
            current(protocol, family, stored.fingerprint)
            and family in settings["families"]
            and data.get(dataset) == stored.data
            and list(stored.seeds) == settings["seeds"]
        )

    frame = Store(out).load(ours)
    if frame.empty and (out / "results.parquet").exists():
        import pandas as pd  # noqa: PLC0415

        try:
            frame = pd.read_parquet(out / "results.parquet")
        except (OSError, ValueError) as error:
            raise BenchError(f"cannot read {out / 'results.parquet'}: {error}") from error
        # Rows of an earlier study must not pass for those of the settings.
        keys = zip(frame["protocol"], frame["family"], frame["fingerprint"], strict=True)
        frame = frame[[current(*key) for key in keys]].reset_index(drop=True)
    if frame.empty:
        raise BenchError(f"no results in {out}: make some with  ldlt bench --out {out}")
    return frame, settings


def make_tables(runs: pd.DataFrame, families: Sequence[str]) -> Tables:
    """All tables of one protocol, as Markdown, LaTeX and CSV.

    Only data sets with all runs of all families are compared. What cannot be compared is left out with a note,
    never a reason to fail after hours of work.

    Args:
        runs: Rows of one protocol.
        families: Families to compare, in this order.
    """
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    from ldlt.bench import stats  # noqa: PLC0415

    notes: list[str] = []
    present = []
    for family in families:
        part = runs[runs["family"] == family]
        if part.empty:
            notes.append(f"{family}: no results")
        elif not part["certified"].all():
            notes.append(f"{family}: not compared, as its certificates do not hold")
        elif not np.isfinite(part[list(stats.METRICS)].to_numpy(dtype=float)).all():
            notes.append(f"{family}: not compared, as it has scores that are not finite")
        else:
            present.append(family)
    if not present:
        return Tables(None, {}, (*notes, "no results to compare"))
    runs = runs[runs["family"].isin(present)]
    try:
        scores = stats.score_frames(runs, algorithms=present)
    except stats.ScoreError as error:
        return Tables(None, {}, (*notes, str(error)))
    notes += [f"{name}: not compared ({reason})" for name, reason in scores.dropped.items()]
    frames = scores.frames
    count = len(next(iter(frames.values())))
    complete = runs[~runs["dataset"].isin(list(scores.dropped))]
    summary = stats.summarise(frames)
    tables = {
        "summary": stats.summary_table(summary, caption=f"Mean ± standard deviation over {count} data sets"),
        "ranges": stats.ranges_table(stats.model_ranges(complete, algorithms=present), caption="Sizes of the models"),
    }
    if count < 2 or len(present) < 2:
        few = f"{count} data set{'s' * (count != 1)}, {len(present)} famil{'y' if len(present) == 1 else 'ies'}"
        notes.append(f"no tests ({few}): at least two of each are needed")
    else:
        tests, critical, bars, pairs = {}, {}, {}, []
        for metric, result in stats.metric_results(frames).items():
            if result.test is None or result.cd is None or result.standings is None or result.outcomes is None:
                continue  # never with two data sets and families
            label = stats.metric_label(metric)
            tables[f"overall-{metric}"] = stats.overall_table(result.standings, result.test, result.cd, caption=label)
            tables[f"outcomes-{metric}"] = stats.outcomes_table(result.outcomes, caption=label)
            tests[metric], critical[metric], bars[metric] = result.test, result.cd, result.groups
            pairs.append(result.pairs)
        tables["friedman"] = stats.friedman_table(tests, critical, bars, caption="Tests on ranks")
        tables["pairwise"] = stats.pairwise_table(
            pd.concat(pairs, ignore_index=True), caption="Wilcoxon signed-rank tests"
        )
    forms = {"md": "markdown", "tex": "latex", "csv": "csv"}
    texts = {
        f"{name}.{ending}": stats.render(table, form)
        for name, table in tables.items()
        for ending, form in forms.items()
    }
    if notes:
        texts["notes.txt"] = "\n".join(notes) + "\n"
    return Tables(summary, texts, tuple(notes))


def _order(todo: Sequence[UnitKey], costs: Mapping[UnitKey, float]) -> list[UnitKey]:
    """The largest first, so that no worker is left alone with one in the end; before them, one data set of each kind.

    The cheapest unit of every protocol and family goes to the front: results to look at within seconds, and a
    fault of a family shows at once rather than after hours.
    """
    first: dict[tuple[str, str], UnitKey] = {}
    for unit in sorted(todo, key=lambda unit: costs[unit]):
        first.setdefault((unit.protocol, unit.family), unit)
    chosen = set(first.values())
    rest = sorted((unit for unit in todo if unit not in chosen), key=lambda unit: -costs[unit])
    return [*first.values(), *rest]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
