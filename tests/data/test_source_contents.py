"""What a tar's JSON, a folder's file names and the first rows say about a source."""

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest
from encoders import Tar, talk

from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError

LEFT, RIGHT = b"the left picture", b"the right picture"  # nothing is decoded here


def test_json_in_tars_names_its_media_in_its_own_order_and_with_times(
    tar: Tar, tmp_path: Path
) -> None:
    said = [{"from": "human", "value": "<image><image>?"}, {"from": "gpt", "value": "a"}]
    row = {"conversations": said, "images": ["x/0.right.png", "left.png"]}
    files = {"x/0.left.png": LEFT, "x/0.right.png": RIGHT, "x/0.thumb.png": LEFT}
    ordered = tar(tmp_path / "a.tar", {"x/0.json": json.dumps(row).encode(), **files})
    assert [media.data for media in SampleDataset(ordered)[0].media] == [RIGHT, LEFT]

    row["images"] = ["0.right.png", "0.lost.png"]
    partly = tar(tmp_path / "b.tar", {"x/0.json": json.dumps(row).encode(), **files})
    with pytest.raises(DataError, match=r"names '0\.lost\.png', which is not in the sample"):
        SampleDataset(partly)[0]

    said[0]["value"] = "<video><video>?"
    spans = [(2.0, 3.5), (0.5, None)]
    clips = [{"path": "0.b.mp4", "start": 2, "end": 3.5}, {"path": "0.b.mp4", "start": 0.5}]
    row = {"conversations": said, "video": clips}
    for renamed in (False, True):  # the second time the tar's writer has given new names
        names = ("1.mp4", "2.mp4") if renamed else ("a.mp4", "b.mp4")
        movies = {f"0.{name}": name.encode() for name in names}
        path = tar(tmp_path / f"{names[0]}.tar", {"0.json": json.dumps(row).encode(), **movies})
        media = SampleDataset(path)[0].media
        assert [(medium.start, medium.end) for medium in media] == spans
        data = [b"1.mp4", b"2.mp4"] if renamed else [b"b.mp4", b"b.mp4"]
        assert [medium.data for medium in media] == data
    row["video"] = clips[:1]
    one = tar(tmp_path / "c.tar", {"0.json": json.dumps(row).encode(), **movies})
    with pytest.raises(DataError, match="start and end for 1 media"):
        SampleDataset(one)[0]


def test_a_folder_of_several_splits_is_no_source(tar: Tar, tmp_path: Path) -> None:
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    hub, folders, tars = tmp_path / "hub", tmp_path / "folders", tmp_path / "tars"
    for folder in (hub / "data", folders / "train", folders / "val", tars):
        folder.mkdir(parents=True)
    parts = ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")
    for part in parts:
        table = pyarrow.table({"id": [part], "conversations": [said]})
        pq.write_table(table, hub / "data" / f"{part}.parquet")
    for split in ("train", "val"):
        table = pyarrow.table({"id": [split], "conversations": [said]})
        pq.write_table(table, folders / split / "0.parquet")
    for name in ("set-train-0", "set-validation-0", "set-contest-0"):
        tar(tars / f"{name}.tar", {"a.png": RIGHT, "a.txt": name.encode()})
    expected = {
        hub: ("test, train", "data/train*.parquet", list(parts[:2])),
        folders: ("train, val", "train/*.parquet", ["train"]),
        tars: ("train, validation", "set-train*.tar", ["a"]),
    }
    for folder, (splits, pattern, ids) in expected.items():
        with pytest.raises(DataError, match=f"holds the splits {splits} -> ") as caught:
            SampleDataset(folder)
        advised = caught.value.remedy.rpartition(" ")[2]
        assert advised == f"{folder}/{pattern}"
        assert [getattr(one, "id", None) for one in SampleDataset(advised).stream()] == ids
    (tars / "set-validation-0.tar").unlink()
    assert len(SampleDataset(tars)) == 2  # a contest is no test


def test_a_tar_that_is_replaced_is_noticed(tar: Tar, tmp_path: Path) -> None:
    """Its members are elsewhere now; the offsets of before would give parts of others."""
    path = tar(
        tmp_path / "a.tar", {f"{n}.{kind}": b"x" * 600 for n in "ab" for kind in ("jpg", "txt")}
    )
    opened = SampleDataset(path)
    assert opened[1].id == "b"
    copied = pickle.loads(pickle.dumps(opened))  # as a worker gets it
    path.write_bytes(tar(tmp_path / "b.tar", {"c.txt": b"x", "c.jpg": b"y" * 2000}).read_bytes())
    for dataset in (opened, copied):
        with pytest.raises(DataError, match=r"a\.tar: the file has changed since it was opened"):
            _ = dataset[1]
    assert SampleDataset(path)[0].id == "c"


def test_a_changed_file_is_scanned_again(tmp_path: Path) -> None:
    row = json.dumps(talk())
    rows = tmp_path / "a.json"
    rows.write_text(f"[{row}, {row}]")
    assert len(SampleDataset(rows)) == 2
    rows.write_text(f"[{row}, {row}, {row}")
    for _ in range(2):  # damage is remembered
        with pytest.raises(DataError, match="is not JSON"):
            SampleDataset(rows)
    rows.write_text(f"[{row}]")
    assert len(SampleDataset(rows)) == 1


def parts_of(folder: Path, *columns: dict[str, pyarrow.Array]) -> Path:
    """Two parts of 20 rows; rows by number are read in another way after the first 16."""
    folder.mkdir()
    for number, column in enumerate(columns):
        said = pyarrow.array([talk()["conversations"]] * 20)
        pq.write_table(
            pyarrow.table({"conversations": said, **column}), folder / f"{number}.parquet"
        )
    return folder


def test_parts_with_other_types_are_read_with_one_schema(tmp_path: Path) -> None:
    images = [{"bytes": LEFT}, {"bytes": RIGHT, "path": "a.png"}]
    columns = [
        {"id": pyarrow.nulls(20), "image": pyarrow.array([images[0]] * 20)},
        {"id": pyarrow.array(["007"] * 20), "image": pyarrow.array([images[1]] * 20)},
    ]
    for order in (1, -1):
        dataset = SampleDataset(parts_of(tmp_path / f"parts{order}", *columns[::order]))
        streamed = list(dataset.stream())
        assert streamed == [dataset[row] for row in range(40)]
        found = [(sample.id, sample.media[0].data) for sample in (dataset[3], dataset[23])]
        assert found[::order] == [("3", LEFT), ("007", RIGHT)]


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        (7, "007", "string, and int64"),
        ({"path": "a.png"}, [{"path": "a.png"}], "list<.*, and struct<"),
        (7, 0.5, "double, and int64"),
    ],
)
def test_parts_whose_types_contradict_each_other_are_refused_by_name(
    tmp_path: Path, one: Any, other: Any, kinds: str
) -> None:
    columns = [{"extra": pyarrow.array([value] * 20)} for value in (one, other)]
    with pytest.raises(DataError, match=rf"1\.parquet: the column extra is {kinds}"):
        SampleDataset(parts_of(tmp_path / "parts", *columns))
