"""The command line: ``ldlt``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldlt._version import __version__
from ldlt.bench import command
from ldlt.certificates.command import add_certify, add_verify
from ldlt.completion import add_completion
from ldlt.errors import LdltError, OptionError
from ldlt.tables.command import add_predict, add_train

if TYPE_CHECKING:
    from ldlt.bench.data import Progress as DownloadProgress

__all__ = ["main"]

_EXAMPLES = """examples:
  ldlt demo                                train certified classifiers on an embedded data set
  ldlt demo --set wine --epochs 80 --json  another set, figures for machines
  ldlt figure factors ldl.png              structure of the LDL' factors of the paper's residual block
  ldlt figure b artefacts.svg              |B| with symmetric and with Cholesky roots
  ldlt train data.csv --target y           train a certified network on a table
  ldlt predict data.ldlt.onnx new.csv
                                           predictions with certified radii
  ldlt certify net.onnx                    bound the Lipschitz constant of a trained network, proven
  ldlt verify net.cert.json net.onnx       check a certificate, from the network's own weights
  ldlt data list                           data sets that need no download
  ldlt bench --sets iris wine --epochs 5   compare all families, a first look
  ldlt report                              the page of the last benchmark

ldlt COMMAND --help has examples for each command.
"""

_DEMO_EXAMPLES = """examples:
  ldlt demo                                a breast cancer data set, in seconds
  ldlt demo --set wine --epochs 80 --json  another set, figures for machines
  ldlt demo --set iris --width 16          a smaller network
  ldlt data list                           the names of the sets

exit codes: 0 done, 2 an error (no such set, a missing package), 130 interrupted
"""

_FIGURE_EXAMPLES = """examples:
  ldlt figure factors ldl.png              structure of the LDL' factors of the paper's residual block
  ldlt figure b artefacts.svg              |B| with symmetric and with Cholesky roots
  ldlt figure b artefacts.svg --seed 3     at another random point

exit codes: 0 drawn, 2 an error (not .png or .svg, a missing package)
"""

_DATA_EXAMPLES = """examples:
  ldlt data fetch                          download the UCI archive to the user's cache, verified
  ldlt data fetch data_py.zip              to a file, for  ldlt bench --data data_py.zip
  ldlt data list                           embedded sets, and those of an archive in the cache or in LDLT_UCI
  ldlt data list data_py.zip               those of an archive
  ldlt data check data_py.zip              read all of it and report what is wrong or odd
  ldlt data list --json                    for machines

exit codes: 0 fine, 1 a check failed, 2 an error, 130 interrupted
"""


_REPORT_EXAMPLES = """examples:
  ldlt report                              the page of the last benchmark, in its folder
  ldlt report uci                          of the results in another folder, also of a run that is not finished
  ldlt report uci --out study.html         to another file

