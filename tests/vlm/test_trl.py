"""TRL's trainers on this project's models, compared with plain computations."""

import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from coat_vlm.model import cudnn

trl = pytest.importorskip("trl", reason="needs trl: pip install -e '.[trl]'")


@pytest.fixture
def trl_trainers() -> Iterator[ModuleType]:
    """The example as a module; the folder is not on the path."""
    path = Path(__file__).parents[2] / "examples" / "trl_trainers.py"
    spec = importlib.util.spec_from_file_location("trl_trainers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    cudnn.set_cudnn_attention(True)


def log_probs(model: Any, processor: Any, row: dict[str, Any], answer: str) -> torch.Tensor:
    """Log-probabilities of an answer's tokens, from the logits of one row without padding."""
    prompt = f"<|im_start|>user\n<image>{row['prompt'][0]['content']}<|im_end|>\n"
    texts = [prompt + "<|im_start|>assistant\n", f"{row[answer][0]['content']}<|im_end|>\n"]
    shown = processor(text=texts[0], images=row["images"])
    ids = torch.tensor([processor.tokenizer(texts[1], add_special_tokens=False)["input_ids"]])
    whole = torch.cat([shown["input_ids"], ids], 1)
    with torch.no_grad():
        logits = model.eval()(input_ids=whole, pixel_values=shown["pixel_values"]).logits
    predicted = logits[:, -ids.shape[1] - 1 : -1].log_softmax(-1)
    return predicted.gather(-1, ids[..., None]).flatten()


@pytest.mark.parametrize("fp8", [False, True])
def test_the_loss_of_sft_is_that_of_the_logits(
    trl_trainers: ModuleType, checkpoint: Path, tmp_path: Path, fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not fp8:
        monkeypatch.setattr(trl_trainers, "convert", lambda *_: None)
    trainer = trl_trainers.build_trainer("sft", checkpoint, tmp_path, steps=1)
    data = trainer.train_dataset = trainer.train_dataset.select(range(4))
    model, processor = trl_trainers.load(checkpoint), trainer.processing_class
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    losses = [-log_probs(model, processor, row, "completion") for row in data]
    expected = torch.cat(losses).mean()
    if fp8:  # the scales are those of the whole batch, padding included
        batch = trainer.data_collator(list(data))
        labels = batch.pop("labels")[:, 1:]
        del batch["attention_mask"]  # on the right, which causal attention does not read
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1]
        supervised = labels != -100
        of_batch = F.cross_entropy(logits[supervised], labels[supervised])
        assert (of_batch - expected).abs() < 0.05 * expected
        expected = of_batch
    loss = trainer.state.log_history[0]["loss"]
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    for part in ("vision_tower", "projector", "language_model"):
        assert any(name.startswith(part) for name in moved), part


def test_dpo_begins_at_log_2_and_prefers_the_chosen_answers(
    trl_trainers: ModuleType, checkpoint: Path, tmp_path: Path
) -> None:
    trainer = trl_trainers.build_trainer("dpo", checkpoint, tmp_path, steps=6, lr=1e-3)
    data = trainer.train_dataset = trainer.train_dataset.select(range(4))
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged[0] == pytest.approx(math.log(2), abs=1e-6)
    before, after = trl_trainers.load(checkpoint), trainer.model

    def gain(answer: str) -> torch.Tensor:
        pairs = [
            [log_probs(m, trainer.processing_class, row, answer).sum() for m in (before, after)]
            for row in data
        ]
        return torch.tensor([later - first for first, later in pairs])

    chosen, rejected = gain("chosen"), gain("rejected")
    assert chosen.mean() > 0  # the loss is of the difference, not of each
    assert (chosen - rejected).min() > 0
    # Also the loss of log-probabilities that the trainer did not compute.
    loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    assert max(loss, logged[-1]) < 0.97 * logged[0]


@pytest.mark.parametrize("image_mode", ["resize", "dynamic"])
def test_grpo_takes_the_reward_of_the_function(
    trl_trainers: ModuleType, checkpoint: Path, tmp_path: Path, image_mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Pictures have one tile, or two and a thumbnail."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    settings = folder / "processor_config.json"
    changed = {**json.loads(settings.read_text()), "image_mode": image_mode}
    settings.write_text(json.dumps(changed | {"image_min_tiles": 2, "image_max_tiles": 2}))
    rewards: list[float] = []

    def reward(completions: list[Any], color: list[str], **_: Any) -> list[float]:
        assert len(completions) == len(color) == 4
        rewards[:] = [float(len(set(one[0]["content"]))) for one in completions]
        return rewards

    monkeypatch.setattr(trl_trainers, "begins_with_color", reward)
    trainer = trl_trainers.build_trainer("grpo", folder, tmp_path / "out", steps=1)
    image_id = trainer.model.config.image_token_id
    with torch.no_grad():  # as likely as the likeliest token; an answer has no image
        output = trainer.model.get_output_embeddings().weight
        output[image_id] = output.mean(0) + 4 * output[5]
    parameters = list(trainer.model.parameters())
    before = [p.clone() for p in parameters]
    trainer.train()
    row = trainer.state.log_history[0]
    assert len(set(rewards)) > 1
    assert row["reward"] == pytest.approx(sum(rewards) / 4)
    assert row["rewards/reward/std"] == pytest.approx(torch.tensor(rewards).std().item())
    assert any(
        not torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True)
    )


def test_hidden_states_are_those_of_the_logits(checkpoint: Path) -> None:
    """What TRL reads as base_model, also packed; and the class by its name in transformers."""
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    assert transformers.CoatVlm is type(model)  # pyright: ignore[reportAttributeAccessIssue]
    processor = AutoProcessor.from_pretrained(checkpoint)
    shown = processor(
        text="<image>Is there a dog? yes no red", images=Image.new("RGB", (20, 20), "red")
    )
    hidden = model.base_model(**shown, use_cache=False).last_hidden_state
    assert torch.equal(model.get_output_embeddings()(hidden), model(**shown).logits)
    ids = shown["input_ids"][:, -9:]
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = model.base_model(input_ids=ids, cu_seq_lens_q=bounds, max_length_q=5)
    alone = model.base_model(input_ids=ids[:, 4:])
    difference = packed.last_hidden_state[:, 4:] - alone.last_hidden_state
    assert difference.abs().max() < 1e-5
