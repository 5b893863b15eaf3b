"""A study: protocols × families × data sets, planned, computed by joblib, stored, and turned into tables.

A study is a function of its arguments and its folder. What the folder already holds is not computed again, so that
the same call goes on where the last one stopped, for whatever reason it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ldlt_bench import require_extra

require_extra()  # before the imports that need it

import joblib
import numpy as np
import pandas as pd
import torch
from filelock import FileLock, Timeout
from joblib.externals.loky.process_executor import BrokenProcessPool
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ldlt._version import __version__
from ldlt.errors import MissingExtraError, OptionError
from ldlt_bench.data import Archive, Collection, DataError, Dataset, Embedded
from ldlt_bench.data.archive import unknown
from ldlt_bench.study.protocol import Protocol
from ldlt_bench.study.results import BenchError, Rows, read_rows, write_whole
from ldlt_bench.study.unit import Unit, estimate_cost, run_unit

__all__ = ["BACKENDS", "Study", "Summary", "call_alone", "cluster"]

BACKENDS = ("loky", "ray", "dask")
"""Who computes: worker processes of this machine, or a cluster, each a backend of joblib."""

ATTEMPTS = 3
"""How often the pool is set up again after the death of a worker. It may have died of its neighbours' use of memory."""

LINES = 20.0
"""Seconds between two lines of progress where there is no terminal."""

Compute = Callable[[Unit, Protocol, Dataset, Sequence[int]], list[dict[str, Any]]]


