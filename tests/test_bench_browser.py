"""The report in a real browser: nothing overflows on a phone or a screen. Skipped where there is no Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from ldlt_bench.report import write_report
from test_bench_report import runs

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
WIDTHS = (390, 1280)
FRAMES = """<!doctype html><body>{frames}<pre id="out"></pre><script>
window.onload = () => {{ out.textContent = [...document.querySelectorAll("iframe")].map(frame => {{
  const page = frame.contentDocument.documentElement;
  const outside = [...page.querySelectorAll("body *")].filter(e => !e.parentElement.closest(".box"))
    .filter(e => e.getBoundingClientRect().right > page.clientWidth + 1);
  const broken = [...frame.contentDocument.images].filter(i => !i.complete || !i.naturalWidth);
  return [page.clientWidth, page.scrollWidth, outside.length, frame.contentDocument.images.length, broken.length];
}}).map(line => "seen " + line.join(" ")).join("\\n"); }};</script>"""


@pytest.mark.skipif(not BROWSER, reason="no Chromium on the path")
def test_nothing_overflows_in_a_browser(tmp_path):
    sizes = {"train_rows": 80, "validation_rows": 20, "test_rows": 50, "edge": 1}
    write_report(runs().assign(**sizes), tmp_path / "report.html")
    frames = "".join(f'<iframe src="report.html" style="width:{w}px;height:800px;border:0"></iframe>' for w in WIDTHS)
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames))
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--window-size=1400,900"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([BROWSER, *words, str(tmp_path / "frames.html")], capture_output=True, text=True, check=False)
    seen = [tuple(map(int, line.split())) for line in re.findall(r"seen ([\d ]+)", done.stdout)]
    assert len(seen) == len(WIDTHS), done.stderr[-500:]
    for (client, scroll, outside, pictures, broken), width in zip(seen, WIDTHS, strict=True):
        assert width - 20 <= client <= width  # less a scroll bar
        assert scroll <= client
        assert outside == 0
        assert pictures > 10
        assert broken == 0
