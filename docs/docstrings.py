"""Docstrings as Markdown: formulas and cross-references of reStructuredText are rewritten before they are rendered."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

BLOCK = re.compile(r"^( *)\.\. math::((?:.*\n)(?:\n|\1 +.*\n?)*)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
SESSION = re.compile(r"^( *)>>> .*\n?(?:\1(?=\S).*\n?|\1 +\S.*\n?)*", re.MULTILINE)
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`~?([^`]+)`")


def _block(match: re.Match[str]) -> str:
    body = textwrap.dedent(match[2]).strip()
    if "&" in body or "\\\\" in body:
        body = f"\\begin{{aligned}} {body} \\end{{aligned}}"
    return "\n" + textwrap.indent(f"$$\n{body}\n$$\n\n", match[1])


def _session(match: re.Match[str]) -> str:
    """A console session as a block of code: brackets in its output are no links."""
    return f"{match[1]}```pycon\n{match[0].rstrip()}\n{match[1]}```\n"


def to_markdown(text: str) -> str:
    """The docstring with ``$$`` and ``$`` for formulas, fences around sessions, and plain code for references."""
    text = SESSION.sub(_session, BLOCK.sub(_block, text + "\n")).rstrip("\n")
    return ROLE.sub(r"`\1`", INLINE.sub(lambda m: f"${' '.join(m[1].split())}$", text))


class Markdown(griffe.Extension):
    """Rewrites every docstring once it has been collected."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for modules, classes, functions and attributes."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
