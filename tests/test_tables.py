"""Tables from CSV files: what is read, what is refused, and that small files cannot fill the memory."""

from __future__ import annotations

import bz2
import gzip
import lzma

import numpy as np
import pandas as pd
import pytest

import ldlt
from ldlt import tables
from ldlt.columns import Column, columns_of, encode

GOOD = "a,b,y\n" + "".join(f"{i},{-i},{i % 2}\n" for i in range(20))


@pytest.fixture
def write(tmp_path):
    def call(content, name="data.csv"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / name

    return call


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (["a", "b"] * 10, "classification"),
        ([True, False] * 10, "classification"),
        ([0, 1, 2, 1] * 5, "classification"),
        ([0.0, 1.0] * 10, "classification"),
        (list(range(20)), "regression"),
        ([0.5, 1.5] * 10, "regression"),
        (list(range(30)) * 2, "regression"),
    ],
)
def test_the_task_is_found_from_the_target(values, task, tmp_path):
    pd.DataFrame({"x": np.arange(len(values)), "y": values}).to_csv(tmp_path / "t.csv", index=False)
    table = tables.read_table(tmp_path / "t.csv")
    assert (table.task, table.name, table.target.tolist()) == (task, "y", values)
    if task == "classification" and not isinstance(values[0], str):
        assert tables.read_table(tmp_path / "t.csv", task="regression").target.dtype == np.float64


def test_columns_go_by_name(write):
    table = tables.read_table(write(GOOD), target="a", drop=["y"])
    assert (list(table.features.columns), table.name) == (["b"], "a")
    assert list(tables.read_features(write(GOOD), [Column("y"), Column("a")]).columns) == ["y", "a"]
    assert tables.read_features(write(GOOD)).shape == (20, 3)


def test_tables_from_spreadsheets_and_compressed_ones(write):
    lines = ["a; b; y"] + [f"{i}; {i * i}; {'u' if i % 2 else 'v'}" for i in range(20)]
    marked = b"\xef\xbb\xbf" + "\r\n".join(lines).encode()  # a mark of Windows in front
    table = tables.read_table(write(marked), separator=";")
    assert list(table.features.columns) == ["a", "b"]
    assert set(table.target) == {"u", "v"}
    for suffix, pack in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        packed = write(pack(GOOD.encode()), f"data.csv{suffix}")
        assert tables.read_features(packed).equals(tables.read_features(write(GOOD)))
        packed.write_bytes(packed.read_bytes()[:-9])
        with pytest.raises(ldlt.OptionError):
            tables.read_features(packed)


def test_parts_agree_on_what_a_column_is(write, monkeypatch):
    monkeypatch.setattr(tables, "_AT_ONCE", 12)
    assert tables.read_features(write(GOOD)).shape == (20, 3)
    assert set(tables.read_table(write(GOOD + "1,2,x\n")).target) == {"0", "1", "x"}
    with pytest.raises(ldlt.OptionError, match="row 18"):
        tables.read_features(write(GOOD.replace("\n17,", "\nseventeen,")))
    coded = "code,y\n" + "".join(f"{i % 6},{i % 2}\n" for i in range(20)) + "x,1\n"
    assert set(tables.read_table(write(coded)).features["code"]) == {*"012345x"}


def test_texts_and_missing_values_are_kept_and_dates_are_refused(write):
    content = "n,c,y\n" + "".join(f"{i if i % 3 else '?'},{'uvw'[i % 3] if i % 4 else ''},{i % 2}\n" for i in range(20))
    table = tables.read_table(write(content))
    number, category = columns_of(table.features)
    assert (number.missing, number.fill, category.categories) == (True, 10.0, ("", "u", "v", "w"))
    again = tables.read_features(write(content), [number, category])
    assert np.array_equal(encode(again, [number, category]), encode(table.features, [number, category]))
    with pytest.raises(ldlt.OptionError, match="date"):
        tables.read_table(write("a,when,y\n" + "".join(f"{i},2024-01-{i + 1:02},{i % 2}\n" for i in range(20))))


