"""Completion scripts for shells, made from the command line's own parser."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter, _SubParsersAction
from collections.abc import Callable, Iterator
from typing import Any

from ldlt.errors import MissingExtraError, OptionError

__all__ = ["SHELLS", "add_completion", "script"]

SHELLS = ("bash", "zsh", "fish")

_FILES = {"certificate", "data", "model", "out", "path", "center"}
"""Arguments that are files, by name."""
_FOLDERS = {"folder"}

_DESCRIPTION = """Print a completion script for a shell: commands, options, their choices, and files.

It needs the extra 'completion' (pip install 'ldlt[completion]') when it is made, not when it is used."""

_EXAMPLES = """examples:
  ldlt completion bash > ~/.local/share/bash-completion/completions/ldlt
  ldlt completion zsh > ~/.zfunc/_ldlt             with  fpath+=~/.zfunc  in .zshrc, before compinit
  ldlt completion fish > ~/.config/fish/completions/ldlt.fish
  eval "$(ldlt completion bash)"                   for this shell only

exit codes: 0 printed, 2 an error (a missing package)
"""


def add_completion(commands: Any, parser: Callable[[], ArgumentParser]) -> None:
    """Add the command ``completion`` to the command line.

    Args:
        commands: Where to add it.
        parser: Makes the parser of the whole command line.
    """
    own: ArgumentParser = commands.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    own.add_argument("shell", choices=SHELLS)

    def run(arguments: Namespace) -> int:
        print(script(parser(), arguments.shell))
        return 0

    own.set_defaults(run=run)


def script(parser: ArgumentParser, shell: str) -> str:
    """The completion script of a parser.

    Raises:
        MissingExtraError: ``shtab`` is not installed.
        OptionError: The installed version does not know the shell.
    """
    try:
        import shtab  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("shtab", "completion") from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise OptionError(f"the installed shtab {shtab.__version__} does not know {shell}: upgrade it")
    for action in _actions(parser):
        if action.choices is None and action.nargs != 0:
            if action.dest in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.dest in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    found: str = shtab.complete(parser, shell=shell)
    return found


def _actions(parser: ArgumentParser) -> Iterator[Action]:
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action
