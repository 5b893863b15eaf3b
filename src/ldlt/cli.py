"""The command line: ``ldlt train``, ``predict``, ``certify``, ``verify``, and the commands that other packages add.

A package adds a command by an entry point of the group ``ldlt.commands``: its name and a ``typer.Typer`` or a function.
Nothing heavy is imported before a command runs. Exit codes: 0 done, 1 refused (one sentence says why), 2 wrong usage,
130 interrupted by Ctrl-C, 141 when whoever reads the output has had enough.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from ldlt import check
from ldlt._version import __version__
from ldlt.errors import CertificateError, LdltError, MissingExtraError, OptionError
from ldlt.progress import Progress

if TYPE_CHECKING:
    from ldlt.certificates import Certificate, Region

__all__ = ["app", "main"]

GROUP = "ldlt.commands"
"""Entry points of this group are commands."""

RADII = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Radii of certified accuracy that ``train`` tells, in standard deviations of the features."""

SHOWN_OUTPUTS = 64
"""Up to this many outputs the constants of all pairs are printed for machines."""

_INTERRUPTED, _PIPE_CLOSED = 130, 141
_DEPTH = 2  # hidden layers
_SHOWN = 6  # entries of a list


# -- the application ---------------------------------------------------------------------------------------------------


class Elsewhere(TyperCommand):
    """The name of another package's command, which is loaded when it is called, so that help loads nothing."""

    def __init__(self, point: EntryPoint) -> None:
        self.point, self.package = point, point.module.split(".")[0]
        super().__init__(point.name, help=f"From {self.package}.")

    def load(self) -> Any:
        """The command itself.

        Raises:
            MissingExtraError: One of its packages is not installed.
        """
        try:
            found = self.point.load()
        except ImportError as error:
            if isinstance(error, LdltError):
                raise
            extra = (self.point.extras or [self.package.removeprefix("ldlt_")])[0]
            raise MissingExtraError(error.name or self.package, extra) from error
        holder = typer.Typer(add_completion=False)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=self.name)
        else:
            holder.command(self.name)(found)
        return typer.main.get_group(holder).commands[str(self.name)]


class Commands(TyperGroup):
    """Our commands and those of entry points; refusals as one sentence."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, those of other packages at the end."""
        return [*super().list_commands(ctx), *sorted(p.name for p in entry_points(group=GROUP))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by name; ours cannot be replaced."""
        own = super().get_command(ctx, cmd_name)
        return own or next((Elsewhere(p) for p in entry_points(group=GROUP) if p.name == cmd_name), None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, Elsewhere) else command, rest

    def make_context(self, *args: Any, **options: Any) -> Any:
        """The arguments, read; Ctrl-C ends that, too."""
        try:
            return super().make_context(*args, **options)
        except KeyboardInterrupt:
            raise typer.Exit(_say("interrupted", _INTERRUPTED)) from None

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what it returns is the exit code."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _silence()
            code = _PIPE_CLOSED
        except KeyboardInterrupt:
            code = _say("interrupted", _INTERRUPTED)
        except LdltError as error:
            code = _say(str(error), 1)
        except OSError as error:  # of a file, or without a name of the output
            if error.filename is None:
                _silence()
            code = _say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
        raise typer.Exit(int(code or 0))


def _say(text: str, code: int) -> int:
    print(f"ldlt: {' '.join(text.split())}", file=sys.stderr)
    return code


def _silence() -> None:
    """Let the interpreter's last flush of standard output go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ldlt {__version__}")
        raise typer.Exit


@app.callback()
def _ldlt(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Networks that are Lipschitz by construction: train, predict, certify, verify."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    try:
        app(None if argv is None else list(argv), prog_name="ldlt")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


# -- arguments ---------------------------------------------------------------------------------------------------------


def _number(checked: Callable[..., float], **limits: float) -> Any:
    """A check of :mod:`ldlt.check` whose refusal is a usage error."""

    def callback(value: float | None) -> float | None:
        try:
            return value if value is None else checked("it", value, **limits)
        except LdltError as error:
            raise typer.BadParameter(str(error)) from None

    return callback


def _place(value: Path | None) -> Path | None:
    """A file to write to, refused before the work and not after it."""
    if value is not None:
        folder = value.parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)) or (os.path.exists(value) and not value.is_file()):
            raise typer.BadParameter(f"cannot write '{value}': it is no file, or its folder cannot be written to")
    return value


