"""Download of the public archive: resumed, retried, verified, and put in place in one step."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ldlt._version import __version__
from ldlt.bench.data.archive import Archive
from ldlt.bench.data.errors import ArchiveError, FetchError
from ldlt.bench.data.store import describe_start, zip_errors
from ldlt.bench.data.unpack import LIMITS, Limits, audit
from ldlt.bench.lock import Lock

__all__ = ["POLICY", "SETS", "URLS", "Policy", "Progress", "fetch", "verify"]

URLS = (
    "http://www.bioinf.jku.at/people/klambauer/data_py.zip",
    "http://persoal.citius.usc.es/manuel.fernandez.delgado/papers/jmlr/data.tar.gz",
)
"""The two public addresses; the second has the layout of 2014 and is refused at its first bytes."""

SETS = 120
"""Complete data sets that the archive must have at least."""

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP answers after which it is worth trying again."""

CHUNK = 1 << 16


@dataclass(frozen=True)
class Policy:
    """How patient a download is.

    Attributes:
        attempts: Tries without any new byte before an address is given up.
        most: Tries altogether per address.
        timeout: Seconds to wait for the server at a time.
        pause: Seconds before the second try; doubled from try to try, at most 30.
        deadline: Seconds for everything.
        largest: Bytes that a download may have.
    """

    attempts: int = 5
    most: int = 20
    timeout: float = 30.0
    pause: float = 1.0
    deadline: float = 3600.0
    largest: int = 1 << 30


POLICY = Policy()


@dataclass(frozen=True)
class Progress:
    """State of a download: address, bytes on disk, bytes of the whole (None if the server does not say)."""

    url: str
    done: int
    total: int | None


class _Refused(Exception):
    """The address will not give the archive, however often it is asked."""


