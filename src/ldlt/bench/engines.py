"""Engines: who computes the units, in this process, in worker processes, or on a cluster.

An engine only computes. It hands every finished unit back to the one process that writes, so that no two processes
ever write the same file. What a unit raises is a result like any other: a failure of that unit.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, TYPE_CHECKING, Any, Protocol

from ldlt.bench.results import BenchError, UnitKey
from ldlt.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from ldlt.bench.data import Collection, Dataset

__all__ = ["ENGINES", "Engine", "Outcome", "ProcessEngine", "RayEngine", "SerialEngine", "Work", "make_engine"]

ENGINES = ("process", "serial", "ray")
"""Names of the engines."""

ATTEMPTS = 2
"""How often a unit is tried whose worker dies. It may have died of its neighbours' use of memory."""

_CACHED = 2
_STARTS = 3


@dataclass(frozen=True)
class Work:
    """What a worker needs to compute any unit.

    Attributes:
        protocols: Name -> settings of a protocol.
        seeds: Seeds of every unit.
        archive: Path of the archive, or None for the embedded data sets.
        module: Module with the function ``run_unit(unit, protocol, dataset, seeds)``.
    """

    protocols: Mapping[str, Any]
    seeds: tuple[int, ...]
    archive: str | None = None
    module: str = "ldlt.bench.unit"


@dataclass(frozen=True)
class Outcome:
    """What became of a unit: rows, or the text of a failure.

    Attributes:
        unit: The unit.
        rows: One row per fold and seed, or None.
        failure: What went wrong, with the traceback if there is one, or ``""``.
        seconds: Time that the worker spent on it.
    """

    unit: UnitKey
    rows: list[dict[str, Any]] | None = None
    failure: str = ""
    seconds: float = 0.0


class Engine(Protocol):
    """Computes units."""

    @property
    def slots(self) -> int:
        """How many units are computed at the same time."""

    def map(self, work: Work, units: Sequence[UnitKey], started: Callable[[UnitKey], None]) -> Iterator[Outcome]:
        """Compute units, about in the given order, and yield each as it is finished.

        Args:
            work: What all units share.
            units: The units.
            started: Called when a unit is begun.
        """


def make_engine(name: str, workers: int | None = None, address: str | None = None) -> Engine:
    """An engine by name.

    Args:
        name: One of :data:`ENGINES`.
        workers: Number of worker processes (``process``, and ``ray`` without an address); None for one per
            processor; 0 means ``serial``.
        address: Address of a ray cluster, or None for one on this machine.

    Raises:
        OptionError: For an unknown name.
        MissingExtraError: If ray is asked for and not installed.
    """
    if name not in ENGINES:
        raise OptionError(f"the engine must be one of {', '.join(ENGINES)}, not '{name}'")
    if name == "ray":
        return RayEngine(address, workers)
    if name == "serial" or workers == 0:
        return SerialEngine()
    return ProcessEngine(workers)


class SerialEngine:
    """One unit after the other in this process: slow, and easy to debug."""

    slots = 1

    def map(self, work: Work, units: Sequence[UnitKey], started: Callable[[UnitKey], None]) -> Iterator[Outcome]:
        """See :meth:`Engine.map`."""
        desk = _Desk(work)
        for unit in units:
            started(unit)
            with _one_thread():
                outcome = desk.compute(unit)
            yield outcome