BAD = {
    "empty": ("", "is empty"),
    "header only": ("a,b,y\n", "is empty"),
    "no header": ("1,2,3\n4,5,6\n", "no header"),
    "duplicate columns": ("a,a,y\n1,2,3\n", "'a' 2 times"),
    "nameless column": (",a,y\n1,2,3\n", "index=False"),
    "only the target": ("y\n1\n2\n", "at least one other column"),
    "names": ("a,b,y\n" + "".join(f"{i},n{i},{i % 2}\n" for i in range(100)), "'b' has 100 different texts"),
    "decimal comma": ('a,b,y\n1,2,0\n2,"3,5",1\n', "'3,5' in row 2"),
    "missing word": ("a,b,y\n1,2,None\n2,3,some\n", "no value in row 1"),
    "another encoding": ("größe,y\n1,0\n2,1\n".encode("latin-1"), "UTF-8"),
    "not text": (b"a,y\n\xff\xfe,1\n", "UTF-8"),
    "one value": ("a,y\n1,0.5\n2,0.5\n3,0.5\n", "in all rows"),
    "one class": ("a,y\n1,0\n2,0\n3,0\n", "in all rows"),
    "infinite value": ("a,b,y\n1,2,0\n2,inf,1\n", "inf in row 2"),
    "long row": ("a,y\n1,2,3\n4,5,6\n", "cannot be read"),
    "ragged row": ("a,y\n1,2\n4,5,6\n", "cannot be read"),
    "other separator": ("a;y\n1;2\n", "--separator ';'"),
    "numbers of Python": (GOOD.replace("\n7,", "\n7_0,"), "'7_0' in row 8"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_table_is_refused_with_a_reason(kind, write):
    content, reason = BAD[kind]
    with pytest.raises(ldlt.OptionError) as caught:
        tables.read_table(write(content))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target": "z"}, "only a, b, y"),
        ({"drop": ["z"]}, "'z'"),
        ({"target": "y", "drop": ["y"]}, "at least one other column"),
        ({"drop": ["a", "b"]}, "at least one other column"),
        ({"task": "regression", "target": "t"}, "--task classification"),
        ({"separator": ";"}, "--separator ','"),
    ],
)
def test_what_does_not_fit_the_table_is_refused(options, reason, write):
    content = "a,t\n1,u\n2,v\n" if options.get("target") == "t" else GOOD
    with pytest.raises(ldlt.OptionError) as caught:
        tables.read_table(write(content), **options)
    assert reason in str(caught.value)


def test_all_that_is_wrong_is_said_at_once_with_near_names(write):
    with pytest.raises(ldlt.OptionError) as caught:
        tables.read_table(write('a,b,c,d,y\n1,1.1.20,,4,0\n2,,inf,5,1\n1,2.1.20,3,"4,5",1\n'))
    assert all(f"column '{name}'" in str(caught.value) for name in "bcd")
    with pytest.raises(ldlt.OptionError) as caught:
        tables.read_features(
            write("sepal width,sepal length,y\n1,2,3\n"), [Column(n) for n in ("sepal widht", "y", "lenght")]
        )
    assert "did you mean 'sepal width'" in str(caught.value)
    assert "'lenght'" in str(caught.value)
    many = ",".join(f"c{i}" for i in range(30))
    with pytest.raises(ldlt.OptionError, match="more"):
        tables.read_features(write(f"{many}\n{','.join('x' * 30)}\n"))


@pytest.mark.parametrize(
    ("limit", "least", "line"),
    [("LARGEST_TEXT", 2**20, b"1,2\n"), ("LONGEST_LINE", 2**10, b"1"), ("MOST_NUMBERS", 10**4, b"1,2\n")],
)
def test_small_files_cannot_fill_the_memory(limit, least, line, write, monkeypatch):
    packed = write(gzip.compress(b"a,b\n" + line * 2**20), "data.csv.gz")
    assert packed.stat().st_size < 20_000
    monkeypatch.setattr(tables, limit, least)
    with pytest.raises(ldlt.OptionError, match="split it"):
        tables.read_features(packed)


def test_without_pandas(write, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ldlt.MissingExtraError) as caught:
        tables.read_table(write(GOOD))
    assert caught.value.extra == "train"


def test_every_class_is_trained_on():
    target = np.array(["rare"] + ["often"] * 50)
    table = tables.Table(pd.DataFrame({"x": np.arange(51.0)}), target, "y", "classification")
    for seed in range(20):
        train, test = tables.split(table, 0.5, seed)
        assert set(target[train]) == {"rare", "often"}
        assert len(np.intersect1d(train, test)) == 0
        assert len(train) + len(test) == 51
    for rows, share in ((51, 0.001), (1, 0.0), (2, 0.5)):
        short = tables.Table(table.features[:rows], target[:rows], "y", "classification")
        with pytest.raises(ldlt.OptionError):
            tables.split(short, share, 0)