@dataclass(frozen=True)
class Summary:
    """What became of a study.

    ``total`` units there are, ``computed`` by this call, ``failures`` with the last line of what they raised; data sets
    that are ``skipped`` or ``damaged``, and why; seconds of this call; all rows.
    """

    out: Path
    total: int
    computed: int
    failures: dict[Unit, str]
    skipped: dict[str, str]
    damaged: dict[str, str]
    seconds: float
    frame: pd.DataFrame = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether every unit is there."""
        return not self.failures and not self.damaged


class Study:
    """A study in a folder.

    Args:
        protocols: How to train; with different names.
        families: Names of families of networks.
        datasets: Names of data sets, or None for all of the source.
        seeds: Seeds of every unit.
        source: Where the data come from, an archive or the embedded sets.
        out: Folder of the results.
        command: The command that asked for this, for the record.
        shortened: Whether the settings were cut for a quick look; for the record.
        add: Files of results of other runs, whose units need not be computed again.
        compute: Computes a unit.
    """

    def __init__(
        self,
        protocols: Sequence[Protocol],
        families: Sequence[str],
        datasets: Sequence[str] | None,
        seeds: Sequence[int],
        source: Collection,
        out: str | Path,
        *,
        command: str = "",
        shortened: bool = False,
        add: Sequence[str | Path] = (),
        compute: Compute = run_unit,
    ) -> None:
        self.protocols = {protocol.name: protocol for protocol in protocols}
        self.families = tuple(dict.fromkeys(families))
        self.seeds = sorted(set(seeds))
        if len(self.protocols) != len(protocols) or not (protocols and families and self.seeds):
            raise OptionError("a study needs protocols of different names, families and seeds")
        self.datasets, self.source, self.out = datasets, source, Path(out)
        self.command, self.shortened, self.added, self.compute = command, shortened, tuple(add), compute
        self.labels: dict[str, str] = {}
        self.costs: dict[Unit, float] = {}
        self.todo: list[Unit] = []

    @property
    def total(self) -> int:
        """Number of units, once the study was begun."""
        return len(self.costs)

    @property
    def safe(self) -> int:
        """Number of units that are stored."""
        return self.total - len(self.todo)

    def run(
        self, backend: str = "loky", workers: int | None = None, address: str | None = None, *, show: bool = True
    ) -> Summary:
        """Compute what is missing, and store each unit as it is finished.

        Args:
            backend: One of :data:`BACKENDS`.
            workers: Units at a time; None for one per processor, 1 for this process.
            address: Address of a running cluster of Ray or Dask; by default one is started on this machine.
            show: Whether to show progress on standard error.

        Raises:
            BenchError: If another run works in the folder, a file cannot be written, or workers keep dying. Finished
                units are safe.
        """
        if backend not in BACKENDS or (workers is not None and workers < 1):
            raise OptionError(
                f"the backend is one of {', '.join(BACKENDS)}, with 1 or more workers, not '{backend}', {workers}"
            )
        begun = time.monotonic()
        chosen, skipped = self._choose()
        with self._alone(), cluster(backend, address):
            rows = {name: Rows(self.out / f"{name}.parquet") for name in self.protocols}
            for path in self.added:
                extra = read_rows(path)
                for name, own in rows.items():
                    more = extra[extra["protocol"] == name]
                    own.add(pd.concat([part for part in (more, own.frame) if len(part)] or [own.frame]))
            damaged = self._plan(chosen)
            self.todo = self._order([unit for unit in self.costs if not self._done(rows, unit)])
            todo, record = len(self.todo), self._record(skipped, damaged)
            self._write_record(record, rows)
            failures = self._work(rows, backend, workers, show)
            frame = pd.concat([self._rows(rows, unit) for unit in self.costs] or [rows[next(iter(rows))].frame[:0]])
            seconds = time.monotonic() - begun
            record |= {"wall_seconds": round(seconds, 3), "failed": len(failures), "finished_at": _now()}
            record["processor_seconds"] = round(float(frame["cpu_seconds"].sum()), 3)
            self._write_record(record, rows)
            for own in rows.values():
                own.write()
        frame = frame.reset_index(drop=True)
        return Summary(self.out, self.total, todo - len(self.todo), failures, skipped, damaged, seconds, frame)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The right to write into the folder."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with FileLock(self.out / ".lock", timeout=0):
                yield
        except Timeout:
            raise BenchError(f"another run works in {self.out}: wait for it, or give another folder") from None
        except OSError as error:
            raise BenchError(f"cannot work in {self.out}: {error.strerror or error}") from error

    def _choose(self) -> tuple[list[str], dict[str, str]]:
        """Data sets that can take part, and why others cannot; an unknown one is an error."""
        names, missing = self.source.names(), self.source.unavailable()
        wanted = list(dict.fromkeys(self.datasets)) if self.datasets is not None else [*names, *missing]
        for name in wanted:
            if name not in names and name not in missing:
                raise unknown(name, [*names, *missing], str(getattr(self.source, "path", "the embedded sets")))
        skipped = {name: missing[name] for name in wanted if name in missing}
        chosen = [name for name in wanted if name in names]
        if not chosen:
            raise BenchError(f"no data set to work on ({'; '.join(skipped.values()) or 'none given'})")
        return chosen, skipped

    def _plan(self, chosen: Sequence[str]) -> dict[str, str]:
        """Label the data, list the units with their estimated costs; returns what is damaged."""
        kind = "archive" if isinstance(self.source, Archive) else "embedded"
        damaged: dict[str, str] = {}
        for name in chosen:
            try:
                size, digest = self.source.summary(name), self.source.digest(name)
            except DataError as error:
                damaged[name] = str(error)
                continue
            self.labels[name] = f"{kind} {size.rows}x{size.columns}x{size.classes} {digest}"
            for protocol in self.protocols.values():
                for family in self.families:
                    unit = Unit(protocol.name, name, family)
                    self.costs[unit] = estimate_cost(unit, protocol, size.rows, size.columns, size.classes)
        return damaged

    def _rows(self, rows: Mapping[str, Rows], unit: Unit) -> pd.DataFrame:
        fingerprint = self.protocols[unit.protocol].fingerprint(unit.family)
        return rows[unit.protocol].of(unit.dataset, unit.family, fingerprint, self.labels[unit.dataset], self.seeds)

    def _done(self, rows: Mapping[str, Rows], unit: Unit) -> bool:
        found = self._rows(rows, unit)
        return set(found["seed"]) == set(self.seeds) and len(found) == len(self.seeds) * found["fold"].nunique()

    def _order(self, todo: Sequence[Unit]) -> list[Unit]:
        """The largest first, so that no worker is left alone with one in the end; before them, one of each family.

        The cheapest unit of every protocol and family goes to the front: results to look at within seconds, and a
        fault of a family shows at once rather than after hours.
        """
        first: dict[tuple[str, str], Unit] = {}
        for unit in sorted(todo, key=self.costs.__getitem__):
            first.setdefault((unit.protocol, unit.family), unit)
        rest = [unit for unit in todo if unit not in set(first.values())]
        return [*first.values(), *sorted(rest, key=lambda unit: -self.costs[unit])]

    def _work(self, rows: Mapping[str, Rows], backend: str, workers: int | None, show: bool) -> dict[Unit, str]:
        """Compute and store; returns what failed. ``todo`` is what is left."""
        failures: dict[Unit, str] = {}
        open_units = list(self.todo)
        with _Bar(sum(self.costs[unit] for unit in self.todo), self, show) as bar:
            for left in reversed(range(ATTEMPTS)):
                try:
                    for unit, found in self._outcomes(open_units, backend, workers):
                        open_units.remove(unit)
                        failure = found if isinstance(found, str) else self._store(rows[unit.protocol], unit, found)
                        if failure:
                            failures[unit] = failure
                            said = [
                                f"{u.family} on {u.dataset}, protocol {u.protocol}\n{f}" for u, f in failures.items()
                            ]
                            write_whole(self.out / "failures.txt", "\n\n".join(said).encode())
                            bar.say(f"failed: {unit.family} on {unit.dataset}: {_last_line(failure)}")
                        bar.advance(self.costs[unit])
                    break
                except BrokenProcessPool as error:  # finished units are stored; the others are begun anew
                    bar.say(f"a worker process died; {left} attempts are left")
                    if not left:
                        raise BenchError(
                            f"worker processes keep dying, of lack of memory perhaps; {self.safe} of {self.total} "
                            "units are safe: run the same command again with fewer --workers"
                        ) from error
        if not failures:
            (self.out / "failures.txt").unlink(missing_ok=True)
        return {unit: _last_line(failure) for unit, failure in failures.items()}

    def _store(self, rows: Rows, unit: Unit, found: Sequence[Mapping[str, Any]]) -> str:
        """Store the rows of a unit; returns what is wrong with them."""
        label = {"data": self.labels[unit.dataset], "finished_at": _now(), **_provenance()}
        label["fingerprint"] = self.protocols[unit.protocol].fingerprint(unit.family)
        try:
            rows.add([{**row, **label} for row in found])
        except BenchError as error:
            if isinstance(error.__cause__, OSError):  # the disk, not the rows
                raise BenchError(f"{error}; {self.safe} of {self.total} units are safe") from error
            return str(error)
        self.todo.remove(unit)
        return ""

    def _outcomes(self, units: Sequence[Unit], backend: str, workers: int | None) -> Iterator[tuple[Unit, Any]]:
        archive = str(self.source.path.resolve()) if isinstance(self.source, Archive) else None
        jobs = [
            joblib.delayed(_compute)(
                self.compute, unit, self.protocols[unit.protocol], archive, self.seeds, os.getpid()
            )
            for unit in units
        ]
        count = joblib.effective_n_jobs(-1) if workers is None else workers
        threads = {"inner_max_num_threads": 1} if backend == "loky" else {}
        with joblib.parallel_config(backend, n_jobs=count, **threads):
            if backend != "ray":
                yield from joblib.Parallel(return_as="generator_unordered", batch_size=1)(jobs)
                return
            for at in range(0, len(jobs), 4 * count):  # it gives nothing back before all of a call is done
                yield from joblib.Parallel(batch_size=1)(jobs[at : at + 4 * count])

    def _record(self, skipped: Mapping[str, str], damaged: Mapping[str, str]) -> dict[str, Any]:
        """``settings.json``: what was asked for, with what."""
        return {
            "command": self.command,
            **_provenance(),
            "protocols": {
                name: {"fingerprints": {f: p.fingerprint(f) for f in self.families}, "settings": asdict(p)}
                for name, p in self.protocols.items()
            },
            "families": list(self.families),
            "datasets": sorted(self.labels),
            "data": dict(self.labels),
            "skipped": dict(skipped),
            "damaged": dict(damaged),
            "seeds": list(self.seeds),
            "source": str(getattr(self.source, "path", "embedded")),
            "shortened": self.shortened,
            "units": self.total,
            "todo": len(self.todo),
            "started_at": _now(),
            "finished_at": None,
        }

    def _write_record(self, record: Mapping[str, Any], rows: Mapping[str, Rows]) -> None:
        for name, own in rows.items():  # paths are of no use elsewhere
            own.settings = {key: value for key, value in record.items() if key not in ("command", "source")}
            own.settings["protocols"] = {name: record["protocols"][name]}
        text = json.dumps(record, indent=2, default=str, ensure_ascii=False)
        write_whole(self.out / "settings.json", text.encode() + b"\n")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


class _Bar:
    """Progress on standard error, in units of estimated cost: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: float, study: Study, show: bool) -> None:
        self.study, self.last = study, time.monotonic()
        console = Console(stderr=True, quiet=not show)
        columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task(self._text(), total=total or 1.0)

    def __enter__(self) -> _Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self.say(self._text())

    def _text(self) -> str:
        return f"{self.study.safe} of {self.study.total} units"

    def say(self, text: str) -> None:
        self.bar.console.print(f"ldlt: {text}", markup=False, highlight=False, soft_wrap=True)

    def advance(self, cost: float) -> None:
        """A unit is done with."""
        self.bar.update(self.task, advance=cost, description=self._text())
        if self.bar.disable and time.monotonic() - self.last > LINES:
            self.last = time.monotonic()
            self.say(self._text())