class ProcessEngine:
    """Worker processes with one thread each: small networks gain nothing from more.

    Own processes and pipes, as an executor of the standard library gives up everything when one worker is
    killed. Each worker is a fresh interpreter, which never runs the caller's main module again.

    Args:
        workers: Number of processes; None for one per processor.
    """

    def __init__(self, workers: int | None = None) -> None:
        if os.name != "posix":
            raise BenchError("worker processes need a POSIX system: use the engine 'serial' or 'ray'")
        self.slots = _processors() if workers is None else workers
        if self.slots < 1:
            raise OptionError(f"at least 1 worker is needed, not {self.slots}")

    def map(self, work: Work, units: Sequence[UnitKey], started: Callable[[UnitKey], None]) -> Iterator[Outcome]:
        """See :meth:`Engine.map`.

        Raises:
            BenchError: If workers cannot even start.
        """
        queue = deque(units)
        deaths: Counter[UnitKey] = Counter()
        crew: list[_Worker] = []
        failed_starts = 0

        def occupy(worker: _Worker) -> None:
            if queue and worker.greeted and worker.unit is None:
                worker.unit = queue.popleft()
                started(worker.unit)
                with contextlib.suppress(OSError):  # a worker that has just died is noticed by its closed pipe
                    worker.pipe.send(worker.unit)

        try:
            while queue or any(worker.unit is not None for worker in crew):
                for worker in crew:  # also those that had nothing to do until another one died
                    occupy(worker)
                busy = sum(worker.unit is not None for worker in crew)
                while len(crew) < min(self.slots, busy + len(queue)):
                    crew.append(_Worker(work))
                for ready in wait([worker.pipe for worker in crew]):
                    worker = next(worker for worker in crew if worker.pipe is ready)
                    unit = worker.unit
                    try:
                        message = worker.pipe.recv()
                    except (EOFError, OSError):
                        crew.remove(worker)
                        cause = worker.bury()
                        if not worker.greeted:
                            failed_starts += 1
                            if failed_starts >= self.slots + _STARTS:
                                raise BenchError(f"workers cannot start: {cause}") from None
                        elif unit is not None:
                            deaths[unit] += 1
                            if deaths[unit] < ATTEMPTS:
                                queue.append(unit)  # last, when there may be more memory
                            else:
                                yield Outcome(unit, failure=f"{cause}; its worker died {ATTEMPTS} times")
                        continue
                    worker.greeted, worker.unit, failed_starts = True, None, 0
                    occupy(worker)  # before the caller takes its time with the outcome
                    if isinstance(message, Outcome):
                        yield message
        finally:
            for worker in crew:
                worker.kill()


class RayEngine:
    """Tasks on a ray cluster, one processor each. The data travel with the tasks, so other machines need no archive.

    Every machine needs the same versions of Python, ray and this package.

    Args:
        address: Address of a cluster, or None for one on this machine while the engine works.
        workers: Processors of the cluster on this machine; None for all.

    Raises:
        MissingExtraError: If ray is not installed.
    """

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        if find_spec("ray") is None:
            raise MissingExtraError("ray", "ray")
        self.address = address
        self.slots = _processors() if workers is None else max(workers, 1)

    def map(self, work: Work, units: Sequence[UnitKey], started: Callable[[UnitKey], None]) -> Iterator[Outcome]:
        """See :meth:`Engine.map`. A unit counts as begun when it is handed to the cluster."""
        import ray  # noqa: PLC0415

        ours = not ray.is_initialized()
        if ours:
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
            try:
                if self.address is None:
                    ray.init(num_cpus=self.slots, include_dashboard=False, **quiet)
                else:
                    ray.init(address=self.address, **quiet)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise BenchError(f"no ray cluster at {self.address or 'this machine'}: {error}") from error
        try:
            self.slots = max(int(ray.cluster_resources().get("CPU", 1)), 1)
            yield from self._run(ray, work, units, started)
        finally:
            if ours:
                ray.shutdown()

    def _run(
        self, ray: Any, work: Work, units: Sequence[UnitKey], started: Callable[[UnitKey], None]
    ) -> Iterator[Outcome]:
        task = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_compute_remotely)
        shared = ray.put(work)
        desk = _Desk(work)
        shipped: OrderedDict[str, Any] = OrderedDict()  # data sets in the cluster's memory, the least recent first
        queue, running = deque(units), dict[Any, UnitKey]()
        try:
            while queue or running:
                while queue and len(running) < 2 * self.slots:  # a few in advance, so that no processor waits
                    unit = queue.popleft()
                    started(unit)
                    try:
                        if unit.dataset not in shipped:
                            shipped[unit.dataset] = ray.put(desk.load(unit.dataset))
                    except Exception:
                        yield Outcome(unit, failure=traceback.format_exc())
                        continue
                    shipped.move_to_end(unit.dataset)
                    while len(shipped) > 2 * self.slots + _CACHED:
                        shipped.popitem(last=False)
                    running[task.remote(shared, unit, shipped[unit.dataset])] = unit
                if not running:
                    continue
                for reference in ray.wait(list(running), num_returns=1, timeout=1.0)[0]:
                    unit = running.pop(reference)
                    try:
                        outcome = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        outcome = Outcome(unit, failure=f"{error}\nits worker died ({type(error).__name__})")
                    yield outcome
        finally:
            for reference in running:
                with contextlib.suppress(Exception):
                    ray.cancel(reference, force=True)


