"""A stage ``dpo`` as a user runs it, next to TRL's own training loop on the same rows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from datasets import Dataset
from family_folders import MAKERS
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from coat_cli.main import main
from coat_vlm.generate import load
from coat_vlm.report import write_report

trl = pytest.importorskip("trl", reason="needs trl: pip install -e '.[trl]'")

COLORS = ("red", "green", "blue", "gray")
STEPS, BETA = 12, 0.5


def image(number: int) -> Image.Image:
    return Image.new("RGB", (16, 16), COLORS[number % 4])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six pairs with answers of different lengths, one without an image, and six ordinary rows."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs, rows = [], []
    for number in range(6):
        right, wrong = COLORS[number % 4], " ".join([COLORS[(number + 1) % 4]] * (1 + number % 3))
        image(number).save(folder / f"{number}.png")
        shown = {} if number == 5 else {"image": f"{number}.png"}
        row = {**shown, "question": "Which color?" if number == 5 else "<image>Which color?"}
        pairs.append({**row, "chosen": right, "rejected": wrong})
        rows.append({**row, "answer": right})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def make_recipe(data: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """One step of sft, then dpo on all pairs in every step."""
    recipe = tiny_run.tiny_recipe(data, run, save_total_limit=9, **changes)
    recipe["model"]["image"] = {}
    recipe["model"]["template"] = "chatml"
    del recipe["model"]["language"]["config"]["attention_dropout"]
    sources = {name: [{"name": name, "path": f"{data / name}.jsonl"}] for name in ("rows", "pairs")}
    sft = recipe["stages"]["sft"]
    sft.update(data=sources["rows"], val_data=[], batch_size=2, max_steps=1, weight_decay=0.0)
    recipe["stages"]["dpo"] = {
        **sft, "data": sources["pairs"], "val_data": sources["pairs"], "dpo": {"beta": BETA},
        "batch_size": 6, "micro_batch_size": 3, "max_steps": STEPS, "save_steps": 6,
        "lr_scheduler_type": "constant", "warmup_ratio": 0.0,
    }  # fmt: skip
    return recipe


def train(recipe: dict[str, Any], folder: Path, *options: str, ranks: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    done = tiny_run.train(recipe, folder, *options, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]


def steps(run: Path) -> list[dict[str, Any]]:
    return tiny_run.steps(run, "dpo")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    train(make_recipe(data, folder / "run"), folder)
    return folder / "run"


def test_it_begins_at_log_2_and_prefers_the_chosen_answers(run: Path) -> None:
    found = steps(run)
    assert len(found) == STEPS
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found[0]["rewards"] == {"chosen": 0, "rejected": 0, "margins": 0, "accuracies": 0}
    last = found[-1]["rewards"]
    assert last["margins"] == pytest.approx(last["chosen"] - last["rejected"], abs=1e-5)
    assert last["margins"] > 0.1
    assert last["accuracies"] == 1
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (validated,) = [row["losses"]["pairs"] for row in rows if row["kind"] == "val"]
    assert validated < found[-1]["loss"]


def own_loop(run: Path, data: Path, out: Path) -> list[dict[str, float]]:
    """Losses and margins of TRL's loop, collator and processor, from the same weights.

    TRL also counts the line break after the end token, which a stage does not supervise.
    """
    start = run / "sft" / "model"
    model, reference = (
        AutoModelForImageTextToText.from_pretrained(start, dtype=torch.float32) for _ in range(2)
    )
    processor = AutoProcessor.from_pretrained(start)
    rows = []
    for number, line in enumerate((data / "pairs.jsonl").read_text().splitlines()):
        row = json.loads(line)
        text = {"type": "text", "text": "Which color?"}
        shown = [{"type": "image"}, text] if "image" in row else [text]
        answers = {
            name: [{"role": "assistant", "content": [{"type": "text", "text": row[name]}]}]
            for name in ("chosen", "rejected")
        }
        prompt = [{"role": "user", "content": shown}]
        rows.append({"images": [image(number)] * ("image" in row), "prompt": prompt, **answers})
    arguments = trl.DPOConfig(
        str(out), beta=BETA, max_steps=STEPS, per_device_train_batch_size=6, logging_steps=1,
        bf16=False, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        lr_scheduler_type="constant", max_grad_norm=1.0, max_length=None,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, (0.9, 0.95), 1e-8, weight_decay=0.0)
    trainer = trl.DPOTrainer(
        model, reference, arguments, train_dataset=Dataset.from_list(rows),
        processing_class=processor, optimizers=(optimizer, None),
    )  # fmt: skip
    collate = trainer.data_collator

    def without_line_break(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate(examples)
        for ids, mask in zip(batch["input_ids"], batch["completion_mask"], strict=True):
            last = int(mask.nonzero()[-1])
            assert processor.tokenizer.decode(ids[last]) == "\n"
            mask[last] = 0
        return batch

    trainer.data_collator = without_line_break
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def test_losses_are_those_of_trl_s_own_loop(run: Path, data: Path, tmp_path: Path) -> None:
    """The same sums in another order: two micro-batches instead of one, no mask."""
    expected = own_loop(run, data, tmp_path)
    for found, other in zip(steps(run), expected, strict=True):
        assert found["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        margin = other["rewards/margins"]
        assert found["rewards"]["margins"] == pytest.approx(margin, rel=1e-3, abs=1e-5)


def test_a_resume_continues_bit_for_bit(run: Path, data: Path, tmp_path: Path) -> None:
    again = tiny_run.copy_run(run, tmp_path / "run")
    tiny_run.forget_after(again, 6, "dpo")
    train(make_recipe(data, again), tmp_path, "--resume", "auto")
    for name in ("loss", "grad_norm", "rewards", "logps"):
        found, whole = ([row[name] for row in steps(at)] for at in (again, run))
        assert found == whole, name
    ours, theirs = (load_file(at / "dpo" / "model" / "model.safetensors") for at in (again, run))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_the_model_is_exported_and_reported_as_those_of_other_stages(
    run: Path, tmp_path: Path
) -> None:
    files = [{path.name for path in (run / at / "model").iterdir()} for at in ("sft", "dpo")]
    assert files[0] == files[1]
    for name in ("config.json", "generation_config.json", "processor_config.json"):
        texts = [(run / at / "model" / name).read_text() for at in ("sft", "dpo")]
        assert texts[0] == texts[1], name
    load(run / "dpo" / "model")
    out = ["--to", str(tmp_path / "language"), "--format", "language"]
    assert main(["export", "--model", str(run / "dpo" / "model"), *out]) == 0
    text = write_report(run).read_text()
    assert "reward margin of the chosen answers" in text
    assert "share of pairs with the right order" in text


def test_adapters_in_fp8_on_two_ranks(data: Path, tmp_path: Path) -> None:
    """The reference computes with the frozen weights and its own adapters, which stay zero."""
    recipe = make_recipe(data, tmp_path / "run", precision="coat", zero_stage=2)
    recipe["stages"]["sft"]["micro_batch_size"] = 1
    recipe["stages"]["dpo"].update(
        vision={"train": False}, gradient_checkpointing=True, val_data=[], micro_batch_size=1,
        lora={"rank": 4, "alpha": 8, "dropout": 0.0}, save_steps=0, max_steps=6,
    )  # fmt: skip
    train(recipe, tmp_path, ranks=2)
    found = steps(tmp_path / "run")
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found[0]["samples"] == 6
    assert found[-1]["rewards"]["margins"] > 0.01
    assert (tmp_path / "run" / "dpo" / "model" / "adapter").is_dir()


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_published_models(data: Path, tmp_path: Path, family: str) -> None:
    MAKERS[family](tmp_path / family)
    recipe = make_recipe(data, tmp_path / "run")
    recipe["model"] = {"pretrained": str(tmp_path / family), "max_length": 1024}
    del recipe["stages"]["sft"]
    recipe["stages"]["dpo"].update(max_steps=3, val_data=[], save_steps=0)
    train(recipe, tmp_path)
    found = steps(tmp_path / "run")
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found[-1]["rewards"]["margins"] > 0.01
