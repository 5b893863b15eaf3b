"""The command line."""

from __future__ import annotations

import pytest

import ldlt
from ldlt.cli import main


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert ldlt.__version__ in capsys.readouterr().out