class _Interrupted(Exception):
    """The transfer broke off; another try may go on."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


def verify(path: str | Path, *, sets: int = SETS, sha256: str | None = None, limits: Limits = LIMITS) -> Archive:
    """Check a downloaded archive: sizes, every checksum inside the zip file, layout, number of data sets.

    Args:
        path: The zip file.
        sets: Complete data sets that it must have at least.
        sha256: Checksum of the whole file, if known.
        limits: Largest size allowed when unpacked.

    Returns:
        The archive, ready to read.

    Raises:
        ArchiveError: If something is wrong.
    """
    path = Path(path)
    if sha256 is not None:
        with zip_errors(path), path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256.strip().lower():
            raise ArchiveError(f"{path}: sha256 is {found} instead of {sha256.strip().lower()}")
    archive = Archive(path)
    audit(path, limits)
    with zip_errors(path), zipfile.ZipFile(path) as zipped:
        damaged = zipped.testzip()
    if damaged is not None:
        raise ArchiveError(f"{path}: '{damaged}' is damaged; fetch it again")
    if len(archive) < sets:
        raise ArchiveError(f"{path}: {len(archive)} complete data sets instead of at least {sets}")
    return archive


def fetch(
    destination: str | Path,
    urls: Sequence[str] = URLS,
    progress: Callable[[Progress], None] | None = None,
    *,
    sets: int = SETS,
    sha256: str | None = None,
    policy: Policy = POLICY,
) -> Path:
    """Download the archive, unless it is already there.

    The addresses are tried in turn. Bytes go to a ``.part`` file beside the destination, which a later call
    resumes (if the server can and its file has not changed); only a verified archive gets the final name,
    in one step.

    Args:
        destination: File to make, or an existing folder for ``data_py.zip``.
        urls: Addresses, the preferred one first.
        progress: Called after every piece.
        sets: As :func:`verify`.
        sha256: As :func:`verify`.
        policy: How patient to be.

    Returns:
        The verified file.

    Raises:
        FetchError: If no address gives the archive; the message has the reason for each.
    """
    target = Path(destination)
    target = target / "data_py.zip" if target.is_dir() else target
    with suppress(ArchiveError):
        verify(target, sets=sets, sha256=sha256)
        return target
    end = time.monotonic() + policy.deadline
    reasons: list[str] = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        busy = f"{target}: another download to this file is running"
        with Lock(target.with_name(f"{target.name}.lock"), busy, FetchError):
            for url in urls:
                download = _Download(url, target, progress or (lambda _: None), policy, end)
                try:
                    download.complete(lambda path: verify(path, sets=sets, sha256=sha256))
                except (_Refused, ArchiveError) as error:
                    reasons.append(f"{url}: {error}")
                else:
                    os.replace(download.part, target)
                    download.discard()
                    return target
    except FetchError:
        raise
    except OSError as error:
        raise FetchError(f"{target}: cannot be written ({error.strerror or error})") from error
    raise FetchError("\n  ".join([f"{target.name} could not be fetched:", *(reasons or ["no address given"])]))


class _Download:
    """One address, one file, as many tries as the policy allows."""

    def __init__(
        self, url: str, target: Path, progress: Callable[[Progress], None], policy: Policy, end: float
    ) -> None:
        self.url, self.progress, self.policy, self.end = url, progress, policy, end
        mark = hashlib.sha256(url.encode()).hexdigest()[:8]
        self.part = target.with_name(f"{target.name}.{mark}.part")
        self.memo = target.with_name(f"{target.name}.{mark}.json")
        self.resumed = False

    def complete(self, check: Callable[[Path], object]) -> None:
        """Make the part file complete and sound; a resumed one that is not is downloaded afresh, once."""
        for last in (False, True):
            self.run()
            try:
                check(self.part)
                return
            except ArchiveError:
                self.discard()
                if last or not self.resumed:
                    raise
            self.resumed = False

    def run(self) -> None:
        """Complete the part file, or raise :class:`_Refused`."""
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise _Refused("not an http or https address")
        idle = 0
        reason = "no try made"
        for _ in range(self.policy.most):
            before = self._size()
            try:
                self._transfer()
                return
            except _Interrupted as error:
                reason = str(error)
                idle = 0 if self._size() > before else idle + 1
                wait = min(max(self.policy.pause * 2.0 ** max(idle - 1, 0), error.wait), 30.0)
            if idle >= self.policy.attempts:
                break
            if time.monotonic() + wait >= self.end:
                raise _Refused(f"out of time ({reason})")
            time.sleep(wait)
        raise _Refused(f"given up ({reason})")

    def discard(self) -> None:
        """Forget what was downloaded."""
        self.memo.unlink(missing_ok=True)
        self.part.unlink(missing_ok=True)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _recall(self) -> dict[str, object]:
        """What the server said about the part file, or nothing."""
        with suppress(OSError, ValueError):
            memo = json.loads(self.memo.read_text(encoding="utf-8"))
            if isinstance(memo, dict) and memo.get("url") == self.url:
                return memo
        return {}

    def _transfer(self) -> None:
        """One request and its answer."""
        memo = self._recall()
        have = self._size() if memo else 0
        if have and have == memo.get("total"):
            self.resumed = True
            return
        headers = {"User-Agent": f"ldlt/{__version__}", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            if isinstance(memo.get("validator"), str):
                headers["If-Range"] = str(memo["validator"])
        with self._open(urllib.request.Request(self.url, headers=headers)) as answer:
            if urlsplit(answer.geturl()).scheme not in ("http", "https"):
                raise _Refused("redirected to something that is not http or https")
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise _Refused("the answer is encoded although it was asked for as it is")
            if answer.status == http.client.PARTIAL_CONTENT and have:
                total = _range_total(answer.headers.get("Content-Range", ""), have)
                if total is None or total != memo.get("total", total):
                    self.discard()
                    raise _Interrupted("the server resumed at the wrong place")
                self.resumed = True
            elif answer.status == http.client.OK:
                have = 0
                self.resumed = False
                self.discard()
                length = answer.headers.get("Content-Length", "")
                total = int(length) if length.isdecimal() else None
                tag = answer.headers.get("ETag") or "W/"
                validator = answer.headers.get("Last-Modified") if tag.startswith("W/") else tag
                memo = {"url": self.url, "validator": validator, "total": total}
                self.part.touch()
                self.memo.write_text(json.dumps(memo), encoding="utf-8")
            else:
                raise _Refused(f"unexpected answer {answer.status}")
            self._copy(answer, have, total)

    @contextmanager
    def _open(self, request: urllib.request.Request) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request; network trouble becomes :class:`_Interrupted` or :class:`_Refused`."""
        try:
            answer = urllib.request.urlopen(request, timeout=self.policy.timeout)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                    self.discard()
                    raise _Interrupted("the server cannot resume") from None
                if error.code in TRANSIENT:
                    after = error.headers.get("Retry-After", "")
                    wait = float(after) if after.isdecimal() else 0.0
                    raise _Interrupted(f"the server answers {error.code} {error.reason}", wait) from None
                raise _Refused(f"the server answers {error.code} {error.reason}") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise _Refused(f"certificate not accepted ({error.reason})") from None
            raise _Interrupted(f"not reachable ({error.reason})") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Interrupted(f"not reachable ({error or type(error).__name__})") from None
        except ValueError as error:
            raise _Refused(f"not a usable address ({error})") from None
        with answer:
            yield answer

    def _copy(self, answer: http.client.HTTPResponse, done: int, total: int | None) -> None:
        """Append the body to the part file."""
        if total is not None and total > self.policy.largest:
            raise _Refused(f"{total:,} bytes, more than {self.policy.largest:,}")
        with self.part.open("r+b") as file:
            file.seek(done)
            file.truncate()
            while True:
                if time.monotonic() > self.end:
                    raise _Refused("out of time")
                try:
                    piece = answer.read1(CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    raise _Interrupted(f"broke off after {done:,} bytes ({error or type(error).__name__})") from None
                if not piece:
                    break
                if not done and not b"PK".startswith(piece[:2]):
                    self.discard()
                    raise _Refused(_unwanted(piece))
                file.write(piece)
                done += len(piece)
                if done > self.policy.largest:
                    raise _Refused(f"more than {self.policy.largest:,} bytes")
                self.progress(Progress(self.url, done, total))
            file.flush()
            os.fsync(file.fileno())
        if total is not None and done < total:
            raise _Interrupted(f"broke off after {done:,} of {total:,} bytes")


def _unwanted(start: bytes) -> str:
    """What came instead of a zip file."""
    if start[:2] == b"\x1f\x8b":
        return "a gzip file, the archive in the layout of 2014, which has no validation folds and is not read"
    return describe_start(start)


def _range_total(header: str, start: int) -> int | None:
    """Total size in a ``Content-Range`` that begins at the right place, else None."""
    unit, _, rest = header.partition(" ")
    span, _, total = rest.partition("/")
    first = span.partition("-")[0]
    good = unit == "bytes" and first.isdecimal() and total.isdecimal() and int(first) == start
    return int(total) if good else None
