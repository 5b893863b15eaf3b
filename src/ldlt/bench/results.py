"""Results on disk: one Parquet file per unit of work, written so that no interruption can damage them.

A benchmark of hours is stopped by full disks, closed laptops and killed processes. Every finished unit is therefore
a file of its own, which appears under its name only when it is whole; the merged table is derived from these files and
can be made again at any time. Nothing is ever deleted here: what cannot be used is renamed, and a message says why.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ldlt.errors import LdltError, MissingExtraError
from ldlt.files import TEMPORARY, write_whole

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = [
    "COLUMNS",
    "BenchError",
    "Column",
    "Store",
    "StoreError",
    "Stored",
    "UnitKey",
    "require_extras",
    "schema",
    "unit_name",
    "write_atomically",
]

VERSION = 1
"""Version of the layout of a unit file. Files of another version are set aside, not guessed at."""

_SUFFIX = ".parquet"
_META = b"ldlt"


class BenchError(LdltError, RuntimeError):
    """A benchmark that cannot start or go on. What is finished is safe, and the message says what to do."""


class StoreError(BenchError):
    """A file that could not be written.

    Attributes:
        path: The file.
        full: Whether the disk, the quota or the limit of the file size is exhausted.
        reason: What the system said.
    """

    def __init__(self, path: Path | str, full: bool, reason: str) -> None:
        what = f"disk full while writing {path}" if full else f"cannot write {path}: {reason}"
        remedy = "free some space" if full else "see to that"
        super().__init__(f"{what}: {remedy} and run the same command again")
        self.path = path
        self.full = full
        self.reason = reason

    def __reduce__(self) -> tuple[type[StoreError], tuple[Path | str, bool, str]]:
        return type(self), (self.path, self.full, self.reason)


class UnitKey(Protocol):
    """What the store needs to know of a unit: the three names that tell it from all others."""

    @property
    def protocol(self) -> str:
        """Name of the protocol."""

    @property
    def dataset(self) -> str:
        """Name of the data set."""

    @property
    def family(self) -> str:
        """Name of the family of networks."""


class _Key(NamedTuple):
    """The three names of a unit that was read from a file."""

    protocol: str
    dataset: str
    family: str


@dataclass(frozen=True)
class Column:
    """One column of the table of results: its name, its type (a name that pyarrow knows) and what it says."""

    name: str
    kind: str
    doc: str


COLUMNS = (
    Column("protocol", "string", "name of the training protocol"),
    Column("dataset", "string", "name of the data set"),
    Column("family", "string", "name of the family of networks"),
    Column("fold", "int64", "test fold, from 0"),
    Column("seed", "int64", "seed of initialisation and batches"),
    Column("accuracy", "double", "share of test rows that are classified correctly"),
    Column("cert_36", "double", "share of test rows that are correct and certified within 36/255"),
    Column("cert_72", "double", "the same within 72/255"),
    Column("cert_108", "double", "the same within 108/255"),
    Column("cert_255", "double", "the same within 255/255"),
    Column("curve", "list", "certified accuracy at the 41 radii 0, 0.05, ..., 2"),
    Column("width", "int64", "neurons of a hidden layer"),
    Column("depth", "int64", "number of hidden layers or blocks"),
    Column("parameters", "int64", "number of trained scalars"),
    Column("padding", "int64", "inputs of value zero that the family had to add"),
    Column("input_dim", "int64", "features of the data set"),
    Column("output_dim", "int64", "classes of the data set"),
    Column("bound", "double", "certified Lipschitz constant of the map from features to logits"),
    Column("rigorous", "bool", "whether the certificate also accounts for rounding errors"),
    Column("certified", "bool", "whether certified accuracies hold, that is whether the construction keeps its bound"),
    Column("epochs", "int64", "epochs trained"),
    Column("best_epoch", "int64", "epoch whose parameters were tested"),
    Column("learning_rate", "double", "learning rate used"),
    Column("loss", "string", "loss used"),
    Column("batch_size", "int64", "rows of a batch"),
    Column(
        "validation_score", "double", "mean of the five metrics on the validation rows, by which settings were chosen"
    ),
    Column("seconds", "double", "time of the unit, searches included, divided by its number of rows"),
    Column("cpu_seconds", "double", "the same in processor time: without the time spent waiting for a core"),
    Column("train_rows", "int64", "number of training rows"),
    Column("validation_rows", "int64", "number of validation rows"),
    Column("test_rows", "int64", "number of test rows"),
    Column("dtype", "string", "precision of training"),
    Column("source", "string", "where the data came from"),
    Column("fingerprint", "string", "hash of all settings of the protocol that concern the family"),
    Column("ldlt_version", "string", "version of this package"),
    Column("torch_version", "string", "version of PyTorch"),
    Column("numpy_version", "string", "version of NumPy"),
    Column("python_version", "string", "version of Python"),
    Column("machine", "string", "processor and number of threads"),
    Column("finished_at", "string", "when the unit was finished (UTC)"),
)
"""Every column of the table of results, in order: the one place where they are defined."""


def require_extras() -> None:
    """Refuse a benchmark at its beginning, not after its hours, if a package of the extra ``bench`` is missing.

    Raises:
        MissingExtraError: Naming the package.
    """
    for package in ("pandas", "pyarrow", "scipy", "statsmodels"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "bench")


@cache
def schema() -> pa.Schema:
    """The columns as a schema of Parquet; each description goes along as metadata of its field."""
    require_extras()
    import pyarrow as pa  # noqa: PLC0415

    kinds = {
        "string": pa.string(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "list": pa.list_(pa.float64()),
    }
    return pa.schema(
        [pa.field(column.name, kinds[column.kind], metadata={"doc": column.doc}) for column in COLUMNS],
    )


def unit_name(unit: UnitKey) -> str:
    """A file name, without suffix, that every file system takes and no two units share.

    Readable parts for people, and a digest of the exact names, since different names may look the same after
    cleaning or to a file system that ignores case.

    Example:
        >>> from types import SimpleNamespace
        >>> unit_name(SimpleNamespace(protocol="paper", dataset="iris", family="LDLT-R as printed"))
        'paper.iris.LDLT-R_as_printed.380fd257'
    """
    parts = (unit.protocol, unit.dataset, unit.family)
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
    clean = [re.sub(r"[^A-Za-z0-9+=-]+", "_", part)[:48] or "_" for part in parts]
    return ".".join([*clean, digest])


def write_atomically(path: Path, content: bytes) -> Path:
    """:func:`ldlt.files.write_whole`, with the folder made and a message that tells a full disk from other trouble.

    Raises:
        StoreError: If the system refuses; an older file of this name is then as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise StoreError(path, full, error.strerror or str(error)) from error
    return path


