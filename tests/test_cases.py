"""Every entry of the tables as a case of the public conformance suite."""

from __future__ import annotations

import pytest

from ldlt.testing import all_cases


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_conformance(case):
    case.check()
