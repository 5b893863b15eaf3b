"""Long work: a line on the terminal that tells how far it is, and Ctrl-C that keeps what there is."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any

__all__ = ["Progress"]


class Progress:
    """A line of progress on standard error, if that is a terminal, and whether Ctrl-C was pressed.

    Searches and training answer a ``KeyboardInterrupt`` with the best they have so far. Inside ``with``, this remembers
    that there was one, and :meth:`tell` raises it again if it got lost: Python drops exceptions that come up in
    destructors and callbacks. The work must not call :meth:`tell` after it has ended.

    Args:
        total: How many steps there will be at most, if that is known.
        show: False for no line even on a terminal.

    Attributes:
        interrupted: Whether Ctrl-C was pressed.
    """

    def __init__(self, total: int | None = None, *, show: bool = True) -> None:
        self.total, self.show, self.interrupted = total, show, False
        self._bar: Any = None
        self._before: Any = None

    def tell(self, line: str, done: int = 0) -> None:
        """Replace the line; ``done`` steps are finished.

        Raises:
            KeyboardInterrupt: If there was one, and the work goes on nevertheless.
        """
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=line, completed=done)
        if self.interrupted:
            raise KeyboardInterrupt

    def __enter__(self) -> Progress:
        if self.show and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console  # noqa: PLC0415
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
            from rich.progress import Progress as Bar  # noqa: PLC0415

            columns = TextColumn("{task.description}", markup=False), BarColumn(20), TimeElapsedColumn()
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
            self._bar.add_task("", total=self.total)
            self._bar.start()
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._bar is not None and not self.interrupted:
            with contextlib.suppress(OSError, ValueError):  # not print: it may be what was interrupted
                os.write(sys.stderr.fileno(), b"\nldlt: stopping; once more to give up\n")
        self.interrupted = True
        self._before(number, frame)
