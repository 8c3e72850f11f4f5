"""What training needs is checked before it starts: every problem once, with its remedy."""

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers import Qwen2Config

from coat_vlm.config import Recipe
from coat_vlm.config.load import load_recipe
from coat_vlm.model.processor import train_tokenizer
from coat_vlm.train import checks
from coat_vlm.train.checks import Findings, check_recipe

TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


def talk(number: int, text: str = "a") -> dict[str, Any]:
    said = [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": text}]
    return {"image": f"{number}.png", "conversations": said}


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    """A recipe with a pretrained language model's folder, and 40 rows with images."""
    model = tmp_path / "qwen"
    Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=400,
    ).save_pretrained(model)
    train_tokenizer(["a question and an answer"], 300).save_pretrained(model)
    images = tmp_path / "images"
    images.mkdir()
    for number in range(40):
        Image.new("RGB", (8, 8)).save(images / f"{number}.png")
    (tmp_path / "chat.json").write_text(json.dumps([talk(number) for number in range(40)]))
    source = {
        "name": "chat",
        "path": str(tmp_path / "chat.json"),
        "media_root": str(images),
    }
    stage = {
        "data": [source],
        "val_data": [source],
        "projector": {"train": True, "lr": 1.0e-3},
        "batch_size": 8,
        "micro_batch_size": 2,
        "max_steps": 5,
    }
    recipe = {
        "name": "small",
        "output_dir": str(tmp_path / "run"),
        "precision": "fp32",
        "model": {
            "vision": {"config": TOWER, "select_layer": -1},
            "language": {"name_or_path": str(model)},
            "projector": {"type": "mlp2x_gelu"},
            "max_length": 128,
        },
        "stages": {"align": stage, "sft": {**stage, "language": {"train": True, "lr": 1.0e-4}}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def load(path: Path, *overrides: str) -> Recipe:
    return load_recipe(str(path), overrides)


def test_a_good_recipe_has_no_problems(recipe_path: Path) -> None:
    assert check_recipe(load(recipe_path), num_ranks=2) == Findings()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["stages.sft.data.0.path=nowhere.json"],
            "stages.sft.data chat: * there is no such file or folder ->",
        ),
        (
            ["stages.sft.data.0.media_root=null"],
            "stages.sft chat: 16 of 16 inspected rows are bad:*16 rows in one file have this "
            "problem: *chat.json:1: *0.png: no such file -> *",
        ),
        (["stages.sft.batch_size=9"], "stages.sft: batch_size=9 is not a multiple of"),
        (["model.max_length=20"], "stages.sft chat: 16 of 16 *tokens* more than max_length=20"),
        (
            ["model.language.name_or_path=/models/nowhere"],
            "model.language.name_or_path='/models/nowhere': the folder /models/nowhere does not",
        ),
        (["precision=coat", "model.vision.config.hidden_size=36"], "*multiples of 16*"),
        (
            ["stages.sft.language=null", "stages.sft.lora={target_modules: [nothing]}",
             "stages.sft.language={train: true, lr: 1}"],
            "*nothing*",
        ),
        (["tracking.wandb_project=x"], "tracking.wandb_project='x' needs the wandb package"),
    ],
)  # fmt: skip
def test_a_problem_is_found(
    recipe_path: Path, overrides: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    findings = check_recipe(load(recipe_path, *overrides), only_stage=None)
    problems = [one for one in findings.problems if fits(one, expected)]
    assert problems, findings
    # A media root or a length that is wrong for one stage may be so for validation, too.
    assert all(fits(one, expected) or " chat: " in one for one in findings.problems), findings


def fits(text: str, pattern: str) -> bool:
    """Whether the words between the asterisks are in the text, in this order."""
    place = 0
    for words in pattern.split("*"):
        place = text.find(words, place)
        if place < 0:
            return False
        place += len(words)
    return True


def test_a_stage_that_starts_from_its_own_earlier_stage(recipe_path: Path) -> None:
    (problem,) = check_recipe(load(recipe_path), only_stage="sft").problems
    assert "train the stage align first" in problem
    (problem,) = check_recipe(load(recipe_path), only_stage="pretrain").problems
    assert problem == "--stage pretrain: the recipe has the stages align, sft"


def test_bad_rows_that_the_stage_allows_are_a_note(recipe_path: Path) -> None:
    (recipe_path.with_name("images") / "0.png").unlink()
    words = "1 of 16 inspected rows are bad"
    problems = check_recipe(load(recipe_path)).problems
    assert [words in one for one in problems] == [True] * 4, "two stages, training and validation"
    without = ["stages.align.val_data=[]", "stages.sft.val_data=[]"]
    allowed = [f"stages.{name}.max_bad_samples=1" for name in ("align", "sft")]
    findings = check_recipe(load(recipe_path, *without, *allowed))
    assert not findings.problems
    assert [words in one for one in findings.notes] == [True] * 2


Usage = namedtuple("Usage", "total used free")


def test_all_problems_come_at_once_and_before_deepspeed(recipe_path: Path) -> None:
    overrides = [
        "stages.align.data.0.path=nowhere.json",
        "stages.sft.data.0.media_root=null",
        "stages.sft.val_data.0.select=first 50",
        "stages.sft.batch_size=7",
    ]
    code = (
        "import sys; from coat_cli.main import main;"
        f"status = main({['train', str(recipe_path), *overrides]!r});"
        "print(status, 'deepspeed' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert "4 problems found before training:" in done.stderr
    for words in (
        "nowhere.json",
        "16 of 16 inspected",
        "first 50",
        "batch_size=7",
    ):
        assert words in done.stderr
    assert not recipe_path.with_name("run").exists()


@pytest.mark.parametrize(
    ("overrides", "only_stage", "deleted"),
    [
        ([], "sft", "align/model (the model from which"),
        (["init_from=RUN/align/model"], None, "align/model (the model from which"),
        (["stages.sft.data.0.exclude=RUN/bad_samples.jsonl"], None, "bad_samples.jsonl (exclude"),
    ],
)
def test_overwrite_does_not_delete_what_the_run_needs(
    recipe_path: Path, overrides: list[str], only_stage: str | None, deleted: str
) -> None:
    run = recipe_path.with_name("run")
    (run / "align" / "model").mkdir(parents=True)
    (run / "align" / "model" / "manifest.json").write_text('{"files": {}}')
    (run / "recipe.yaml").write_text(recipe_path.read_text())
    recipe = load(recipe_path, *(one.replace("RUN", str(run)) for one in overrides))
    problems = check_recipe(recipe, only_stage=only_stage, overwrite=True).problems
    assert any(f"--overwrite would delete {run}/{deleted}" in one for one in problems), problems
    assert not check_recipe(load(recipe_path), overwrite=True).problems
