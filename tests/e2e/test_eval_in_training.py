"""``eval_every``: what the live weights answer, against the checkpoint saved at the same step."""

import json
from pathlib import Path
from typing import Any

import pytest
import started
import tiny_run
import yaml

from coat_data.sample import Sample
from coat_eval.tasks import get_task
from coat_vlm.export.hugging_face import export
from coat_vlm.generate import generate, load

STEPS, EVERY, QUESTIONS = 30, 10, 24
ANSWERS = {"red": "red", "green": "green green", "blue": "blue blue blue blue"}
RUNS: dict[str, dict[str, Any]] = {
    "asked": {"eval_every": EVERY},
    "not asked": {},
}


@pytest.fixture(scope="module")
def recipe(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Questions with and without images (the red ones), answered in one, two or four words."""
    folder = tmp_path_factory.mktemp("asked")
    rows = json.loads((tiny_data / "data.json").read_text())
    rows = [row for row in rows if "video" not in row]
    for row in rows:
        answer = row["conversations"][1]
        answer["value"] = ANSWERS[answer["value"].split()[0]]
    (folder / "data.json").write_text(json.dumps(rows))
    questions = [
        {
            "question_id": str(row["id"]),
            **({"image": row["image"]} if "image" in row else {}),
            "text": "Which color?",
            "answer": row["conversations"][1]["value"],
            "category": "plain",
        }
        for row in rows
    ]
    # What two ranks would do out of step: every second question has an image for as long as there
    # are others, so one rank would see a whole batch of images and the other none; of those with an
    # image every second one is green, so one rank has short answers and the other long ones.
    blind = [row for row in questions if "image" not in row]
    blind.append({**blind[0], "question_id": "again"})
    seeing = [row for row in questions if "image" in row]
    pairs = zip(blind, seeing, strict=False)
    questions = [*(row for pair in pairs for row in pair), *seeing[len(blind) :]]
    # Each one is followed by one that is not asked.
    decoys = [
        {**row, "question_id": f"not {row['question_id']}", "answer": "never"} for row in questions
    ]
    questions = [row for pair in zip(questions, decoys, strict=True) for row in pair]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    trains = {"train": True, "lr": 1e-2}
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    # ZeRO-3 leaves parameters below 1e5 elements whole on every rank; those of the MLPs are larger.
    size["intermediate_size"] = 4096
    tower = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
    language = {"model_type": "qwen2", "num_key_value_heads": 1, "max_position_embeddings": 128}
    language["attention_dropout"] = 0.1  # draws, and disturbs answers, outside evaluation mode
    return {
        "name": "asked",
        "precision": "fp32",
        "num_workers": 0,
        "tracking": {"tensorboard": False},
        "save_total_limit": 9,
        "model": {
            "vision": {"config": {**tower, **size}, "select_layer": -1},
            "language": {"config": {**language, **size}},
            "tokenizer": {"train_vocab_size": 280},
        },
        "stages": {
            "sft": {
                "data": [
                    {
                        "name": "tiny",
                        "path": str(folder / "data.json"),
                        "media_root": str(tiny_data),
                    }
                ],
                **dict.fromkeys(("vision", "projector", "language"), trains),
                "batch_size": 8,
                "micro_batch_size": 4,
                "max_steps": STEPS,
                "lr_scheduler_type": "constant",
                "warmup_ratio": 0.0,
                "save_steps": EVERY,
            }
        },
        "eval_sets": {
            "colors": {
                "task": "short_answer",
                "path": str(folder),
                "media_root": str(tiny_data),
            }
        },
        "eval_samples": QUESTIONS,
    }


@pytest.fixture(scope="module")
def runs(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two run folders of two ranks each."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in RUNS.items():
        path = folder / f"{name}.yaml"
        settings = {**recipe, "zero_stage": 3, **changes, "output_dir": str(folder / name)}
        path.write_text(yaml.safe_dump(settings))
        done = started.run(["train", str(path)], ranks=2)
        assert done.returncode == 0, done.stderr[-4000:]
    return {name: folder / name for name in RUNS}


def asked_again(recipe: dict[str, Any], checkpoint: Path, target: Path) -> tuple[float, list[str]]:
    """Accuracy of an exported checkpoint asked one by one, and its answers."""
    settings = recipe["eval_sets"]["colors"]
    items = get_task("short_answer", settings["media_root"]).load(Path(settings["path"]))
    chosen = items[::2]
    model, processor = load(export(checkpoint, target))
    samples: list[Sample] = [item.details["sample"] for item in chosen]
    answers = [generate(model, processor, [sample], 16)[0] for sample in samples]
    right = sum(answer.lower() == item.answer for answer, item in zip(answers, chosen, strict=True))
    return round(100 * right / QUESTIONS, 2), answers


def test_live_weights_answer_as_the_checkpoint_of_that_step(
    recipe: dict[str, Any], runs: dict[str, Path], tmp_path: Path
) -> None:
    run = runs["asked"]
    asked = tiny_run.entries(run, "eval")
    assert [row["step"] for row in asked] == [10, 20, 30]
    found, words = [], set()
    for row in asked:
        checkpoint = run / f"sft/checkpoints/step-{row['step']:08d}"
        accuracy, answers = asked_again(recipe, checkpoint, tmp_path / str(row["step"]))
        assert row["metrics"]["colors"]["accuracy"] == accuracy
        assert (row["headline"], row["samples"]) == ({"colors": "accuracy"}, {"colors": QUESTIONS})
        found.append(accuracy)
        words |= {len(answer.split()) for answer in answers}
    assert len(set(found)) > 1, found  # otherwise a mix-up of steps or questions would pass
    assert len(words) > 1, words


def test_asking_leaves_no_trace_in_the_training(runs: dict[str, Path]) -> None:
    assert tiny_run.losses(runs["asked"]) == tiny_run.losses(runs["not asked"])
    assert not tiny_run.entries(runs["not asked"], "eval")
