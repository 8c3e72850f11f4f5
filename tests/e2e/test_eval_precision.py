"""Runs trained in FP8, evaluated in BF16 as a server computes them, and in their own precision."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from family_folders import publish, settings_of
from transformers import AutoModelForImageTextToText

from coat_cli.main import main
from coat_data.sample import Media, Part, Sample, Turn
from coat_eval.own_model import load_run_or_model
from coat_vlm.generate import PromptEncoder, media_inputs
from coat_vlm.model.families import FAMILIES

LORA = {"rank": 4, "alpha": 8, "modules": ["language"]}
FIRST = "qwen3_vl"
"""The family that is trained in every run of the tests."""


def make_recipe(kind: str, data: Path, folder: Path) -> dict[str, Any]:
    """Two steps in FP8 from random weights, or from those of a family; questions at the end."""
    recipe = tiny_run.tiny_recipe(data, folder / "run", precision="coat")
    recipe["model"]["projector"] = {"type": "mlp2x_gelu"}  # as in stock transformers
    stage = recipe["stages"]["sft"]
    stage["data"][0]["select"] = "first 20"  # without the video
    stage.update(max_steps=2, val_data=stage["data"])
    if kind == "lora":
        stage["lora"], stage["vision"] = LORA, {"train": False}
    elif kind != "composed":
        publish(kind, folder / "published")
        recipe["model"] = settings_of(folder / "published")
        # Blocks that are not as wide as an FP8 GEMM needs have FP8 linear layers where they fit.
        recipe["fp8"] = {"bf16_forward": []}
    rows = [
        {"question_id": number, "image": f"{number}.png", "text": "Is it red?", "answer": "yes"}
        for number in ("1", "2", "4")
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = {"task": "yes_no", "path": str(folder), "media_root": str(data)}
    return recipe | {"eval_sets": {"q": asked}, "eval_every": 2, "eval_samples": 2}


@pytest.fixture(
    scope="module",
    params=[
        kind if kind in ("composed", "lora", FIRST) else pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("composed", "lora", *sorted(FAMILIES))
    ],
)
def run(
    request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    done = tiny_run.train(make_recipe(request.param, tiny_data, folder), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def make_inputs(model: Any, processor: Any, image: Path) -> dict[str, torch.Tensor]:
    turns = (Turn("user", (Part("image"), Part("text", "What is it?"))),)
    media = (Media(kind="image", path=str(image)),)
    batch: Any = PromptEncoder(processor)([Sample(id="1", turns=turns, media=media)])
    inputs = media_inputs(model, batch)
    inputs.pop("image_grids", None)  # of composed models
    return inputs | {name: batch[name] for name in ("input_ids", "attention_mask")}


def test_bf16_is_what_a_server_computes(
    run: Path, tiny_data: Path, tmp_path: Path, in_own_memory: Any
) -> None:
    """Bit for bit, and neither FP8 nor the model in FP32."""
    composed = json.loads((run / "sft/model/config.json").read_text())["model_type"] == "coat_vlm"
    layout = ["--format", "llava"] if composed else []
    words = ["export", "--model", str(run / "sft/model"), "--to", str(tmp_path / "x"), *layout]
    assert main(words) == 0
    stock: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "x", dtype=torch.bfloat16)
    found = {}
    for precision in ("coat", "fp32", "bf16", None):
        model, processor, _, told = load_run_or_model(run, "cpu", precision)
        assert told == (precision or "bf16")
        inputs = make_inputs(model, processor, tiny_data / "1.png")
        with torch.no_grad():
            found[precision] = in_own_memory(model)(**inputs).logits
    with torch.no_grad():
        expected = in_own_memory(stock.eval())(**inputs).logits
    assert expected.dtype == torch.bfloat16
    assert torch.equal(found[None], expected)
    assert torch.equal(found["bf16"], expected)
    assert not torch.equal(found["coat"].bfloat16(), expected)
    assert not torch.equal(found["coat"], found["fp32"])


@pytest.mark.parametrize("run", ["composed"], indirect=True)
def test_results_name_the_precision(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("val", "eval"):
        assert [row["precision"] for row in tiny_run.entries(run, kind)] == ["coat"], kind
    chosen = {"bf16": [], "coat": ["--precision", "coat"]}
    for precision, words in chosen.items():
        again = shutil.copytree(run, tmp_path / precision)
        capsys.readouterr()
        assert main(["eval", "--model", str(again), *words]) == 0
        assert f"precision of the forward pass: {precision}\n" in capsys.readouterr().out
        assert json.loads((again / "eval.json").read_text())["precision"] == precision
        for name in ("report.json", "run.json"):
            assert json.loads((again / "eval/q" / name).read_text())["precision"] == precision
        assert main(["report", str(again)]) == 0
        page = (again / "report.html").read_text()
        assert f"Precision of the forward pass: {precision}." in page
    capsys.readouterr()
    pair = [str(tmp_path / name) for name in chosen]
    assert main(["compare", *pair, "--json", str(tmp_path / "pair.json")]) == 0
    out = capsys.readouterr().out
    assert "Comparable: same items, references and rules; precision bf16 in A, coat in B." in out
    assert "| sft training loss (coat) |" in out
    precisions = json.loads((tmp_path / "pair.json").read_text())["precision"]
    assert precisions == {name: {"q": name} for name in chosen}
    assert main(["compare", pair[0], "--with", pair[1]]) == 0
    assert "| q f1 (bf16 and coat) |" in capsys.readouterr().out
