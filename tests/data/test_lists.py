"""Lists of sources, as each project writes them, become the same entries and rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from encoders import jsonl, talk

from coat_data.lists import SourceEntry, read_list
from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError
from coat_datasets.download import FOLDER, download, known_mixtures


def rows(name: str, number: int) -> list[dict[str, Any]]:
    return [talk(id=f"{name}{index}") for index in range(number)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.json with 10 rows and b.jsonl with 3."""
    (tmp_path / "a.json").write_text(json.dumps(rows("a", 10)))
    jsonl(tmp_path / "b.jsonl", *rows("b", 3))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ids(path: str | Path) -> list[str]:
    dataset = SampleDataset(path)
    found = [dataset[index].id for index in range(len(dataset))]
    assert [getattr(sample, "id", None) for sample in dataset.stream()] == found
    return found


def a(*numbers: int) -> list[str]:
    return [f"a{number}" for number in numbers]


B = ["b0", "b1", "b2"]


def test_llava_next_yaml(folder: Path) -> None:
    path = folder / "next.yaml"
    entries = [
        {"json_path": "a.json", "sampling_strategy": "first:2"},
        {"json_path": "a.json", "sampling_strategy": "end:20%"},
        {"json_path": str(folder / "b.jsonl"), "sampling_strategy": "all"},
        {"json_path": "a.json", "sampling_strategy": "random:30%"},
    ]
    path.write_text(yaml.safe_dump({"datasets": entries}))
    found = ids(path)
    assert found[:-3] == [*a(0, 1), *a(8, 9), *B]
    assert len(set(found[-3:])) == 3
    assert found == ids(path)  # the same random rows every time
    listed = read_list(path)
    assert listed is not None
    assert [entry.name for entry in listed] == ["a", "a_2", "b", "a_3"]
    assert listed[1] == SourceEntry(name="a_2", path=str(folder / "a.json"), select="last 20%")
    entries[0]["sampling_strategy"] = "middle:2"
    path.write_text(yaml.safe_dump({"datasets": entries}))
    with pytest.raises(DataError, match=r"next\.yaml:0: sampling_strategy is 'middle:2'"):
        SampleDataset(path)


def test_internvl_meta(folder: Path) -> None:
    (folder / "images").mkdir()
    meta = {
        "one": {"root": "images", "annotation": "a.json", "repeat_time": 0.2, "length": 10,
                "data_augment": False, "max_dynamic_patch": 12},
        "two": {"root": "", "annotation": "b.jsonl", "repeat_time": 2, "length": 3},
    }  # fmt: skip
    path = folder / "meta.json"
    path.write_text(json.dumps(meta, indent=2))
    assert ids(path) == [*a(0, 1), *B, *B]
    assert ids(f"{path}#two") == [*B, *B]
    assert SampleDataset(path).media_root == folder  # above images and b.jsonl
    assert SampleDataset(f"{path}#one").media_root == folder / "images"
    with pytest.raises(DataError, match="no source 'three'"):
        SampleDataset(f"{path}#three")
    meta["two"]["repeat_time"] = 1.5
    path.write_text(json.dumps(meta))
    with pytest.raises(DataError, match=r"meta\.json:two: repeat_time is 1\.5"):
        SampleDataset(path)


def test_llama_factory_dataset_info(folder: Path) -> None:
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "<image>Who?"},
        {"role": "bot", "content": "Me"},
    ]
    (folder / "c.json").write_text(json.dumps([{"talk": chat, "pics": ["a.jpg"]}]))
    (folder / "d.json").write_text(json.dumps([{"ask": "q", "say": "a", "input": "not mapped"}]))
    info = {
        "mllm": {
            "file_name": "c.json", "formatting": "sharegpt",
            "columns": {"messages": "talk", "images": "pics"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                     "assistant_tag": "bot", "system_tag": "system"},
        },
        "plain": {"file_name": "d.json", "columns": {"prompt": "ask", "response": "say"}},
        "some": {"file_name": "a.json", "formatting": "sharegpt", "num_samples": 4},
        "far": {"hf_hub_url": "owner/name"},
    }  # fmt: skip
    path = folder / "dataset_info.json"
    path.write_text(json.dumps(info))
    sample, plain = SampleDataset(f"{path}#mllm,plain").stream()
    assert [turn.role for turn in sample.turns] == ["system", "user", "assistant"]  # pyright: ignore
    assert sample.media[0].path == str(folder / "a.jpg")  # pyright: ignore
    assert [turn.text for turn in plain.turns] == ["q", "a"]  # pyright: ignore
    assert len(SampleDataset(f"{path}#some")) == 4
    with pytest.raises(DataError, match=r"dataset_info\.json:far: the data set is on a hub"):
        SampleDataset(path)


def test_our_own_mixture_files(folder: Path) -> None:
    path = folder / "mix.yaml"
    sources = [
        {"path": "a.json", "select": "last 1", "repeat": 2.0},
        {"name": "x", "path": "b.jsonl"},
    ]
    path.write_text(yaml.safe_dump({"sources": sources}))
    assert ids(path) == ["a9", "a9", *B]
    assert [source.name for source in SampleDataset(path).sources()] == ["a", "x"]
    path.write_text(yaml.safe_dump({"sources": [{"path": "a.json", "repeats": 2}]}))
    with pytest.raises(DataError, match=r"mix\.yaml:0: repeats: Unexpected keyword argument"):
        SampleDataset(path)
    path.write_text("nothing: 1")
    with pytest.raises(DataError, match="is not a list of sources"):
        SampleDataset(path)


def test_the_known_mixtures_and_a_download_without_a_network(tmp_path: Path) -> None:
    names = [mixture.name for mixture in known_mixtures()]
    assert names == ["llava_558k", "llava_mix665k", "llava_onevision", "llava_video_178k"]
    assert len(names) == len(list(FOLDER.iterdir()))
    for mixture in known_mixtures():
        folders = {repository.folder for repository in mixture.hub}
        assert all(repository.license for repository in mixture.hub)
        assert {str(source["path"]).split("/")[0] for source in mixture.sources} <= folders
    with pytest.raises(DataError, match=r"hf download liuhaotian/LLaVA-Pretrain .*--local-dir"):
        download("llava_558k", tmp_path)
    with pytest.raises(DataError, match="is no known data set"):
        download("llava", tmp_path)
    own = tmp_path / "LLaVA-Instruct-150K"  # copied by hand, as the message says
    (own / "images").mkdir(parents=True)
    (own / "llava_v1_5_mix665k.json").write_text(json.dumps(rows("m", 2)))
    path, notes = download("llava_mix665k", tmp_path)
    assert ids(path) == ["m0", "m1"]
    assert "not in the repository" in notes[0]
