"""What the site needs beyond Markdown: pages of files outside docs/, links to them, and formulas.

The pages of docs/ are written for a reader of the repository, so they link to ``../examples/x.py`` or ``../README.md``.
On the site every such file gets a page of its own, and links are rewritten. Formulas are turned into MathML while
building, so that they can be read without a network; ``assets/math.js`` sets them again with KaTeX where that can be
loaded.
"""

from __future__ import annotations

import ast
import html
import posixpath
import re
import unicodedata
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
NAMED = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
LIST = "<!-- list of examples -->"
SCRIPT = re.compile(r"\\mathcal\s*\{?([ACDGJKN-QS-Z])\}?")
TITLES = {
    "certified_tabular": "Certified tabular classifier",
    "certify_onnx": "Certify an ONNX network",
    "controller": "Controller in a closed loop",
    "erratum": "The erratum",
    "fashion_mnist": "Fashion-MNIST",
    "wasserstein": "Wasserstein distance",
    "wrap_your_resnet": "Wrap your own ResNet",
}
"""Titles in the navigation where the name of the file would read badly."""
LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".toml": "toml"}


def examples() -> list[str]:
    """Names of the examples, in the order of the alphabet."""
    return sorted(p.stem for p in (ROOT / "examples").glob("*.py"))


def inside(path: str) -> bool:
    """Whether a file of the repository is on the site as it is."""
    return path.startswith("docs/") and not path.endswith(".py")


def site_path(path: str) -> str | None:
    """Page of the site for a file of the repository, or None if it is no file."""
    if not (ROOT / path).is_file():
        return None
    if inside(path):
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith(".py"):
        return f"examples/{Path(path).stem}.md"
    return NAMED.get(path, f"source/{path.removesuffix('.md')}.md")


def outside(path: str, text: str) -> set[str]:
    """Files outside docs/ to which a Markdown file of the repository links."""
    found = set()
    for _, target, _ in LINK.findall(FENCE.sub("", text)):
        full = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not re.match(r"\w+:", target) and (ROOT / full).is_file() and not inside(full):
            found.add(full)
    return found


def relink(path: str, page: str, text: str) -> str:
    """The text of a repository file with links for the site, where it is ``page``."""

    def change(match: re.Match[str]) -> str:
        full = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        target = None if re.match(r"\w+:", match[2]) else site_path(full)
        return match[0] if target is None else match[1] + posixpath.relpath(target, posixpath.dirname(page)) + match[3]

    parts = re.split(f"({FENCE.pattern})", text, flags=FENCE.flags)
    return "".join(p if index % 2 else LINK.sub(change, p) for index, p in enumerate(parts))


def nav_title(name: str) -> str:
    """Short title of an example."""
    return TITLES.get(name, name.replace("_", " ").capitalize())


def example_page(name: str) -> str:
    """An example: its docstring, its picture, what it prints, its code."""
    code = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(code)) or name).partition("\n")
    run, _, rest = text.strip().partition("\n\n")
    picture, printed = (ROOT / "docs" / "pictures" / f"{name}{suffix}" for suffix in (".png", ".txt"))
    parts = [f"# {title.strip().removesuffix('.')}", rest if run.startswith("Run:") else text]
    if picture.exists():
        parts.append(f"![What the example draws](../pictures/{name}.png)")
    if printed.exists():
        parts.append(f"## What it prints\n\n```text\n{printed.read_text(encoding='utf-8').rstrip()}\n```")
    parts.append(f"## The code\n\n`examples/{name}.py`\n\n```python\n{code.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def example_list() -> str:
    """All examples with their titles and pictures."""
    entries = []
    for name in examples():
        title = example_page(name).partition("\n")[0].removeprefix("# ")
        picture = f"\n\n[![]({f'../pictures/{name}.png'})]({name}.md)"
        has = (ROOT / "docs" / "pictures" / f"{name}.png").exists()
        entries.append(f"### [`{name}.py`]({name}.md)\n\n{title}.{picture if has else ''}")
    return "\n\n".join(entries)


def source_page(path: str) -> str:
    """A file of the repository: Markdown as it is, everything else as code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text if text.startswith("#") else f"# {path}\n\n{text}"
    return f"# {path}\n\n```{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n```\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the examples into the navigation."""
    for entry in config.nav or []:
        if isinstance(entry, dict) and "Examples" in entry:
            pages = [{nav_title(name): f"examples/{name}.md"} for name in examples()]
            entry["Examples"] = ["examples/index.md", *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for the examples and for every file outside docs/ that a page links to, however indirectly."""
    wanted = set(NAMED)
    for file in files.documentation_pages():
        wanted |= outside(f"docs/{file.src_uri}", file.content_string)
    done: set[str] = set()
    while wanted - done:
        path = sorted(wanted - done)[0]
        done.add(path)
        if path.endswith(".md"):
            wanted |= outside(path, (ROOT / path).read_text(encoding="utf-8"))
    done |= {f"examples/{name}.py" for name in examples()}
    for path in sorted(done):
        page = site_path(path)
        assert page is not None
        is_example = page.startswith("examples/")
        text = example_page(Path(path).stem) if is_example else relink(path, page, source_page(path))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links of docs/ that lead outside."""
    if page.file.generated_by:
        return markdown
    if LIST in markdown:
        markdown = markdown.replace(LIST, example_list())
    return relink(f"docs/{page.file.src_uri}", page.file.src_uri, markdown)


def script(letter: str) -> str:
    """A script capital as a character: browsers ignore the font that MathML asks for."""
    return unicodedata.lookup(f"MATHEMATICAL SCRIPT CAPITAL {letter}")


def formula(match: re.Match[str]) -> str:
    """One formula as MathML, with its source beside it for KaTeX."""
    tex = html.unescape(match[2]).strip()
    display = match[1] == "div" or match[0].startswith('<span class="arithmatex">\\[')
    mathml = convert(SCRIPT.sub(lambda m: script(m[1]), tex), display="block" if display else "inline")
    return f'<{match[1]} class="tex" data-tex="{html.escape(tex)}" data-display="{int(display)}">{mathml}</{match[1]}>'


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML."""
    return FORMULA.sub(formula, content)
