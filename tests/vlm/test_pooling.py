"""Pooling of frames in time: by hand, in the model, in generation, and on the processor's side."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image

from coat_data.load.collate import collate, collate_packed
from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.config import ModelConfig
from coat_vlm.config.model import VideoConfig
from coat_vlm.export.transformers_parts import check_frames
from coat_vlm.generate import PromptEncoder, generate_batch
from coat_vlm.model import CoatVlm, build_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.placeholders import pool_frames
from coat_vlm.model.processor import CoatVlmProcessor, build_processor

IMAGE = 2  # of tiny_tokenizer


def test_groups_become_their_means() -> None:
    """By hand: groups of 2, 2, 1 (a shorter last one) and a single image."""
    x = torch.tensor([[1.0, 10], [3, 20], [5, 0], [9, 2], [7, 7], [4, 4]]).reshape(6, 1, 2)
    x.requires_grad_()
    y = pool_frames(x, [2, 2, 1, 1])
    assert y.tolist() == [[[2, 15]], [[7, 1]], [[7, 7]], [[4, 4]]]
    (y * torch.tensor([1.0, 2, 3, 4]).reshape(4, 1, 1)).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0, 0].tolist() == [0.5, 0.5, 1, 1, 3, 4]


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """A folder of five frames of different grey."""
    for number in range(5):
        Image.new("RGB", (28, 28), (40 * number,) * 3).save(tmp_path / f"{number}.png")
    return tmp_path


def recipe_of(tiny: Any, **video: Any) -> ModelConfig:
    return dataclasses.replace(
        tiny.recipe(), template="plain", max_length=64, video=VideoConfig(**video)
    )


def shown(frames: Path) -> Sample:
    """An image, then the video."""
    parts = (Part("image"), Part("video"))
    turns = (Turn("user", parts), Turn("assistant", (Part("text", "w5 w6"),)))
    image = Media(kind="image", path=str(frames / "4.png"))
    video = Media(kind="video", path=str(frames))
    return Sample(id="1", turns=turns, media=(image, video), source="rows.json")


def model_and_processor(tiny: Any, tokenizer: Any, **video: Any) -> tuple[CoatVlm, Any]:
    recipe = recipe_of(tiny, **video)
    torch.manual_seed(0)
    model = build_model(recipe, tokenizer).eval()
    return model, build_processor(recipe, tokenizer, cast(CoatVlmConfig, model.config))


def test_the_model_reads_means_of_projected_frames(
    tiny: Any, tiny_tokenizer: Any, frames: Path
) -> None:
    model, processor = model_and_processor(tiny, tiny_tokenizer, num_frames=5, pool_frames=2)
    encoder = processor.encoder()
    sample = shown(frames)
    encoded = encoder(sample)
    per_tile = model.config.tokens_per_image
    assert encoded.frame_groups.tolist() == [1, 2, 2, 1]  # the image; five frames in twos
    assert int((encoded.input_ids == IMAGE).sum()) == 4 * per_tile
    assert len(encoded.pixel_values) == 6
    assert encoder.measure(sample)[:2] == (len(encoded.input_ids), 6)  # known without decoding
    batch: Any = collate([encoded, encoded], pad_token_id=0)
    assert batch["frame_groups"].tolist() == [1, 2, 2, 1] * 2
    rows, groups = batch["input_ids"], batch["frame_groups"]
    assert model.count_row_images(rows, None, groups) == [(4, 6)] * 2
    tower: Any = model.vision_tower
    projector: Any = model.projector
    with torch.no_grad():
        f = projector(tower(encoded.pixel_values))
        wanted = torch.stack([f[0], (f[1] + f[2]) / 2, (f[3] + f[4]) / 2, f[5]]).flatten(0, 1)
        embeds = model.embed(
            batch["input_ids"], batch["pixel_values"], frame_groups=batch["frame_groups"]
        )
    found = embeds[1][batch["input_ids"][1] == IMAGE]
    assert torch.allclose(found, wanted, atol=1e-6)
    assert not torch.allclose(wanted[per_tile], f[1][0], atol=1e-4)  # a mean of different frames


def test_packed_rows_and_gradients(tiny: Any, tiny_tokenizer: Any, frames: Path) -> None:
    model, processor = model_and_processor(tiny, tiny_tokenizer, num_frames=5, pool_frames=3)
    encoded = processor.encoder()(shown(frames))
    assert encoded.frame_groups.tolist() == [1, 3, 2]
    inputs: Any = collate_packed([encoded, encoded], pad_token_id=0, align=16)
    alone: Any = collate([encoded, encoded], pad_token_id=0)
    losses = [model(**batch, skip_logits=True).loss for batch in (inputs, alone)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    losses[1].backward()
    first = next(iter(model.vision_tower.parameters()))  # pyright: ignore[reportOptionalMemberAccess]
    assert first.grad is not None
    assert first.grad.abs().sum() > 0


def test_a_saved_processor_asks_and_answers_the_same(
    tiny: Any, tiny_tokenizer: Any, frames: Path, tmp_path: Path
) -> None:
    """Training, evaluation and a loaded export have one number of tokens and one answer."""
    model, processor = model_and_processor(tiny, tiny_tokenizer, num_frames=5, pool_frames=2)
    out = tmp_path / "model"
    model.save_pretrained(out)
    processor.save_pretrained(out)
    loaded = CoatVlm.from_pretrained(out).eval()
    again = CoatVlmProcessor.from_pretrained(str(out))
    assert again.video["pool_frames"] == 2
    answers = []
    for one, own in ((model, processor), (loaded, again)):
        encoder = PromptEncoder(own)
        batch: Any = encoder([shown(frames)] * 2)
        assert batch["frame_groups"].tolist() == [1, 2, 2, 1] * 2
        answers.append(generate_batch(one, encoder, batch, 6))
    assert answers[0] == answers[1]
    batch = PromptEncoder(processor)([shown(frames)])
    with pytest.raises(ValueError, match=r"--format vila: the model was trained with model.video"):
        check_frames(processor, "vila")
    with_beams = cast(Any, model).generate
    beams = with_beams(**batch, num_beams=2, max_new_tokens=3, do_sample=False)
    assert beams.shape[0] == 1
