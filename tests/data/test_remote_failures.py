"""What fails while shards are read over a network: pages, kept indices, folders, connections."""

import json
import pickle
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coat_data.containers import remote_file, remote_shards
from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError

TALK = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
MEMORY = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COAT_VLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_file, "WAITS_S", (0.0, 0.0, 0.0))
    return tmp_path / "cache"


def put(name: str, data: bytes) -> str:
    MEMORY.pipe_file(f"/failures/{name}", data)
    return f"memory://failures/{name}"


def lines(size: int) -> bytes:
    rows = [{"id": str(number), "conversations": TALK} for number in range(size)]
    return "\n".join(json.dumps(row) for row in rows).encode()


def parquet(tmp_path: Path, groups: int) -> Path:
    """Row groups of 10 rows; row n has the id n."""
    rows = [{"id": str(number), "conversations": TALK} for number in range(10 * groups)]
    pq.write_table(
        pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=10, compression="snappy"
    )
    return tmp_path / "a.parquet"


def fail(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, times: int
) -> list[Exception]:
    """Let a method of the file system raise so often; the list has what it raised."""
    original: Callable[..., Any] = getattr(type(MEMORY), method)
    raised: list[Exception] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        if len(raised) < times:
            raised.append(error)
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(type(MEMORY), method, called)
    return raised


def test_a_corrupt_page_is_told_by_its_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path, 3)
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
    first = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[first : first + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    dataset = SampleDataset(put("page.parquet", bytes(data)))
    assert dataset[5].id == "5"
    with pytest.raises(DataError, match=r"page\.parquet: row group 1 is damaged: "):
        dataset[15]
    # The network is not the file's fault.
    dataset = SampleDataset(put("good.parquet", path.read_bytes()))
    fail(monkeypatch, "cat_file", ConnectionResetError("reset"), 99)
    dataset = pickle.loads(pickle.dumps(dataset))  # as workers get it: without what was read
    with pytest.raises(ConnectionResetError, match="reset"):
        dataset[25]


@pytest.mark.parametrize("left", [0, 100, -30])
def test_a_cut_index_is_made_again(left: int) -> None:
    url = put("cut.jsonl", lines(50))
    dataset = SampleDataset(url)
    (path,) = dataset.paths
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    again = SampleDataset(url)
    assert [again[row].id for row in (0, 49)] == ["0", "49"]
    assert path.read_bytes()[:4] == whole[:4]


def test_a_cache_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COAT_VLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="COAT_VLM_CACHE"):
        SampleDataset(put("unusable.jsonl", lines(3)))


def test_row_groups_are_kept_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing takes rows of several row groups in turn."""
    opened = SampleDataset(put("groups.parquet", parquet(tmp_path, 6).read_bytes()))
    dataset = pickle.loads(pickle.dumps(opened))  # as workers get it: without what was read
    read: list[int] = []
    original = remote_shards._row_group  # pyright: ignore[reportPrivateUsage]

    def counted(file: Any, group: int) -> Any:
        read.append(group)
        return original(file, group)

    monkeypatch.setattr(remote_shards, "_row_group", counted)
    order = [10 * group + row for row in range(10) for group in range(6)]
    assert [int(dataset[row].id) for row in order] == order
    assert read == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(remote_shards, "_GROUPS_BYTES", 1)
    read.clear()
    assert [int(dataset[row].id) for row in (0, 1, 10, 11, 2)] == [0, 1, 10, 11, 2]
    assert read == [1, 0]


class ConnectError(Exception):
    """As httpx has it, which ``hf:`` reads with: no OSError."""


def test_what_a_file_system_raises_is_tried_again_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = put("outage.jsonl", lines(20))
    for method in ("info", "cat_file"):
        raised = fail(monkeypatch, method, ConnectError("no route"), 3)
        assert len(SampleDataset(f"{url}")) == 20
        assert len(raised) == 3
        put("outage.jsonl", lines(20))  # another time of change: a new index
    fail(monkeypatch, "info", ConnectError("no route"), 99)
    with pytest.raises(
        DataError,
        match=r"outage\.jsonl: cannot be read: ConnectionError: ConnectError: no route -> check",
    ):
        SampleDataset(url)
    raised = fail(monkeypatch, "info", TypeError("a mistake"), 99)
    with pytest.raises(TypeError, match="a mistake"):
        SampleDataset(url)
    assert len(raised) == 1


def test_a_broken_connection_does_not_end_the_pass(tmp_path: Path) -> None:
    """Every other answer ends after 3,000 bytes."""
    data = lines(100)
    (tmp_path / "a.jsonl").write_bytes(data)
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Range"])
            first, last = map(int, asked[-1].removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[:3000] if len(asked) % 2 == 0 else part)

        def log_message(self, format: str, *args: Any) -> None:
            """Not to the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    dataset = SampleDataset(f"http://127.0.0.1:{server.server_address[1]}/a.jsonl")
    assert len(dataset) == 100
    whole = f"bytes=0-{len(data) - 1}"
    assert asked.count(whole) > asked[::2].count(whole) > 0  # broken off, and tried again
    server.shutdown()
    server.server_close()


def test_a_file_that_gives_less_than_its_size_is_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = put("short.jsonl", lines(50))
    monkeypatch.setattr(type(MEMORY), "cat_file", lambda *_, **__: lines(50)[:1000])
    with pytest.raises(ConnectionError, match=r"short\.jsonl: broke off at byte 1000 of"):
        SampleDataset(url)
