"""Sources at addresses: the rows of the same files on disk, which are downloaded once."""

import errno
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoders import talk

from coat_data.containers import remote_file
from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError, Sample, UnreachableError

SIZES = (20, 10)
MEMORY = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "WAITS_S", (0.0, 0.0))


def row(number: int) -> dict[str, Any]:
    return talk(answer=f"answer {number}", id=f"{number}")


def lines(size: int) -> bytes:
    return "\n".join(json.dumps(row(number)) for number in range(size)).encode()


@pytest.fixture
def folder(tmp_path: Path, tar: Any) -> Path:
    """Two shards of each kind."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard, size in enumerate(SIZES):
        members: dict[str, bytes] = {}
        for number in range(size):
            members |= {f"{number}.jpg": bytes([number]), f"{number}.txt": f"{number}".encode()}
        tar(folder / f"s-{shard}.tar", members)
        tar(folder / f"s-{shard}.tar.gz", members)
        table = pa.Table.from_pylist([row(number) for number in range(size)])
        pq.write_table(table, folder / f"s-{shard}.parquet", row_group_size=8)
        (folder / f"s-{shard}.jsonl").write_bytes(lines(size))
    return folder


def content(sample: Sample | DataError) -> tuple[Any, ...]:
    assert isinstance(sample, Sample)
    return sample.id, sample.turns, [medium.data for medium in sample.media]


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "parquet", "jsonl"])
def test_rows_are_those_of_the_files_on_disk(folder: Path, serve: Any, kind: str) -> None:
    MEMORY.put(str(folder), "/data", recursive=True)
    pattern = f"s-{{0..1}}.{kind}"
    expected = list(map(content, SampleDataset(folder / pattern).stream()))
    for start in (serve(folder).url, "memory://data", f"file://{folder}"):
        remote = SampleDataset(f"{start}/{pattern}")
        assert list(map(content, remote.stream())) == expected
        assert content(remote[7]) == expected[7]
        assert remote[7].where == f"{start}/s-0.{kind}:8"
    assert len(SampleDataset(f"memory://data/*.{kind}")) == len(expected) == sum(SIZES)


def test_a_file_is_downloaded_once_and_again_if_it_changes(
    serve: Any, tmp_path: Path, cache: Path
) -> None:
    server = serve(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(15))
    url = f"{server.url}/a.jsonl"
    with ThreadPoolExecutor(4) as ranks:  # at the same time
        datasets = list(ranks.map(SampleDataset, [url] * 4))
    assert len(server.asked) == 4 + 1  # the version each time, and the content
    (copy,) = datasets[0].paths
    assert copy.is_relative_to(cache)
    assert copy.name == "a.jsonl"
    assert datasets[0][3].where == f"{url}:4"
    path.write_bytes(lines(10))
    assert len(SampleDataset(url)) == 10
    assert len(datasets[0]) == 15


def test_what_cannot_be_read_names_its_address(serve: Any, tmp_path: Path) -> None:
    url = serve(tmp_path).url
    (tmp_path / "a.txt.gz").write_bytes(b"\x1f\x8b")
    for address, words in (
        (f"{url}/missing.tar", r"missing\.tar: cannot be read: HTTPError: .*404"),
        (f"{url}/a.txt.gz", r"a\.txt\.gz: is damaged"),
        ("memory://nothing/here.jsonl", "here.jsonl: cannot be read: FileNotFoundError"),
        ("memory://nothing/*.jsonl", r"\*\.jsonl: matches no file"),
        ("nosuch://host/a.jsonl", "no installed file system reads such URLs"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            SampleDataset(address)
        assert not isinstance(caught.value, UnreachableError)
    with pytest.raises(DataError, match="network: deny"):
        SampleDataset(f"{url}/a.jsonl", network="deny")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:pass@host.org/a.tar", "https://***@host.org/a.tar"),
        ("s3://KEY:p@ss@bucket/{0..9}.tar", "s3://***@bucket/{0..9}.tar"),
        ("runs/https:/me:word@host/x", "runs/https:/***@host/x"),
        ("zip://a::https://me@host/x", "zip://a::https://***@host/x"),
        ("https://b.net/c/x?sv=2&sig=a%2Fb&se=3", "https://b.net/c/x?sv=2&sig=***&se=3"),
        (
            "http://h/x?X-Amz-Credential=a&X-Amz-Date=2&X-Amz-Security-Token=b&AWSAccessKeyId=c",
            "http://h/x?X-Amz-Credential=***&X-Amz-Date=2&X-Amz-Security-Token=***"
            "&AWSAccessKeyId=***",
        ),
        ("https://medium.com/@me/a?design=1", "https://medium.com/@me/a?design=1"),
        ("hf://datasets/a/b@main/x.tar", "hf://datasets/a/b@main/x.tar"),
        ("mail me@host.org?key=1 https://h", "mail me@host.org?key=*** https://h"),
    ],
)
def test_errors_show_no_secrets_of_addresses(address: str, shown: str) -> None:
    error = DataError(f"rows.json:3: {address}", f"HTTP 403 of {address}", "check")
    assert error.row() | {"remedy": ""} == {
        "where": f"rows.json:3: {shown}",
        "problem": f"HTTP 403 of {shown}",
        "remedy": "",
    }
    assert str(error) == f"rows.json:3: {shown}: HTTP 403 of {shown} -> check"


def test_transient_failures_are_retried(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    MEMORY.pipe_file("/failures/a.jsonl", lines(5))
    original, failures = type(MEMORY).open, [ConnectionResetError("reset"), RuntimeError("httpx")]

    def open_or_fail(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*args, **options)

    monkeypatch.setattr(type(MEMORY), "open", open_or_fail)
    assert len(SampleDataset("memory://failures/a.jsonl")) == 5
    MEMORY.pipe_file("/failures/b.jsonl", lines(5))
    failures += [ConnectionResetError("reset")] * 3
    with pytest.raises(UnreachableError, match=r"b\.jsonl: cannot be read: ConnectionReset"):
        SampleDataset("memory://failures/b.jsonl")
    failures += [OSError(errno.ENOSPC, "No space left on device")]
    with pytest.raises(DataError, match=rf"{cache}: the disk is full -> set COAT_VLM_CACHE"):
        SampleDataset("memory://failures/b.jsonl")
