"""The families of networks that the study compares: their names and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ldlt.engine.contraction import CONTRACTIONS
from ldlt.errors import OptionError

__all__ = ["AS_PRINTED", "FAMILIES", "STUDY_FAMILIES", "Family", "find_family"]

AS_PRINTED = "LDLT-R as printed"
"""The family whose construction is refuted; never certified."""


@dataclass(frozen=True)
class Family:
    """A family of networks.

    Attributes:
        name: Its name in results, with the contraction behind a colon if one is asked for.
        cost: Relative cost of a step on the weights of a wide network (the engine's: by Cholesky); for estimates of
            time only.
        form: ``feedforward`` or ``residual`` if it is built by the engine, else ``""``.
        contraction: Contraction of the engine's networks if one is asked for, else the protocol's.
        certified: Whether its bound is proven.
    """

    name: str
    cost: float
    form: str = ""
    contraction: str = ""
    certified: bool = True

    @property
    def has_start(self) -> bool:
        """Whether its networks begin at :class:`~ldlt_bench.study.protocol.Start`; the others begin as published."""
        return bool(self.form)


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
        Family(AS_PRINTED, 9.0, certified=False),
    )
}

STUDY_FAMILIES: tuple[str, ...] = tuple(_TABLE)[:6]
"""The six families of the paper's tables."""

FAMILIES: tuple[str, ...] = tuple(_TABLE)
"""All families. ``LDLT-L:cayley`` and the like ask for a contraction, whatever the protocol's."""


def find_family(name: str) -> Family:
    """A family by its name, written in any case.

    Raises:
        OptionError: If there is no such family.

    Example:
        >>> find_family("ldlt-r").name, find_family("LDLT-L:Cayley").name
        ('LDLT-R', 'LDLT-L:cayley')
    """
    base, _, contraction = name.strip().lower().partition(":")
    for family in _TABLE.values():
        if family.name.lower() != base:
            continue
        if not contraction:
            return family
        if family.form and contraction in CONTRACTIONS:
            return replace(family, name=f"{family.name}:{contraction}", contraction=contraction)
    raise OptionError(
        f"unknown family {name!r}; choose from {', '.join(FAMILIES)}, or LDLT-L / LDLT-R with a contraction behind a "
        f"colon ({', '.join(CONTRACTIONS)})"
    )