@dataclass(frozen=True)
class Stored:
    """The content of a unit file.

    Attributes:
        key: Protocol, data set, family.
        fingerprint: Settings it was computed with.
        seeds: Seeds it was computed with, sorted.
        data: Label of the data it was computed from.
        table: Its rows.
    """

    key: tuple[str, str, str]
    fingerprint: str
    seeds: tuple[int, ...]
    data: str
    table: pa.Table


class _Unusable(Exception):
    """Why a file is no unit file."""


class Store:
    """The unit files of a benchmark.

    Args:
        folder: Folder of the benchmark; the files are in ``units/`` below it.
        report: Called with one sentence whenever a file is set aside.
    """

    def __init__(self, folder: str | Path, report: Callable[[str], None] | None = None) -> None:
        self.folder = Path(folder)
        self.units = self.folder / "units"
        self._report = report or (lambda _: None)
        self._cache: dict[Path, tuple[tuple[int, int], Stored]] = {}

    def path(self, unit: UnitKey) -> Path:
        """File of a unit."""
        return self.units / f"{unit_name(unit)}{_SUFFIX}"

    def clean(self) -> int:
        """Remove temporary files that a killed run has left; only the holder of the lock may do this.

        Returns:
            How many there were.
        """
        count = 0
        for path in self.folder.rglob(f".*{TEMPORARY}"):
            with contextlib.suppress(OSError):
                path.unlink()
                count += 1
        return count

    def done(self, unit: UnitKey, fingerprint: str, seeds: Sequence[int], data: str = "") -> bool:
        """Whether the unit is there, whole, and computed with these settings, seeds and data.

        A file that is damaged or of another make is set aside with a message. One that was set aside before and
        fits is taken back, so that going back to earlier settings costs nothing.
        """
        path = self.path(unit)
        wanted = (fingerprint, tuple(sorted(seeds)), data)
        stored = self._open(path) if path.exists() else None
        if stored is not None and stored.key != (unit.protocol, unit.dataset, unit.family):
            self._set_aside(path, "corrupt", f"holds another unit ({', '.join(stored.key)})")
            stored = None
        if stored is not None and (stored.fingerprint, stored.seeds, stored.data) == wanted:
            return True
        if stored is not None:
            self._set_aside(path, _stale(stored.fingerprint, stored.seeds, stored.data), _difference(stored, *wanted))
        earlier = path.with_name(f"{path.name}.{_stale(*wanted)}")
        if not earlier.exists():
            return False
        os.replace(earlier, path)
        return self.done(unit, fingerprint, seeds, data)

    def write(self, unit: UnitKey, rows: Sequence[Mapping[str, Any]], data: str = "") -> Path:
        """Store the rows of a finished unit.

        Raises:
            BenchError: If the rows are not those of this unit, or lack columns.
            StoreError: If the system refuses to write; nothing else is touched.
        """
        table = _marked(_table(unit, rows), unit=[unit.protocol, unit.dataset, unit.family], data=data)
        try:
            _check(table)
        except _Unusable as error:
            raise BenchError(f"{_title(unit)}: {error}") from None
        return self._put(unit, table)

    def _put(self, unit: UnitKey, table: pa.Table) -> Path:
        path = self.path(unit)
        self._cache.pop(path, None)
        return write_atomically(path, _bytes(table))

    def add(self, path: str | Path) -> int:
        """Take over the units of a file that :meth:`merge` wrote, here or on another machine.

        A unit that is there already stays as it is. Whether a unit that was taken over fits the settings of a run is
        decided by :meth:`done`, as for all others.

        Returns:
            How many units were taken over.

        Raises:
            BenchError: If the file cannot be read or is not a table of results; nothing is taken over then.
        """
        try:
            whole = _parsed(Path(path).read_bytes())
            labels = json.loads((whole.schema.metadata or {})[_META])["labels"]
            members: dict[_Key, list[int]] = {}
            for row, key in enumerate(zip(*(whole[name].to_pylist() for name in _Key._fields), strict=True)):
                members.setdefault(_Key(*key), []).append(row)
            tables = {
                key: _marked(whole.take(rows), unit=list(key), data=labels[key.dataset])
                for key, rows in members.items()
            }
            for table in tables.values():
                _check(table)
        except OSError as error:
            raise BenchError(f"cannot read {path}: {error.strerror or error}") from error
        except (KeyError, ValueError, TypeError):
            raise BenchError(f"{path} is not a results.parquet of this version") from None
        except _Unusable as error:
            raise BenchError(f"{path} is not a results.parquet of this version: it {error}") from None
        new = {key: table for key, table in tables.items() if not self.path(key).exists()}
        for key, table in new.items():
            self._put(key, table)
        return len(new)

    def stored(self) -> Iterator[Stored]:
        """All usable units, by name. Files that are not are skipped, and left where they are."""
        for path in sorted(self.units.glob(f"*{_SUFFIX}")):
            try:
                yield self._read(path)
            except _Unusable:
                continue

    def load(self, keep: Callable[[Stored], bool] | None = None) -> pd.DataFrame:
        """The rows of all units, or of those that ``keep`` accepts, in the order of protocol, data set and family."""
        return self._gather(keep).to_pandas()

    def merge(self, path: Path, keep: Callable[[Stored], bool] | None = None) -> Path:
        """Write all rows into one Parquet file.

        Raises:
            StoreError: If the system refuses to write.
        """
        return write_atomically(path, _bytes(self._gather(keep)))

    def _gather(self, keep: Callable[[Stored], bool] | None) -> pa.Table:
        import pyarrow as pa  # noqa: PLC0415

        chosen = [stored for stored in self.stored() if keep is None or keep(stored)]
        chosen.sort(key=lambda stored: stored.key)
        tables = [stored.table.replace_schema_metadata(None) for stored in chosen]
        labels = {stored.key[1]: stored.data for stored in chosen}
        return _marked(pa.concat_tables([schema().empty_table(), *tables]), labels=labels)

    def _open(self, path: Path) -> Stored | None:
        """A unit file, or None after setting aside what is none."""
        try:
            return self._read(path)
        except _Unusable as error:
            self._set_aside(path, "corrupt", str(error))
            return None

    def _read(self, path: Path) -> Stored:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if path in self._cache and self._cache[path][0] == stamp:
                return self._cache[path][1]
            content = path.read_bytes()
        except OSError as error:
            raise BenchError(f"cannot read {path}: {error.strerror or error}") from error
        stored = _check(_parsed(content))
        self._cache[path] = (stamp, stored)
        return stored

    def _set_aside(self, path: Path, ending: str, reason: str) -> None:
        target = path.with_name(f"{path.name}.{ending}")
        number = 1
        while target.exists():
            number += 1
            target = path.with_name(f"{path.name}.{ending}.{number}")
        try:
            os.replace(path, target)
        except OSError as error:
            raise StoreError(target, False, error.strerror or str(error)) from error
        self._cache.pop(path, None)
        self._report(f"{path.name} {reason}: set aside as {target.name}, the unit is computed again")


