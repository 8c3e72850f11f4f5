"""The runner with a real, small, random model: images, workers and batches."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from coat_eval.adapter import ModelAdapter
from coat_eval.generation import Generation
from coat_eval.runner import EvalTask, load_adapter, run_benchmark
from coat_eval.tasks import get_task
from coat_vlm.config import LanguageConfig, ModelConfig, TokenizerConfig, VisionConfig
from coat_vlm.model.build import build_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.processor import build_processor, prepare_tokenizer, train_tokenizer

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
VISION = {**SIZES, "model_type": "siglip_vision_model", "num_attention_heads": 2}
LANGUAGE = {**SIZES, "model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = ModelConfig(
        vision=VisionConfig(config={**VISION, "image_size": 16, "patch_size": 8}),
        language=LanguageConfig(config=LANGUAGE),
        tokenizer=TokenizerConfig(train_vocab_size=280),
        max_length=64,
    )
    tokenizer = prepare_tokenizer(train_tokenizer(["What is it?"], 280))
    model = build_model(config, tokenizer)
    with torch.no_grad():  # answers that depend on the question and the image
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 * parameter[0].numel() ** -0.5)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    assert isinstance(model.config, CoatVlmConfig)
    build_processor(config, tokenizer, model.config).save_pretrained(folder)
    return folder


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = []
    for number in range(9):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        images = [f"{number}.png", "0.png"][: number % 3]
        text = "What is it" + "?" * number
        rows.append({"question_id": number, "image": images, "text": text, "answer": "x"})
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def load(model_dir: Path) -> ModelAdapter:
    return load_adapter(str(model_dir), torch.device("cpu"))


def test_batches_and_workers_do_not_change_answers(model_dir: Path, questions: Path):
    adapter, task = load(model_dir), get_task("short_answer")
    answers = []
    for batch_size, num_workers in ((1, 0), (4, 1)):
        out = questions / f"out{batch_size}"
        generation = Generation(batch_size=batch_size, num_workers=num_workers, max_new_tokens=6)
        report = run_benchmark(adapter, EvalTask(benchmark=task), questions, out, generation)
        assert report["n"] == 9
        rows = map(json.loads, (out / "predictions.jsonl").read_text().splitlines())
        answers.append({row["question_id"]: row["prediction"] for row in rows})
    assert answers[0] == answers[1]
    assert len(set(answers[0].values())) > 5
