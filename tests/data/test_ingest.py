import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from coat_data.containers.ingested import Manifest
from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError
from coat_data.tools.ingest import ingest


def make_images(folder: Path, number: int, size: int = 8) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        pixels = np.random.default_rng(index).integers(256, size=(size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")


def rows_of(number: int) -> list[dict[str, Any]]:
    """Rows with 0, 1 and 2 images in turn."""
    return [
        {
            "id": index,
            "image": [f"{(index + n) % number}.png" for n in range(index % 3)],
            "conversations": [
                {"from": "human", "value": "<image>" * (index % 3) + f"\nWhich? \u2028 {index}"},
                {"from": "gpt", "value": f"Number {index}, an <image>"},
            ],
        }
        for index in range(number)
    ]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_images(tmp_path / "images", 10)
    path = tmp_path / "train.json"
    path.write_text(json.dumps(rows_of(10)))
    return path


def run(source: Path, name: str = "out", **options: Any) -> tuple[Path, Manifest]:
    out = source.parent / name
    options = {"media_root": source.parent / "images", **options}
    return out, ingest(source, out, **options)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_the_folder_holds_the_samples_of_the_file(source: Path) -> None:
    out, manifest = run(source, shard_rows=4)
    names = ["manifest.json", "part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert sorted(path.name for path in out.iterdir()) == names
    expected = [*SampleDataset(source, source.parent / "images")]
    assert [*SampleDataset(out)] == expected
    assert [shard.rows for shard in manifest.shards] == [4, 4, 2]
    written = json.loads((out / "manifest.json").read_text())
    assert {**written, "shards": None} == {
        "format": "coat-vlm-samples", "version": 2, "rows": 10, "bad_samples": 0, "shards": None,
        "source": str(source), "media_root": str(source.parent / "images"),
    }  # fmt: skip
    stored = pq.read_table(out / names[1]).to_pylist()
    assert [[media["path"] for media in row["media"]] for row in stored] == [
        [], ["1.png"], ["2.png", "3.png"], []
    ]  # fmt: skip


def test_the_media_root_can_move_and_no_path_leaves_it(source: Path) -> None:
    elsewhere = source.parent / "elsewhere"
    make_images(elsewhere, 1)
    rows = rows_of(2)
    rows[1]["image"] = [str(elsewhere / "0.png")]
    source.write_text(json.dumps([*rows, *rows_of(2)]))
    with pytest.raises(DataError, match=r"elsewhere/0\.png' leaves the media root"):
        run(source)
    source.write_text(json.dumps(rows_of(2)))
    out, _ = run(source)
    moved = SampleDataset(out, elsewhere, name="moved")
    assert moved.name == "moved"
    assert moved[1].media[0].path == str(elsewhere / "1.png")


def spoil(source: Path) -> None:
    """Rows 1, 2, 4 and 6 become bad, each in its own way."""
    rows = rows_of(10)
    whole = (source.parent / "images/1.png").read_bytes()
    (source.parent / "images/1.png").write_bytes(whole[: len(whole) // 2])
    rows[2]["image"] = ["absent.png", "3.png"]
    rows[4]["conversations"][0]["value"] = "<image><image>"
    rows[6]["conversations"][1]["value"] = ""
    rows[5]["image"] = rows[8]["image"] = ["5.png", "6.png"]
    source.write_text("\n".join(json.dumps(row) for row in rows))


def test_bad_rows_stop_the_ingest_and_are_named(source: Path) -> None:
    spoil(source)
    for allowed in (0, 3):
        with pytest.raises(DataError) as caught:
            run(source, max_bad_samples=allowed)
        message = str(caught.value)
        assert f"4 of 10 rows are bad, {allowed} allowed" in message
        for row, problem in ((2, "1.png"), (3, "absent.png"), (5, "2 <image>"), (7, "empty")):
            line = next(line for line in message.split("\n") if f"{source}:{row}" in line)
            assert problem in line
            assert " -> " in line
    assert not (source.parent / "out").exists()
    assert hidden(source.parent) == []


def test_allowed_bad_rows_are_left_out_and_listed(source: Path) -> None:
    spoil(source)
    out, manifest = run(source, max_bad_samples=4)
    assert (manifest.rows, manifest.bad_samples) == (6, 4)
    listed = [json.loads(line) for line in (out / "bad_samples.jsonl").read_text().splitlines()]
    assert [row["where"].split(":")[1] for row in listed] == ["2", "3", "5", "7"]
    assert all(row["problem"] and row["remedy"] for row in listed)
    kept = [*SampleDataset(out)]
    assert [sample.id for sample in kept] == ["0", "3", "5", "7", "8", "9"]
    assert kept[2].where == f"{source}:6"  # the row of the source, not of the folder


def test_inputs_that_cannot_be_ingested(source: Path, tmp_path: Path) -> None:
    source.write_text("[]")
    with pytest.raises(DataError, match="there are no rows"):
        run(source)
    source.write_text('[{"id": 1}]')
    with pytest.raises(DataError, match=r"format of the rows is unknown \(fields: id\)"):
        run(source, max_bad_samples=1)
    with pytest.raises(DataError, match="10 of 10 rows are bad"):
        ingest(tmp_path / "images", tmp_path / "out")
    with pytest.raises(DataError, match="media_root is not a folder"):
        run(source, media_root=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_left_alone(source: Path) -> None:
    out, _ = run(source)
    with pytest.raises(DataError, match="already exists and is not empty"):
        run(source)
    assert len(SampleDataset(out)) == 10
    (source.parent / "empty").mkdir()
    (source.parent / "link").symlink_to("empty")
    run(source, "link")
    assert len(SampleDataset(source.parent / "empty")) == 10
    assert hidden(source.parent) == []


def test_damaged_folders_are_refused(source: Path) -> None:
    out, _ = run(source, shard_rows=5)
    shard, manifest = out / "part-00001.parquet", out / "manifest.json"
    whole, text = shard.read_bytes(), manifest.read_text()

    shard.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"part-00001.parquet: .* has {len(whole) - 1} bytes"):
        SampleDataset(out)
    shard.write_bytes(b"PAR1" + bytes(len(whole) - 4))
    with pytest.raises(DataError, match="a shard cannot be read"):
        SampleDataset(out)
    shard.write_bytes(whole)
    assert len(SampleDataset(out)) == 10

    for broken, problem in (
        (text.replace('"rows": 10', '"rows": 11'), "hold 10 rows, the manifest says 11"),
        (text.replace('"version": 2', '"version": 5'), "version 5"),
        (text.replace('"rows": 10,', ""), "is not a manifest"),
    ):
        manifest.write_text(broken)
        with pytest.raises(DataError, match=problem):
            SampleDataset(out)
    manifest.unlink()
    with pytest.raises(DataError, match=r"no manifest\.json"):
        SampleDataset(out)
    with pytest.raises(DataError, match="no such file or folder"):
        SampleDataset(source.parent / "absent")
