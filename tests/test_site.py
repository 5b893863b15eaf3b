"""The documentation builds as a site without a warning, and what is on it is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ldlt

ROOT = Path(__file__).parent.parent
NEEDED = ("mkdocs", "material", "mkdocstrings", "latex2mathml")
MISSING = [module for module in NEEDED if find_spec(module) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the site needs {', '.join(MISSING)}: pip install 'ldlt[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


def test_every_example_has_a_page_with_its_code(site):
    names = [p.stem for p in (ROOT / "examples").glob("*.py")]
    for name in names:
        text = page(site, f"examples/{name}")
        assert "The code" in text
        if (ROOT / "docs" / "pictures" / f"{name}.png").exists():
            assert f"../pictures/{name}.png" in text
        assert f"{name}.html" in page(site, "examples/index")


def test_formulas_are_readable_without_a_network(site):
    text = page(site, "theory")
    assert text.count("<math") > 400
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert 'class="arithmatex"' not in text, path
        loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?:[^"]*)"', text)
        assert [url for url in loaded if "canonical" not in url] == [], path


def test_public_names_are_in_the_reference(site):
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    anchors = set(re.findall(r'id="(ldlt[\w.]*)"', text))
    short = {anchor.rpartition(".")[2] for anchor in anchors}
    for name in set(ldlt.__all__) - {"__version__"}:
        assert name in short, name
    for left in (".. math::", ":math:", ":class:", ":func:", ":meth:"):
        assert left not in text, left


def test_links_to_the_repository_became_pages(site):
    assert "../examples/" not in page(site, "certificates")
    assert (site / "source" / "benchmarks" / "step.py.html").exists()
    assert "Speed" in page(site, "readme")
