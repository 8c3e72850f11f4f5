"""Measures ingest, lint, preview and reading of a generated LLaVA file: rows/s and peak memory.

    python data/benchmarks/ingest.py --rows 100000

Each job runs in a process of its own. Its peak is what the process holds at most (``ru_maxrss``)
less what it holds after the imports, so that it is the memory that the rows need. The rows are
written by this script: 2 to 6 turns of 40 to 400 characters; every eighth row has no image; the
images are 64 JPEGs of 32 x 32 pixels, so that decoding is a small part. Seconds are CPU seconds of
the process, user and system, which other work on the machine disturbs less than wall time; the
median of ``--repeats`` runs.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

WORDS = ["a", "red", "bus", "stands", "near", "the", "old", "house", "while", "people", "talk"]


def write_rows(folder: Path, rows: int) -> tuple[Path, Path]:
    """A JSON array and a JSONL file of the same rows, and their images."""
    rng = random.Random(0)
    (folder / "images").mkdir()
    for number in range(64):
        image = Image.new("RGB", (32, 32), tuple(rng.randrange(256) for _ in range(3)))
        image.save(folder / f"images/{number}.jpg")
    array, lines = folder / "rows.json", folder / "rows.jsonl"
    with array.open("w") as array_file, lines.open("w") as lines_file:
        array_file.write("[")
        for number in range(rows):
            text = json.dumps(_row(number, rng))
            array_file.write((",\n" if number else "\n") + text)
            lines_file.write(text + "\n")
        array_file.write("\n]\n")
    return array, lines


def _row(number: int, rng: random.Random) -> dict[str, object]:
    said = []
    for turn in range(2 * rng.randint(1, 3)):
        text = " ".join(rng.choices(WORDS, k=rng.randint(8, 80)))
        said.append({"from": ("human", "gpt")[turn % 2], "value": text})
    if number % 8 == 0:
        return {"id": number, "conversations": said}
    said[0]["value"] = "<image>\n" + said[0]["value"]
    return {"id": number, "image": f"images/{number % 64}.jpg", "conversations": said}


def open_file(path: Path, _: Path) -> None:
    """Open the file and take 100 samples out of it."""
    from coat_data.load.dataset import SampleDataset

    dataset = SampleDataset(path)
    for index in range(0, len(dataset), max(1, len(dataset) // 100)):
        dataset[index]


def stream(path: Path, _: Path) -> None:
    """Read every sample in order."""
    from coat_data.load.dataset import SampleDataset

    for _sample in SampleDataset(path).stream():
        pass


def lint(path: Path, _: Path) -> None:
    """Check every row and the header of every image."""
    from coat_data.tools.lint import lint as run

    summary = run(path, print, progress=False)
    assert summary.bad == 0


def preview(path: Path, folder: Path) -> None:
    """Write a page of 20 samples."""
    from coat_data.tools.preview import write_preview

    write_preview(path, folder / f"{os.getpid()}.html", progress=False)


def ingest(path: Path, folder: Path) -> None:
    """Check every row, decode every image, write Parquet shards."""
    from coat_data.tools.ingest import ingest as run

    run(path, folder / f"out-{os.getpid()}", progress=False)


JOBS: dict[str, Callable[[Path, Path], None]] = {
    "open": open_file,
    "stream": stream,
    "lint": lint,
    "preview": preview,
    "ingest": ingest,
}


def _measure(job: str, path: Path, folder: Path) -> tuple[float, float]:
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch  # noqa: F401

    import coat_data.tools.ingest
    import coat_data.tools.lint
    import coat_data.tools.preview  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    JOBS[job](path, folder)
    cpu_s = time.process_time() - start
    return cpu_s, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        array, lines = write_rows(folder, args.rows)
        megabytes = array.stat().st_size / 2**20
        print(f"{args.rows:,} rows, {megabytes:.0f} MiB, {os.cpu_count()} cores, one process\n")
        print("| job | file | rows/s | CPU s | peak MiB above imports |\n|---|---|---|---|---|")
        spawn = multiprocessing.get_context("spawn")
        for job in JOBS:
            for path in (array, lines) if job == "open" else (array,):
                runs = []
                for _ in range(args.repeats):
                    with spawn.Pool(1) as pool:
                        runs.append(pool.apply(_measure, (job, path, folder)))
                seconds = statistics.median(run[0] for run in runs)
                peak = max(run[1] for run in runs)
                rate = f"{args.rows / seconds:,.0f}"
                print(
                    f"| {job} | {path.suffix[1:]} | {rate} | {seconds:.2f} | {peak:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
