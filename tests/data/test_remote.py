"""Shards read over a network: the rows of the same files on disk, and one order to resume from."""

import io
import json
import os
import struct
import tarfile
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from coat_data.load.dataset import SampleDataset
from coat_data.load.encode import EncodedSample
from coat_data.load.loader import TrainLoader
from coat_data.mixture.sampler import Mixture, SamplerState
from coat_data.mixture.selection import SelectedRows, shards_of
from coat_data.sample import DataError, Sample

SIZES = (600, 300)
"""Rows of the shards, in several windows."""
LARGE = 7
"""The row of the first tar with a long member."""


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def row(number: int) -> dict[str, Any]:
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": f"answer {number} \u00e4"}]
    return {"id": f"{number}", "conversations": said}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of every kind; row n of a kind is the number n."""
    folder = tmp_path_factory.mktemp("shards")
    first = 0
    for shard, size in enumerate(SIZES):
        numbers = range(first, first + size)
        with tarfile.open(folder / f"s-{shard}.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            add(archive, "README", b"no sample")
            for number in numbers:
                long = "x" * 120 if number % 50 == 0 else ""  # a header of several blocks
                key = f"dir/{number:05d}{long}"
                pixels = b"\xff\xd8" + bytes([number % 251]) * (300_000 if number == LARGE else 700)
                add(archive, f"{key}.jpg", pixels)
                add(archive, f"{key}.txt", f"caption {number}".encode())
        lines = [json.dumps(row(number), ensure_ascii=number % 2 == 0) for number in numbers]
        (folder / f"s-{shard}.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
        (folder / f"s-{shard}.json").write_text(json.dumps([row(n) for n in numbers], indent=1))
        table = pa.Table.from_pylist([row(number) for number in numbers])
        pq.write_table(table, folder / f"s-{shard}.parquet", row_group_size=128)
        first += size
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COAT_VLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def http(serve: Any, folder: Path) -> Any:
    return serve(folder)


def content(sample: Sample | DataError) -> tuple[Any, ...]:
    assert isinstance(sample, Sample)
    return (sample.id, sample.turns, [medium.data for medium in sample.media])


@pytest.mark.parametrize("kind", ["tar", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("where", ["http", "memory", "file"])
def test_rows_are_those_of_the_files_on_disk(
    folder: Path, http: Any, kind: str, where: str
) -> None:
    """Each shard read by the readers of local files is the reference."""
    wanted = [
        content(sample)
        for shard in range(2)
        for sample in SampleDataset(folder / f"s-{shard}.{kind}").stream()
    ]
    if where == "memory":
        system = fsspec.filesystem("memory")
        for path in folder.glob(f"*.{kind}"):
            system.pipe_file(f"/data/{path.name}", path.read_bytes())
    start = {"http": http.url, "memory": "memory://data", "file": f"file://{folder}"}[where]
    url = f"{start}/s-{{0..1}}.{kind}"
    remote = SampleDataset(url)
    assert [content(sample) for sample in remote.stream()] == wanted
    chosen = [899, 3, 0, 600, 599, LARGE]
    assert [content(remote[index]) for index in chosen] == [wanted[index] for index in chosen]
    assert remote[601].where == f"{start}/s-1.{kind}:1"
    if where in ("memory", "file"):
        assert len(SampleDataset(f"{start}/*.{kind}")) == 900


@pytest.mark.parametrize("kind", ["tar", "jsonl", "json", "parquet"])
def test_a_server_without_ranges_is_refused(serve: Any, folder: Path, kind: str) -> None:
    server = serve(folder, ranges=False)
    with pytest.raises(DataError, match="a server that does not answer ranges -> download it"):
        SampleDataset(f"{server.url}/s-0.{kind}")


def test_a_shard_is_indexed_once_and_rows_are_ranges(http: Any, folder: Path, cache: Path) -> None:
    url = f"{http.url}/s-0.tar"
    dataset = SampleDataset(url)
    size = (folder / "s-0.tar").stat().st_size
    assert [asked for asked in http.asked if asked[1] == f"bytes=0-{size - 1}"] == [
        ("/s-0.tar", f"bytes=0-{size - 1}")
    ]
    http.asked.clear()
    again = SampleDataset(url)
    assert len(again) == SIZES[0]
    assert again.paths == dataset.paths
    assert [path.parent.parent for path in again.paths] == [cache]
    assert [span for _, span in http.asked] == ["bytes=0-0", "bytes=0-1048575"]
    http.asked.clear()
    sample = dataset[LARGE]
    ((_, span),) = http.asked
    first, last = (int(end) for end in str(span).removeprefix("bytes=").split("-"))
    assert last - first + 1 < 300_000 + 512 * 8  # its own bytes and headers, no more
    assert len(sample.media[0].data or b"") == 300_002
    http.asked.clear()
    [dataset[index] for index in range(100, 110)]
    assert len(http.asked) <= 1  # small neighbours come together


def test_an_index_beside_a_tar_saves_the_pass(serve: Any, folder: Path, tmp_path: Path) -> None:
    """As Energon writes it: where samples start, and where the last one ends."""
    (tmp_path / "a.tar").write_bytes((folder / "s-1.tar").read_bytes())
    with tarfile.open(tmp_path / "a.tar") as archive:
        members = archive.getmembers()
        end = archive.offset  # pyright: ignore[reportAttributeAccessIssue]
    offsets = [*(m.offset for m in members if m.name.endswith(".jpg")), end]
    server = serve(tmp_path, ranges=True)
    whole = f"bytes=0-{(tmp_path / 'a.tar').stat().st_size - 1}"
    wanted = [content(sample) for sample in SampleDataset(folder / "s-1.tar").stream()]
    # Stale ones are of no use: of a longer tar, of other samples, or cut.
    wrong: list[list[int]] = [[*offsets, end + 9999], [512, *offsets[3:]], [*offsets[:-3], 1], []]
    for number, stale in enumerate(wrong):
        (tmp_path / "a.tar.idx").write_bytes(struct.pack(f"<{len(stale)}Q", *stale))
        os.utime(tmp_path / "a.tar", ns=(0, number))
        server.asked.clear()
        assert [
            content(sample) for sample in SampleDataset(f"{server.url}/a.tar").stream()
        ] == wanted
        assert server.asked.count(("/a.tar", whole)) == 2  # the block of its rows, and the pass
    (tmp_path / "a.tar.idx").write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))
    os.utime(tmp_path / "a.tar", ns=(0, 99999))
    server.asked.clear()
    assert [content(sample) for sample in SampleDataset(f"{server.url}/a.tar").stream()] == wanted
    assert server.asked.count(("/a.tar", whole)) == 1
    server.close()


def test_a_changed_shard_is_noticed_and_indexed_anew(serve: Any, tmp_path: Path) -> None:
    server = serve(tmp_path, ranges=True)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row(number)) for number in range(15_000)))
    dataset = SampleDataset(f"{server.url}/a.jsonl")
    path.write_text("\n".join(json.dumps(row(number)) for number in range(10)))
    with pytest.raises(DataError, match=r"a\.jsonl: has changed since it was opened"):
        SampleDataset.__getitem__(dataset, 14_999)
    assert len(SampleDataset(f"{server.url}/a.jsonl")) == 10
    server.close()


def test_what_cannot_be_read_is_told_by_its_address(
    serve: Any, folder: Path, tmp_path: Path
) -> None:
    server = serve(tmp_path, ranges=True)
    good = (folder / "s-1.tar").read_bytes()
    with tarfile.open(folder / "s-1.tar") as archive:
        header = archive.getmembers()[40].offset
    cases = {
        "cut.tar": (good[:100_000], "the tar is damaged"),
        "header.tar": (
            good[:header] + b"?" * 512 + good[header + 512 :],
            f"byte {header} is damaged",
        ),
        "text.txt": (b"hello", "is not JSON, JSONL, Parquet or a plain tar"),
    }
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        link = tarfile.TarInfo("a.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    cases["link.tar"] = ((tmp_path / "link.tar").read_bytes(), "is a link to '/etc/passwd'")
    for name, (data, words) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}: .*{words}"):
            SampleDataset(f"{server.url}/{name}")
    with pytest.raises(DataError, match=r"missing\.tar: cannot be read: HTTPError: .*404"):
        SampleDataset(f"{server.url}/missing.tar")
    with pytest.raises(DataError, match="cannot be read: FileNotFoundError"):
        SampleDataset("memory://nothing/here.jsonl")
    with pytest.raises(DataError, match="nothing here opens such addresses"):
        SampleDataset("nosuch://host/a.jsonl")
    server.close()


class Number:
    """Encodes sample n as n."""

    def __call__(self, sample: Sample, rng: np.random.Generator | None) -> EncodedSample:
        assert rng is not None
        ids = torch.tensor([int(sample.id) + 1])
        return EncodedSample(ids, ids, torch.full((0, 1, 1, 1), float(rng.random())))


def mixture_of(datasets: Sequence[Any]) -> Mixture:
    sizes = [len(dataset) for dataset in datasets]
    shards = [shards_of(dataset) for dataset in datasets]
    return Mixture(sizes, [1.0, 0.5], [None, None], seed=3, shards=shards)


def loader(url: str, local: SampleDataset, rank: int, world: int, num_workers: int) -> TrainLoader:
    remote = SampleDataset(url)
    datasets = [SelectedRows(remote, np.arange(0, 900, 2)), local]
    return TrainLoader(
        datasets,
        mixture_of(datasets),
        Number(),
        batch_size=60,
        micro_batch_size=10,
        rank=rank,
        world_size=world,
        num_workers=num_workers,
        seed=7,
        replace_bad=False,
        pad_token_id=0,
    )


def test_one_two_three_ranks_and_zero_to_four_workers_continue_one_order(
    serve: Any, folder: Path, tmp_path: Path
) -> None:
    server = serve(folder)
    url = f"{server.url}/s-{{0..1}}.jsonl"
    (tmp_path / "l.json").write_text(json.dumps([row(number) for number in range(1000, 1050)]))
    local = SampleDataset(tmp_path / "l.json")

    def steps(
        state: SamplerState, number: int, world: int, workers: int
    ) -> tuple[list[Any], SamplerState]:
        ranks = []
        for rank in range(world):
            stream = loader(url, local, rank, world, workers).steps(state)
            ranks.append(list(islice(stream, number)))
            stream.close()
        sampler = loader(url, local, 0, 1, 0).sampler
        for _ in range(number):
            _, state = sampler.step(state)
        found = []
        for step in range(number):
            micro_batches = [micro for rank in ranks for micro in rank[step]]
            ids = [m.batch["input_ids"].flatten().tolist() for m in micro_batches]
            found.append(Counter(number for some in ids for number in some))
        return found, state

    straight, end = steps(SamplerState(), 9, 1, 0)
    seen = sum(straight[:7], Counter())
    assert end.position == 540  # an epoch is 450 + 25
    assert set(seen.values()) == {1}
    assert {number % 2 for number in seen if number <= 900} == {1}  # rows 0, 2, 4, ...
    pieces, state = [], SamplerState()
    for world, workers, number in ((1, 0, 2), (2, 1, 3), (3, 2, 2), (1, 4, 2)):
        state = SamplerState(*json.loads(json.dumps(state)))  # as a checkpoint keeps it
        part, state = steps(state, number, world, workers)
        pieces += part
    assert pieces == straight
    assert state == end
    server.close()
