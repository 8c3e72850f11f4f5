"""``lint`` and ``ingest`` in several processes: same bytes, same order, no leftovers."""

import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoders import talk
from PIL import Image

from coat_cli.main import main
from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError, Sample
from coat_data.tools import lint as lint_tool
from coat_data.tools.ingest import ingest
from coat_data.tools.lint import lint

ROWS = 700


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A list of JSON, a truncated array, a file without rows, Parquet, and a part of a file.

    Every 50th row is bad.
    """
    for number in range(7):
        pixels = np.random.default_rng(number).integers(256, size=(20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    rows = [talk(id=n, image=f"{n % 7}.png" if n % 50 else "absent.png") for n in range(ROWS)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "cut.json").write_text(json.dumps(rows[:300])[:-40])
    (tmp_path / "none.json").write_text("[")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=130)
    listing = [{"path": name} for name in ("a.json", "cut.json", "none.json", "b.parquet")]
    listing.append({"path": "a.json", "name": "part", "select": "last 60"})
    (tmp_path / "all.yaml").write_text(json.dumps({"sources": listing}))
    return tmp_path / "all.yaml"


def test_lint_says_the_same_in_the_same_order(source: Path, capsys: pytest.CaptureFixture) -> None:
    printed: dict[str, list[str]] = {}
    for number in "1", "3":
        main(["data", "lint", str(source), "--num-workers", number])
        printed[number] = capsys.readouterr().out.splitlines()
    assert printed["1"] == printed["3"]
    found: dict[int, list[DataError]] = {1: [], 3: []}
    for number, errors in found.items():
        lint(source, errors.append, workers=number)
    problems = [str(error) for error in found[1]]
    assert problems == [str(error) for error in found[3]]
    cut = [
        number for number, line in enumerate(problems) if line.startswith(f"{source.parent}/cut")
    ]
    assert len(problems) == 14 + 6 + 1 + 1 + 14 + 1
    # The damage follows the rows of its file and precedes those of the next one.
    assert "is not JSON" in problems[cut[-1]]
    assert "none.json" in problems[cut[-1] + 1]
    assert problems[-1].startswith(f"{source.parent}/a.json:651: ")


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def test_the_ingested_folder_is_the_same_byte_for_byte(source: Path, tmp_path: Path) -> None:
    options = {"embed_media": True, "max_bad_samples": 40, "shard_rows": 333}
    for number in 1, 3:
        ingest(tmp_path / "a.json", tmp_path / f"out{number}", workers=number, **options)
    assert digests(tmp_path / "out1") == digests(tmp_path / "out3")
    assert "bad_samples.jsonl" in digests(tmp_path / "out1")


def test_a_damaged_row_group_is_one_problem_and_keeps_the_numbers_of_other_rows(
    source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "b.parquet"
    group = pq.ParquetFile(path).metadata.row_group(1)
    start = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 40] = bytes(40)
    path.write_bytes(data)
    for number in 1, 2:
        found: list[DataError] = []
        lint(path, found.append, workers=number, check_media="none")
        assert ["is damaged" in error.problem for error in found] == [True]
    read = [one for one in SampleDataset(path, in_order=True).stream() if isinstance(one, Sample)]
    assert [one.row for one in read] == [*range(130), *range(260, ROWS)]
    assert all(one.id == str(one.row) for one in read)


def test_an_unexpected_error_names_file_and_row(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(medium: Any, *_: Any) -> None:
        if medium.path.endswith("3.png"):
            raise ZeroDivisionError("of a decoder")

    monkeypatch.setattr(lint_tool, "image_size", fail)
    with pytest.raises(RuntimeError, match=r"a\.json:4: ZeroDivisionError: of a decoder"):
        lint(source.parent / "a.json", lambda _: None, workers=2)


def test_a_killed_worker_names_its_rows(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(medium: Any, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(lint_tool, "image_size", die)
    with pytest.raises(DataError, match=r"a\.json\), row 1 to 256: a worker process was killed"):
        lint(source.parent / "a.json", lambda _: None, workers=2)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGKILL, -9)],
)
def test_a_signal_ends_all_workers_and_removes_what_was_written(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """The workers wait for a silent server; their ends close the connections."""
    opened: list[str] = []
    closed: list[str] = []

    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            opened.append(self.path)
            with suppress(ConnectionError):
                self.rfile.read()
            closed.append(self.path)

        def log_message(self, format: str, *args: Any) -> None:
            """Not to the terminal."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        rows = [talk(id=n, image=f"{address}/{n}.png") for n in range(100)]
        (tmp_path / "a.json").write_text(json.dumps(rows))
        words = ["data", "ingest", str(tmp_path / "a.json"), "--to", str(tmp_path / "out")]
        words += ["--media-root", address, "--num-workers", "3"]
        command = [sys.executable, "-m", "coat_cli.main", *words]
        process = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        wait_for(lambda: len(opened) > 2 * 16)  # each of the three asks for 16 rows
        # As a scheduler or a terminal does, to the whole group; a kill reaches one process.
        if number == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)
        assert process.wait(timeout=60) == status
        wait_for(lambda: sorted(closed) == sorted(opened))
        server.shutdown()
    left = [path.name for path in tmp_path.iterdir() if path.name != "a.json"]
    if number != signal.SIGKILL:
        assert left == []
        return
    assert {name.rpartition(".")[2] for name in left} == {"lock", "new"}
    (tmp_path / "b.json").write_text(json.dumps([talk(id=0)]))
    ingest(tmp_path / "b.json", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json", "out"]