def _radius(value: str | None) -> float | str | None:
    try:
        return value if value in (None, "auto") else check.finite("it", value and float(value), least=0.0)
    except ValueError:
        raise typer.BadParameter(f"a number that is not negative is needed, or auto, not {value!r}") from None


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return check.sample_shape([int(part) for part in text.split(",")])
    except ValueError:
        raise typer.BadParameter(f"sizes without the batch are needed, such as 784 or 1,28,28, not {text!r}") from None


def _character(text: str) -> str:
    text = "\t" if text == "\\t" else text  # shells have no easy way to write one
    if len(text) != 1:
        raise typer.BadParameter(f"one character is needed, not {text!r}")
    return text


def _file(help: str) -> Any:
    return typer.Argument(help=help, exists=True, dir_okay=False, show_default=False)


def _opt(help: str, callback: Any = None, **options: Any) -> Any:
    return typer.Option(help=help, callback=callback, **options)


_POSITIVE, _LEAST_0 = _number(check.positive), _number(check.finite, least=0.0)
_SHARE = _number(check.finite, least=0.0, below=1.0)

Task = Literal["classification", "regression"]
Method = Literal["optimal", "product"]
Data = Annotated[Path, _file("CSV file with a header, plain or compressed (.gz, .bz2, .xz).")]
Separator = Annotated[str, _opt("Between columns; \\t is a tab.", _character)]
Json = Annotated[bool, typer.Option("--json", help="Print the outcome for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")]
InputName = Annotated[str | None, _opt("Input of the file, if it has several.")]
OutputName = Annotated[str | None, _opt("Output, or any other value of the file: the logits before a softmax.")]
Out = Annotated[Path | None, _opt("File to write.", _place)]
Radius = Annotated[float | None, _opt("Radius of a region, or distance that an interval allows for.", _LEAST_0)]


# -- train -------------------------------------------------------------------------------------------------------------