def _stale(fingerprint: str, seeds: Iterable[int], data: str) -> str:
    """Ending of a file that is set aside for its settings: the same settings give the same ending."""
    text = json.dumps([fingerprint, sorted(seeds), data])
    return f"stale-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _difference(stored: Stored, fingerprint: str, seeds: tuple[int, ...], data: str) -> str:
    reasons = []
    if stored.fingerprint != fingerprint:
        reasons.append(f"other settings ({stored.fingerprint}, now {fingerprint})")
    if stored.seeds != seeds:
        reasons.append(f"other seeds ({_brief(stored.seeds)}, now {_brief(seeds)})")
    if stored.data != data:
        reasons.append(f"other data ({stored.data}, now {data})")
    return "was computed with " + " and ".join(reasons)


def _brief(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) < 6 else f"{numbers[0]} ... {numbers[-1]}"


def _title(unit: UnitKey) -> str:
    return f"{unit.family} on {unit.dataset} ({unit.protocol})"


def _table(unit: UnitKey, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table of the schema, or a sentence about what does not fit."""
    import pyarrow as pa  # noqa: PLC0415

    names = [column.name for column in COLUMNS]
    if not rows:
        raise BenchError(f"{_title(unit)}: no rows")
    for row in rows:
        missing, unknown = [n for n in names if n not in row], [str(n) for n in row if n not in names]
        if missing or unknown:
            parts = [
                f"{what}: {', '.join(which)}" for what, which in (("lack", missing), ("unknown", unknown)) if which
            ]
            raise BenchError(
                f"{_title(unit)}: rows do not have the columns of the table of results ({'; '.join(parts)})"
            )
    arrays = []
    for field, column in zip(schema(), COLUMNS, strict=True):
        values = [row[column.name] for row in rows]
        if column.kind == "double":
            values = [float("nan") if value is None else value for value in values]
        try:
            array = pa.array(values, type=field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise BenchError(
                f"{_title(unit)}: column '{column.name}' does not hold {column.kind} values: {error}"
            ) from None
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema())


def _marked(table: pa.Table, **meta: Any) -> pa.Table:
    """The table with what its rows do not say: for a unit its key and the label of its data."""
    return table.replace_schema_metadata({_META: json.dumps({"version": VERSION, **meta}).encode()})


def _bytes(table: pa.Table) -> bytes:
    import pyarrow.parquet as pq  # noqa: PLC0415

    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def _parsed(content: bytes) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        # Not `read_table`, whose machinery for folders of files takes several times as long.
        return pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise _Unusable(f"cannot be read ({(str(error) or type(error).__name__).splitlines()[0][:120]})") from None


def _check(table: pa.Table) -> Stored:
    """The unit that a table holds, after checking that it is one, whole and of one make."""
    try:
        meta = json.loads((table.schema.metadata or {})[_META])
        version, key, data = meta["version"], tuple(meta["unit"]), meta["data"]
    except (KeyError, ValueError, TypeError):
        raise _Unusable("is no unit file of this program") from None
    if version != VERSION:
        raise _Unusable(f"has layout version {version} instead of {VERSION}")
    if not table.schema.equals(schema(), check_metadata=False):
        raise _Unusable("has other columns than this version writes")
    if any(column.null_count for column in table.columns):
        raise _Unusable("has missing values")
    columns = [table[name].to_pylist() for name in ("protocol", "dataset", "family", "fingerprint", "fold", "seed")]
    rows = list(zip(*columns, strict=True))
    if not rows or len({row[:4] for row in rows}) != 1 or rows[0][:3] != key:
        raise _Unusable("does not hold the rows of one unit")
    runs = [row[4:] for row in rows]
    folds, seeds = {fold for fold, _ in runs}, {seed for _, seed in runs}
    if len(set(runs)) != len(runs) or len(runs) != len(folds) * len(seeds):
        raise _Unusable("lacks or repeats runs: every seed must have every fold once")
    return Stored(key, rows[0][3], tuple(sorted(seeds)), data, table)
