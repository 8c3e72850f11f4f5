"""Losses of given answers by this project's checkpoints, next to one answer at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_cli.main import main
from coat_data.sample import Media, Part, Sample, Turn
from coat_eval.benchmark import IMAGE_LINE, prompt_sample
from coat_eval.own_model import CoatAdapter
from coat_vlm.model.processor import CoatVlmProcessor
from coat_vlm.model.vlm import CoatVlm

NAME = "seedbench_likelihood"
CHOICES = ("red", "yes no B C", "a dog", "")


def loss_alone(adapter: CoatAdapter, folder: Path, text: str, image: Media, answer: str) -> float:
    """Mean of -log p of what training would train of a conversation, token by token."""
    shown = (Part("image"), Part("text", IMAGE_LINE), Part("text", text))
    turns = (Turn("user", shown), Turn("assistant", (Part("text", answer),)))
    sample = Sample(id="x", turns=turns, media=(image,))
    encoded = CoatVlmProcessor.from_pretrained(folder).encoder()(sample)
    model, ids = adapter.model, encoded.input_ids
    assert isinstance(model, CoatVlm)
    with torch.no_grad():
        embeds = model.embed(ids[None], encoded.pixel_values)  # pyright: ignore[reportArgumentType]
        logits = model.language_model(inputs_embeds=embeds).logits[0].double()
    losses = [
        float(logits[place - 1].logsumexp(0) - logits[place - 1, ids[place]])
        for place in range(len(ids))
        if encoded.labels[place] >= 0
    ]
    return sum(losses) / len(losses)


def test_a_batch_of_choices_has_the_losses_of_one_at_a_time(
    adapter: CoatAdapter, speaking_model: Path, benchmarks: Path
):
    images = [
        Media(kind="image", path=str(path))
        for path in sorted((benchmarks / "gqa" / "images").iterdir())[:2]
    ]
    texts = ("What?", "Which one then of all of these?")
    encoder = adapter.encoder
    encoded = [
        row
        for text, image in zip(texts, images, strict=True)
        for row in encoder.encode_choices(prompt_sample(text, [image]), CHOICES)
    ]
    batch = encoder.collate_choices(encoded)
    found = adapter.compute_losses(batch)
    expected = [
        loss_alone(adapter, speaking_model, text, image, answer)
        for text, image in zip(texts, images, strict=True)
        for answer in CHOICES
    ]
    assert found == pytest.approx(expected, rel=1e-4)
    tokens = (batch["labels"] >= 0).sum(1).tolist()
    assert tokens[3] == 1  # the token that ends an answer
    assert tokens[0] == 2


def test_losses_are_resumed_and_scored_from_their_file(
    benchmarks: Path, speaking_model: Path, tmp_path: Path
):
    def ask(out: Path, *more: str) -> list[dict[str, Any]]:
        words = ["--model", str(speaking_model), "--tasks", NAME, "--data", str(benchmarks)]
        assert main(["eval", *words, "--to", str(out), "--batch-size", "8", *more]) == 0
        text = (out / NAME / "predictions.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    first = ask(tmp_path / "a", "--limit", "2")
    rows = ask(tmp_path / "a", "--max-new-tokens", "9")  # nothing is generated
    assert rows[:2] == first
    for one, other in zip(rows, ask(tmp_path / "b"), strict=True):
        assert one.pop("losses") == pytest.approx(other.pop("losses"), rel=1e-5)
        assert one == other
    folder, report = tmp_path / "a" / NAME, tmp_path / "report.json"
    prompt = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0])
    assert (prompt["prompt"], prompt["choices"]) == ("Which one?", ["a0", "b0", "c0", "d0"])
    assert "max_new_tokens" not in json.loads((folder / "run.json").read_text())
    files = [
        "--references",
        str(benchmarks / "seedbench" / "SEED-Bench.json"),
        "--out",
        str(report),
    ]
    saved = str(folder / "predictions.jsonl")
    assert main(["score", "seedbench", "--predictions", saved, *files]) == 0
    metrics = [json.loads(path.read_text())["metrics"] for path in (folder / "report.json", report)]
    assert metrics[0] == metrics[1]
