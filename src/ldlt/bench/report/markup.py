"""Escaping and number formats of the page."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ldlt.bench.stats.tables import format_p, stars

__all__ = ["Families", "cell", "duration", "escape", "head", "number", "p_value", "percent", "script_json", "table"]

# C0 and C1 controls but tab and newlines, and lone surrogates, which have no UTF-8 form.
_UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def escape(value: Any) -> str:
    """Text as HTML, safe between tags and inside quoted attributes.

    Example:
        >>> escape('<b a="1">')
        '&lt;b a=&quot;1&quot;&gt;'
    """
    return html.escape(_UNSAFE.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def script_json(value: Any) -> str:
    r"""JSON that can stand inside a ``script`` element: no character in it can end the element or open another.

    Example:
        >>> script_json("</script>")
        '"\\u003c/script\\u003e"'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """A number with fixed digits and a true minus sign; a dash for what is no number.

    Example:
        >>> number(-0.25, 1), number(0.5, 1, signed=True), number(float("nan"), 1), number(-0.01, 1)
        ('−0.2', '+0.5', '–', '0.0')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:,.{digits}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    if not re.search("[1-9]", text):
        text = text.lstrip("-")
    elif signed and value > 0:
        text = f"+{text}"
    return text.replace("-", "−")


def percent(value: float, digits: int = 1, *, signed: bool = False) -> str:
    """A share in percent, without the sign %.

    Example:
        >>> percent(0.8125)
        '81.2'
    """
    return number(100 * value, digits, signed=signed)


def p_value(p: float) -> str:
    """A p-value as HTML, with its stars.

    Example:
        >>> p_value(2.26e-17)
        '2.3×10<sup>−17</sup><span class="stars">***</span>'
    """
    text = format_p(p)
    match = re.fullmatch(r"(<?)([\d.]+)e-0*(\d+)", text)
    if match:
        text = f"{escape(match[1])}{match[2]}×10<sup>−{match[3]}</sup>"
    return f'{text}<span class="stars">{"*" * stars(p)}</span>'


def duration(seconds: float) -> str:
    """A span of time in the two largest units.

    Example:
        >>> duration(0.51), duration(75), duration(3700), duration(200000)
        ('0.5 s', '1 min 15 s', '1 h 1 min', '2 d 7 h')
    """
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    for big, small, names in ((86400, 3600, "d h"), (3600, 60, "h min"), (60, 1, "min s")):
        if whole >= big:
            large, little = names.split()
            return f"{whole // big} {large} {whole % big // small} {little}"
    return f"{whole} s"


@dataclass(frozen=True)
class Families:
    """How families are shown: each has a number, a colour and, if it has no certificate, a badge.

    Attributes:
        order: All families of the page.
        refused: Those without a certificate.
    """

    order: Sequence[str]
    refused: frozenset[str]

    SLOTS = 9
    """Number of colours in the style sheet."""

    def index(self, name: str) -> int:
        """Number of a family on this page."""
        return list(self.order).index(name)

    def slot(self, name: str) -> int:
        """Number of its colour."""
        # The last colour is that of families without a certificate.
        last = self.SLOTS - 1
        return last if name in self.refused else self.index(name) % last

    def label(self, name: str, *, badge: bool = True) -> str:
        """Name with its colour as HTML."""
        mark = '<span class="badge">not certified</span>' if badge and name in self.refused else ""
        return f'<span class="fam s{self.slot(name)}"><i class="dot"></i><bdi>{escape(name)}</bdi></span>{mark}'


def cell(text: str, *, value: float | None = None, kind: str = "", tag: str = "td", attributes: str = "") -> str:
    """One cell; ``text`` is HTML, ``value`` the number behind it in full precision."""
    data = "" if value is None else f' data-v="{value!r}"'
    extra = f' class="{kind}"' if kind else ""
    scope = ' scope="row"' if tag == "th" else ""
    return f"<{tag}{scope}{extra}{data}{attributes}>{text}</{tag}>"


def head(titles: Sequence[str], *, left: int = 1) -> str:
    """A row of column heads; the first ``left`` of them are over text, the others over numbers."""
    cells = (
        f'<th scope="col"{"" if index < left else " class=num"}>{title}</th>' for index, title in enumerate(titles)
    )
    return f"<tr>{''.join(cells)}</tr>"


def table(caption: str, header: str, rows: Sequence[str], *, kind: str = "", note: str = "", label: str = "") -> str:
    """A table with its caption, inside a box that scrolls on its own; all arguments are HTML but ``label``."""
    name = escape(label or re.sub("<[^>]*>", "", html.unescape(caption)))
    foot = f'<p class="note">{note}</p>' if note else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table class="{kind}">'
        f"<caption><span>{caption}</span></caption><thead>{header}</thead><tbody>{''.join(rows)}</tbody></table></div>{foot}"
    )
