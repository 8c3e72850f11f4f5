"""Takes the screenshots of docs/figures with Chromium, from a run of ./scripts/quickstart.

python docs/make_screenshots.py runs/quickstart runs/quickstart-data/questions.json
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FIGURES = Path(__file__).resolve().parent / "figures"
WIDTH, SCALE = 560, 1.5
"""CSS pixels of the window, and pixels of the picture for each: readable at 400 pixels."""


def take(page: Path, picture: Path, height: int, folder: Path) -> None:
    """Write what a window shows of a page, with short paths; few colors make a small file."""
    shown = folder / "page.html"
    text = page.read_text(encoding="utf-8").replace(f"{Path.cwd()}/", "")
    shown.write_text(text, encoding="utf-8")
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--user-data-dir={folder / 'browser'}", f"--window-size={WIDTH},{height}"]
    options += [f"--force-device-scale-factor={SCALE}", f"--screenshot={folder / 'shot.png'}"]
    subprocess.run([browser, *options, shown.as_uri()], check=True, capture_output=True)
    Image.open(folder / "shot.png").convert("RGB").quantize(128).save(picture, optimize=True)


def main() -> None:
    """Write report.png and preview.png."""
    run, rows = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        preview = folder / "preview.html"
        words = ["data", "preview", rows, "--model", run, "--limit", "3", "--out", str(preview)]
        for command in (["report", run], words):
            subprocess.run([sys.executable, "-m", "coat_vlm.cli", *command], check=True)
        take(Path(run).resolve() / "report.html", FIGURES / "report.png", 1160, folder)
        take(preview, FIGURES / "preview.png", 600, folder)


if __name__ == "__main__":
    main()
