"""Blocks marked ``python`` or ``pycon`` in README and docs run, docstring examples hold, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
from pathlib import Path

import pytest

import ldlt

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = {page: BLOCK.findall(page.read_text()) for page in PAGES}
MODULES = sorted(
    {m.name for m in pkgutil.walk_packages(ldlt.__path__, "ldlt.") if not m.name.endswith("__main__")} | {"ldlt"}
)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """The blocks of a page are run in order and share their names."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for index, code in enumerate(BLOCKS[page]):
        exec(compile(code, f"{page.name} block {index}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_console_examples(page):
    """Blocks marked ``pycon`` are sessions with their output; those of one page share their names."""
    text = "\n".join(re.findall(r"^```pycon\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_the_readme_has_code():
    assert BLOCKS[ROOT / "README.md"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"https?://|mailto:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_public_names_exist_and_are_documented():
    for name in ldlt.__all__:
        value = getattr(ldlt, name)
        assert name.startswith("_") or getattr(value, "__doc__", None), name


def test_scripts_can_be_run():
    for script in ("scripts/bench", "scripts/docs", "scripts/test", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK)
