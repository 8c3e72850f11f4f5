"""Folders and files as other programs leave them: frames, img2dataset, ``datasets``, old names."""

import io
import json
import random
import tarfile
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet as pq
import pytest
from encoders import Tar
from PIL import Image

from coat_data.load.dataset import SampleDataset
from coat_data.media.video import read_frames
from coat_data.sample import DataError, Media, Sample
from coat_data.tools.ingest import ingest
from coat_data.tools.lint import lint
from coat_data.tools.preview import preview


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "names",
    [
        [f"shot{shot}_f{frame}.png" for shot in (2, 10) for frame in (1, 9, 10, 100)],
        ["01.png", "1.png", "02.png", "10.png", "a.png", "a2.png", "a10.png", "b1.png"],
    ],
)
def test_frames_of_a_folder_are_in_the_order_of_their_numbers(
    tmp_path: Path, names: list[str]
) -> None:
    written = list(enumerate(names))
    random.Random(0).shuffle(written)
    for value, name in written:
        (tmp_path / name).write_bytes(png(10 * value))
    frames = read_frames(Media(kind="video", path=str(tmp_path)), len(names))
    assert [frame.getpixel((0, 0)) for frame in frames] == [
        (10 * value,) * 3 for value in range(len(names))
    ]


def img2dataset(folder: Path, form: str, tar: Tar) -> None:
    """Write two shards as rom1504/img2dataset's writer.py does; one download of four failed."""
    folder.mkdir()
    for shard in range(2):
        members, rows = {}, []
        for number in range(4):
            failed, key = number == 2, f"{shard:05d}{number:04d}"
            meta = {
                "url": f"http://127.0.0.1:1/{key}.jpg", "caption": f"caption {key}", "key": key,
                "status": "failed_to_download" if failed else "success",
                "error_message": "HTTP Error 404" if failed else None,
            }  # fmt: skip
            rows.append(meta | ({"jpg": None if failed else png(number)} if form != "tar" else {}))
            if not failed:
                members[f"{key}.jpg"] = png(number)
                members[f"{key}.txt"] = f"caption {key}".encode()
                members[f"{key}.json"] = json.dumps(meta, indent=4).encode()
        pq.write_table(pyarrow.Table.from_pylist(rows), folder / f"{shard:05d}.parquet")
        if form == "tar":
            tar(folder / f"{shard:05d}.tar", members)


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_output_folders_of_img2dataset_are_their_images(
    tmp_path: Path, tar: Tar, form: str
) -> None:
    folder = tmp_path / "out"
    img2dataset(folder, form, tar)
    found = list(SampleDataset(folder).stream())
    good = [sample for sample in found if isinstance(sample, Sample)]
    keys = [f"{shard:05d}{number:04d}" for shard in range(2) for number in (0, 1, 3)]
    assert [sample.turns[1].text for sample in good] == [f"caption {key}" for key in keys]
    assert all(len(sample.media) == 1 for sample in good)
    problems: list[DataError] = []
    summary = lint(folder, problems.append, check_media="decode")
    assert summary.bad == (2 if form == "parquet" else 0), problems


def test_member_names_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "old.tar"
    form = tarfile.GNU_FORMAT
    with tarfile.open(path, "w", format=form, errors="surrogateescape") as archive:
        for name, data in (("caf\udce9.txt", b"a cafe"), ("caf\udce9.png", png(1))):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert lint(path, lambda error: pytest.fail(str(error)), check_media="decode").rows == 1
    assert SampleDataset(path)[0].id == "caf\\xe9"
    ingest(path, tmp_path / "out", embed_media=True)
    assert SampleDataset(tmp_path / "out")[0].id == "caf\\xe9"
    page = tmp_path / "page.html"
    assert len(preview(path, page)) == 1
    assert "caf\\xe9" in page.read_text(encoding="utf-8")


def test_arrow_files_of_datasets_are_tables(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}]
    rows = [{"id": str(n), "image": {"bytes": png(n), "path": None}, "conversations": said}
            for n in range(6)]  # fmt: skip
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    files = sorted((tmp_path / "saved").glob("*.arrow"))
    assert [sample.id for sample in SampleDataset(files[1]).stream()] == ["3", "4", "5"]  # pyright: ignore
    both = SampleDataset(tmp_path / "saved" / "data-*.arrow")
    assert [both[n].media[0].data for n in range(6)] == [png(n) for n in range(6)]
    assert both.container.place(4) == (str(files[1]), 1)
    for file in files:
        file.rename(tmp_path / file.name)
    (tmp_path / "cache-0123456789abcdef.arrow").write_bytes(b"the result of a map")
    for path in tmp_path.glob("saved/*"):
        path.unlink()
    assert len(SampleDataset(tmp_path)) == 6
    cut = tmp_path / "data-00001-of-00002.arrow"
    cut.write_bytes(cut.read_bytes()[:200])
    with pytest.raises(DataError, match="is not a file of datasets"):
        SampleDataset(cut)
