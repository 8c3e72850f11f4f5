"""Models of other projects: tiny checkpoints in the formats of LLaVA and Qwen2-VL on the Hub.

The reference is transformers' own way of asking one prompt at a time, without padding.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from coat_cli.main import main
from coat_data.sample import DataError, Media
from coat_eval.benchmark import prompt_sample
from coat_eval.hub_model import HubAdapter

Load = Callable[[Path], HubAdapter]


def pictures(folder: Path, number: int) -> list[Media]:
    found = []
    for index in range(number):
        pixels = np.random.default_rng(index).integers(0, 256, (20, 16 + 8 * index, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        found.append(Media(kind="image", path=str(folder / f"{index}.png")))
    return found


def alone(adapter: HubAdapter, text: str, media: list[Media]) -> str:
    """One prompt as transformers' documentation asks it."""
    model, processor = adapter.model, adapter.encoder._processor
    content = [{"type": "image", "image": Image.open(str(one.path))} for one in media]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(answer, skip_special_tokens=True).strip()


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_a_left_padded_batch_says_what_one_prompt_alone_says(
    load: Load, folder: Path, tmp_path: Path, num_images: int
):
    adapter = load(folder)
    images = pictures(tmp_path, 4)
    texts = ["what is this ?", "is this dog ? " * 4 + "yes no ?", "no"]
    shown = [images[i : i + num_images] for i in range(3)]
    encoder = adapter.encoder
    samples = [prompt_sample(*one) for one in zip(texts, shown, strict=True)]
    batch = encoder.collate([encoder.encode(one) for one in samples])
    assert batch["attention_mask"].sum(1).tolist() != [batch["attention_mask"].shape[1]] * 3
    answers = adapter.answer(batch, 6)
    assert answers == [alone(adapter, *one) for one in zip(texts, shown, strict=True)]
    assert len(set(answers)) == 3


def loss_alone(adapter: HubAdapter, text: str, media: list[Media], answer: str) -> float:
    """The mean loss of an answer's words and the end token, as transformers computes it."""
    model, processor = adapter.model, adapter.encoder._processor
    content = [{"type": "image"} for _ in media]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
        add_generation_prompt=True,
    )
    inputs = processor(
        text=f"{prompt} {answer} </s>",
        images=[Image.open(str(one.path)) for one in media] or None,
        return_tensors="pt",
        add_special_tokens=not prompt.startswith("<s>"),
    )
    labels = inputs["input_ids"].clone()
    labels[:, : -len(answer.split()) - 1] = -100
    with torch.no_grad():
        return float(model(**inputs, labels=labels).loss)


@pytest.mark.parametrize("num_images", [0, 1])
def test_a_batch_of_choices_has_the_losses_of_one_at_a_time(
    load: Load, folder: Path, tmp_path: Path, num_images: int
):
    adapter = load(folder)
    encoder, images = adapter.encoder, pictures(tmp_path, 2)
    asked = {"what is this ?": ("dog", "w1 w2 w3"), "is this " * 5 + "?": ("yes", "no dog ?", "")}
    shown = [images[i : i + num_images] for i in range(2)]
    encoded = [
        row
        for (text, choices), own in zip(asked.items(), shown, strict=True)
        for row in encoder.encode_choices(prompt_sample(text, own), choices)
    ]
    batch = encoder.collate_choices(encoded)
    tokens = (batch["labels"] >= 0).sum(1).tolist()
    found = adapter.compute_losses(batch)
    expected = [
        loss_alone(adapter, text, own, answer)
        for (text, choices), own in zip(asked.items(), shown, strict=True)
        for answer in choices
    ]
    assert found == pytest.approx(expected, rel=1e-4)
    assert tokens == [2, 4, 2, 4, 1]
    assert len({round(one, 3) for one in expected}) == 5
    assert encoder.tokenizer.padding_side == "left"  # as answers need it


def test_a_video_is_shown_as_its_frames(load: Load, folder: Path, benchmarks: Path):
    encoder = load(folder).encoder
    video = Media(kind="video", path=str(benchmarks / "videomme" / "data" / "aaa.mp4"))
    assert encoder.videos_as == "images"
    frames = encoder.encode(prompt_sample("what ?", [video])).images
    # Two frames of four: those on screen in the middles of the two halves, grey 60 and 180.
    values = [frame.getpixel((16, 16)) for frame in frames]
    assert [round(value[0] / 60) for value in values if isinstance(value, tuple)] == [1, 3]
    assert encoder.frame_times(video) == pytest.approx([1.0, 3.0], abs=1e-3)
    assert encoder.encode(prompt_sample("is ?", [video])).images[0] is frames[0]  # decoded once
    with pytest.raises(DataError, match="no such file"):
        encoder.encode(prompt_sample("what ?", [Media(kind="video", path="gone.mp4")]))


def test_the_command_takes_it(llava: Callable[[Path], None], benchmarks: Path, tmp_path: Path):
    folder = tmp_path / "model"
    llava(folder)
    tasks = "pope,videomme_subtitles,seedbench_likelihood"
    words = ["--model", str(folder), "--tasks", *tasks.split(","), "--num-frames", "2"]
    where = ["--data", str(benchmarks), "--to", str(tmp_path / "out"), "--max-new-tokens", "2"]
    assert main(["eval", *words, *where]) == 0
    lines = (tmp_path / "out" / "pope" / "predictions.jsonl").read_text().splitlines()
    assert len(lines) == 18
    said = json.loads((tmp_path / "out" / "videomme_subtitles" / "run.json").read_text())
    assert (said["num_frames"], said["videos_as"]) == (2, "images")


def spoil_template(folder: Path) -> None:
    for path in folder.glob("chat_template*"):
        path.unlink()


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen2"}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_template, "has no chat template"),
        (spoil_config, "cannot be loaded as an image-text-to-text model"),
    ],
)
def test_what_cannot_be_asked(
    load: Load,
    llava: Callable[[Path], None],
    tmp_path: Path,
    spoil: Callable[[Path], None],
    message: str,
):
    llava(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "model")