@contextlib.contextmanager
def cluster(backend: str, address: str | None = None) -> Iterator[None]:
    """Make a backend known to joblib, connected to its cluster; by default one that is started on this machine."""
    if backend == "ray":
        try:
            import ray  # noqa: PLC0415
            from ray.util.joblib import register_ray  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("ray", "ray") from error
        register_ray()
        ours = not ray.is_initialized()
        if ours:
            ray.init(address, include_dashboard=False, log_to_driver=False)
        try:
            yield
        finally:
            if ours:
                ray.shutdown()
    elif backend == "dask":
        try:
            from distributed import Client  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("distributed", "dask") from error
        with Client(address) if address else Client(threads_per_worker=1, dashboard_address=None):
            yield
    else:
        yield


@lru_cache(maxsize=2)
def _dataset(archive: str | None, name: str) -> Dataset:
    return (Embedded() if archive is None else Archive(archive)).load(name)


def call_alone(parent: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns with one thread, whoever computes: all give the same numbers."""
    if os.getpid() != parent and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(threads)


def _compute(
    compute: Compute, unit: Unit, protocol: Protocol, archive: str | None, seeds: Sequence[int], parent: int
) -> tuple[Unit, list[dict[str, Any]] | str]:
    """Rows of a unit, or the text of what it raised."""
    try:
        return unit, call_alone(parent, lambda: compute(unit, protocol, _dataset(archive, unit.dataset), seeds))
    except Exception:
        return unit, traceback.format_exc()


@cache
def _provenance() -> dict[str, str]:
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        processor = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), processor)
    return {
        "commit": _commit(),
        "ldlt_version": __version__,
        "torch_version": torch.__version__,
        "numpy_version": np.__version__,
        "python_version": sys.version.split()[0],
        "machine": f"{processor}, 1 thread",
    }


def _commit() -> str:
    """Commit of these sources, with a plus sign if they were changed; empty where there is none."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "../.."])
        )
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + "+" * bool(changed) if tracked.returncode == 0 else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
