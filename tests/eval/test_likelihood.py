"""Losses of given answers by this project's checkpoints, beside one answer at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_cli.main import main
from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_eval.answerer import ModelOptions
from coat_eval.benchmark import IMAGE_LINE, Choices, Prompt, prompt_sample
from coat_eval.coat_answerer import CoatAnswerer
from coat_eval.generation import Generation, answer_all
from coat_eval.runner import load_answerer
from coat_vlm.model.processor import CoatVlmProcessor

NAME = "seedbench_likelihood"
CHOICES = ("red", "yes no B C", "a dog", "")


@pytest.fixture(scope="module")
def answerer(speaking_model: Path) -> CoatAnswerer:
    found = load_answerer(str(speaking_model), ModelOptions(device=torch.device("cpu")))
    assert isinstance(found, CoatAnswerer)
    return found


def loss_alone(answerer: CoatAnswerer, folder: Path, text: str, image: Media, answer: str) -> float:
    """Sum of -log p of what training would train of a conversation, token by token."""
    shown = (Part("image"), Part("text", IMAGE_LINE), Part("text", text))
    turns = (Turn("user", shown), Turn("assistant", (Part("text", answer),)))
    sample = Sample(id="x", turns=turns, media=(image,))
    encoded = CoatVlmProcessor.from_pretrained(folder).encoder(train=False)(sample)
    model, ids = answerer._model, encoded.input_ids
    with torch.no_grad():
        embeds = model.embed(ids[None], encoded.pixel_values)  # pyright: ignore[reportArgumentType]
        logits = model.language_model(inputs_embeds=embeds).logits[0].double()
    return sum(
        float(logits[place - 1].logsumexp(0) - logits[place - 1, ids[place]])
        for place in range(len(ids))
        if encoded.labels[place] >= 0
    )


def test_a_batch_of_choices_has_the_losses_of_one_at_a_time(
    answerer: CoatAnswerer, speaking_model: Path, benchmarks: Path
):
    images = [
        Media(kind="image", path=str(path))
        for path in sorted((benchmarks / "gqa" / "images").iterdir())[:2]
    ]
    texts = ("What?", "Which one then of all of these?")
    encoder = answerer.encoder
    encoded = [
        row
        for text, image in zip(texts, images, strict=True)
        for row in encoder.answered(prompt_sample(text, [image]), CHOICES)
    ]
    found = answerer.losses(encoder.collate_answered(encoded))
    expected = [
        loss_alone(answerer, speaking_model, text, image, answer)
        for text, image in zip(texts, images, strict=True)
        for answer in CHOICES
    ]
    assert [one.nats for one in found] == pytest.approx(expected, rel=1e-4)
    assert found[3].tokens == 1  # the token that ends an answer
    assert found[0].tokens == 2
    assert found[1].value(per_token=True) == pytest.approx(expected[1] / found[1].tokens, rel=1e-4)


def test_choices_are_asked_in_as_many_rows_as_a_batch_has(
    answerer: CoatAnswerer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Eight rows are two questions with four choices; a long choice is listed, not fatal."""
    rows: list[int] = []
    losses = CoatAnswerer.losses

    def noted(self: CoatAnswerer, batch: Any) -> list[Any]:
        rows.append(len(batch["input_ids"]))
        return losses(self, batch)

    monkeypatch.setattr(CoatAnswerer, "losses", noted)
    prompts = [
        Prompt(question_id=str(number), text="What?", choices=Choices(texts=CHOICES))
        for number in range(3)
    ]
    prompts.append(Prompt(question_id="3", text="?", choices=Choices(texts=("x" * 4000,))))
    generation = Generation(batch_size=8, progress=False)
    problems = answer_all(answerer, prompts, set(), tmp_path, generation)
    assert rows == [8, 4]
    assert [row["question_id"] for row in problems] == ["3"]
    assert "with the answer 'xxx" in problems[0]["problem"]
    with pytest.raises(DataError, match="more than max_length"):
        answerer.encoder.answered(prompt_sample("?"), ["x" * 4000])


def test_losses_are_resumed_and_scored_from_their_file(
    benchmarks: Path, speaking_model: Path, tmp_path: Path
):
    def ask(out: Path, *more: str) -> list[dict[str, Any]]:
        words = ["--model", str(speaking_model), "--tasks", NAME, "--data", str(benchmarks)]
        assert main(["eval", *words, "--out", str(out), "--batch-size", "8", *more]) == 0
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
