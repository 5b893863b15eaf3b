"""The two training protocols, and every decision the paper leaves open."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from ldlt.check import whole
from ldlt.errors import OptionError
from ldlt_bench.study.family import AS_LDLT, Start, find_family

__all__ = [
    "CURVE",
    "LOSSES",
    "PROTOCOLS",
    "RADII",
    "Candidate",
    "Loss",
    "Protocol",
    "network_width",
    "read_starts",
    "shortened",
]

RADII: dict[str, float] = {"cert_36": 36 / 255, "cert_72": 72 / 255, "cert_108": 108 / 255, "cert_255": 1.0}
"""Columns of certified accuracy and their radii, in standardised input units."""

CURVE: tuple[float, ...] = tuple(i / 20 for i in range(41))
"""Radii of the certified-accuracy curve."""


RULES = 2
"""Version of what is fixed in code: rule of the width, batches, choice of the epoch. Raise it when one changes."""


@dataclass(frozen=True)
class Loss:
    """``t · CE((y − o·onehot(c)) / t)``: cross-entropy that asks for a margin ``offset`` o at ``temperature`` t."""

    name: str
    offset: float
    temperature: float


LOSSES: dict[str, Loss] = {
    "cross-entropy": Loss("cross-entropy", 0.0, 1.0),
    # offset and temperature as in B. Prach and C. H. Lampert, "Almost-orthogonal layers", ECCV 2022
    "margin": Loss("margin", math.sqrt(2.0), 0.25),
}


@dataclass(frozen=True)
class Candidate:
    """One setting of the search: AdamW's first step size (times the family's own rate), and a key of LOSSES."""

    learning_rate: float
    loss: str


@dataclass(frozen=True)
class Protocol:
    """How every network of a study is trained.

    The paper's values are the defaults; ``batch`` and what follows it are decisions of ours.

    Attributes:
        name: Name in the results.
        candidates: Settings that are tried. With one there is no search.
        depth: Number of hidden layers.
        epochs: Largest number of epochs.
        weight_decay: AdamW's decoupled weight decay.
        plateau: Epochs without a better validation accuracy until the step size is halved (counted anew after that).
        patience: Epochs without a better validation accuracy until training stops.
        batch: Rows per step.
        least_steps: Small sets: at least this many steps per epoch (of fewer rows).
        most_steps: Large sets: at most this many steps per epoch (of more rows).
        rungs: Search: at epoch e the best k candidates of a fold go on, for (e, k) in order.
        starts: Family -> where its networks start; those that are not named start as published.
    """

    name: str
    candidates: tuple[Candidate, ...] = (Candidate(1e-3, "cross-entropy"),)
    depth: int = 4
    epochs: int = 100
    weight_decay: float = 1e-4
    plateau: int = 8
    patience: int = 30
    batch: int = 256
    least_steps: int = 4
    most_steps: int = 32
    rungs: tuple[tuple[int, int], ...] = ()
    starts: Mapping[str, Start] = field(default_factory=dict)

    def steps(self, rows: int) -> int:
        """Steps per epoch for a number of training rows; the rows are dealt into batches of equal size (± 1)."""
        steps = min(max(math.ceil(rows / self.batch), self.least_steps), self.most_steps)
        return max(1, min(steps, rows))

    def start(self, family: str) -> Start:
        """Where the networks of a family start; the contraction behind a colon is not looked at."""
        return self.starts.get(family.partition(":")[0], Start())

    def fingerprint(self, family: str) -> str:
        """Short hash of all settings that concern a family, so that results of different settings are never mixed.

        Losses and radii count by their numbers, not their names.
        """
        settings = asdict(self) | {"starts": asdict(self.start(family))}
        losses = {candidate.loss: asdict(LOSSES[candidate.loss]) for candidate in self.candidates}
        settings |= {"losses": losses, "radii": RADII, "curve": CURVE, "rules": RULES}
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


_LDLT = Start(contraction="cayley", gain=0.6, placing=0.5, bias_scale=3.0)
_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)

PROTOCOLS: dict[str, Protocol] = {
    "paper": Protocol("paper"),
    "tuned": Protocol(
        "tuned",
        candidates=tuple(Candidate(rate, loss) for loss in LOSSES for rate in _RATES),
        rungs=((3, 4), (10, 2), (20, 1)),
        starts={"LDLT-L": _LDLT, "LDLT-R": _LDLT, AS_LDLT: _LDLT},
    ),
}
"""``paper``: one setting for all. ``tuned``: every family gets the same search, judged on validation rows; its starts
are those of the file that ``ldlt starts`` writes. Without that file only LDLT has others than published."""


def read_starts(path: str | Path) -> dict[str, Start]:
    """Starts of all families from a file that ``ldlt starts`` wrote."""
    try:
        starts = msgspec.json.decode(Path(path).read_bytes(), type=_Starts).starts
    except (OSError, msgspec.MsgspecError) as error:
        raise OptionError(f"{path} is no file of starts ({error}); make one with  ldlt starts") from error
    return {find_family(name).name: start for name, start in starts.items()}


class _Starts(msgspec.Struct):
    starts: dict[str, Start]


def shortened(protocol: Protocol, epochs: int) -> Protocol:
    """Return the protocol with fewer epochs; its fingerprint differs, so its results stay apart."""
    if whole("epochs", epochs) >= protocol.epochs:
        return protocol
    rungs = tuple((max(1, e * epochs // protocol.epochs), k) for e, k in protocol.rungs)
    return replace(protocol, epochs=epochs, rungs=rungs)


def network_width(features: int, classes: int) -> int:
    r"""Hidden width by the paper's rule.

    .. math:: b = \min(\max(4N, 32), 512), \quad b' = (1 + 0.25 \cdot 1_{M > 10})\, b, \quad
        w = 2^{\operatorname{round}(\log_2 b')} ,

    for N features and M classes, and at most 512 (the largest width the paper reports).

    Example:
        >>> network_width(4, 3), network_width(16, 26), network_width(262, 13)
        (32, 64, 512)
    """
    base = min(max(4 * features, 32), 512) * (1.25 if classes > 10 else 1.0)
    return 2 ** round(math.log2(base))
