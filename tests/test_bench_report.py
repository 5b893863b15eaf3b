"""The HTML report: structure, numbers, hostile names, gaps in the data, and the page in a real browser."""

from __future__ import annotations

import functools
import gc
import html
import json
import os
import re
import shutil
import tempfile
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ldlt.bench.family import AS_PRINTED
from ldlt.bench.report import build_report, write_report
from ldlt.bench.report.analysis import RADII, analyse
from ldlt.bench.report.markup import escape, number, percent, script_json
from ldlt.bench.stats import (
    METRICS,
    ScoreError,
    average_ranks,
    compare_all,
    critical_difference,
    friedman,
    model_ranges,
    score_frames,
    standings,
    summarise,
)
from ldlt_bench.paper import scalar_counterexample

FAMILIES = ("AOL", "Orthogonal", "Sandwich", "SLL", "LDLT-L", "LDLT-R")
QUALITY = {"AOL": 0.0, "Orthogonal": 0.35, "SLL": 0.5, "Sandwich": 0.95, "LDLT-L": 1.0, "LDLT-R": 1.15, AS_PRINTED: 1.1}
SECTIONS = ("findings", "means", "ranks", "pairs", "standings", "curves", "heat", "size")
STEMS = re.findall(
    r"\w+",
    """abalone adult annealing arrhythmia audiology balance bank blood breast car cardio chess congressional connect
    contraceptive credit cylinder dermatology echo ecoli energy fertility flags glass haberman heart hepatitis hill
    horse ilpd image ionosphere iris led lenses letter libras lymph magic mammographic""",
)
SETTINGS = {
    "command": "ldlt bench --protocol paper --protocol tuned <all>",
    "total_seconds": 41_312.0,
    "versions": {"ldlt": "0.1.0", "torch": "2.13.0"},
    "alpha": 0.05,
}


