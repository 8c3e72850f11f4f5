"""The VLM of pretrained parts on a CPU: a few steps on a few generated pictures."""

import copy
import csv
import io
import json
import lzma
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model, LlamaConfig, LlamaForCausalLM

import dinov2
import harness
import lab_real_parts as bench
import photo_questions
from coat_vlm.model.processor import train_tokenizer
from photo_questions import CIFAR_ORDER, make_questions

CLASSES = ("red fox", "orange", "lime", "leaf", "sky", "ocean", "plum")


def make_zips(folder: Path) -> list[Path]:
    """Both photograph sets: pictures of one color per class, with noise."""
    draw = np.random.default_rng(0)

    def picture(hue: int, side: int) -> bytes:
        color = Image.new("HSV", (side, side), (hue, 200, 200)).convert("RGB")
        noise = draw.integers(-30, 30, (side, side, 3))
        buffer = io.BytesIO()
        image = Image.fromarray((np.asarray(color) + noise).clip(0, 255).astype(np.uint8))
        image.save(buffer, "JPEG")
        return buffer.getvalue()

    tiny, cifar = folder / "tiny.zip", folder / "cifar.zip"
    with zipfile.ZipFile(tiny, "w") as archive:
        names = [{"folder": name.replace(" ", "_"), "name": name} for name in CLASSES]
        archive.writestr("classes.json", json.dumps(names))
        for number, row in enumerate(names):
            for split, size in (("train", 8), ("val", 4)):
                for one in range(size):
                    path = f"{split}/{row['folder']}/{one}.jpg"
                    archive.writestr(path, picture(number * 36, 64))
    with zipfile.ZipFile(cifar, "w") as archive:
        for number, name in enumerate(CIFAR_ORDER):
            content = picture(number * 25, 32)
            for one in range(5):
                archive.writestr(f"train/{name}/{one}.jpg", content)
    return [tiny, cifar]


@pytest.fixture(autouse=True)
def few_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photo_questions, "HELD_OUT", 2)


def save_tower(folder: Path) -> Dinov2Model:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 1}
    tower = Dinov2Model(Dinov2Config(image_size=28, patch_size=7, **sizes)).eval()
    tower.save_pretrained(folder)
    return tower


def save_llm(folder: Path) -> None:
    texts = ["What is this? Is there an orange in the photo? Answer yes or no. A. B. C. D."]
    tokenizer = train_tokenizer([*texts, *CLASSES] * 4, 320)
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=2, vocab_size=len(tokenizer), max_position_embeddings=512
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encode(*fields: tuple[int, int | bytes]) -> bytes:
    """A protobuf message of (number, value)."""

    def varint(value: int) -> bytes:
        low, high = value & 127, value >> 7
        return bytes([low | 128]) + varint(high) if high else bytes([low])

    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(varint(number << 3) + varint(value))
        else:
            parts.append(varint(number << 3 | 2) + varint(len(value)) + value)
    return b"".join(parts)


def save_onnx(tower: Dinov2Model, path: Path) -> None:
    """As exported: matrices transposed and without names, positions in two tensors."""
    tensors: dict[str, torch.Tensor] = {"decoder.bias": torch.ones(3)}
    nodes: list[tuple[str, list[str], str]] = []
    for name, tensor in tower.state_dict().items():
        if name.endswith("position_embeddings"):
            tensors |= {"Concat_1": tensor[:, :1], "Reshape_2": tensor[:, 1:]}
        elif tensor.ndim == 2 and name.startswith("encoder"):
            number, bias = len(nodes), f"backbone.{name.removesuffix('weight')}bias"
            tensors[f"MatMul_{number}"] = tensor.t()
            nodes.append(("MatMul", ["x", f"MatMul_{number}"], f"product_{number}"))
            nodes.append(("Add", [bias, f"product_{number}"], f"sum_{number}"))
        elif not name.endswith("mask_token"):
            tensors[f"backbone.{name}"] = tensor
    graph = [
        (5, encode(*((1, size) for size in tensor.shape), (2, 1), (8, name.encode()),
                   (9, tensor.contiguous().numpy().tobytes())))
        for name, tensor in tensors.items()
    ]  # fmt: skip
    for operator, inputs, output in nodes:
        operands = ((1, name.encode()) for name in inputs)
        graph.append((1, encode(*operands, (2, output.encode()), (4, operator.encode()))))
    path.write_bytes(encode((1, 8), (7, encode(*graph))))


