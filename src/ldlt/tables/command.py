"""What ``ldlt train`` and ``ldlt predict`` do."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ldlt.errors import CertificateError, LdltError, MissingExtraError, OptionError
from ldlt.tables.reading import TASKS, Table, read_features, read_table, split
from ldlt.watch import Watch

if TYPE_CHECKING:
    from ldlt.estimators import Epoch
    from ldlt.files import Deployed

__all__ = ["RADII", "add_predict", "add_train", "run_predict", "run_train"]

RADII = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Radii of certified accuracy that are told, in standard deviations of the features."""

MODEL_SUFFIX = ".ldlt.onnx"
"""Ending of the model beside the data."""

_TRAIN = """Train a network on a CSV table that is Lipschitz by construction, and certify it in the units of the table.

The file needs a header and numbers. Texts and missing values are refused, with what to do about them: how they are
turned into numbers decides what a radius means."""

_TRAIN_EPILOG = f"""examples:
  ldlt train iris.csv                              predict the last column
  ldlt train data.csv --target price --bound 0.5   a regression, in standard deviations at most half as steep
  ldlt train data.csv --target y --task classification --margin 1
                                                   larger radii, at some cost of accuracy
  ldlt train data.csv --drop id name               without these columns
  ldlt train data.csv --out model.onnx             for another runtime
  ldlt verify data{MODEL_SUFFIX}              prove its certificate again
  ldlt predict data{MODEL_SUFFIX} new.csv     predictions with certified radii

Written are the model with its certificate inside, and a model card (.card.md) beside it. Texts, truth values and up to
20 different whole numbers are classes; --task overrides that. Ctrl-C ends training and keeps what was learnt.

exit codes: 0 trained and certified, 1 trained, but nothing could be proven (the reason is printed), 2 an error (no such
file or column, not a table of numbers, bad arguments, a missing package), 130 interrupted before there was a model
"""

_PREDICT = """Predict the rows of a CSV table with a model that carries its certificate.

The certificate is proven again first. A classifier tells the class and the certified radius: no row closer than that,
in the units of the table, has another prediction. A regressor tells the value, and with --radius what it can become."""

_PREDICT_EPILOG = f"""examples:
  ldlt predict data{MODEL_SUFFIX} new.csv                  to standard output, as CSV
  ldlt predict data{MODEL_SUFFIX} new.csv --out found.csv
  ldlt predict price{MODEL_SUFFIX} new.csv --radius 0.1    with the ends of an interval
  ldlt predict model.onnx new.csv --json

exit codes: 0 predicted, 1 the model's certificate is rejected, 2 an error (no such file or column, not a table of
numbers, not a model), 130 interrupted
"""


# -- arguments ---------------------------------------------------------------------------------------------------------


