"""Energon's metadatasets, written by its documentation, become sources with the same shares."""

import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coat_data.lists.read import read_list
from coat_data.load.dataset import SampleDataset
from coat_data.mixture.sampler import Mixture
from coat_data.sample import DataError, Sample
from coat_data.tools.ingest import ingest
from coat_vlm.config import SourceConfig
from coat_vlm.train.open_sources import find_list_warnings, open_source, open_sources

SIZES = {"coco": 20, "coyo": 10, "other": 5}


def prepare(folder: Path, size: int, held_out: int = 3) -> None:
    """What ``energon prepare`` leaves: shards, and in .nv-meta their splits and field map."""
    (folder / ".nv-meta").mkdir(parents=True)
    for part, rows in (("train", size), ("val", held_out)):
        with tarfile.open(folder / f"{part}.tar", "w") as archive:
            for row in range(rows):
                answers = json.dumps({"q": "Which?", "a": [f"{folder.name} {part} {row}"]})
                for ending, data in (("jpg", b"\xff\xd8"), ("json", answers.encode())):
                    info = tarfile.TarInfo(f"{row:03d}.{ending}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    split = {"exclude": [], "split_parts": {"train": ["train.tar"], "val": ["val.tar"], "test": []}}
    (folder / ".nv-meta/split.yaml").write_text(yaml.safe_dump(split))
    fields = {"image": "jpg", "context": "json[q]", "answers": "json[a]"}
    (folder / ".nv-meta/dataset.yaml").write_text(yaml.safe_dump({"field_map": fields}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        prepare(tmp_path / name, size)
    return tmp_path


def write(path: Path, splits: dict[str, Any], version: str = "MetadatasetV2") -> Path:
    content = {"__module__": "megatron.energon", "__class__": version, "splits": splits}
    path.write_text(yaml.safe_dump(content))
    return path


def listed(path: Path | str) -> dict[str, tuple[float | None, float | None, str | None]]:
    """Weight, repeat and selection of each source."""
    entries = read_list(path)
    assert entries is not None
    return {entry.name: (entry.weight, entry.repeat, entry.select) for entry in entries}


def answers(samples: Iterator[Sample | DataError]) -> list[str]:
    found = []
    for sample in samples:
        assert isinstance(sample, Sample)
        found.append(sample.turns[-1].text)
    return found


BLEND = [
    {"weight": 5, "path": "./coco", "subflavors": {"text_length": "short"}},
    {"weight": 2, "path": "./coyo", "split_part": "train"},
    {"weight": 1, "path": "./coyo", "split_part": "val"},
]


def epoch(path: Path, epochs: int = 1) -> list[str]:
    """The answers in the order of training."""
    configs, rows = open_sources([SourceConfig(name="mix", path=str(path))], 0)
    sizes, repeats = [len(part) for part in rows], [config.repeat for config in configs]
    mixture = Mixture(sizes, repeats, [config.weight for config in configs], seed=3)
    places = [mixture.locate(position) for position in range(epochs * mixture.epoch_size)]
    return [rows[source][row].turns[-1].text for source, row in places]


def test_a_blend_by_weight(folder: Path) -> None:
    """The example of Energon's page on metadatasets: 5/8, 2/8 and 1/8 of the samples."""
    path = write(folder / "meta.yaml", {"train": {"blend": BLEND}, "val": {"path": "./coco"}})
    shares = {"coco": 5 / 8, "coyo": 2 / 8, "coyo-val": 1 / 8}
    assert listed(path) == {name: (share, None, None) for name, share in shares.items()}
    order = epoch(path)
    counts = Counter(tuple(answer.split()[:2]) for answer in order)
    assert len(order) == 20 + 10 + 3
    assert counts == {("coco", "train"): 21, ("coyo", "train"): 8, ("coyo", "val"): 4}
    assert epoch(path) == order  # the same in every process
    assert epoch(path, 2)[: len(order)] == order
    assert epoch(path, 2)[len(order) :] != order
    assert answers(SampleDataset(f"{path}#val").stream()) == [f"coco val {n}" for n in range(3)]
    assert answers(SampleDataset(folder / "coyo#val").stream()) == [
        f"coyo val {n}" for n in range(3)
    ]
    ingest(path, folder / "out", check_media=False)  # every row once
    assert len(SampleDataset(folder / "out")) == 33


def test_a_blend_with_weights_validates_on_every_row_once(folder: Path) -> None:
    path = write(folder / "meta.yaml", {"train": {"blend": BLEND}, "val": {"path": "./coco"}})
    (folder / "all.yaml").write_text("sources: [{path: meta.yaml, weight: 2}]")
    for source in (str(path), str(folder / "all.yaml")):
        config = SourceConfig(name="mix", path=source)
        rows = open_source(config, 0, without_weights=True)
        found = [rows[row].turns[-1].text for row in range(len(rows))]
        assert Counter(answer.rpartition(" ")[0] for answer in found) == {
            "coco train": 20, "coyo train": 10, "coyo val": 3
        }  # fmt: skip
        with pytest.raises(ValueError, match="weight has no meaning when a list is read as one"):
            open_source(config, 0)
        *_, note = find_list_warnings([], [config])
        assert f"weights of {source} are ignored in validation" in note
        assert f"{source}#val" in note
    assert not find_list_warnings([], [SourceConfig(name="val", path=f"{path}#val")])


def test_an_epochized_blend(folder: Path) -> None:
    """The example of Energon's page on epochized blending: 5, 2 and 1 repetitions."""
    blend = [
        {"repetitions": 5, "path": "./coco"},
        {"repetitions": 2, "path": "./coyo"},
        {"repetitions": 1, "path": "./coyo", "split_part": "val"},
        {"repetitions": 0.4, "path": "./other"},
    ]
    path = write(folder / "meta.yaml", {"train": {"blend_epochized": blend}})
    order = epoch(path)
    counts = Counter(order)
    assert len(order) == 5 * 20 + 2 * 10 + 3 + 2
    assert {counts[f"coco train {n}"] for n in range(20)} == {5}
    assert {counts[f"coyo train {n}"] for n in range(10)} == {2}
    assert {counts[f"coyo val {n}"] for n in range(3)} == {1}
    assert epoch(path) == order
    assert Counter(epoch(path, 3))["coyo train 4"] == 6


def test_metadatasets_in_metadatasets_and_the_first_version(folder: Path) -> None:
    (folder / "deep").mkdir()
    inner = {
        "train": {"datasets": [{"weight": 3, "path": "../coyo"}, {"path": "../other"}]},
        "val": {"datasets": [{"weight": 9, "path": "../coyo"}]},
    }
    write(folder / "deep/inner.yaml", inner, "Metadataset")
    blend = [{"weight": 1, "path": "coco"}, {"weight": 4, "path": "deep/inner.yaml"}]
    splits = {"train": {"blend": blend}, "val": {"blend": blend}}
    path = write(folder / "meta.yaml", splits)
    weights = {name: weight for name, (weight, _, _) in listed(path).items()}
    assert weights == pytest.approx({"coco": 1 / 5, "coyo": 3 / 5, "other": 1 / 5})
    assert listed(f"{path}#val") == dict.fromkeys(("coco-val", "coyo-val"), (None, None, None))
    assert len(SampleDataset(f"{path}#val")) == 6
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": said}))
    write(folder / "plain.yaml", {"val": {"path": "rows.jsonl"}})
    assert answers(SampleDataset(f"{folder}/plain.yaml#val").stream()) == ["a"]
    twice = [{"repetitions": 2, "path": "again.yaml"}, {"path": "coco"}]
    write(
        folder / "again.yaml", {"train": {"blend_epochized": [{"repetitions": 3, "path": "coyo"}]}}
    )
    write(path, {"train": {"blend_epochized": twice}})
    assert listed(path) == {"coyo": (None, 6, None), "coco": (None, 1, None)}
    twice.append({"path": "deep/inner.yaml"})
    write(path, {"train": {"blend_epochized": twice}})
    with pytest.raises(DataError, match=r"blend_epochized\.2: weight within blend_epochized"):
        read_list(path)
    write(path, {"train": {"blend": [{"path": "meta.yaml"}]}})
    with pytest.raises(DataError, match="leads back to itself"):
        read_list(path)


def test_subsets(folder: Path) -> None:
    """The examples of Energon's page on subsets: 500 rows of 1000, and 80% with the rest."""
    half = {"range": ["0%", "50%"]}
    blend = [{"path": "coco", "subset": {"range": [0, 10]}}, {"path": "coyo"}]
    path = write(folder / "meta.yaml", {"train": {"blend": blend}})
    assert [select for _, _, select in listed(path).values()] == ["first 10", None]
    write(path, {"train": {"subset": half, "blend": blend}})
    with pytest.raises(DataError, match="train: subset of what is a subset itself"):
        read_list(path)
    write(path, {"train": {"subset": half, "blend": [{"path": "coco"}, {"path": "coyo"}]}})
    assert [select for _, _, select in listed(path).values()] == ["first 50%"] * 2
    write(path, {"train": {"path": "coco", "subset": {"range": [0, "end"]}}})
    assert [select for _, _, select in listed(path).values()] == [None]
    splits = {
        "train": {"path": "coco", "subset": {"range": ["0%", "12.5%"]}},
        "rest": {"path": "coco", "split_part": "train", "subset": {"range": ["12.5%", "end"]}},
    }
    write(path, splits)
    both = [answers(SampleDataset(f"{path}#{split}").stream()) for split in splits]
    assert both[0] + both[1] == [f"coco train {n}" for n in range(20)]  # 2.5 rows fall to one side
    for wrong, words in (
        (["25%", "75%"], "in the middle"),
        (["50%", "50%"], "is no row"),
        ([0, "50%"], "two percentages, or two rows"),
        (["end", "50%"], "two percentages, or two rows"),
        (["0%", "101%"], "has the bound '101%'"),
        ([5, "end"], "in the middle"),
        (["1/0%", "50%"], "has the bound '1/0%'"),
        (["0%"], r"write subset: \{range"),
    ):
        write(path, {"train": {"path": "coco", "subset": {"range": wrong}}})
        with pytest.raises(DataError, match=words):
            read_list(path)
    write(path, {"train": {"blend": blend, "subset": {"range": [0, 4]}}})
    with pytest.raises(DataError, match="counts rows of several data sets"):
        read_list(path)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (
            {"join": [{"path": "coco"}, {"path": "coyo"}], "joiner": "x"},
            "train: join cannot be read",
        ),
        ({"path": "coco", "aux": {"pics": "coyo"}}, "train: aux cannot be read"),
        ({"blend": [{"path": "coco", "join": []}]}, r"blend\.0: join cannot"),
        ({"blend": [{"path": "coco", "weight": {"step": {0: 1, 9: 0}}}]}, "weight is {'step'"),
        ({"blend": [{"path": "coco", "weight": 0}]}, "weight is 0 -> give a number above 0"),
        ({"blend": [{"path": "coco", "repetitions": 2}]}, "repetitions within blend"),
        ({"path": "coco", "weight": 2}, "weight outside of a blend"),
        ({"path": "coco", "split": "val"}, "unknown key 'split' -> allowed: path, split_part"),
        ({"path": "coco", "dataset_config": "b.yaml"}, "dataset_config is 'b.yaml'"),
        ({"path": "nowhere"}, "'nowhere' does not exist"),
        ({"path": "s3://bucket/coco"}, "is an address"),
        ({"path": "."}, "has no .nv-meta"),
        ({"blend": []}, "is no list of data sets"),
        ({"subflavors": {}}, "has no data -> give it one of path, blend"),
        ({"path": "coco", "blend": BLEND}, "has path and blend"),
        (["coco"], "is no object"),
    ],
)
def test_what_cannot_be_obeyed_is_an_error_that_names_the_key(
    folder: Path, split: Any, words: str
) -> None:
    path = write(folder / "meta.yaml", {"train": split})
    with pytest.raises(DataError, match=words):
        read_list(path)


def test_other_mistakes(folder: Path) -> None:
    path = write(folder / "meta.yaml", {"train": {"path": "coco", "split_part": "test"}})
    with pytest.raises(DataError, match="names no test shards -> choose from train, val"):
        SampleDataset(path)
    with pytest.raises(DataError, match="has no split 'val' -> choose from train"):
        SampleDataset(f"{path}#val")
    write(path, {"train": {"path": "coco"}}, "Blend")
    with pytest.raises(DataError, match="__class__ is 'Blend' -> use Metadataset or MetadatasetV2"):
        SampleDataset(path)


def test_keys_without_a_meaning_are_told(folder: Path) -> None:
    path = write(folder / "meta.yaml", {"train": {"blend": BLEND, "subflavors": {"a": 1}}})
    notes = find_list_warnings([SourceConfig(name="mix", path=str(path))], [])
    assert [note.partition(" of ")[0] for note in notes] == [
        "mix/coco: subflavors", "mix/coyo: subflavors", "mix/coyo-val: subflavors"
    ]  # fmt: skip
    assert not find_list_warnings([SourceConfig(name="coco", path=str(folder / "coco"))], [])
