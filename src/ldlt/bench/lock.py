"""One process at a time."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ldlt.errors import LdltError

__all__ = ["Lock"]


class Lock:
    """The right to write somewhere, for one process at a time.

    The system's own lock decides where there is one, since it dies with its holder, whatever killed it. Process
    number and host in the file are for people, and decide on file systems without locks.

    Args:
        path: The file of the lock; its folder is made if it is missing.
        busy: What it means that another process holds it, for the message.
        error: What is raised then.

    Raises:
        LdltError: On entering, ``error``, if another process holds it or the file cannot be written.
    """

    def __init__(self, path: Path, busy: str, error: type[LdltError]) -> None:
        self.path = path
        self.busy = busy
        self.error = error
        self._file: int | None = None

    def __enter__(self) -> Lock:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self._claim():
                pass
        except OSError as error:
            raise self.error(f"cannot write {self.path}: {error.strerror or error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._file)
            self._file = None

    def _claim(self) -> bool:
        """Take the lock; False if the file was removed meanwhile by a run that ended."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            ours = _system_lock(file)
            if ours is False or (ours is None and self._alive(file)):
                raise self.error(self._message(file))
            try:
                same = os.fstat(file).st_ino == os.stat(self.path).st_ino
            except FileNotFoundError:
                same = False
            if not same:
                os.close(file)
                return False
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(holder).encode(), 0)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(file)
            raise
        self._file = file
        return True

    def _holder(self, file: int) -> dict[str, Any]:
        try:
            holder = json.loads(os.pread(file, 4096, 0))
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _alive(self, file: int) -> bool:
        """Whether the holder named in the file may still run; only asked where the system has no locks."""
        holder = self._holder(file)
        if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
            return bool(holder)
        try:
            os.kill(holder["pid"], 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return holder["pid"] != os.getpid()

    def _message(self, file: int) -> str:
        holder = self._holder(file)
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('since', '?')}"
        return f"{self.busy} ({who}): wait for it, or give another path (if no such process exists, remove {self.path})"


def _system_lock(file: int) -> bool | None:
    """Try to take the system's lock of an open file: True if it is ours, False if another's, None if there is none."""
    try:
        import fcntl  # noqa: PLC0415

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True
