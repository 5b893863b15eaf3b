"""The report of the benchmark: one self-contained HTML page.

All statistics come from :mod:`ldlt.bench.stats` and are computed when the page is built; the page itself only
filters, sorts and draws. It needs no network, and every name in the table of runs is treated as untrusted
text.

* :mod:`~ldlt.bench.report.analysis`: from the table of runs to results per protocol;
* :mod:`~ldlt.bench.report.markup`: escaping and number formats;
* :mod:`~ldlt.bench.report.figures`: inline SVG;
* :mod:`~ldlt.bench.report.sections`: sections of the page;
* :mod:`~ldlt.bench.report.erratum`: the numbers on the residual block as printed.
"""

from __future__ import annotations

from ldlt.bench.report.page import build_report, write_report

__all__ = ["build_report", "write_report"]