def study(sets=120, families=FAMILIES, folds=4, protocols=("paper", "tuned"), printed=True, seed=0):
    """Made-up runs that look like real ones: hard and easy data sets, families that differ a little."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(sets):
        name = f"{STEMS[index % len(STEMS)]}-{'abc'[index // len(STEMS) % 3]}" if sets > len(STEMS) else STEMS[index]
        ease, scale, size = rng.beta(5, 2), rng.uniform(0.15, 0.9), int(rng.integers(60, 900))
        inputs, outputs = int(rng.integers(3, 262)), int(rng.integers(2, 27))
        taste = {family: rng.normal(0, 0.35) for family in QUALITY}
        for protocol in protocols:
            for family in (*families, *((AS_PRINTED,) if printed else ())):
                skill = QUALITY.get(family, 0.4) + taste.get(family, 0.0) + 0.25 * (protocol == "tuned")
                for fold in range(folds):
                    noise = rng.normal(0, 0.012)
                    top = np.clip(0.38 + 0.55 * ease + 0.022 * skill + noise, 0.05, 1)
                    reach = scale * (0.55 + 0.28 * max(skill, 0.05)) * np.exp(rng.normal(0, 0.04))
                    curve = np.round(size * top * np.exp(-((RADII / reach) ** 1.4))) / size
                    radii = np.array([0, 36, 72, 108, 255]) / 255
                    scores = np.round(size * top * np.exp(-((radii / reach) ** 1.4))) / size
                    width = int(2 ** rng.integers(5, 9))
                    rows.append(
                        {
                            "protocol": protocol, "dataset": name, "family": family, "fold": fold, "seed": 0,
                            **dict(zip(METRICS, scores.tolist(), strict=True)),
                            "curve": curve.tolist(), "width": width, "depth": int(rng.integers(2, 7)),
                            "parameters": width * (inputs + 3 * width + outputs), "padding": int(rng.integers(0, 30)),
                            "input_dim": inputs, "output_dim": outputs, "bound": 1.0, "rigorous": True,
                            "certified": family != AS_PRINTED, "epochs": 200, "best_epoch": int(rng.integers(5, 200)),
                            "learning_rate": 0.01 if protocol == "paper" else float(rng.choice([0.003, 0.01, 0.03])),
                            "loss": "cross entropy", "batch_size": 256, "validation_score": float(top),
                            "seconds": float(np.exp(rng.normal(0.8 + 0.5 * QUALITY.get(family, 0.5), 0.7))),
                            "train_rows": 2 * size, "validation_rows": size, "test_rows": size, "dtype": "float32",
                            "source": "archive", "fingerprint": f"{index}-{protocol}", "ldlt_version": "0.1.0",
                            "torch_version": "2.13.0", "numpy_version": "2.3.0", "python_version": "3.11.2",
                            "machine": "x86_64, 2 cores", "finished_at": f"2026-01-{1 + index % 28:02d}T12:00:00",
                        }
                    )  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture(autouse=True)
def _cheap_collection():
    """The correction of statsmodels collects garbage at every call; leave what exists out of it."""
    gc.freeze()
    yield
    gc.unfreeze()


@functools.cache
def large():
    """The full-sized study, its page and its settings."""
    frame = study()
    return frame, build_report(frame, SETTINGS)


@functools.cache
def small():
    frame = study(sets=12, families=("AOL", "SLL"), folds=2)
    return frame, build_report(frame)


tiny = functools.partial(study, sets=3, families=("AOL", "SLL", "LDLT-R"), folds=2, protocols=("paper",))


class Page(HTMLParser):
    """Tables of a page as ``(panel, caption) -> rows``, every cell as ``(text, attributes)``; also ids and text."""

    def __init__(self, page):
        super().__init__()
        self.tables, self.ids, self.words, self.stack = {}, [], [], []
        self.panel = self.caption = self.rows = self.cell = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if "data-panel" in attributes:
            self.panel = int(attributes["data-panel"])
        if attributes.get("id") == "erratum":
            self.panel = None
        if tag == "table":
            self.caption, self.rows = "", []
        elif tag == "tr" and self.rows is not None:
            self.rows.append([])
        elif tag in {"td", "th"} and self.rows is not None:
            self.cell = ["", attributes]
            self.rows[-1].append(self.cell)
        if tag not in {"meta", "link", "input", "br", "line", "path", "circle"}:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop() != tag:
            pass
        if tag == "table":
            self.tables[self.panel, self.caption] = [[(text.strip(), at) for text, at in row] for row in self.rows]
            self.rows = None
        elif tag in {"td", "th"}:
            self.cell = None

    def handle_data(self, text):
        if "script" in self.stack or "style" in self.stack:
            return
        self.words.append(text)
        if "caption" in self.stack:
            self.caption += text
        elif self.cell is not None:
            self.cell[0] += text

    @property
    def text(self):
        return " ".join(self.words)


def embedded(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


# -------------------- structure


def test_all_sections_are_there_for_both_protocols():
    _, page = large()
    parsed = Page(page)
    expected = [f"p{index}-{section}" for index in (0, 1) for section in SECTIONS]
    assert set(expected) <= set(parsed.ids)
    assert {"erratum", "reading", "provenance"} <= set(parsed.ids)
    assert len(parsed.ids) == len(set(parsed.ids))
    for link in re.findall(r'href="#([^"]+)"', page):
        assert link in parsed.ids
    for name in re.findall(r'aria-(?:labelledby|controls)="([^"]+)"', page):
        assert set(name.split()) <= set(parsed.ids)


def test_the_page_is_small_and_loads_nothing():
    _, page = large()
    assert len(page.encode()) < 3_000_000
    body = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", body)
    assert not re.search(r"<(?:img|iframe|object|embed|base)\b|@import|url\(", body)
    assert "default-src 'none'" in page
    assert "$" not in re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL).replace("${", "")


def test_the_page_is_the_same_for_the_same_runs():
    frame, page = small()
    assert build_report(frame) == page
    shuffled = frame.sample(frac=1.0, random_state=1)
    assert embedded(build_report(shuffled)) == embedded(page)


def test_every_table_has_a_caption_and_heads():
    _, page = large()
    assert page.count("<table") == page.count("<caption>")
    assert page.count('role="img"') == page.count("<desc") == 2 * len(METRICS) + 1
    assert 'lang="en"' in page
    assert page.count("<h1>") == 1


def test_write_report_makes_the_folder(tmp_path):
    frame, page = small()
    path = write_report(frame, tmp_path / "deep" / "report.html", settings=None)
    assert path == tmp_path / "deep" / "report.html"
    assert path.read_text(encoding="utf-8") == page


# -------------------- numbers


@pytest.mark.parametrize("index", [0, 1])
def test_numbers_are_those_of_the_statistics(index):
    frame, page = large()
    tables = Page(page).tables
    runs = frame[(frame["protocol"] == ("paper", "tuned")[index]) & (frame["family"] != AS_PRINTED)]
    frames = score_frames(runs).frames
    summary = summarise(frames).set_index(["algorithm", "metric"])
    shown = {row[0][0]: row[1:] for row in tables[index, "Mean scores in percent"][1:]}
    assert set(shown) == {*FAMILIES, f"{AS_PRINTED}not certified"}
    for family in FAMILIES:
        for metric, (text, attributes) in zip(METRICS, shown[family], strict=True):
            row = summary.loc[(family, metric)]
            assert float(attributes["data-v"]) == pytest.approx(row["mean"], abs=1e-12)
            assert text == f"{percent(row['mean'])}± {percent(row['sd'])}"
    pairs = compare_all(frames)
    for metric in METRICS:
        label = "Accuracy" if metric == "accuracy" else f"Certified {metric[5:]}/255"
        one = pairs[pairs["metric"] == metric]
        rows = tables[index, f"Pairs of families: {label}"][1:]
        listed = {frozenset((row[0][0], row[1][0])): row for row in rows}
        assert len(listed) == len(rows) == 15
        for pair in one.itertuples():
            a, b, counts, median, p, r = listed[frozenset((pair.a, pair.b))]
            flip = 1 if a[0] == pair.a else -1
            wins = (pair.wins_a, pair.ties, pair.wins_b)[::flip]
            assert counts[0] == " / ".join(map(str, wins))
            assert float(median[1]["data-v"]) == pytest.approx(flip * pair.median_diff, abs=1e-12)
            assert float(p[1]["data-v"]) == pytest.approx(pair.p_holm, rel=1e-12)
            assert float(r[1]["data-v"]) == pytest.approx(pair.r, rel=1e-12)
        means = average_ranks(frames[metric])
        result = standings(means, one).set_index("algorithm")
        for row in tables[index, f"Significant wins and losses: {label}"][1:]:
            name, *values = (text for text, _ in row)
            want = result.loc[name]
            assert values[:4] == [
                number(want["average_rank"], 2), str(int(want["wins"])), str(int(want["losses"])),
                number(want["net_wins"], 0, signed=True),
            ]  # fmt: skip
            assert float(row[5][1]["data-v"]) == want["win_share"]
            assert float(row[6][1]["data-v"]) == pytest.approx(want["mean_r"])
        test = friedman(frames[metric])
        cd = critical_difference(6, len(frames[metric]))
        ranks = page.split(f'<section id="p{index}-ranks"')[1].split("</section>")[0]
        block = re.search(rf'<div data-metric="{metric}">(.*?)</dl>', ranks, re.DOTALL)[1]
        values = [float(value) for value in re.findall(r'<dd data-v="([^"]+)"', block)]
        assert values == pytest.approx([test.chi2, test.f, cd], rel=1e-12)
        for name, rank in means.items():
            assert f'>{name}</tspan>&#160; <tspan class="cd-rank">{rank:.2f}<' in block or (
                f'<tspan class="cd-rank">{rank:.2f}</tspan>&#160; <tspan class="cd-name">{name}<' in block
            )


def test_model_ranges_and_curves():
    frame, page = large()
    runs = frame[frame["protocol"] == "paper"]
    ranges = model_ranges(runs).set_index(["algorithm", "quantity"])
    rows = Page(page).tables[0, "Model range: smallest to largest value over all runs"]
    width = {row[0][0].replace("not certified", ""): row[1][1] for row in rows[1:]}
    for family in (*FAMILIES, AS_PRINTED):
        want = ranges.loc[(family, "width")]
        assert (float(width[family]["data-low"]), float(width[family]["data-high"])) == (want["min"], want["max"])
    data = embedded(page)
    names = [family["name"] for family in data["families"]]
    entry = data["protocols"][0]["sets"][5]
    part = runs[(runs["dataset"] == entry["n"]) & (runs["family"] == "SLL")]
    assert np.allclose(
        np.array(entry["c"][names.index("SLL")]) / 1e4, np.mean(part["curve"].tolist(), axis=0), atol=5e-5
    )
    assert np.allclose(np.array(entry["v"][names.index("SLL")]) / 1e6, part[list(METRICS)].mean(), atol=5e-7)


def test_the_erratum_has_its_numbers():
    example = scalar_counterexample()
    _, page = large()
    rows = {row[0][0]: row[1] for row in Page(page).tables[None, "Computed when this page was built"][1:]}
    assert rows["Exact slope on paper"][0] == str(example.slope) == "5/4"
    assert float(rows["Steepest slope found by search"][1]["data-v"]) > 1.2499
    assert float(rows["Its smallest eigenvalue"][1]["data-v"]) == example.smallest_eigenvalue
    assert float(rows["Steepest slope found in the corrected block, same parameters"][1]["data-v"]) <= 1 + 1e-9
    claims = Page(page).tables[None, "Printed and corrected block on the runs that both have, mean in percent"]
    assert [row[1][0] for row in claims[1:]] == [f"{AS_PRINTED}not certified", "LDLT-R"] * 2


def test_what_is_not_certified_is_marked_and_not_ranked():
    for result in analyse(tiny()):
        assert result.uncertified == [AS_PRINTED]
        for metric in result.metrics.values():
            assert AS_PRINTED not in metric.ranks.index
            assert AS_PRINTED not in set(metric.pairs["a"]) | set(metric.pairs["b"])
    labels = re.findall(rf"<bdi>{AS_PRINTED}</bdi></span>(.{{0,40}})", large()[1])
    assert len(labels) > 8
    assert all(label.startswith('<span class="badge">not certified') for label in labels)
    # The flag decides for other families, and the printed block is never certified, whatever its flag says.
    part = tiny(sets=2)
    part["certified"] = part["family"] != "AOL"
    assert set(analyse(part)[0].uncertified) == {"AOL", AS_PRINTED}
    assert analyse(part.drop(columns="certified"))[0].uncertified == [AS_PRINTED]


# -------------------- gaps


def test_missing_rows_leave_data_sets_out():
    frame, _ = small()
    first, second, third = sorted(frame["dataset"].unique())[:3]
    paper = frame["protocol"] == "paper"
    gone = paper & (frame["dataset"] == first) & (frame["family"] == "SLL") & (frame["fold"] == 1)
    late = paper & (frame["dataset"] == second) & (frame["family"] == "AOL")
    holes = frame[~gone & ~late].copy()
    holes.loc[paper & (holes["dataset"] == third) & (holes["fold"] == 0) & (holes["family"] == "AOL"), "cert_72"] = (
        np.nan
    )
    page = build_report(holes)
    text = Page(page).text
    assert "9 of 12 data sets complete (Paper protocol)" in text
    assert "12 of 12 data sets complete (Tuned protocol)" in text
    assert "3 data sets left out of the statistics" in text
    assert "1 run without usable metrics" in text
    marks = {entry["n"]: entry["ok"] for entry in embedded(page)["protocols"][0]["sets"]}
    assert [name for name, ok in marks.items() if not ok] == [first, second, third]
    result = analyse(holes)[0]
    clean = holes[(holes["protocol"] == "paper") & ~holes["dataset"].isin([first, second, third])]
    want = score_frames(clean[clean["family"] != AS_PRINTED]).frames["accuracy"]
    pd.testing.assert_frame_equal(result.scores.frames["accuracy"][list(want.columns)], want)


def test_what_was_planned_is_counted():
    frame = tiny()
    plan = {
        "datasets": ["abalone", "adult", "annealing", "zoo"],
        "families": ["AOL", "SLL", "LDLT-R", "CPL"],
        "data": {f"set {i}": "0" * 40 for i in range(30)},
        "shortened": True,
        "finished_at": None,
    }
    page = build_report(frame, plan)
    text = Page(page).text
    assert "3 of 4 data sets complete" in text
    assert "zoo : no runs" in text
    assert "Planned, but without runs so far: CPL." in text
    assert "quick look" in text
    assert "not finished" in text
    assert "30 entries" in text
    assert len(embedded(page)["protocols"][0]["sets"]) == 3
    calm = build_report(frame, {**plan, "shortened": False, "finished_at": "today", "families": [], "datasets": []})
    assert '<p class="caution">' not in calm


def test_partial_printed_runs_do_not_enter_means():
    frame, _ = small()
    name = sorted(frame["dataset"].unique())[0]
    holes = frame[~((frame["dataset"] == name) & (frame["family"] == AS_PRINTED) & (frame["fold"] == 0))]
    result = analyse(holes)[0]
    assert len(result.complete) == 12
    assert set(result.summary.loc[result.summary["algorithm"] == AS_PRINTED, "n"]) == {11}


@pytest.mark.parametrize(
    "frame",
    [
        study(sets=5, families=("LDLT-R",), printed=False),
        study(sets=1, families=("AOL", "SLL")),
        study(sets=1, families=("LDLT-R",), folds=1, protocols=("paper",), printed=False),
        study(sets=2, families=("AOL", "SLL"), protocols=("other <i>",)),
        study(sets=3, families=(), protocols=("paper",)),
        tiny().loc[lambda t: (t["dataset"] == "abalone") == (t["family"] == "AOL")],
        tiny().assign(cert_36=np.nan),
        tiny().assign(curve=None, seconds=np.nan, parameters=np.nan, width=np.nan),
        tiny().assign(accuracy=0.5, cert_36=0.5, cert_72=0.5, cert_108=0.5, cert_255=0.5),
        tiny()[["protocol", "dataset", "family", "fold", "seed", *METRICS]],
        tiny(families=[f"family {i}" for i in range(12)]),
        tiny().assign(curve=lambda t: t["curve"].map(json.dumps), certified=lambda t: t["certified"].map(str)),
        tiny().assign(curve=lambda t: t["curve"].map(np.array), fold=lambda t: t["fold"].astype(float)),
    ],
    ids=["one family", "one data set", "one run", "other protocol", "only printed", "nothing complete", "all NaN",
         "no sizes", "all equal", "only metrics", "many families", "text", "arrays"],
)  # fmt: skip
def test_odd_studies_give_a_page(frame):
    page = build_report(frame, None)
    parsed = Page(page)
    assert {f"p0-{section}" for section in SECTIONS} <= set(parsed.ids)
    assert not re.search(r"\bnan\b|\bNone\b", parsed.text)
    json.dumps(embedded(page), allow_nan=False)


def test_wrong_tables_are_refused():
    frame = study(sets=2)
    with pytest.raises(ScoreError, match="empty"):
        build_report(frame.iloc[:0])
    with pytest.raises(ScoreError, match="lacks"):
        build_report(frame.drop(columns="cert_72"))
    with pytest.raises(ScoreError, match="repeated run"):
        build_report(pd.concat([frame, frame.iloc[:1]]))
    with pytest.raises(ScoreError, match="missing entries"):
        build_report(frame.assign(fold=np.nan))


def test_settings_are_shown_and_escaped():
    frame, page = small()
    assert "No settings were handed" in page
    page = build_report(frame, {**SETTINGS, "title": "<Mine>", "note": {"a": ["<x>", 1]}, "flag": True})
    assert "<title>&lt;Mine&gt;</title>" in page
    assert "ldlt bench --protocol paper --protocol tuned &lt;all&gt;" in page
    assert "11 h 28 min" in page
    assert "<bdi>&lt;x&gt;</bdi>, <bdi>1</bdi>" in page
    assert "<x>" not in page


# -------------------- hostile names

HOSTILE = [
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "\"><svg onload=window.pwned=1>'",
    "<!--<script>",
    "${7*7} $title {{7*7}} &amp; &lt;",
    "\u202egnitsop\u2028 x\u0001\u0000 end",
    "n" * 300,
]


@functools.cache
def hostile():
    """A study full of hostile names, and its page."""
    frame = study(sets=len(HOSTILE), families=("AOL", "LDLT-R"), folds=2)
    names = dict(zip(frame["dataset"].unique(), HOSTILE, strict=True))
    frame["dataset"] = frame["dataset"].map(names)
    frame["family"] = frame["family"].replace("AOL", HOSTILE[1])
    frame["protocol"] = frame["protocol"].replace("tuned", HOSTILE[0])
    frame["machine"] = HOSTILE[0]
    drop = (frame["dataset"] == HOSTILE[0]) & (frame["family"] == "LDLT-R") & (frame["fold"] == 0)
    frame = frame[~drop]
    return frame, build_report(frame, {"command": HOSTILE[0], HOSTILE[2]: HOSTILE[1]})


def test_hostile_names_stay_text():
    _, page = hostile()
    page.encode("utf-8")
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    for sign in ("<img", "<svg onload", "<!--", "\x00"):
        assert sign not in page
    assert html.escape(HOSTILE[0]) in page
    assert {entry["n"] for entry in embedded(page)["protocols"][0]["sets"]} == set(HOSTILE)
    assert Page(page).text.count("window.pwned") > 3


def test_what_html_cannot_hold_is_replaced():
    assert escape("a\x00b\ud800c\x85<") == "a\ufffdb\ufffdc\ufffd&lt;"


def test_script_json_cannot_leave_its_element():
    text = script_json({"</script>": ["<!--", "&", "\u2028"]})
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == {"</script>": ["<!--", "&", "\u2028"]}


# -------------------- a real browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage",
)  # fmt: skip

in_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and find_spec("selenium")),
    reason="needs chromium, chromedriver and the Python package selenium on this machine",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver  # noqa: PLC0415
    from selenium.webdriver.chrome.service import Service  # noqa: PLC0415

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"user-data-dir={profile}", "window-size=1280,900"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(DRIVER, log_output=os.devnull)
        driver = webdriver.Chrome(options=options, service=service)
        driver.set_page_load_timeout(60)
        try:
            yield driver
        finally:
            driver.quit()


class Tab:
    """The page as a reader uses it."""

    def __init__(self, driver, path, width=1280, height=900, scheme="light"):
        self.driver = driver
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.get_log("browser")
        driver.get(Path(path).as_uri())

    def run(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def click(self, selector):
        self.run("document.querySelector(arguments[0]).click()", selector)

    def type(self, text):
        box = self.driver.find_element("css selector", "#search")
        box.clear()
        box.send_keys(text)

    def texts(self, selector):
        visible = "[...document.querySelectorAll(arguments[0])].filter(n => n.checkVisibility())"
        return self.run(f"return {visible}.map(n => n.textContent)", selector)

    def errors(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(large()[1], encoding="utf-8")
    return path


@in_browser
def test_filters_change_what_is_shown(browser, report):
    frame, _ = large()
    tab = Tab(browser, report)
    runs = frame[(frame["family"] != AS_PRINTED) & (frame["protocol"] == "paper")]
    assert len(tab.texts("#p0 .heat tbody tr")) == 120
    assert tab.texts("#p1 section") == []

    # metric
    foot = tab.texts('#p0 [data-foot="mean"] td')
    order = ["LDLT-R", "LDLT-L", "Sandwich", "SLL", "AOL", "Orthogonal"]
    assert foot[:6] == [percent(value) for value in score_frames(runs).frames["accuracy"].mean()[order]]
    assert tab.texts("#p0 .pairs caption") == ["Pairs of families: Accuracy"]
    tab.click('#metric input[value="cert_108"]')
    foot = tab.texts('#p0 [data-foot="mean"] td')
    assert foot[:6] == [percent(value) for value in score_frames(runs).frames["cert_108"].mean()[order]]
    assert tab.texts("#p0 .pairs caption") == ["Pairs of families: Certified 108/255"]
    assert tab.texts("#p0 figcaption.title") == ["Critical-difference diagram: Certified 108/255"]
    tab.click('#p0 [data-pick="cert_36"]')
    assert tab.run("return document.querySelector('#metric input:checked').value") == "cert_36"

    # text: rows and curves follow
    before = tab.texts("#p0 [data-readout] b")
    tab.type("IRIS")
    assert tab.texts("#p0 .heat tbody th") == ["iris-a", "iris-b", "iris-c"]
    curves = (
        runs[runs["dataset"].str.startswith("iris")]
        .groupby("family")["curve"]
        .apply(lambda column: 100 * np.mean(column.tolist(), axis=0)[3])
    )
    shown = dict(zip(tab.texts("#p0 [data-readout] bdi"), tab.texts("#p0 [data-readout] b"), strict=True))
    assert tab.texts("#p0 [data-radius]") == ["At radius 0.15, %"]
    assert {name: float(value) for name, value in shown.items()} == pytest.approx(curves.to_dict(), abs=0.11)
    assert tab.texts("#p0 [data-readout] b") != before
    tab.type("no such data set")
    assert tab.texts("#p0 [data-heat] .empty") == ["No data set matches the filter."]
    tab.driver.find_element("css selector", "#search").clear()
    tab.run("const s = document.getElementById('search'); s.value = ''; s.dispatchEvent(new Event('input'))")

    # families
    assert len(tab.texts("#p0 [data-metric='cert_36'] .pairs tbody tr")) == 15
    tab.click('[data-family="3"]')
    assert len(tab.texts("#p0 [data-metric='cert_36'] .pairs tbody tr")) == 10
    assert len(tab.texts("#p0 .heat thead th")) == 7
    assert len(tab.texts("#p0 [data-curve]")) == 5
    assert len(tab.texts("#p0 .means tbody tr")) == 5
    tab.click('[data-family="6"]')
    assert len(tab.texts("#p0 .means tbody tr.refused")) == 1
    assert "not certified" in tab.texts("#p0 .heat thead th")[6]
    assert len(tab.texts("#p0 [data-readout] .badge")) == 1
    assert tab.errors() == []


@in_browser
def test_sorting_tone_tabs_and_keys(browser, report):
    tab = Tab(browser, report)
    tab.click('#p0 [data-sort="0"]')
    values = [float(text) for text in tab.texts("#p0 .heat tbody td:nth-child(2)")]
    assert values == sorted(values, reverse=True)
    assert tab.run("return document.querySelector('#p0 .heat [aria-sort]').getAttribute('aria-sort')") == "descending"
    assert tab.run("return document.activeElement.dataset.sort") == "0"
    tab.click('#p0 [data-sort="0"]')
    assert [float(text) for text in tab.texts("#p0 .heat tbody td:nth-child(2)")] == sorted(values)
    tab.click('#p0 input[value="gap"]')
    assert tab.run("return document.querySelector('#p0 .heat').classList.contains('gap')")

    first = tab.texts("#p0 [data-foot='mean'] td")
    tab.run("document.getElementById('p0-tab').focus()")
    tab.driver.switch_to.active_element.send_keys("\ue014")  # right arrow
    assert tab.run("return document.activeElement.id") == "p1-tab"
    assert tab.texts("#p0 section") == []
    assert len(tab.texts("#p1 section")) == len(SECTIONS)
    assert tab.texts("#p1 [data-foot='mean'] td") != first
    assert tab.run("return document.querySelector('[data-section=heat]').hash") == "#p1-heat"
    tab.click("#p0-tab")
    assert len(tab.texts("#p0 section")) == len(SECTIONS)

    tab.run("document.querySelector('#p0 [data-plot] svg').focus()")
    before = tab.texts("#p0 [data-radius]")
    tab.driver.switch_to.active_element.send_keys("\ue014")
    assert before == ["At radius 0.40, %"]
    assert tab.texts("#p0 [data-radius]") == ["At radius 0.45, %"]
    spoken = tab.run("return document.querySelector('#p0 [data-plot] svg').getAttribute('aria-valuetext')")
    assert spoken.startswith("radius 0.45: LDLT-R")
    assert tab.errors() == []


@in_browser
def test_light_and_dark(browser, tmp_path):
    report = tmp_path / "report.html"
    report.write_text(small()[1], encoding="utf-8")
    ground = "return getComputedStyle(document.body).backgroundColor"
    tab = Tab(browser, report)
    tab.run("localStorage.clear()")
    tab = Tab(browser, report)
    light = tab.run(ground)
    tab.click("#theme")
    dark = tab.run(ground)
    assert light != dark
    assert tab.texts("#theme") == ["Light"]
    tab = Tab(browser, report)
    assert tab.run(ground) == dark  # remembered
    tab.click("#theme")
    assert tab.run(ground) == light
    tab.run("localStorage.clear()")
    tab = Tab(browser, report, scheme="dark")
    assert tab.run(ground) == dark
    tab.click("#theme")
    assert tab.run(ground) == light
    tab.run("localStorage.clear()")
    assert tab.errors() == []


@in_browser
@pytest.mark.parametrize("width", [360, 768, 1020])
def test_the_body_never_scrolls_sideways(browser, report, width):
    tab = Tab(browser, report, width=width, height=780)
    for protocol in (0, 1):
        tab.click(f"#p{protocol}-tab")
        tab.click('[data-family="6"]')
        assert tab.run("return [innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]
    assert tab.errors() == []


@in_browser
def test_hostile_names_in_the_browser(browser, tmp_path):
    path = tmp_path / "hostile.html"
    path.write_text(hostile()[1], encoding="utf-8")
    tab = Tab(browser, path, width=360, height=780)
    assert tab.run("return window.pwned") is None
    names = tab.texts("#p0 .heat tbody th bdi")
    assert set(HOSTILE[:5]) <= set(names)
    tab.type("<img")
    assert tab.texts("#p0 .heat tbody th bdi") == [HOSTILE[1]]
    tab.click("#p1-tab")
    assert tab.run("return window.pwned") is None
    assert tab.run("return document.images.length") == 0
    assert tab.run("return document.documentElement.scrollWidth") == 360
    assert tab.errors() == []


@in_browser
def test_odd_pages_in_the_browser(browser, tmp_path):
    odd = {
        "one": study(sets=1, families=("LDLT-R",), folds=1, protocols=("paper",), printed=False),
        "none": tiny().loc[lambda t: (t["dataset"] == "abalone") == (t["family"] == "AOL")],
        "bare": tiny()[["protocol", "dataset", "family", "fold", "seed", *METRICS]],
    }
    for name, frame in odd.items():
        tab = Tab(browser, write_report(frame, tmp_path / f"{name}.html"))
        assert tab.texts("#p0 .heat tbody th")
        tab.click('[data-family="0"]')
        assert tab.texts("#p0 [data-plot] .empty")
        assert tab.errors() == []


@in_browser
def test_print_shows_everything(browser, report):
    tab = Tab(browser, report)
    tab.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert tab.run("return getComputedStyle(document.getElementById('controls')).display") == "none"
    assert tab.run("const n = document.querySelector('#p0 .tall'); return n.scrollHeight - n.clientHeight") <= 1
    tab.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