def add_train(commands: Any) -> None:
    """Add the command ``train`` to the command line."""
    parser: ArgumentParser = commands.add_parser(
        "train",
        help="train a certified network on a CSV table",
        description=_TRAIN,
        epilog=_TRAIN_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    _add_data(parser)
    parser.add_argument("--target", metavar="COLUMN", help="column to predict; default: the last one")
    parser.add_argument("--task", choices=TASKS, help="default: from the target")
    parser.add_argument("--drop", nargs="+", metavar="COLUMN", help="columns to leave out")
    parser.add_argument(
        "--bound", type=float, default=1.0, metavar="L", help="Lipschitz constant on standardised features; default: 1"
    )
    parser.add_argument(
        "--margin", type=float, metavar="R", help="radius that training asks for, in standard deviations; default: 0.5"
    )
    parser.add_argument("--width", type=int, default=64, metavar="N", help="neurons per hidden layer; default: 64")
    parser.add_argument("--depth", type=int, default=2, metavar="N", help="hidden layers; default: 2")
    parser.add_argument("--epochs", type=int, default=100, metavar="N", help="passes over the rows; default: 100")
    parser.add_argument("--patience", type=int, metavar="N", help="stop after N epochs without progress on held rows")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random; default: 0")
    parser.add_argument(
        "--test-share", type=float, default=0.2, metavar="S", help="share of rows to test with; default: 0.2; 0: none"
    )
    parser.add_argument(
        "--out", metavar="FILE", help=f"model to write, .onnx; default: DATA{MODEL_SUFFIX}"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome for machines")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run_train)


def add_predict(commands: Any) -> None:
    """Add the command ``predict`` to the command line."""
    parser: ArgumentParser = commands.add_parser(
        "predict",
        help="predict the rows of a CSV table, with certified radii",
        description=_PREDICT,
        epilog=_PREDICT_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="file that ldlt train or ldlt.save wrote")
    _add_data(parser)
    parser.add_argument(
        "--radius", type=float, metavar="R", help="of a regressor: distance that an interval allows for"
    )
    parser.add_argument("--out", metavar="FILE", help="CSV file to write; default: standard output")
    parser.add_argument("--json", action="store_true", help="print predictions for machines")
    parser.set_defaults(run=run_predict)


def _add_data(parser: ArgumentParser) -> None:
    parser.add_argument("data", help="CSV file with a header")
    parser.add_argument(
        "--separator",
        default=",",
        metavar="CHARACTER",
        type=lambda text: "\t" if text == "\\t" else text,  # shells have no easy way to write one
        help="between columns; default: a comma",
    )


def _check_train(arguments: Namespace) -> None:
    """Refuse numbers out of range, in one line each."""
    if not (math.isfinite(arguments.bound) and arguments.bound > 0):
        raise OptionError(f"--bound must be a positive finite number, not {arguments.bound:g}")
    if not 0 <= arguments.test_share < 1:
        raise OptionError(f"--test-share must be at least 0 and below 1, not {arguments.test_share:g}")
    if arguments.margin is not None and not (math.isfinite(arguments.margin) and arguments.margin >= 0):
        raise OptionError(f"--margin must be a finite number that is not negative, not {arguments.margin:g}")
    for name in ("width", "depth", "epochs", "patience"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} must be at least 1, not {value}")
    if not 0 <= arguments.seed < 2**32:
        raise OptionError(f"--seed must be a whole number from 0 to {2**32 - 1}, not {arguments.seed}")
    if len(arguments.separator) != 1:
        raise OptionError(f"--separator must be one character, not {arguments.separator!r}")


def _place(out: str | None, data: str) -> Path:
    """Where the model goes, refused before the work and not after it."""
    from ldlt.files.replace import readable, writable  # noqa: PLC0415

    path = readable(data, "data").with_suffix(MODEL_SUFFIX) if out is None else Path(out)
    return writable(path, ".onnx")


# -- training ----------------------------------------------------------------------------------------------------------


def run_train(arguments: Namespace) -> int:
    """Train, certify, test and save.

    Returns:
        0 if the model is certified, 1 if not.

    Raises:
        LdltError: A file or an argument that is wrong.
        KeyboardInterrupt: There was no model yet.
    """
    begin = time.perf_counter()
    _check_train(arguments)
    path = _place(arguments.out, arguments.data)
    _require(path)
    table = read_table(
        arguments.data,
        target=arguments.target,
        task=arguments.task,
        drop=arguments.drop,
        separator=arguments.separator,
    )
    if table.task == "regression" and arguments.margin is not None:
        raise OptionError("--margin is for classification; a regression is smoothed with a smaller --bound")
    train, test = split(table, arguments.test_share, arguments.seed)
    held = table.features.iloc[test], table.target[test]
    with _told("training"):
        estimator, notes = _fit(arguments, table, train)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "nothing is certified")  # the status says it, with the reason
            deployed = _saved(estimator, table, path)
            figures = _test(estimator, deployed, table.task, *held) if len(test) else None
    certificate = deployed.certificate
    card = path.with_suffix(".card.md")
    facts: dict[str, Any] = {
        "data": arguments.data,
        "task": table.task,
        "inferred": table.inferred,
        "target": table.name,
        "rows": len(table),
        "features": len(table.features.columns),
        "classes": None if deployed.meaning.classes is None else len(deployed.meaning.classes),
        "trained_on": len(train),
        "tested_on": len(test),
        "epochs": estimator.n_iter_,
        "best_epoch": estimator.best_epoch_,
        "bound_standardised": arguments.bound,
        "bound": certificate.bound if certificate.is_certified else None,
        "status": certificate.status,
        "reason": certificate.reason,
        "rigorous": certificate.rigorous,
        "fingerprint": certificate.fingerprint,
        "test": figures,
        "model": str(path),
        "card": str(card),
        "notes": notes,
    }
    _write_card(deployed, card, f"Model of {Path(arguments.data).name}", held if len(test) else None)
    facts["seconds"] = time.perf_counter() - begin
    _print(facts, arguments.json)
    return 0 if certificate.is_certified else 1


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What numbers or sizes out of all proportion raise, as one line."""
    try:
        yield
    except LdltError:
        raise
    except (ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OptionError(f"{what} failed: {reason}") from error


def _require(path: Path) -> None:
    """Refuse missing packages before the work."""
    for package, extra in (("pandas", "train"), ("sklearn", "train")):
        if find_spec(package) is None:
            raise MissingExtraError(package, extra)
    for package in ("onnx", "msgspec"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "files")


def _fit(arguments: Namespace, table: Table, rows: Any) -> tuple[Any, list[str]]:
    """A fitted estimator, and what there is to say about its training."""
    from ldlt.estimators import LipschitzClassifier, LipschitzRegressor  # noqa: PLC0415

    progress = _Progress(sys.stderr.isatty() and not (arguments.json or arguments.quiet))
    options: dict[str, Any] = {
        "hidden": (arguments.width,) * arguments.depth,
        "bound": arguments.bound,
        "epochs": arguments.epochs,
        "early_stopping": arguments.patience is not None,
        "patience": 20 if arguments.patience is None else arguments.patience,
        "random_state": arguments.seed,
        "callback": progress,
    }
    estimator: Any
    if table.task == "regression":
        estimator = LipschitzRegressor(**options)
    else:
        estimator = LipschitzClassifier(**options, margin=0.5 if arguments.margin is None else arguments.margin)
    with warnings.catch_warnings(record=True) as caught, progress:
        warnings.simplefilter("always")
        estimator.fit(table.features.iloc[rows], table.target[rows])
    estimator.set_params(callback=None)
    notes = [str(w.message) for w in caught if not progress.interrupted or "interrupted" not in str(w.message)]
    if progress.interrupted:
        if not estimator.best_epoch_:
            raise KeyboardInterrupt
        notes.append(f"training was interrupted; the network of epoch {estimator.best_epoch_} was kept")
    return estimator, notes


class _Progress(Watch):
    """Progress of training."""

    def __call__(self, epoch: Epoch) -> None:
        held = "" if math.isnan(epoch.validation) else f"   held rows {epoch.validation:.4f}"
        self.tell(f"epoch {epoch.epoch}/{epoch.epochs}   loss {epoch.loss:.4f}{held}   {epoch.seconds:.0f} s")


def _saved(estimator: Any, table: Table, path: Path) -> Deployed:
    """The deployed model, written to its file."""
    from ldlt.files import deploy, save  # noqa: PLC0415

    deployed = deploy(estimator)
    deployed.meaning = replace(deployed.meaning, target=table.name)
    save(deployed, path)
    return deployed


def _write_card(deployed: Deployed, path: Path, name: str, held: tuple[Any, Any] | None) -> None:
    from ldlt.files import model_card  # noqa: PLC0415
    from ldlt.files.replace import write_whole  # noqa: PLC0415

    text = model_card(deployed, name=name) if held is None else model_card(deployed, *held, name=name)
    write_whole(path, text.encode())


def _test(estimator: Any, deployed: Deployed, task: str, features: Any, target: Any) -> dict[str, Any]:
    """Figures on rows that were not trained on."""
    if task == "classification":
        shares = estimator.certified_accuracy(features, target, RADII, units="standard")
        _, counts = np.unique(target, return_counts=True)
        radius = deployed.certified_radius(features)
        return {
            "accuracy": float(estimator.score(features, target)),
            "largest_class": float(counts.max() / counts.sum()),
            "radii": list(RADII),
            "certified_accuracy": [float(s) for s in shares],
            "median_radius": float(np.median(radius)),
        }
    error = np.abs(estimator.predict(features) - target)
    variance = float(np.var(target))
    constant = float(deployed.certificate.output_bounds().max())
    return {
        "mean_absolute_error": float(error.mean()),
        "root_mean_square_error": math.sqrt(float((error**2).mean())),
        "explained": 1 - float((error**2).mean()) / variance if variance > 0 else None,
        "change_per_unit": constant if math.isfinite(constant) else None,
    }


# -- prediction --------------------------------------------------------------------------------------------------------


def run_predict(arguments: Namespace) -> int:
    """Predict the rows of a table.

    Returns:
        0 if the model's certificate was proven again, 1 if it is rejected.

    Raises:
        LdltError: A file or an argument that is wrong.
    """
    from ldlt.certificates import verify  # noqa: PLC0415
    from ldlt.files import load  # noqa: PLC0415
    from ldlt.files.replace import why  # noqa: PLC0415

    if len(arguments.separator) != 1:
        raise OptionError(f"--separator must be one character, not {arguments.separator!r}")
    if arguments.radius is not None and not (math.isfinite(arguments.radius) and arguments.radius >= 0):
        raise OptionError(f"--radius must be a finite number that is not negative, not {arguments.radius:g}")
    try:
        deployed = load(arguments.model)
        verify(deployed)
    except CertificateError as error:
        print(f"ldlt: the model '{arguments.model}' is rejected: {error}", file=sys.stderr)
        return 1
    rows = _predict(deployed, arguments)
    if arguments.json:
        text = _json(rows) + "\n"
    else:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        text = buffer.getvalue()
    if arguments.out is None:
        print(text, end="")
        return 0
    try:
        Path(arguments.out).write_text(text, encoding="utf-8")  # a file, or a device such as /dev/stdout
    except OSError as error:
        raise OptionError(f"cannot write '{arguments.out}': {why(error)}") from error
    return 0


def _predict(deployed: Deployed, arguments: Namespace) -> list[dict[str, Any]]:
    features = read_features(arguments.data, deployed.meaning.features, arguments.separator)
    given, wanted = len(features.columns), math.prod(deployed.input_shape)
    if given != wanted:
        raise OptionError(f"'{arguments.data}' has {given} columns, the model reads {wanted}")
    x = features if deployed.meaning.features is not None else features.to_numpy().reshape(-1, *deployed.input_shape)
    if deployed.meaning.task == "classification":
        if arguments.radius is not None:
            raise OptionError("--radius is for regressors; a classifier tells the radius of every prediction")
        classes, radii = deployed.predict_certified(x)
        return [{"prediction": c, "certified_radius": r} for c, r in zip(classes.tolist(), radii.tolist(), strict=True)]
    outputs = np.reshape(deployed.predict(x), (len(features), -1))
    names = ["prediction"] if outputs.shape[1] == 1 else [f"output_{i}" for i in range(outputs.shape[1])]
    rows = [dict(zip(names, row, strict=True)) for row in outputs.tolist()]
    if arguments.radius is not None:
        ends = [np.reshape(e, outputs.shape) for e in deployed.predict_interval(x, arguments.radius)]
        for i, row in enumerate(rows):
            for j, name in enumerate(names):
                prefix = "" if name == "prediction" else f"{name}_"
                row[f"{prefix}lower"], row[f"{prefix}upper"] = float(ends[0][i, j]), float(ends[1][i, j])
    return rows


# -- what is printed ---------------------------------------------------------------------------------------------------


def _print(facts: Mapping[str, Any], machine: bool) -> None:
    if machine:
        print(_json(facts))
        return
    rows = _rows(facts)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}".rstrip())
    for i, note in enumerate(facts["notes"]):
        print("\n" * (i == 0) + f"note: {note}")


def _json(data: Any) -> str:
    """As JSON, which has no numbers that are not finite: null."""

    def finite(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, Mapping):
            return {k: finite(v) for k, v in value.items()}
        return [finite(v) for v in value] if isinstance(value, list) else value

    return json.dumps(finite(data), allow_nan=False)


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    from ldlt.files.card import ceiling, floor  # noqa: PLC0415

    found = "" if not facts["inferred"] else " (found from the target; --task overrides)"
    classes = "" if facts["classes"] is None else f", {facts['classes']} classes"
    bound = "none" if facts["bound"] is None else ceiling(facts["bound"])
    rows = [
        ("data", f"{facts['data']}: {facts['rows']} rows, {facts['features']} features"),
        ("target", f"{facts['target']}{classes}"),
        ("task", facts["task"] + found),
        ("trained on", f"{facts['trained_on']} rows, {facts['epochs']} epochs"),
        ("bound, standardised", f"{facts['bound_standardised']:g}"),
        ("bound, units of the table", bound),
        ("status", facts["status"] + (f": {facts['reason']}" if facts["reason"] else "")),
        ("rigorous", "yes" if facts["rigorous"] else "no"),
    ]
    test = facts["test"]
    if test is not None:
        rows.append(("tested on", f"{facts['tested_on']} rows that were not trained on"))
        if "accuracy" in test:
            rows.append(("accuracy", f"{test['accuracy']:.3f} (largest class: {test['largest_class']:.3f})"))
            for radius, share in zip(test["radii"], test["certified_accuracy"], strict=True):
                rows.append((f"  certified at {radius:g}", f"{share:.3f} (standard deviations)"))
            rows.append(("median radius", f"{floor(test['median_radius'])} (units of the table)"))
        else:
            rows.append(("mean absolute error", f"{test['mean_absolute_error']:.6g}"))
            explained = "" if test["explained"] is None else f" (R² {test['explained']:.3f})"
            rows.append(("root mean square error", f"{test['root_mean_square_error']:.6g}{explained}"))
            change = "not known" if test["change_per_unit"] is None else f"at most {ceiling(test['change_per_unit'])}"
            rows.append(("change per unit of input", change))
    rows += [("time", f"{facts['seconds']:.1f} s"), ("model written", facts["model"]), ("card written", facts["card"])]
    return rows