@app.command(
    epilog="Examples:\n\n"
    "ldlt train iris.csv --target species\n\n"
    "ldlt train data.csv --target price --bound 0.5   (a regression)\n\n"
    "ldlt train data.csv --drop id --drop name --radius 1 --out model.onnx"
)
def train(
    data: Data,
    target: Annotated[str | None, _opt("Column to predict; the last one if none is given.")] = None,
    task: Annotated[Task | None, _opt("Found from the target if not given.")] = None,
    drop: Annotated[list[str] | None, _opt("Column to leave out; may be repeated.")] = None,
    radius: Annotated[
        str | None,
        _opt("How far classes shall be robust, in standard deviations, or auto; 0.25 if not given.", _radius),
    ] = None,
    bound: Annotated[
        float | None,
        _opt("Of a regression: Lipschitz constant on standardised columns; found if not given.", _POSITIVE),
    ] = None,
    balanced: Annotated[bool, typer.Option("--balanced", help="All classes weigh the same, also rare ones.")] = False,
    width: Annotated[int | None, _opt("Neurons per hidden layer; by the number of rows if not given.", min=1)] = None,
    depth: Annotated[int, _opt("Hidden layers.", min=1)] = _DEPTH,
    epochs: Annotated[int | None, _opt("Passes over the rows.", min=1)] = None,
    patience: Annotated[int | None, _opt("Stop after so many epochs without progress.", min=1)] = None,
    seed: Annotated[int, _opt("Of everything random.", min=0, max=2**32 - 1)] = 0,
    test_share: Annotated[float, _opt("Share of rows to test with.", _SHARE)] = 0.2,
    separator: Separator = ",",
    out: Annotated[Path | None, _opt("Model to write, .onnx; DATA.ldlt.onnx if none is given.", _place)] = None,
    machine: Json = False,
    quiet: Quiet = False,
) -> int:
    """Train a network on a CSV table that is Lipschitz by construction, and certify it in the units of the table.

    The table needs a header. Texts are categories, two of which are at a distance of 1; a missing number becomes the
    median, and its being missing an input. Columns that would mean nothing, such as dates, are refused, all at once.
    Written are the model with its certificate inside, and a model card beside it. Ctrl-C ends training and keeps the
    best model so far. The exit code is 1 if nothing could be proven.
    """
    begin = time.perf_counter()
    from ldlt import deploy, load, model_card, save, tables  # noqa: PLC0415
    from ldlt.files import atomic  # noqa: PLC0415

    path = out or data.with_name(re.sub(r"(\.[a-z]{3})?(\.gz|\.bz2|\.xz)?$", "", data.name) + ".ldlt.onnx")
    _place(path)
    if path.suffix.lower() != ".onnx":
        raise typer.BadParameter(f"the model must be an .onnx file, not '{path}'")
    if find_spec("onnx") is None:
        raise MissingExtraError("onnx", "train")
    table = tables.read_table(data, target=target, task=task, drop=drop or (), separator=separator)
    regression = table.task == "regression"
    if regression and (radius is not None or balanced):
        raise typer.BadParameter("--radius and --balanced are for classes; a regression has a --bound")
    if bound is not None and not regression:
        raise typer.BadParameter("--bound is for a regression; for classes say how far they shall be robust: --radius")
    rows, test = tables.split(table, test_share, seed)
    options: dict[str, Any] = {"random_state": seed}
    if width is not None or depth != _DEPTH:
        options["hidden"] = (width or 128,) * depth
    given = {"radius": radius, "bound": bound, "epochs": epochs, "class_weight": "balanced" if balanced else None}
    options |= {name: value for name, value in given.items() if value is not None}
    if patience is not None:
        options |= {"early_stopping": True, "patience": patience}
    with _told("training"), warnings.catch_warnings():
        estimator, notes = _fit(table, rows, options, not (machine or quiet))
        warnings.filterwarnings("ignore", "nothing is certified")  # the status says it, with the reason
        deployed = deploy(estimator)
        deployed.meaning = replace(deployed.meaning, target=table.name)
        save(deployed, path)
        deployed = load(path)  # what is told is about the file
        held = (table.features.iloc[test], table.target[test]) if len(test) else None
        figures = None if held is None else _test(estimator, deployed, *held)
        card = path.with_suffix(".card.md")
        with atomic(card) as place:
            place.write_text(model_card(deployed, *(held or ()), name=f"Model of {data.name}"), encoding="utf-8")
    shown = _facts(deployed.certificate)
    facts: dict[str, Any] = {
        "data": str(data),
        "task": table.task,
        "inferred": task is None,
        "target": table.name,
        "rows": len(table.target),
        "features": len(table.features.columns),
        "inputs": len(estimator.mean_),
        "classes": None if deployed.meaning.classes is None else len(deployed.meaning.classes),
        "trained_on": len(rows),
        "tested_on": len(test),
        "epochs": estimator.n_iter_,
        "best_epoch": estimator.best_epoch_,
        "bound_standardised": estimator.bound_,
        "radius": None if regression else estimator.radius_,
        **{name: shown[name] for name in ("bound", "status", "reason", "rigorous", "fingerprint")},
        "test": figures,
        "model": str(path),
        "card": str(card),
        "notes": notes,
    }
    return _done(facts, begin, machine)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """What numbers or sizes out of all proportion raise, as a refusal."""
    try:
        yield
    except (LdltError, OSError):
        raise
    except (ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise OptionError(f"{what} failed: {error or type(error).__name__}") from error


def _fit(table: Any, rows: Any, options: Mapping[str, Any], show: bool) -> tuple[Any, list[str]]:
    """A fitted estimator, and what there is to say about its training."""
    import ldlt  # noqa: PLC0415

    kind = ldlt.LipschitzRegressor if table.task == "regression" else ldlt.LipschitzClassifier
    progress = Progress(show=show)
    estimator = kind(**options, callback=lambda epoch: progress.tell(str(epoch), epoch.epoch))
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


def _test(estimator: Any, deployed: Any, features: Any, target: Any) -> dict[str, Any]:
    """Figures on rows that were not trained on."""
    import numpy as np  # noqa: PLC0415

    if deployed.meaning.task == "classification":
        predicted, reach = estimator.predict(features), estimator.certified_radius(features, units="standard")
        right = predicted == target
        classes = estimator.classes_
        counts = np.array([[np.sum((target == c) & (predicted == p)) for p in classes] for c in classes])
        recall = {
            str(c): float(row[i] / row.sum())
            for i, (c, row) in enumerate(zip(classes, counts, strict=True))
            if row.sum()
        }
        return {
            "accuracy": float(right.mean()),
            "largest_class": float(counts.sum(1).max() / len(target)),
            "balanced_accuracy": float(np.mean([*recall.values()])),
            "recall": recall if len(classes) <= _SHOWN else None,
            "confusion": {str(c): row for c, row in zip(classes, counts.tolist(), strict=True)}
            if len(classes) <= _SHOWN
            else None,
            "radii": list(RADII),
            "certified_accuracy": [float((right & (reach > r)).mean()) for r in RADII],
            "radii_unit": "standard deviations, and 1 from one category to another",
            "median_radius": float(np.median(deployed.certified_radius(features))),
            "median_radius_unit": "units of the table",
        }
    error = estimator.predict(features) - target
    square, variance = float((error**2).mean()), float(np.var(target))
    return {
        "mean_absolute_error": float(np.abs(error).mean()),
        "root_mean_square_error": math.sqrt(square),
        "explained": 1 - square / variance if variance > 0 else None,
        "change_per_unit": float(deployed.certificate.output_bounds().max()),
    }


# -- predict -----------------------------------------------------------------------------------------------------------


@app.command(
    epilog="Examples:\n\n"
    "ldlt predict data.ldlt.onnx new.csv --out found.csv\n\n"
    "ldlt predict price.ldlt.onnx new.csv --radius 0.1   (with the ends of an interval)"
)
def predict(
    model: Annotated[Path, _file("File that ldlt train or ldlt.save wrote.")],
    data: Data,
    radius: Radius = None,
    separator: Separator = ",",
    out: Out = None,
    machine: Json = False,
) -> int:
    """Predict the rows of a CSV table with a model that carries its certificate, which is proven again first.

    A classifier tells the class and the certified radius: no row closer than that, in the units of the table, has
    another prediction. A regressor tells the value, and with --radius what it can become.
    """
    from ldlt import load, tables, verify  # noqa: PLC0415
    from ldlt.files import atomic  # noqa: PLC0415

    deployed = load(model)
    verify(deployed)
    features = tables.read_features(data, deployed.meaning.columns, separator)
    if deployed.meaning.columns is None:
        given, wanted = len(features.columns), math.prod(deployed.input_shape)
        if given != wanted:
            raise OptionError(f"'{data}' has {given} columns, the model reads {wanted}")
        features = features.to_numpy().reshape(-1, *deployed.input_shape)
    columns = _predictions(deployed, features, radius)
    rows = list(zip(*columns.values(), strict=True))
    buffer = io.StringIO()
    if machine:
        print(_json([dict(zip(columns, row, strict=True)) for row in rows]), file=buffer)
    else:
        csv.writer(buffer, lineterminator="\n").writerows([list(columns), *rows])
    if out is None:
        print(buffer.getvalue(), end="")
    else:
        with atomic(out) as place:
            place.write_text(buffer.getvalue(), encoding="utf-8")
    return 0


def _predictions(deployed: Any, x: Any, radius: float | None) -> dict[str, list[Any]]:
    """Columns by name."""
    if deployed.meaning.task == "classification":
        if radius is not None:
            raise typer.BadParameter("--radius is for regressors; a classifier tells the radius of every prediction")
        classes, radii = deployed.predict_certified(x)
        return {"prediction": classes.tolist(), "certified_radius": radii.tolist()}
    outputs = deployed.predict(x).reshape(len(x), -1)
    names = [""] if outputs.shape[1] == 1 else [f"output_{i}" for i in range(outputs.shape[1])]
    columns = {name or "prediction": outputs[:, i].tolist() for i, name in enumerate(names)}
    if radius is not None:
        ends = deployed.predict_interval(x, radius)
        for i, name in enumerate(names):
            for end, values in zip(("lower", "upper"), ends, strict=True):
                columns[f"{name}_{end}".lstrip("_")] = values.reshape(outputs.shape)[:, i].tolist()
    return columns


# -- certify -----------------------------------------------------------------------------------------------------------


@app.command(
    epilog="Examples:\n\n"
    "ldlt certify net.onnx --out net.cert.json   (a file that others can check)\n\n"
    "ldlt certify net.onnx --time-limit 60\n\n"
    "ldlt certify net.onnx --output-name logits   (without the softmax behind them)\n\n"
    "ldlt certify net.onnx --center x.npy --radius 0.1 --box   (in a region only)"
)
def certify(
    model: Annotated[Path, _file("Network, an ONNX file.")],
    method: Annotated[Method, _opt("How to search; 'product' multiplies norms.")] = "optimal",
    input_shape: Annotated[Any, _opt("Shape of one input, such as 784 or 1,28,28.", parser=_sizes)] = None,
    input_name: InputName = None,
    output_name: OutputName = None,
    time_limit: Annotated[float | None, _opt("Seconds; what was found is valid.", _LEAST_0)] = None,
    tolerance: Annotated[float, _opt("Relative, of the search.", _POSITIVE)] = 1e-4,
    center: Annotated[
        str | None, _opt("Bound a region around this input: a .npy file, numbers with commas, or one for all entries.")
    ] = None,
    radius: Radius = None,
    box: Annotated[bool, typer.Option("--box", help="Entry by entry within the radius, instead of a ball.")] = False,
    out: Out = None,
    machine: Json = False,
    quiet: Quiet = False,
) -> int:
    """Bound the Lipschitz constant (Euclidean norm) of a trained network, and prove the bound for its weights.

    The network is an ONNX file. It is data: nothing in it is executed, and no other file is opened. Ctrl-C ends the
    search: the best bound so far is proven and reported; once more, and the command is given up. The exit code is 1 if
    there is no bound, or none that could be proven.
    """
    begin = time.perf_counter()
    if (center is None) != (radius is None) or (box and center is None):
        raise typer.BadParameter("a region needs both --center and --radius")
    if time_limit is not None and method != "optimal":
        raise typer.BadParameter(f"--time-limit is for the search of --method optimal; {method} has none")
    if out is not None and out.exists() and out.samefile(model):
        raise typer.BadParameter(f"cannot write '{out}': it is the model")
    import ldlt  # noqa: PLC0415

    network = _network(model, input_name, output_name, input_shape)
    region = None if center is None else _region(center, radius or 0.0, box, network.input_shape)
    last: Any = None
    progress = Progress(show=not (machine or quiet))

    def tell(step: Any) -> None:
        nonlocal last
        last = step
        progress.tell(f"bound {step.bound:.6g}   best possible {step.lower:.6g}")

    with progress:
        searched = time.perf_counter()
        certificate = ldlt.certify(
            network.module,
            network.input_shape,
            method=method,
            region=region,
            time_limit=time_limit,
            tolerance=tolerance,
            progress=tell,
        )
    late = time_limit is not None and time.perf_counter() - searched > time_limit
    facts = {"model": str(model), **_facts(certificate), "interrupted": progress.interrupted}
    known = last is not None and last.lower > 0 and certificate.is_certified
    facts["gap"] = gap = max(certificate.bound / last.lower - 1, 0.0) if known else None
    notes = _rigour(certificate)
    if progress.interrupted or (late and not (known and last.bound <= last.lower * (1 + tolerance))):
        why = "the search was interrupted" if progress.interrupted else "the time limit was reached"
        notes.append(f"{why}; the bound is the best found until then")
    if gap is not None and gap > 0.01:
        notes.append(f"the best multipliers may lower the bound, by {100 * gap / (1 + gap):.0f} % at most")
    trouble = None
    if out is not None and certificate.is_certified:
        try:
            certificate.save(out)
        except (OSError, LdltError) as error:  # the bound is not lost
            trouble = error
    saved = out is not None and certificate.is_certified and trouble is None
    facts |= {"file": str(out) if saved else None, "notes": notes if certificate.is_certified else []}
    code = _done(facts, begin, machine)
    if trouble is not None:
        raise OptionError(f"cannot write '{out}': {trouble}")
    return code


def _network(path: Path, input_name: str | None, output_name: str | None, shape: tuple[int, ...] | None) -> Any:
    from ldlt import read_onnx  # noqa: PLC0415

    if path.suffix.lower() != ".onnx":
        raise OptionError(
            f"'{path}' is not an ONNX file: write one with ldlt.save or torch.onnx.export. Only ONNX is read, because "
            "it is data; other formats, such as the pickles of torch.save, can execute code when they are read"
        )
    return read_onnx(path, input_name=input_name, output_name=output_name, input_shape=shape)


def _region(center: str, radius: float, box: bool, shape: tuple[int, ...]) -> Region:
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from ldlt import Region  # noqa: PLC0415

    try:
        if center.lower().endswith(".npy"):
            # Mapped, a header that promises more than the file holds is an error before memory is allocated.
            found = np.lib.format.open_memmap(center, mode="r")
            if found.dtype.kind not in "fiu" or found.shape not in (shape, (1, *shape), (math.prod(shape),)):
                raise ValueError(f"it has {found.dtype} entries of shape {found.shape}, an input has {shape}")
            values = np.array(found, dtype=np.float64)
        else:
            values = np.array([float(part) for part in center.split(",")])
            values = np.broadcast_to(values, math.prod(shape)).copy()
    except Exception as error:  # a file must not be able to raise anything else
        raise OptionError(f"--center must be a .npy file of numbers, or numbers with commas: {error}") from error
    size = torch.tensor(radius, dtype=torch.float64)
    point = torch.from_numpy(values).reshape(shape)
    return Region("box", point, size.expand(shape).clone()) if box else Region("ball", point, size)


# -- verify ------------------------------------------------------------------------------------------------------------


@app.command(
    epilog="Examples:\n\n"
    "ldlt verify net.cert.json net.onnx\n\n"
    "ldlt verify net.onnx   (the certificate that ldlt train or ldlt.save put into the file)"
)
def verify(
    certificate: Annotated[Path, _file("File that ldlt certify --out wrote, or a model that carries its certificate.")],
    model: Annotated[Path | None, _file("Network, an ONNX file, if the certificate is in a file of its own.")] = None,
    input_name: InputName = None,
    output_name: OutputName = None,
    machine: Json = False,
) -> int:
    """Check a certificate against a network, without trusting whoever made it.

    The bound is proven again from the network's own weights. If the outcome is 'rigorous', all rounding errors are
    accounted for. The exit code is 1 if the certificate is rejected.
    """
    begin = time.perf_counter()
    if model is None and (certificate.suffix == ".json" or input_name or output_name):
        raise typer.BadParameter("the network is missing: ldlt verify net.cert.json net.onnx")
    import ldlt  # noqa: PLC0415

    facts: dict[str, Any] = {"certificate": str(certificate), "model": str(model or certificate)}
    try:
        if model is None:
            proven = ldlt.verify(certificate)
        else:
            stated = ldlt.Certificate.load(certificate)
            proven = ldlt.verify(stated, _network(model, input_name, output_name, stated.input_shape).module)
        facts |= {"verified": True, **_facts(proven), "created": proven.created, "notes": _rigour(proven)}
    except CertificateError as error:
        facts |= {"verified": False, "status": "rejected", "reason": str(error), "notes": []}
    return _done(facts, begin, machine)


# -- what is printed ---------------------------------------------------------------------------------------------------


def _rigour(certificate: Certificate) -> list[str]:
    note = "the bound is not rigorous: rounding is accounted for by margins, not by a proof"
    return [] if certificate.rigorous else [note]


def _facts(certificate: Certificate) -> dict[str, Any]:
    """What a certificate says."""
    region, k = certificate.region, certificate.outputs
    pairs = largest = where = None
    if certificate.is_certified and k > 1:
        # Without a table all pairs have the same constant: two outputs tell it.
        shown = certificate if certificate.gram is not None else replace(certificate, outputs=2)
        largest = float(shown.pair_bounds().max())
        pairs = certificate.pair_bounds().tolist() if k <= SHOWN_OUTPUTS else None
    if region is not None:
        sizes = region.radius.double().reshape(-1).tolist()
        size = sizes[0] if len(set(sizes)) == 1 else sizes
        where = {"kind": region.kind, "center": region.center.double().reshape(-1).tolist(), "radius": size}
    stated = ("bound", "status", "reason", "rigorous", "method", "residual", "fingerprint")
    return {
        "input_shape": list(certificate.input_shape),
        "inputs": math.prod(certificate.input_shape),
        "outputs": k,
        "region": where,
        **{name: getattr(certificate, name) for name in stated},
        "largest_pair_bound": largest,
        "pair_bounds": pairs,
    }


def _done(facts: Mapping[str, Any], begin: float, machine: bool) -> int:
    """Print what was found; 0 if something is certified, else 1."""
    facts = {**facts, "seconds": time.perf_counter() - begin}
    if machine:
        print(_json(facts))
    else:
        rows = list(_rows(facts))
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows))
        print("".join(f"\nnote: {note}" for note in facts["notes"]), end="\n" * bool(facts["notes"]))
    return 0 if facts["status"] == "certified" else 1


def _rows(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values for people, without what is not known; bounds are rounded up, radii down."""
    from ldlt.files.card import ceiling, floor  # noqa: PLC0415

    for name, value in facts.items():
        label = prefix + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield from _rows(value, f"{label} ")
        elif isinstance(value, float) and name.endswith(("bound", "per_unit", "radius")):
            rounded = floor(value, 9) if name.endswith("radius") else ceiling(value)
            yield label, rounded if math.isfinite(value) else "none"
        elif name not in ("notes", "pair_bounds") and str(value) not in ("", "None", "nan"):
            values = value if isinstance(value, list) else [value]
            texts = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in values[:_SHOWN]]
            text = ", ".join(texts) + ", …" * (len(values) > _SHOWN)
            yield label, {"True": "yes", "False": "no"}.get(text, text)


def _json(data: Any) -> str:
    """As JSON, which has no numbers that are not finite: null."""

    def finite(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, Mapping):
            return {k: finite(v) for k, v in value.items()}
        return [finite(v) for v in value] if isinstance(value, list) else value

    return json.dumps(finite(data), allow_nan=False)