def test_the_tower_of_an_onnx_file_is_the_original(tmp_path: Path) -> None:
    tower = save_tower(tmp_path / "original")
    save_onnx(tower, tmp_path / "tower.onnx")
    dinov2.convert(tmp_path / "tower.onnx", tmp_path)
    converted: Any = Dinov2Model.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rounded: Any = copy.deepcopy(tower).bfloat16().float()
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = rounded(pixels).last_hidden_state
        assert torch.equal(converted(pixels).last_hidden_state, expected)


def test_questions_are_balanced_and_about_other_photographs(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    tiny_imagenet, cifar10 = make_zips(tmp_path)
    make_questions(tiny_imagenet, cifar10, folder)

    def read(name: str) -> list[Any]:
        lines = (folder / "eval" / name / "questions.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    presence, choice = read("presence"), read("choice")
    names, general = read("tiny_imagenet"), read("cifar10")
    assert [len(names), len(general)] == [4 * len(CLASSES), 2 * len(CIFAR_ORDER)]
    truth = {row["image"]: row["answer"] for row in names}
    assert [row["answer"] for row in presence] == ["yes", "no"] * (len(presence) // 2)
    for row in presence:
        assert (truth[row["image"]] in row["text"]) == (row["answer"] == "yes")
    assert "Is there an orange in" in "".join(row["text"] for row in presence)
    for row in choice:
        assert row["choices"]["ABCD".index(row["answer"])] == truth[row["image"]]
        assert len(set(row["choices"])) == 4
    assert {row["answer"] for row in choice} == set("ABCD")
    for file in folder.glob("*.json"):
        rows = json.loads(file.read_text())
        trained = {row["image"] for row in rows}
        assert not trained & {row["image"] for row in (*names, *general)}
        size = {"tiny_imagenet": 8 * len(CLASSES), "cifar10": 3 * len(CIFAR_ORDER)}
        assert len(rows) == size.get(file.stem, sum(size.values()))
    with pytest.raises(ValueError, match=r"cifar\.zip: classes\.json must be"):
        make_questions(tmp_path / "cifar.zip", tmp_path / "cifar.zip", folder)
    with pytest.raises(ValueError, match=r"tiny\.zip: 10 classes, no photograph"):
        make_questions(tmp_path / "tiny.zip", tmp_path / "tiny.zip", tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("llm", ["random", "smollm2"])
def test_runs_end_in_rows_and_a_table(
    llm: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tower(tmp_path / "tower")
    folder = tmp_path / "llm"
    if llm == "smollm2":
        folder = request.getfixturevalue("smollm2")
    else:
        save_llm(folder)
    tiny, cifar = make_zips(tmp_path)
    row = json.dumps({"text": "What is this? A leaf."}) + "\n"
    (tmp_path / "text.jsonl.xz").write_bytes(lzma.compress(3 * row.encode()))
    passage = {"context": "Is there an orange in the", "continuation": "photo"}
    (tmp_path / "lambada.jsonl").write_text(2 * (json.dumps(passage) + "\n"))
    out = tmp_path / "out"
    words = ["--tiny-imagenet", str(tiny), "--cifar10", str(cifar)]
    words += ["--text", str(tmp_path / "text.jsonl.xz"), "--limit", "8", "--out", str(out)]
    words += ["--lambada", str(tmp_path / "lambada.jsonl"), "--csv", str(tmp_path / "rows.csv")]
    words += ["--llm", str(folder), "--tower", str(tmp_path / "tower")]
    words += [
        f"stages.{stage}.{key}"
        for stage in ("align", "sft")
        for key in ("batch_size=4", "micro_batch_size=4", "max_steps=2")
    ]
    words += ["model.vision.select_layer=-1", "num_workers=0", "tracking.tensorboard=false"]
    assert harness.run_script(bench.build_parser(), bench.main, words) == 0
    table = capsys.readouterr().out
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [("bf16", "bf16"), ("coat", "bf16"), ("coat", "coat")]
    assert [(one["precision"], one["evaluated_in"]) for one in rows] == expected
    assert all(float(one["held_out_loss"]) > 0 for one in rows)
    assert "| held out loss |" in table
    # The language model is trained, and the one before is the same in both runs.
    assert rows[0]["perplexity"] != rows[0]["perplexity_before"] == rows[1]["perplexity_before"]

    written = [file.stat().st_mtime_ns for file in (out / "runs").iterdir()]
    assert harness.run_script(bench.build_parser(), bench.main, words) == 0
    assert capsys.readouterr().out.endswith(table[table.index("| measure") :])
    assert written == [file.stat().st_mtime_ns for file in (out / "runs").iterdir()]
