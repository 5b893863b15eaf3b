"""The families of networks that the study compares, and where their networks start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ldlt.engine.contraction import CONTRACTIONS
from ldlt.errors import OptionError

__all__ = ["AS_LDLT", "AS_PRINTED", "FAMILIES", "GRIDS", "STUDY_FAMILIES", "Family", "Start", "find_family"]

AS_PRINTED = "LDLT-R as printed"
"""The family whose construction is refuted; never certified."""

AS_LDLT = "Sandwich as LDLT-L"
"""Sandwich networks that start as the LDLT-L networks with the Cayley contraction: the same set of networks."""


@dataclass(frozen=True)
class Start:
    """Where networks start, which decides how far an optimiser's step moves them; the defaults are *as published*.

    Attributes:
        gain: The free matrices start this many times as large as published. LDLT: they start at norm ``gain·√α``; for
            ``cayley`` see :meth:`ldlt.engine.contraction.Cayley.free_gain`.
        placing: The biases start this many times as large as published. LDLT: means of the pre-activations; see
            :mod:`ldlt.engine.start`.
        bias_scale: Biases are stored divided by this number, so that a step moves them by that much more.
        init: ``orthogonal``: the free matrices start orthogonal, of the norm they had. ``default``: as published.
        rate: The step sizes of the protocol are this many times as large.
        own: What only this family has, in units of what is published: the standard deviation of log q (SLL), Ψ
            (Sandwich), α (the residual as printed).
        alpha: LDLT: start value of α at width 64. Without effect on ``cayley``.
        growth: LDLT: α is multiplied by ``(width / 64)^growth``. A step of AdamW with step size η changes a w × w
            matrix by a norm of up to ``ηw``, so with 2 networks of all widths move equally far, in units of √α.
        contraction: LDLT: contraction of the networks, unless the family names one.
    """

    gain: float = 1.0
    placing: float = 1.0
    bias_scale: float = 1.0
    init: str = "default"
    rate: float = 1.0
    own: float = 1.0
    alpha: float = 1e-2
    growth: float = 2.0
    contraction: str = "cholesky"


@dataclass(frozen=True)
class Family:
    """A family of networks: its name in results, the relative cost of a step on wide ones, whether its bound is proven.

    ``form`` is ``feedforward`` or ``residual`` if it is built by the engine; ``contraction``, if one is asked for, goes
    before that of the start.
    """

    name: str
    cost: float
    form: str = ""
    contraction: str = ""
    certified: bool = True


_TABLE = {
    family.name: family
    for family in (
        Family("AOL", 0.8),
        Family("Orthogonal", 2.8),
        Family("Sandwich", 12.0),
        Family("SLL", 3.4),
        Family("LDLT-L", 6.0, "feedforward"),
        Family("LDLT-R", 9.0, "residual"),
        Family("CPL", 3.0),
        Family("Spectral", 3.0),
        Family(AS_LDLT, 12.0),
        Family(AS_PRINTED, 9.0, certified=False),
    )
}

STUDY_FAMILIES: tuple[str, ...] = tuple(_TABLE)[:6]
"""The six families of the paper's tables."""

FAMILIES: tuple[str, ...] = tuple(_TABLE)
"""All families. ``LDLT-L:cayley`` and the like ask for a contraction, whatever the start's."""

_COMMON: dict[str, tuple[float | str, ...]] = {
    "placing": (1.0, 0.5, 0.0),
    "bias_scale": (1.0, 3.0),
    "init": ("default", "orthogonal"),
    "rate": (1.0, 1 / 3, 3.0),
}
_THREE, _FIVE = (1.0, 0.5, 2.0), (1.0, 0.25, 0.5, 2.0, 4.0)

GRIDS: Mapping[str, Mapping[str, tuple[float | str, ...]]] = {
    "LDLT-L": {"contraction": ("cholesky", "symmetric", "cayley"), "gain": _THREE, **_COMMON},
    "LDLT-R": {"contraction": ("cholesky", "symmetric", "cayley"), "gain": _THREE, **_COMMON},
    "Sandwich": {"own": _THREE, "gain": _THREE, **_COMMON},
    AS_LDLT: {"own": _THREE, "gain": _THREE, **_COMMON},
    "SLL": {"own": (1.0, 0.5, 0.0), "gain": _THREE, **_COMMON},
    AS_PRINTED: {"own": (1.0, 1e-1, 1e-2), "gain": _THREE, **_COMMON},
    **{name: {"gain": _FIVE, **_COMMON} for name in ("AOL", "Orthogonal", "CPL", "Spectral")},
}
"""Settings of the start that are tried for each family (:mod:`ldlt_bench.study.choose`), equally many for each: one
after the other, the first value is where it begins. A family without anything of its own has more gains."""


def find_family(name: str) -> Family:
    """A family by its name, written in any case.

    Example:
        >>> find_family("ldlt-r").name, find_family("LDLT-L:Cayley").name
        ('LDLT-R', 'LDLT-L:cayley')
    """
    base, _, contraction = name.strip().lower().partition(":")
    for family in _TABLE.values():
        if family.name.lower() == base and not contraction:
            return family
        if family.name.lower() == base and family.form and contraction in CONTRACTIONS:
            return replace(family, name=f"{family.name}:{contraction}", contraction=contraction)
    raise OptionError(
        f"unknown family {name!r}; choose from {', '.join(FAMILIES)}, or LDLT-L / LDLT-R with a contraction behind a "
        f"colon ({', '.join(CONTRACTIONS)})"
    )
