"""The report: one page that holds everything, says the statistics' numbers, and trusts no name."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from itertools import product

import numpy as np
import pandas as pd
import pytest

from ldlt_bench.report import build_report, write_report
from ldlt_bench.statistics import METRICS, ScoreError, average_ranks, score_frames
from ldlt_bench.study.protocol import CURVE
from ldlt_bench.tables import compare_runs, make_tables

FAMILIES = ("LDLT-L", "AOL", "LDLT-R as printed")


def runs(protocols=("paper", "tuned"), sets=("iris", "wine", "seeds"), families=FAMILIES) -> pd.DataFrame:
    keys = ["protocol", "dataset", "family", "fold", "seed"]
    table = pd.DataFrame(product(protocols, sets, families, range(4), [0]), columns=keys)
    rng = np.random.default_rng(0)
    for metric in METRICS:
        table[metric] = rng.uniform(0.2, 0.9, len(table))
    table["curve"] = [list(np.linspace(a, 0, len(CURVE))) for a in table["accuracy"]]
    sizes = {"width": 32, "depth": 4, "parameters": 1000, "padding": 0, "input_dim": 4, "output_dim": 3}
    return table.assign(**sizes, seconds=1.5, rigorous=False, certified=table.family != "LDLT-R as printed")


class Page(HTMLParser):
    """Elements, tables as lists of rows, and whether every table and picture is in a box that scrolls."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.seen, self.tables, self.boxed, self.text = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag in ("table", "img"):
            self.boxed.append("box" in [a.get("class") for _, a in self.open])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ("meta", "img"):
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text.append(data)
        if any(tag in ("td", "th") for tag, _ in self.open):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(build_report(runs(), {"command": "ldlt bench", "finished_at": "now"}))


def test_the_page_is_well_formed_and_loads_nothing(page):
    assert not page.open
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "link", "iframe", "object", "form", "button"}
    addresses = [a[key] for _, a in page.seen for key in ("src", "href", "srcset") if key in a]
    assert all(address.startswith(("data:image/svg+xml;base64,", "#")) for address in addresses)
    assert any("default-src 'none'" in a.get("content", "") for _, a in page.seen)
    assert any("width=device-width" in a.get("content", "") for _, a in page.seen)
    ids = [a["id"] for _, a in page.seen if "id" in a]
    assert len(ids) == len(set(ids))
    assert {address[1:] for address in addresses if address.startswith("#")} <= set(ids)


def test_everything_wide_scrolls_in_its_own_box(page):
    assert len(page.boxed) > 20
    assert all(page.boxed)
    assert all(a.get("alt") for tag, a in page.seen if tag == "img")


def test_tables_are_those_of_the_statistics(page):
    table = runs()
    for protocol in ("paper", "tuned"):
        comparison = compare_runs(table[table.protocol == protocol].reset_index(drop=True))
        for name, made in make_tables(comparison).items():
            if name != "pairwise":
                shown = [[str(c).strip("\x02\x03") for c in row] for row in made.shown.to_numpy().tolist()]
                assert [list(made.shown.columns), *shown] in page.tables, name
        frames = score_frames(table[table.protocol == protocol], algorithms=comparison.families).frames
        ranks = average_ranks(frames["accuracy"])
        assert any(f"{ranks.iloc[0]:.3f}" in row for t in page.tables for row in t)


def test_nothing_is_called_certified_without_rigour(page):
    assert (
        "certified" not in " ".join(page.text[page.text.index("Mean scores") :]).replace("no certificates", "").lower()
    )
    rigorous = build_report(runs(("paper",), families=FAMILIES[:2]).assign(rigorous=True))
    assert "Certified 36/255" in rigorous


def test_a_refuted_family_has_no_radii(page):
    with_it = [row for t in page.tables for row in t if row and row[0] == "LDLT-R as printed"]
    assert with_it
    assert not any("±" in cell for row in with_it for cell in row)


def test_the_erratum_is_measured(page):
    said = " ".join(page.text)
    assert "5/4" in said
    assert "1.250000" in said


def test_the_same_runs_give_the_same_page(tmp_path):
    table = runs(protocols=("paper",))
    path = write_report(table, tmp_path / "new" / "page.html")
    assert path.read_text() == build_report(table)


@pytest.mark.parametrize(
    "frame",
    [
        runs(("paper",), ("iris",)),
        runs(("paper",), families=("AOL",)),
        runs(("paper",), families=("LDLT-R as printed",)),
        runs(("paper",)).drop(columns=["curve", "seconds", "width", "certified", "rigorous"]),
        runs(("paper",)).drop(index=range(0, 36, 5)),
        runs(("paper",)).assign(cert_36=math.nan),
    ],
    ids=["one set", "one family", "refuted", "few columns", "gaps", "no scores"],
)
def test_odd_studies_give_a_page(frame):
    assert not Page(build_report(frame)).open


def test_cautions():
    said = build_report(
        runs(("paper",), ("iris",)),
        {"shortened": True, "finished_at": None, "families": ["SLL"], "datasets": ["glass"]},
    )
    found = re.findall('class="caution">(.*?)</p>', said)
    assert len(found) == 4
    assert "SLL" in "".join(found)
    assert "glass" in "".join(found)


def test_names_stay_text():
    hostile = "<script>alert(1)</script>\"'&\x00 $x^2"
    table = runs(families=(hostile, "AOL"), sets=(hostile, "wine", "iris"), protocols=(hostile,))
    text = build_report(table, {"title": hostile + "\ud800", hostile: {hostile: [hostile]}})
    text.encode()
    found = Page(text)
    assert not {tag for tag, _ in found.seen} & {"script"}
    assert "alert(1)" in "".join(found.text)


def test_wrong_tables_are_refused():
    for bad in (runs()[:0], runs().drop(columns="cert_36"), pd.concat([runs(), runs()]), runs().assign(fold=math.nan)):
        with pytest.raises(ScoreError):
            build_report(bad)
