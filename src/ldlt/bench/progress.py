"""How far a benchmark is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import TracebackType
from typing import Any, TextIO

from ldlt.bench.results import UnitKey

__all__ = ["Pace", "Progress", "clock"]

INTERVAL = 20.0
"""Seconds between two lines where there is no terminal."""

_SHOWN = 3


def clock(seconds: float | None) -> str:
    """A duration for people.

    Example:
        >>> clock(5), clock(65), clock(7265), clock(200_000), clock(None)
        ('0:05', '1:05', '2:01:05', '2 d 7:33:20', '–')
    """
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass
class Pace:
    """Counts units and estimates the time that is left.

    Units differ a thousandfold in size, so that counting them says little about time. Their estimated costs are
    compared with the seconds that the finished ones took.

    Attributes:
        costs: Estimated cost of every unit that is still to do.
        done: Units that were finished before.
        slots: Units that run at the same time; asked each time, as a cluster is known only once it is reached.
        now: The clock.
    """

    costs: dict[UnitKey, float]
    done: int = 0
    slots: Callable[[], int] = lambda: 1
    now: Callable[[], float] = time.monotonic
    failed: int = 0
    running: dict[UnitKey, float] = field(default_factory=dict)
    _finished: set[UnitKey] = field(default_factory=set)
    _cost: float = 0.0
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        self.total = self.done + len(self.costs)
        self._left = sum(self.costs.values())
        self._begun = self.now()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning of this run."""
        return self.now() - self._begun

    def start(self, unit: UnitKey) -> None:
        """A unit was begun."""
        self.running[unit] = self.now()

    def finish(self, unit: UnitKey, seconds: float, ok: bool = True) -> None:
        """A unit was finished in this time, or failed."""
        self.running.pop(unit, None)
        if unit in self._finished:
            return
        self._finished.add(unit)
        self._left -= self.costs[unit]
        self.done += ok
        self.failed += not ok
        if ok:
            self._cost += self.costs[unit]
            self._seconds += seconds

    def remaining(self) -> float | None:
        """Seconds that are left, or None before anything was measured."""
        if not self._cost or not self._seconds:
            return None if len(self._finished) < len(self.costs) else 0.0
        price = self._seconds / self._cost
        spent = {unit: self.now() - begun for unit, begun in self.running.copy().items()}
        work = self._left * price - sum(min(spent[unit], self.costs[unit] * price) for unit in spent)
        longest = max((self.costs[unit] * price - spent[unit] for unit in spent), default=0.0)
        return max(work / max(self.slots(), 1), longest, 0.0)

    def line(self) -> str:
        """The state in one line."""
        failed = f", {self.failed} failed" if self.failed else ""
        left = self.remaining()
        more = "" if left is None else f", about {clock(left)} left"
        return f"{self.done} of {self.total} units{failed}, {clock(self.elapsed)} elapsed{more}{self.current()}"

    def current(self) -> str:
        """What is being computed."""
        names = [f"{unit.dataset} {unit.family}" for unit in list(self.running.copy())[-_SHOWN:]]
        return f" [{', '.join(names)}]" if names else ""


class Progress:
    """Shows a :class:`Pace` while a benchmark runs.

    Args:
        pace: What to show.
        stream: Where to; standard error by default, so that standard output stays clean for results.
        interval: Seconds between two lines where there is no terminal.
    """

    def __init__(self, pace: Pace, stream: TextIO | None = None, interval: float = INTERVAL) -> None:
        self.pace = pace
        self._stream = sys.stderr if stream is None else stream
        self._interval = interval
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._stream.isatty() and find_spec("rich") is not None:
            self._open_bar()
        period = 0.5 if self._bar is not None else self._interval
        self._thread = threading.Thread(target=self._tick, args=(period,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        if self._bar is not None:
            self._update()
            self._bar.stop()
        else:
            self._print(self.pace.line())

    def start(self, unit: UnitKey) -> None:
        """A unit was begun."""
        self.pace.start(unit)

    def finish(self, unit: UnitKey, seconds: float, ok: bool = True) -> None:
        """A unit was finished, or failed."""
        self.pace.finish(unit, seconds, ok)

    def message(self, text: str) -> None:
        """Say something without spoiling the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(f"ldlt: {text}", file=self._stream, flush=True)

    def _open_bar(self) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
        from rich.progress import Progress as Bar  # noqa: PLC0415

        self._bar = Bar(
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} units{task.fields[failed]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[current]}", style="dim", markup=False),
            console=Console(file=self._stream),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=self.pace.total, failed="", left="", current="")
        self._bar.start()

    def _tick(self, period: float) -> None:
        while not self._end.wait(period):
            if self._bar is not None:
                self._update()
            else:
                self._print(self.pace.line())

    def _update(self) -> None:
        left = self.pace.remaining()
        self._bar.update(
            self._task,
            completed=self.pace.done + self.pace.failed,
            failed=f", {self.pace.failed} failed" if self.pace.failed else "",
            left="" if left is None else f"about {clock(left)} left",
            current=self.pace.current().strip(" []"),
        )