exit codes: 0 written, 2 an error (no results there, a file that cannot be written, a missing package)
"""


def _demo(arguments: argparse.Namespace) -> int:
    from ldlt import demo  # noqa: PLC0415

    show = sys.stderr.isatty() and not arguments.json
    outcomes = demo.run(
        arguments.set,
        epochs=arguments.epochs,
        width=arguments.width,
        seed=arguments.seed,
        progress=(lambda line: print(f"\r{line}   ", end="", file=sys.stderr)) if show else (lambda _: None),
    )
    if show:
        print(file=sys.stderr)
    if arguments.json:
        print(json.dumps([asdict(o) for o in outcomes]))
        return 0
    print(f"{arguments.set}: share of test points that are right and certified within a Euclidean radius\n")
    print(demo.format_outcomes(outcomes))
    print(
        "\nbound: certified constant of the whole map (every single logit has 1); attack: steepest slope found;"
        "\nLMI: smallest eigenvalue of the matrix inequality at that bound, relative to its scale."
    )
    return 0


def _figure(arguments: argparse.Namespace) -> int:
    from ldlt.paper import figures  # noqa: PLC0415

    draw = {"factors": figures.factor_structure, "b": figures.b_structure}[arguments.which]
    path = draw(Path(arguments.path), seed=arguments.seed)
    print(json.dumps({"figure": str(path)}) if arguments.json else path)
    return 0


def _data(arguments: argparse.Namespace) -> int:
    from ldlt.bench import data  # noqa: PLC0415

    if arguments.action != "fetch" and (arguments.unpack or arguments.sha256):
        raise OptionError("--unpack and --sha256 go with  ldlt data fetch")
    if arguments.action == "fetch":
        show = sys.stderr.isatty() and not arguments.json
        archive = data.fetch_sets(
            arguments.path,
            folder=arguments.unpack,
            sha256=arguments.sha256,
            progress=_show_download if show else None,
        )
        if show:
            print(file=sys.stderr)
        count, path = len(archive.names()), str(archive.path)
        print(json.dumps({"sets": count, "archive": path}) if arguments.json else f"{count} data sets in {path}")
        return 0
    where = None if arguments.path == "embedded" else data.locate(arguments.path)
    archive_or_none = None if where is None else data.Archive(where)
    if arguments.action == "list":
        sources = [archive_or_none] if arguments.path or archive_or_none is None else [None, archive_or_none]
        rows = [row for source in sources for row in data.list_sets(source)]
        print(json.dumps([asdict(row) for row in rows]) if arguments.json else data.format_table(rows))
        return 0
    report = data.check_sets(archive_or_none)
    if arguments.json:
        print(json.dumps({**asdict(report), "ok": report.ok}))
    else:
        findings = report.of("error", "unavailable", "warning")
        print(f"{data.format_table(findings)}\n\n{report}" if findings else report)
    return 0 if report.ok else 1


def _show_download(progress: DownloadProgress) -> None:
    total = "" if progress.total is None else f" of {progress.total / 1e6:.1f}"
    print(f"\r{progress.done / 1e6:.1f}{total} MB from {progress.url}   ", end="", file=sys.stderr)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _command(commands: Any, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ldlt",
        description="Networks that are Lipschitz by construction.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ldlt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    demo = _command(commands, "demo", "train certified classifiers on an embedded data set", _DEMO_EXAMPLES)
    demo.add_argument("--set", default="breast-cancer-wisc-diag", help="name of an embedded set (ldlt data list)")
    demo.add_argument("--epochs", type=_positive, default=40)
    demo.add_argument("--width", type=_positive, default=64, help="neurons per hidden layer")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--json", action="store_true", help="print figures for machines")
    demo.set_defaults(run=_demo)

    figure = _command(commands, "figure", "draw the figures of the paper's factor structure", _FIGURE_EXAMPLES)
    figure.add_argument("which", choices=["factors", "b"])
    figure.add_argument("path", help="file to write, .png or .svg")
    figure.add_argument("--seed", type=int, default=0)
    figure.add_argument("--json", action="store_true", help="print the file's path for machines")
    figure.set_defaults(run=_figure)

    data = _command(commands, "data", "list, check or fetch the benchmark's data sets", _DATA_EXAMPLES)
    data.add_argument("action", choices=["list", "check", "fetch"])
    data.add_argument(
        "path", nargs="?", help="archive (zip or folder), or 'embedded'; default: LDLT_UCI or the user's cache"
    )
    data.add_argument("--unpack", metavar="DIR", help="fetch: unpack to this folder, too (it can be read without)")
    data.add_argument("--sha256", metavar="HEX", help="fetch: refuse a file with another checksum")
    data.add_argument("--json", action="store_true", help="print what was found for machines")
    data.set_defaults(run=_data)

    add_train(commands)
    add_predict(commands)
    add_certify(commands)
    add_verify(commands)
    command.add_bench(commands)
    command.add_report(commands)
    report = commands.choices["report"]
    report.epilog, report.formatter_class = _REPORT_EXAMPLES, argparse.RawDescriptionHelpFormatter
    add_completion(commands, _parser)
    return parser


_PIPE_CLOSED = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 on success, 1 if a check failed, 2 on an error, 130 when interrupted.

    If whoever reads standard output has had enough (``ldlt predict … | head``), it ends quietly with 141, as a program
    does that is stopped by the signal for this.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    arguments.command_line = shlex.join(["ldlt", *given])
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _silence()
        return _PIPE_CLOSED
    except LdltError as error:
        print(f"ldlt: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # Files are a command's own matter; what is left is its output.
        _silence()
        print(f"ldlt: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nldlt: interrupted", file=sys.stderr)
        return 130


def _silence() -> None:
    """Let the interpreter's last flush of standard output go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
