"""The VILA recipes as a user starts them: own checkpoints, own LLaVA JSON, overrides alone."""

import json
import os
from pathlib import Path
from typing import cast

import av
import pytest
import started
import torch
import yaml
from av.video.stream import VideoStream
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.model.processor import IMAGE_TOKEN, CoatVlmProcessor, train_tokenizer

LEARNING_RATE = 2e-5
"""Of NVILA-Lite's sft.sh."""


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: both towers, and the image processor next to them."""
    folder = tmp_path_factory.mktemp("siglip")
    torch.manual_seed(1)
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    vision = text | {"num_hidden_layers": 2, "image_size": 28, "patch_size": 7}
    del vision["vocab_size"]
    SiglipModel(SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: weights, a tokenizer with ChatML next to them, a padded vocabulary."""
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(2)
    tokenizer = train_tokenizer(["What is this? A red square, and a blue one."] * 4, 300)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """own.json: a square image and a wide one; own_clip.json: a video of six seconds."""
    folder = tmp_path_factory.mktemp("own")
    Image.new("RGB", (28, 28), (220, 30, 40)).save(folder / "square.png")
    Image.new("RGB", (112, 56), (30, 70, 220)).save(folder / "wide.png")
    answers = {"square.png": "A red square.", "wide.png": "A blue one."}
    rows = [
        {
            "id": name,
            "image": name,
            "conversations": [
                {"from": "human", "value": "<image>\nWhat is this?"},
                {"from": "gpt", "value": answer},
            ],
        }
        for name, answer in answers.items()
    ]
    (folder / "own.json").write_text(json.dumps(rows))
    turns = [
        {"from": "human", "value": "<video>\nWhat is this?"},
        {"from": "gpt", "value": "A blue one."},
    ]
    with av.open(str(folder / "clip.mp4"), "w") as container:  # 6 seconds at 10 frames per second
        stream = cast(VideoStream, container.add_stream("libx264", rate=10))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(60):
            picture = Image.new("RGB", (64, 48), (4 * number, 70, 220))
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode(None))
    video = {"id": "clip", "video": "clip.mp4"}
    (folder / "own_clip.json").write_text(json.dumps([video | {"conversations": turns}]))
    return folder


def train(recipe: str, *overrides: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in ("VILA_DATA", "LLAVA_DATA"):
        environment.pop(name, None)
    done = started.run(["train", recipe, "num_workers=0", *overrides], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.distributed" not in done.stderr  # DeepSpeed's use of old names, in every step


@pytest.fixture(scope="module")
def tuned(siglip: Path, qwen: Path, own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of vila_sft, two steps."""
    run = tmp_path_factory.mktemp("runs") / "own"
    source = {"name": "own", "path": str(own / "own.json"), "media_root": str(own)}
    train(
        "vila_sft",
        "init_from=null",
        f"output_dir={run}",
        f"model.vision.name_or_path={siglip}",
        f"model.language.name_or_path={qwen}",
        f"stages.sft.data=[{yaml.safe_dump(source, default_flow_style=True).strip()}]",
        "stages.sft.batch_size=2",
        "stages.sft.micro_batch_size=2",
        "stages.sft.epochs=null",
        "stages.sft.max_steps=2",
        "stages.sft.warmup_ratio=0",
    )
    return run


def steps(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]


def test_vila_sft_starts_from_the_users_weights(tuned: Path, siglip: Path, qwen: Path) -> None:
    """AdamW's first steps move a weight by about the learning rate: the rest is the checkpoint."""
    assert len(steps(tuned)) == 2
    trained = load_file(tuned / "sft" / "model" / "model.safetensors")
    for folder, block in (
        (siglip, "encoder.layers.0.mlp.fc1.weight"),
        (qwen, "layers.1.mlp.up_proj.weight"),
    ):
        before = load_file(folder / "model.safetensors")
        part = "vision" if folder == siglip else "language"
        old = next(w for n, w in before.items() if n.endswith(block) and "text" not in n)
        new = next(w for n, w in trained.items() if n.endswith(block) and part in n)
        moved = (new.float() - old.float()).abs()
        assert 0.5 * LEARNING_RATE < moved.max() < 4 * LEARNING_RATE


def test_vila_long_video_trains_answers_and_extends_the_context(tuned: Path, own: Path) -> None:
    """6 seconds at 2 frames per second: 12 frames in 6 groups of 4 tokens, with their times."""
    run = tuned.parent / "long"
    train(
        "vila_long_video",
        f"init_from={tuned / 'sft' / 'model'}",
        f"output_dir={run}",
        f"stages.sft.data=[{{name: own, path: {own / 'own_clip.json'}, media_root: {own}}}]",
        "stages.sft.batch_size=1",
        "stages.sft.epochs=null",
        "stages.sft.max_steps=1",
    )
    (step,) = steps(run)
    assert (step["tiles"], step["vision_tokens"]) == (12, 24)
    assert step["videos"] == {"video_pyav": 1}
    model = run / "sft" / "model"
    text = json.loads((model / "config.json").read_text())["text_config"]
    assert text["rope_parameters"]["rope_theta"] == 1.53e7
    assert text["max_position_embeddings"] == 65536
    processor = CoatVlmProcessor.from_pretrained(str(model))
    clip = Media(kind="video", path=str(own / "clip.mp4"))
    turn = Turn("user", (Part("video"), Part("text", "What is this?")))
    ids = processor.encoder().prompt(Sample(id="a", turns=(turn,), media=(clip,)))
    words = processor.tokenizer.decode(ids.input_ids).replace(IMAGE_TOKEN, "")
    assert "<0.5 seconds><1.5 seconds>" in words  # frames at 0.2 s, 0.7 s; 1.2 s, 1.7 s
    done = started.run(
        ["generate", "--model", str(model), "--video", clip.path or "", "--prompt", "What is this?",
         "--max-new-tokens", "4"]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
