"""Rows of a study: one Parquet file per protocol, written so that no interruption can damage it.

Every finished unit is added to the file, which is replaced in one step by the whole new one. Rows are never taken away:
those of other settings or other data stay beside the present ones, known by ``fingerprint`` and ``data``, so that going
back to earlier settings costs nothing and different settings are never mixed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ldlt_bench import require_extra

require_extra()  # before the imports that need it

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ldlt.errors import LdltError
from ldlt.files.replace import atomic

__all__ = ["COLUMNS", "KEYS", "BenchError", "Rows", "latest", "read_rows", "read_settings", "write_whole"]

COLUMNS: dict[str, tuple[str, str]] = {
    "protocol": ("string", "name of the training protocol"),
    "dataset": ("string", "name of the data set"),
    "family": ("string", "name of the family of networks"),
    "fold": ("int64", "test fold, from 0"),
    "seed": ("int64", "seed of initialisation and batches"),
    "accuracy": ("double", "share of test rows that are classified correctly"),
    "cert_36": ("double", "share of test rows that are correct with a margin for a radius of 36/255"),
    "cert_72": ("double", "the same for 72/255"),
    "cert_108": ("double", "the same for 108/255"),
    "cert_255": ("double", "the same for 255/255"),
    "curve": ("list", "the same at the 41 radii 0, 0.05, ..., 2"),
    "width": ("int64", "neurons of a hidden layer"),
    "depth": ("int64", "number of hidden layers or blocks"),
    "parameters": ("int64", "number of trained scalars"),
    "padding": ("int64", "inputs of value zero that the family had to add"),
    "input_dim": ("int64", "features of the data set"),
    "output_dim": ("int64", "classes of the data set"),
    "bound": ("double", "Lipschitz constant of the map from features to logits"),
    "rigorous": ("bool", "whether the radii also account for rounding errors"),
    "certified": ("bool", "whether the construction keeps its bound, in real arithmetic"),
    "violation": ("double", "largest slope that a search found, over the bound, of a family without a proven bound"),
    "epochs": ("int64", "epochs trained"),
    "best_epoch": ("int64", "epoch whose parameters were tested"),
    "learning_rate": ("double", "learning rate used"),
    "edge": ("int64", "-1 or 1 if that is the smallest or largest of those tried, else 0"),
    "loss": ("string", "loss used"),
    "batch_size": ("int64", "rows of a batch"),
    "validation_score": ("double", "mean of the five metrics on the validation rows, by which settings were chosen"),
    "seconds": ("double", "time of the unit, searches included, divided by its number of rows"),
    "cpu_seconds": ("double", "the same in processor time: without the time spent waiting for a core"),
    "train_rows": ("int64", "number of training rows"),
    "validation_rows": ("int64", "number of validation rows"),
    "test_rows": ("int64", "number of test rows"),
    "dtype": ("string", "precision of training"),
    "source": ("string", "where the data came from"),
    "data": ("string", "kind, size and hash of the data"),
    "fingerprint": ("string", "hash of all settings of the protocol that concern the family"),
    "commit": ("string", "commit of the sources, with a plus sign if they were changed; empty if installed"),
    "ldlt_version": ("string", "version of this package"),
    "torch_version": ("string", "version of PyTorch"),
    "numpy_version": ("string", "version of NumPy"),
    "python_version": ("string", "version of Python"),
    "machine": ("string", "processor"),
    "finished_at": ("string", "when the unit was finished (UTC)"),
}
"""Every column of the table of results, in order: its type (a name that pyarrow knows) and what it says."""

KEYS = ["protocol", "dataset", "family", "fold", "seed"]
"""What tells a run of one study from all others."""

_TYPES = {"list": pa.list_(pa.float64()), "string": pa.string(), "int64": pa.int64(), "bool": pa.bool_()}
_SCHEMA = pa.schema(
    [pa.field(name, _TYPES.get(kind, pa.float64()), metadata={"doc": doc}) for name, (kind, doc) in COLUMNS.items()]
)


class BenchError(LdltError, RuntimeError):
    """A study that cannot start or go on. What is finished is safe, and the message says what to do."""


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file in one step, making its folder.

    Raises:
        BenchError: If the system refuses; an older file of this name is then as it was, and nothing is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as beside:
            beside.write_bytes(content)
    except OSError as error:
        reason = error.strerror or error
        raise BenchError(f"cannot write {path} ({reason}): see to that and run the same command again") from error
    return path


def read_rows(path: str | Path) -> pd.DataFrame:
    """The rows of a file of results, all columns checked.

    Raises:
        BenchError: If it cannot be read or is no table of results.
    """
    try:
        table = pq.ParquetFile(io.BytesIO(Path(path).read_bytes()), page_checksum_verification=True).read()
        missing = [name for name in COLUMNS if name not in table.column_names]
        if missing or any(table[name].null_count for name in KEYS):
            raise BenchError(f"{path} is no table of results of this version: it lacks keys or {', '.join(missing)}")
        return table.select(list(COLUMNS)).cast(_SCHEMA).to_pandas()
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise BenchError(f"cannot read {path} ({reason}): if it is damaged, move it away") from error


def read_settings(place: str | Path) -> dict[str, Any]:
    """What was asked for, with what: of a folder of results or a file of rows; empty if there is nothing to be read."""
    place = Path(place)
    try:
        if place.is_dir():
            content = json.loads((place / "settings.json").read_bytes())
        else:
            content = json.loads((pq.read_schema(place).metadata or {})[b"settings"])
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return {}
    return content if isinstance(content, dict) else {}


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one study: of each protocol and family the newest settings, of each data set the newest data."""
    new = rows.sort_values("finished_at", kind="stable")
    fingerprint = new.groupby(["protocol", "family"])["fingerprint"].transform("last")
    new = new[new["fingerprint"] == fingerprint]
    return new[new["data"] == new.groupby("dataset")["data"].transform("last")].sort_values(KEYS, ignore_index=True)


