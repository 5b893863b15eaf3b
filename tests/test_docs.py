"""Every block of code in README and docs runs, docstring examples hold, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ldlt
import ldlt_bench
from ldlt.cli import main
from ldlt_bench import data

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = {page: BLOCK.findall(page.read_text()) for page in PAGES}
SHELL = {page: re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in PAGES}
LONG = ("bench", "report", "data", "starts", "tables")
"""Commands of the study, which are run by its own tests."""
MODULES = sorted(
    {m.name for p in (ldlt, ldlt_bench) for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")}
    - {"ldlt.__main__", "ldlt_bench.__main__"}
    | {"ldlt"}
)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_no_block_is_of_another_kind(page):
    """One that no test would run, such as ``py`` or an indented one."""
    opened = re.findall(r"^([ \t]*)```(\S+)", page.read_text(), re.MULTILINE)
    assert set(opened) <= {("", "python"), ("", "pycon"), ("", "sh")}


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """The blocks of a page are run in order and share their names; nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "fetch_sets", inspect.signature(data.fetch_sets).bind)
    names = {"__name__": "__main__"}
    for index, code in enumerate(BLOCKS[page]):
        exec(compile(code, f"{page.name} block {index}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_console_examples(page):
    """Blocks marked ``pycon`` are sessions with their output; those of one page share their names."""
    text = "\n".join(re.findall(r"^```pycon\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("page", [p for p in PAGES if SHELL[p]], ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_run(page, tmp_path, monkeypatch):
    """Commands of ``ldlt`` work on a table and a network of the names that the pages use."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    rows = random.standard_normal((40, 3))
    for name in ("data.csv", "new.csv"):
        lines = [f"{a},{b},{c},{'yes' if a > b else 'no'}" for a, b, c in rows]
        Path(name).write_text("\n".join(["a,b,c,y", *lines]) + "\n")
    torch.manual_seed(0)
    ldlt.save(ldlt.nn.FeedForward(3, [4], 2), "net.onnx")
    np.save("x.npy", rows[0].astype(np.float32))
    for line in "".join(SHELL[page]).splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "scripts/avx512":
            words = words[1:]
        if words[0] == "ldlt":
            if words[1] not in LONG:
                assert main(words[1:]) == 0, line
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), line
        else:
            assert words[:4] == ["pip", "install", "-c", "constraints.txt"], line


SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("[!_]*.py")) if "ArgumentParser" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_benchmarks_start(script):
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


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
    for script in ("scripts/avx512", "scripts/bench", "scripts/docs", "scripts/test", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK)


def test_the_avx512_script_runs_commands_as_they_are(tmp_path):
    """Arguments, output and exit code pass through, and PyTorch computes what it computes without it."""
    script = str(ROOT / "scripts" / "avx512")
    code = "import sys, torch; torch.manual_seed(0); a = torch.rand(65, 65); print((a @ a).sum().item(), sys.argv)"
    bare = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", "LD_PRELOAD")}
    (tmp_path / "a b").mkdir()
    (tmp_path / "file").touch()
    places = {"XDG_CACHE_HOME": tmp_path / "new"}, {"XDG_CACHE_HOME": tmp_path / "a b"}, {"HOME": tmp_path / "file"}

    def run(*how, **place):
        environment = bare | {"TMPDIR": str(tmp_path)} | {key: str(value) for key, value in place.items()}
        command = [*how, sys.executable, "-c", code, "a b", "*"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    plain = run()
    for place in ({}, *places):  # no home, a cache to make, a path that cannot be preloaded, one that cannot be made
        through = run(script, **place)
        assert through.split(" ", 1)[1] == plain.split(" ", 1)[1] == "['-c', 'a b', '*']\n"
        assert float(through.split()[0]) == pytest.approx(float(plain.split()[0]), rel=1e-5)
    assert not list(tmp_path.rglob("shim.*"))
    assert subprocess.run([script, "false"], env=bare | {"TMPDIR": str(tmp_path)}, check=False).returncode == 1
    nothing = subprocess.run([script], capture_output=True, text=True, check=False)
    assert nothing.returncode == 2
    assert "usage" in nothing.stderr
