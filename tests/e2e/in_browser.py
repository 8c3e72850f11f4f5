"""Pages in a real browser, headless, where one is installed."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")


def measure_in_browser(page: Path, folder: Path, script: str) -> Any:
    """Run a script next to the page in an iframe ``f``; returns what it returns, through JSON."""
    frame = folder / "frame.html"
    frame.write_text(
        f'<iframe id="f" src="{page.as_uri()}" style="border: 0"></iframe><pre></pre>'
        "<script>f.onload = () => { const inner = f.contentDocument;"
        f"document.querySelector('pre').textContent = JSON.stringify((() => {{ {script} }})()); }}"
        "</script>"
    )
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    options += [f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [str(CHROMIUM), *options, frame.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = re.search(r"<pre>(.+?)</pre>", done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    return json.loads(unescape(found[1]))


def find_overflow(page: Path, folder: Path) -> dict[str, int]:
    """Width of the window -> pixels by which the page is wider, where it is."""
    widths = [360, 480, 640, 768, 1024, 1280, 1600]
    measure = (
        f"return Object.fromEntries({widths}.map(width => {{ f.style.width = `${{width}}px`;"
        "const root = inner.documentElement;"
        "return [width, root.scrollWidth - root.clientWidth]; }))"
    )
    found = measure_in_browser(page, folder, measure)
    assert list(found) == [str(width) for width in widths]
    return {width: pixels for width, pixels in found.items() if pixels}