class _Desk:
    """Where units are computed: opens the data once, and keeps the last sets, as neighbours share them."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._source: Collection | None = None
        self._sets: OrderedDict[str, Dataset] = OrderedDict()

    def load(self, name: str) -> Dataset:
        from ldlt.bench.data import Archive, Embedded  # noqa: PLC0415

        if name in self._sets:
            self._sets.move_to_end(name)
            return self._sets[name]
        if self._source is None:
            self._source = Embedded() if self.work.archive is None else Archive(self.work.archive)
        self._sets[name] = self._source.load(name)
        while len(self._sets) > _CACHED:
            self._sets.popitem(last=False)
        return self._sets[name]

    def compute(self, unit: UnitKey, dataset: Dataset | None = None) -> Outcome:
        """Compute a unit; whatever it raises becomes its failure, except an interruption."""
        begun = time.perf_counter()
        try:
            protocol = self.work.protocols[unit.protocol]
            run_unit = import_module(self.work.module).run_unit
            data = self.load(unit.dataset) if dataset is None else dataset
            rows = run_unit(unit, protocol, data, self.work.seeds)
            origin = {"fingerprint": protocol.fingerprint(unit.family), **provenance()}
            return Outcome(unit, [{**row, **origin} for row in rows], seconds=time.perf_counter() - begun)
        except KeyboardInterrupt:
            raise
        except BaseException:  # also SystemExit: a unit must not end the run
            return Outcome(unit, failure=traceback.format_exc(), seconds=time.perf_counter() - begun)


def provenance() -> dict[str, str]:
    """Versions, machine and time, as columns of a row: what one needs to know to compute it again."""
    import numpy  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from ldlt._version import __version__  # noqa: PLC0415

    threads = torch.get_num_threads()
    return {
        "ldlt_version": __version__,
        "torch_version": str(torch.__version__),
        "numpy_version": numpy.__version__,
        "python_version": platform.python_version(),
        "machine": f"{_processor_name()}, {threads} thread{'s' * (threads > 1)}",
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@dataclass
class _Worker:
    """A worker process as its parent sees it."""

    work: Work
    pipe: Connection = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)
    output: IO[bytes] = field(init=False)
    unit: UnitKey | None = None
    greeted: bool = False

    def __post_init__(self) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `kill`
        self.pipe, theirs = Pipe()
        one = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        # The first statement, before slow imports: Ctrl-C is the parent's business.
        code = (
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from ldlt.bench.engines import _serve; _serve({theirs.fileno()}, {os.getpid()})"
        )
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
                env={**os.environ, **dict.fromkeys(one, "1")},
            )
        except OSError as error:
            self.pipe.close()
            self.output.close()
            raise BenchError(f"a worker process cannot be started: {error}") from error
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # a worker that has already died is noticed by its closed pipe
            self.pipe.send(self.work)

    def bury(self) -> str:
        """Say what a worker died of, after it closed its pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        code = self.process.poll()
        self.output.seek(0)
        said = self.output.read().decode(errors="replace").strip()[-2000:]
        self.kill()
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            hint = " (often for want of memory)" if -code == signal.SIGKILL else ""
            cause = f"killed by {name}{hint}"
        else:
            cause = f"ended with exit code {code}"
        return f"{said}\n{cause}" if said else cause  # the last line is what a summary shows

    def kill(self) -> None:
        """End it at once. Nothing is lost, as workers write nothing."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.output.close()


def _serve(descriptor: int, parent: int) -> None:
    """Life of a worker process: units in, outcomes out, until the pipe or the parent is gone."""
    _die_with(parent)
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    try:
        desk = _Desk(pipe.recv())
        pipe.send("ready")
        while True:
            outcome = desk.compute(pipe.recv())
            try:
                pipe.send(outcome)
            except (OSError, EOFError):
                raise
            except Exception:  # rows that cannot be pickled
                pipe.send(Outcome(outcome.unit, failure=traceback.format_exc(), seconds=outcome.seconds))
    except (EOFError, OSError):
        return


def _die_with(parent: int) -> None:
    """End this process when its parent ends, however that ends, even while a long computation runs."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _compute_remotely(work: Work, unit: UnitKey, dataset: Dataset) -> Outcome:
    """A ray task."""
    with _one_thread():
        return _Desk(work).compute(unit, dataset)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One thread in PyTorch, as in worker processes, so that all engines give the same numbers."""
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1


def _processor_name() -> str:
    """Model of the processor, as far as the system tells."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown processor"
