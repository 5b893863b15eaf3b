"""What there is to say about a deployed network, as Markdown; every line comes from the network or its certificate."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

import numpy as np

from ldlt.certificates import Certificate
from ldlt.errors import OptionError, ShapeError
from ldlt.files.deployed import CLASSIFICATION, REGRESSION, Deployed

__all__ = ["card_of", "ceiling", "floor"]

_SHOWN = 20  # names in a list

_TASKS = {
    CLASSIFICATION: "classification; outputs are logits, the largest one is the predicted class",
    REGRESSION: "regression; outputs are in the units of the target",
    None: "not stated",
}


def card_of(
    deployed: Deployed, X: Any = None, y: Any = None, radii: Sequence[float] | None = None, name: str = "Model card"
) -> str:
    """As :func:`ldlt.model_card`, for a network whose certificate has just been proven."""
    if (X is None) != (y is None):
        raise OptionError("results need both X and y")
    parts = [
        f"# {_line(name)}",
        _section("Network", _network(deployed)),
        _section("Certificate", _certificate(deployed.certificate)),
        *(
            []
            if X is None
            else [_section(f"Results on {len(np.asarray(y))} given rows", _results(deployed, X, y, radii))]
        ),
        f"## Units\n\n{_units(deployed)}",
        "## Limits\n\n" + "\n".join(f"* {limit}" for limit in _limits(deployed)),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    known = [f"| {left} | {_line(str(right))} |" for left, right in rows if right not in (None, "")]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *known])


def _network(deployed: Deployed) -> list[tuple[str, Any]]:
    meaning, shape = deployed.meaning, deployed.input_shape
    count = math.prod(shape)
    return [
        ("task", _TASKS[meaning.task]),
        ("inputs", f"{count}" + (f" ({' × '.join(map(str, shape))})" if len(shape) > 1 else "")),
        ("features", _names(meaning.features)),
        ("target", meaning.target),
        ("outputs", deployed.certificate.outputs),
        ("classes", _names(meaning.classes)),
        ("trained on", meaning.rows and f"{meaning.rows} rows of {count} features"),
        ("architecture", meaning.architecture),
        ("parameters", sum(p.numel() for p in deployed.network.parameters() if p.is_floating_point())),
        ("precision", str(deployed.dtype).removeprefix("torch.")),
    ]


def _certificate(certificate: Certificate) -> list[tuple[str, str]]:
    rows = [("status", certificate.status + (f": {certificate.reason}" if certificate.reason else ""))]
    if certificate.is_certified:
        region = certificate.region
        rows.append(("Lipschitz bound, Euclidean norm", ceiling(certificate.bound)))
        rows.append(("holds for", "all inputs" if region is None else f"inputs in a {region.kind}"))
        if certificate.outputs > 1:
            rows.append(
                ("largest constant of two outputs' difference", ceiling(float(certificate.pair_bounds().max())))
            )
        proof = "for the weights as they are stored, all rounding errors of the check accounted for"
        rigorous = certificate.rigorous and region is None  # slopes of a region are enclosed with margins only
        rows.append(("proven", proof if rigorous else "no: rounding is accounted for by margins only"))
    rows += [
        ("multipliers", certificate.method),
        ("SHA-256 of the network", f"`{certificate.fingerprint}`"),
        ("SHA-256 of the certificate", f"`{hashlib.sha256(certificate.to_json().encode()).hexdigest()}`"),
        ("made", certificate.created),
        ("with", ", ".join(f"{name} {version}" for name, version in sorted(certificate.versions.items()))),
        ("check it with", "`ldlt verify FILE`, or `ldlt.verify(ldlt.load(FILE))`"),
    ]
    return rows


def _results(deployed: Deployed, X: Any, y: Any, radii: Sequence[float] | None) -> list[tuple[str, Any]]:
    task, truth = deployed.meaning.task, np.asarray(y)
    if task == CLASSIFICATION:
        predicted, reach = deployed.predict_certified(X)
    elif task == REGRESSION:
        predicted, reach = np.asarray(deployed.predict(X)), np.zeros(0)
    else:
        raise OptionError("results are told for classifiers and regressors; the task of this network is not stated")
    if truth.shape != predicted.shape:
        raise ShapeError(f"predictions have shape {predicted.shape}, true values {truth.shape}")
    if task == CLASSIFICATION:
        right = predicted == truth
        wanted = sorted({float(r) for r in np.quantile(reach, [0.25, 0.5, 0.75])}) if radii is None else list(radii)
        return [
            ("accuracy", f"{right.mean():.4f}"),
            *((f"right, and certified beyond {floor(r)}", f"{(right & (reach > r)).mean():.4f}") for r in wanted),
            ("median certified radius", floor(float(np.median(reach)))),
        ]
    error = np.abs(predicted - truth.astype(np.float64))
    found = [
        ("mean absolute error", f"{error.mean():.6g}"),
        ("root mean square error", f"{math.sqrt(float((error**2).mean())):.6g}"),
    ]
    for r in () if radii is None else radii:
        lower, upper = deployed.predict_interval(X, float(r))
        found.append(
            (f"largest change of an output for inputs within {r:g}", ceiling(float((upper - lower).max() / 2)))
        )
    return found


def _units(deployed: Deployed) -> str:
    if deployed.meaning.task is None:
        return "Distances are Euclidean, in the units of inputs; the bound is in units of outputs per distance."
    outputs = "the target" if deployed.meaning.task == REGRESSION else "the logits"
    return (
        "Inputs are rows of the table as they are: standardisation is a part of the network. Distances are Euclidean, "
        f"in the units of that table; the bound is in units of {outputs} per distance. A ball treats all columns "
        "alike, so the column with the smallest spread decides how much a radius is worth."
    )


def _limits(deployed: Deployed) -> list[str]:
    certificate, found = deployed.certificate, []
    if not certificate.is_certified:
        found.append("Nothing is certified: radii are zero and intervals infinite.")
    else:
        charged = "added to intervals" if deployed.meaning.task == REGRESSION else "taken off radii"
        found.append(f"The bound is about the network in real arithmetic; rounding errors of outputs are {charged}.")
        if deployed.meaning.task != REGRESSION:
            found.append("A certified prediction is one that does not change nearby; it need not be right.")
    if certificate.region is not None:
        found.append("The bound holds between points of its region only.")
    if deployed.meaning.task == REGRESSION:
        found.append("Intervals are about errors of the input, not about noise of the target.")
    found.append("Whether predictions are right for data from another source than the training rows is not known.")
    return found


def _names(names: Sequence[Any] | None) -> str:
    names = names or ()
    shown = ", ".join(str(n) for n in names[:_SHOWN])
    return shown + (f", … ({len(names)} in all)" if len(names) > _SHOWN else "")


def _line(text: str) -> str:
    """One line that no name can break out of."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain.replace("|", "\\|").replace("<", "&lt;")


def ceiling(value: float, digits: int = 9) -> str:
    """A number in few digits that is not below it.

    >>> ceiling(1 / 3), ceiling(math.inf)
    ('0.333333334', 'infinite')
    """
    if not math.isfinite(value):
        return "infinite"
    return format(Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value), "g")


def floor(value: float, digits: int = 6) -> str:
    """A number in few digits that is not above it."""
    return format(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal_from_float(value), "g")