class Rows:
    """The file of results of one protocol, which says in its metadata how they were made.

    Args:
        path: The file; it need not exist.

    Attributes:
        settings: What was asked for, with what (:func:`read_settings`).
    """

    def __init__(self, path: Path) -> None:
        self.path, self.settings = path, dict[str, Any]()
        self.frame = read_rows(path) if path.exists() else _SCHEMA.empty_table().to_pandas()

    def of(self, dataset: str, family: str, fingerprint: str, data: str, seeds: Sequence[int]) -> pd.DataFrame:
        """Rows of a unit that were computed with these settings, from these data."""
        f = self.frame
        mine = (f["dataset"] == dataset) & (f["family"] == family) & (f["fingerprint"] == fingerprint)
        return f[mine & (f["data"] == data) & f["seed"].isin(seeds)]

    def add(self, rows: Sequence[Mapping[str, Any]] | pd.DataFrame) -> None:
        """Add rows and write the file; a run that is there already with the same settings and data is replaced.

        Raises:
            BenchError: If a row does not have the columns of the table, or the system refuses to write.
        """
        try:
            new = pa.Table.from_pandas(pd.DataFrame(rows)[list(COLUMNS)], schema=_SCHEMA, preserve_index=False)
        except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
            raise BenchError(f"rows do not have the columns of the table of results: {error}") from error
        parts = [part for part in (self.frame, new.to_pandas()) if len(part)]
        whole = pd.concat(parts, ignore_index=True) if parts else self.frame
        self.frame = whole.drop_duplicates([*KEYS, "fingerprint", "data"], keep="last")
        self.write()

    def write(self) -> None:
        """Write the file."""
        schema = _SCHEMA.with_metadata({"settings": json.dumps(self.settings, default=str, ensure_ascii=False)})
        buffer = io.BytesIO()
        table = pa.Table.from_pandas(self.frame, schema=schema, preserve_index=False)
        pq.write_table(
            table.replace_schema_metadata(schema.metadata), buffer, compression="zstd", write_page_checksum=True
        )
        write_whole(self.path, buffer.getvalue())
