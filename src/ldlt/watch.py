"""Long work on the command line: a line of progress, and Ctrl-C that keeps what there is."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any

__all__ = ["Watch"]


class Watch:
    """A line of progress on standard error, and whether Ctrl-C was pressed.

    Searches and training answer a ``KeyboardInterrupt`` with the best they have so far. Inside ``with``, this remembers
    that there was one, and :meth:`tell` raises it again if it got lost: Python drops exceptions that come up in
    destructors and callbacks. The work must not call :meth:`tell` after it has ended.

    Args:
        show: Whether to print.

    Attributes:
        interrupted: Whether Ctrl-C was pressed.
    """

    def __init__(self, show: bool) -> None:
        self.show, self.interrupted = show, False
        self._before: Any = None
        self._lines = False

    def tell(self, line: str) -> None:
        """Replace the line.

        Raises:
            KeyboardInterrupt: If there was one, and the work goes on nevertheless.
        """
        if self.show:
            self._lines = True
            print(f"\r{line:<70}", end="", file=sys.stderr, flush=True)
        if self.interrupted:
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._interrupt)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._lines:
            print(file=sys.stderr)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.show and not self.interrupted:
            with contextlib.suppress(OSError, ValueError):  # not print: it may be what was interrupted
                os.write(sys.stderr.fileno(), b"\nldlt: stopping; once more to give up\n")
        self.interrupted = True
        self._before(number, frame)
