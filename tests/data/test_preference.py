"""Preference pairs in the formats of TRL, LlamaFactory, ms-swift and RLAIF-V."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from encoders import jsonl
from PIL import Image

from coat_cli.main import main
from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError, Sample
from coat_data.tools.export import export
from coat_data.tools.ingest import ingest


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def gpt(text: str) -> dict[str, Any]:
    return {"from": "gpt", "value": text}


SHOWN = [{"type": "image"}, {"type": "text", "text": "Which color?"}]
ASKED = [said("user", "<image>Which color?")]
HUMAN = [{"from": "human", "value": "<image>Which color?"}]
PAIR = {"chosen": "Red.", "rejected": "Blue."}
ANSWERS = {name: [said("assistant", text)] for name, text in PAIR.items()}
ROWS: dict[str, dict[str, Any]] = {
    "TRL": {"images": ["a.png"], "prompt": [said("user", SHOWN)], **ANSWERS},
    "TRL, texts": {"images": ["a.png"], "prompt": "<image>Which color?", **PAIR},
    "TRL, implicit prompt": {
        "images": ["a.png"],
        **{name: ASKED + answer for name, answer in ANSWERS.items()},
    },
    "UltraFeedback": {
        "image": "a.png",
        "prompt": "Which color?",
        "messages": ASKED + ANSWERS["chosen"],
        **{name: ASKED + answer for name, answer in ANSWERS.items()},
    },
    "capybara": {
        "image": "a.png",
        "conversation": [{"input": "Which color?", "output": "Red."}],
        **{name: ASKED + answer for name, answer in ANSWERS.items()},
    },
    "LlamaFactory": {
        "images": ["a.png"],
        "conversations": HUMAN,
        **{name: gpt(text) for name, text in PAIR.items()},
    },
    "LlamaFactory, alpaca": {"images": ["a.png"], "instruction": "<image>Which color?", **PAIR},
    "RLAIF-V": {"image": "a.png", "question": "<image>Which color?", **PAIR, "ds_name": "x"},
    "ms-swift": {
        "images": ["a.png"],
        "messages": ASKED + ANSWERS["chosen"],
        "rejected_response": "Blue.",
    },
}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    Image.new("RGB", (8, 8), "red").save(folder / "a.png")
    return jsonl(folder / "pairs.jsonl", *rows)


def read(folder: Path, row: dict[str, Any], **options: Any) -> Sample:
    return SampleDataset(write(folder, row), **options)[0]


def content(sample: Sample) -> Any:
    turns = [(turn.role, [*turn.parts], turn.supervised) for turn in sample.turns]
    return turns, [Path(one.path or "").name for one in sample.media], sample.rejected


@pytest.mark.parametrize("name", ROWS)
def test_every_format_is_the_same_pair(tmp_path: Path, name: str) -> None:
    expected = content(read(tmp_path, ROWS["TRL"]))
    assert [turn[0] for turn in expected[0]] == ["user", "assistant"]
    assert [part.kind for part in expected[0][0][1]] == ["image", "text"]
    assert expected[0][1][1][0].text == "Red."
    assert expected[1:] == (["a.png"], "Blue.")
    sample = read(tmp_path, ROWS[name])
    assert content(sample) == expected
    repeated = {"UltraFeedback": {"prompt"}, "capybara": {"conversation"}}
    used = ROWS[name].keys() - {"ds_name"} - repeated.get(name, set())
    assert sample.reading.used == used


def test_the_last_answer_alone_is_supervised(tmp_path: Path) -> None:
    before = [*ASKED, said("assistant", "Look."), said("user", "Well?")]
    whole = {name: [said("system", "Be brief."), *before, *ANSWERS[name]] for name in PAIR}
    sample = read(tmp_path, {"image": "a.png", **whole})
    answers = [(t.text, t.supervised) for t in sample.turns if t.role == "assistant"]
    assert answers == [("Look.", False), ("Red.", True)]
    assert sample.rejected == "Blue."
    whole["rejected"] = [said("system", "Be long."), *before, *ANSWERS["rejected"]]
    with pytest.raises(DataError, match=r"pairs.jsonl:1: the conversations of chosen and rejected"):
        read(tmp_path, {"image": "a.png", **whole})


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"rejected": None}, "a preference row without the rejected answer"),
    ({"rejected": " \n"}, "the rejected answer is empty"),
    ({"rejected": "Red."}, "the chosen and the rejected answer are equal"),
    ({"chosen": gpt("Red."), "rejected": {"from": "Tom", "value": "No."}}, "different speakers"),
    (
        {"rejected": said("assistant", "No.") | {"tool_calls": ["f()"]}},
        "rejected: the field tool_c",
    ),
    ({"rejected": ["Blue.", "Green."]}, "rejected has 2 answers"),
    ({"rejected_response": "Green."}, "the row has rejected and rejected_response"),
    (
        {"messages": [said("user", "Well?")]}
        | {name: ASKED + answer for name, answer in ANSWERS.items()},
        "the row has another conversation in messages than in chosen and rejected",
    ),
    ({"chosen": [said("assistant", "Red."), said("user", "Sure?")]}, "before their last answer"),
]


@pytest.mark.parametrize(("change", "problem"), BROKEN)
def test_a_row_without_a_pair_is_an_error(
    tmp_path: Path, change: dict[str, Any], problem: str, capsys: pytest.CaptureFixture
) -> None:
    good = ROWS["RLAIF-V"]
    path = write(tmp_path, good, {**good, **change}, good)
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: .*{problem}.* -> "):
        SampleDataset(path)[1]
    assert main(["data", "lint", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert problem in lines[0]
    assert lines[2] == "pairs: 2 of 2 rows are preference pairs"
    assert lines[-1].endswith("3 rows, 1 problem (read as question)")


def test_pairs_survive_ingest_and_export(tmp_path: Path) -> None:
    turns = [*HUMAN, gpt("Look."), {"from": "human", "value": "Well?"}]
    row = {"image": "a.png", "conversations": turns, "chosen": gpt("Red."), "rejected": gpt("No.")}
    path = write(tmp_path, row, ROWS["LlamaFactory"])
    expected = [replace(sample, source="", media=()) for sample in SampleDataset(path)]
    ingest(path, tmp_path / "ingested")
    sources = [tmp_path / "ingested"]
    sources += [export(path, tmp_path / to, to).path for to in ("llava", "messages")]
    for source in sources:
        found = [replace(sample, source="", media=()) for sample in SampleDataset(source)]
        for one, other in zip(found, expected, strict=True):
            assert (one.turns[-1], one.rejected) == (other.turns[-1], other.rejected)
            assert [t.supervised for t in one.turns] == [t.supervised for t in other.turns]


def test_llama_factory_s_list_with_ranking(tmp_path: Path) -> None:
    write(tmp_path, ROWS["LlamaFactory"])
    columns = {"chosen": "chosen", "rejected": "rejected", "images": "images"}
    columns["messages"] = "conversations"
    entry = {"file_name": "pairs.jsonl", "ranking": True, "formatting": "sharegpt"}
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps({"pairs": {**entry, "columns": columns}}))
    assert content(SampleDataset(path)[0]) == content(read(tmp_path, ROWS["TRL"]))
