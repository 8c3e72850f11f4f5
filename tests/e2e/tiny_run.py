"""A recipe that trains 30k parameters in seconds, and what tests do with its runs."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import started
import yaml


def tiny_recipe(data: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """A recipe for ``tiny_data`` with one stage; ``changes`` replace its top-level keys."""
    trains = {"train": True, "lr": 3e-3}
    source = {"name": "tiny", "path": str(data / "data.json")}
    recipe: dict[str, Any] = {
        "name": "tiny",
        "output_dir": str(output_dir),
        "precision": "fp32",
        "num_workers": 0,
        "tracking": {"tensorboard": False},
        "model": {
            "vision": {
                "config": {
                    "model_type": "siglip_vision_model",
                    "hidden_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "intermediate_size": 32,
                    "image_size": 16,
                    "patch_size": 4,
                },
                "select_layer": -1,
            },
            "language": {
                "config": {
                    "model_type": "qwen2",
                    "hidden_size": 32,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "intermediate_size": 64,
                    "max_position_embeddings": 128,
                    "attention_dropout": 0.1,
                }
            },
            "tokenizer": {"train_vocab_size": 280},
        },
        "stages": {
            "sft": {
                "data": [source],
                "val_data": [source],
                "vision": trains,
                "projector": trains,
                "language": trains,
                "batch_size": 8,
                "micro_batch_size": 2,
                "max_steps": 6,
                "weight_decay": 0.01,
            }
        },
    }
    return {**recipe, **changes}


def write_recipe(recipe: dict[str, Any], path: Path) -> Path:
    """Write a recipe as YAML."""
    path.write_text(yaml.safe_dump(recipe))
    return path


def wait_for(condition: Callable[[], Any], limit_s: float = 120.0) -> Any:
    """Wait until the condition holds, and return its value."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.05)
    return value


def edit_answer(data: Path) -> None:
    """Change an answer that is not among the sampled rows, and not its size."""
    file = data / "data.json"
    rows = json.loads(file.read_text())
    rows[2]["conversations"][1]["value"] = rows[2]["conversations"][1]["value"][::-1]
    file.write_text(json.dumps(rows))


def steps(run_dir: Path, stage: str = "sft") -> list[dict[str, Any]]:
    """The steps of a stage in metrics.jsonl."""
    return [entry for entry in entries(run_dir, "step") if entry["stage"] == stage]


def losses(run_dir: Path, stage: str = "sft") -> list[float]:
    """The training losses in metrics.jsonl by step."""
    rows = steps(run_dir, stage)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


TRAIN = [sys.executable, "-m", "coat_cli.main", "train"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def train(
    recipe: dict[str, Any], tmp_path: Path, *options: str, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    return started.run(["train", str(path), *options], ranks=ranks, env=ENV)


def launch(
    recipe: dict[str, Any], tmp_path: Path, *options: str, ranks: int = 1, **popen: Any
) -> subprocess.CompletedProcess[str]:
    """As :func:`train`, by the real commands."""
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher = TRAIN if ranks == 1 else [sys.executable, *torchrun, *TRAIN[1:]]
    return subprocess.run(
        [*launcher, str(path), *options],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **popen,
    )


def no_dropout(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["model"]["language"]["config"]["attention_dropout"] = 0.0
    return recipe


def small_recipe(data: Path, run_dir: Path) -> dict[str, Any]:
    """The recipe of the fixture ``small_run``."""
    recipe = no_dropout(tiny_recipe(data, run_dir, save_total_limit=9))
    recipe["stages"]["sft"]["save_steps"] = 2
    return recipe


def entries(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The entries of metrics.jsonl of one kind."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def copy_run(run_dir: Path, copy: Path) -> Path:
    """Copy a finished run, with the copy as its output_dir."""
    shutil.copytree(run_dir, copy)
    recipe = copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(run_dir), str(copy)))
    return copy


def forget_after(run_dir: Path, step: int, stage: str = "sft") -> None:
    """Leave what a run has that was killed while it wrote the checkpoint after this step."""
    (run_dir / stage / "model" / "manifest.json").unlink()
    for path in (run_dir / stage / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            (path / "manifest.json").unlink()
