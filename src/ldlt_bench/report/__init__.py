"""The report of a study: one self-contained HTML page from its rows (see ``docs/report.md``)."""

from ldlt_bench import require_extra

require_extra()  # before the imports that need it

from ldlt_bench.report.page import build_report, write_report

__all__ = ["build_report", "write_report"]
