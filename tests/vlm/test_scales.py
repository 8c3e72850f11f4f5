"""Images of several scales: the stitching against torch's own resizing, and a whole model's."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from coat_data.load.collate import Batch, collate, collate_packed
from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.config import ImageConfig
from coat_vlm.generate import generate
from coat_vlm.model import build_model
from coat_vlm.model.packing import PACKED
from coat_vlm.model.processor import CoatVlmProcessor, build_processor, train_tokenizer
from coat_vlm.model.projector import area_average
from coat_vlm.model.vlm import CoatVlm

SCALES = [28, 56, 84]
TEXTS = ["What is in the image? A red circle. USER: ASSISTANT: user assistant system"] * 3


@pytest.mark.parametrize(("old", "new"), [((4, 4), (12, 16)), ((8, 8), (12, 20)), ((9, 7), (4, 5))])
def test_areas_are_averaged_as_torch_does(old: tuple[int, int], new: tuple[int, int]):
    features = torch.randn(*old, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = F.interpolate(features.permute(2, 0, 1)[None], size=new, mode="area")
    actual = area_average(features, new)
    torch.testing.assert_close(actual, expected[0].permute(1, 2, 0))
    weight = torch.randn_like(actual)
    (wanted,) = torch.autograd.grad((expected[0].permute(1, 2, 0) * weight).sum(), features)
    (found,) = torch.autograd.grad((actual * weight).sum(), features)
    torch.testing.assert_close(found, wanted)


def by_hand(tiles: torch.Tensor, grid: tuple[int, int], project) -> torch.Tensor:
    """One image of three scales, as VILA's paper and code describe it, in channels-first maps."""
    side, channels = 4, tiles.shape[-1]
    maps, start = [], 0
    for rows, columns in [(1, 1), (2, 2), grid]:
        whole = torch.zeros(channels, rows * side, columns * side)
        for row in range(rows):
            for column in range(columns):
                tile = tiles[start].T.reshape(channels, side, side)
                top, left = row * side, column * side
                whole[:, top : top + side, left : left + side] = tile
                start += 1
        maps.append(whole)
    size = maps[-1].shape[1:]
    whole = torch.cat([F.interpolate(m[None], size=size, mode="area")[0] for m in maps])
    rows, columns = grid
    lines = []
    for row in range(rows):
        projected = []
        for column in range(columns):
            top, left = row * side, column * side
            patch = whole[:, top : top + side, left : left + side]
            tokens = project(patch.flatten(1).T[None])[0]  # (T, H)
            width = round(len(tokens) ** 0.5)
            projected.append(tokens.reshape(width, width, -1))
        lines.append(torch.cat(projected, dim=1))
    return torch.cat(lines, dim=0).flatten(0, 1)


def model_of(tiny, mode: Any = "dynamic_s2", **image) -> tuple[Any, Any]:
    tokenizer = train_tokenizer(TEXTS, 300)
    recipe = dataclasses.replace(
        tiny.recipe(), image=ImageConfig(mode=mode, **image), max_length=2048
    )
    language = recipe.language.config | {"max_position_embeddings": 2048}
    recipe = dataclasses.replace(recipe, language=type(recipe.language)(config=language))
    torch.manual_seed(0)
    model: Any = build_model(recipe, tokenizer).eval()
    return model, build_processor(recipe, tokenizer, model.config)


@pytest.fixture(scope="module")
def s2(tiny) -> tuple[Any, Any]:
    return model_of(tiny)


def picture(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@torch.no_grad()
def test_the_model_reads_the_stitched_features(s2: tuple[Any, Any]):
    """Two pictures of different shapes in one batch; where the placeholders are, and what there."""
    model, processor = s2
    assert model.config.s2_scales == SCALES
    images = [picture(120, 90), picture(60, 90)]
    inputs = processor(images=images, text=["<image>What?", "Is <image>red?"])
    assert inputs["image_grids"].tolist() == [[3, 4], [4, 3]]
    assert inputs["pixel_values"].shape == (2 * (1 + 4 + 12), 3, 28, 28)
    features = model.vision_tower(inputs["pixel_values"])
    expected = [
        by_hand(own, grid, model.projector)
        for own, grid in zip(features.split(17), [(3, 4), (4, 3)], strict=True)
    ]
    embeds = model.embed(**{k: v for k, v in inputs.items() if k != "attention_mask"})
    for row in range(2):
        placed = embeds[row][inputs["input_ids"][row] == model.config.image_token_id]
        assert placed.shape == (12 * 4, 32)
        torch.testing.assert_close(placed, expected[row])


def test_generation_in_a_batch_equals_one_by_one(s2: tuple[Any, Any]):
    """Grids are shared out to rows, and repeated with their row where there are beams."""
    model, processor = s2
    texts = ["<image>a", "b c", "<image>d"]
    inputs = processor(images=[picture(120, 90), picture(60, 90)], text=texts)
    pixels = inputs["pixel_values"]
    media = {"pixel_values": pixels, "image_grids": inputs["image_grids"]}
    _, expanded = model._expand_inputs_for_generation(2, False, inputs["input_ids"], **media)
    assert expanded["image_grids"].tolist() == [[3, 4], [3, 4], [4, 3], [4, 3]]
    own = [pixels[:17], pixels[:17], pixels[17:], pixels[17:]]
    assert torch.equal(expanded["pixel_values"], torch.cat(own))
    settings = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    batch = model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
    for row, images in enumerate([[picture(120, 90)], None, [picture(60, 90)]]):
        alone = processor(images=images, text=texts[row])
        found = model.generate(**alone, **settings)[0, alone["input_ids"].shape[1] :]
        assert batch[row].tolist()[: len(found)] == found.tolist()


def test_a_saved_model_and_processor_keep_their_scales(tiny, tmp_path: Path, in_own_memory):
    model, processor = model_of(tiny, s2_scales=(28, 56), max_tiles=6)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again, reader = CoatVlm.from_pretrained(tmp_path), CoatVlmProcessor.from_pretrained(tmp_path)
    assert again.config.s2_scales == reader.image_s2_scales == [28, 56]
    inputs = reader(images=picture(60, 90), text="<image>What?")
    assert inputs["image_grids"].tolist() == [[3, 2]]
    assert torch.equal(in_own_memory(again)(**inputs).logits, model(**inputs).logits)
    turn = Turn("user", (Part("text", "What?"),))
    assert generate(again, reader, [Sample(id="q", turns=(turn,))], max_new_tokens=1)


def test_what_does_not_fit_together_is_refused(s2: tuple[Any, Any], tiny):
    model, processor = s2
    inputs = dict(processor(images=picture(120, 90), text="<image>What?"))
    with pytest.raises(ValueError, match="need 17 tiles"):
        model(**inputs | {"pixel_values": inputs["pixel_values"][:16]})
    with pytest.raises(ValueError, match="placeholders"):
        model(**inputs | {"image_grids": torch.tensor([[3, 3]])})
    with pytest.raises(ValueError, match=r"s2_scales=\[28, 60\]"):
        model_of(tiny, s2_scales=(28, 60))


def test_tiles_of_mode_dynamic_are_images_with_line_breaks_between(tiny):
    model, processor = model_of(tiny, "dynamic", max_tiles=4)
    assert model.config.s2_scales is None
    inputs = processor(images=picture(56, 28), text="<image>?")
    image, newline = model.config.image_token_id, processor.tokenizer("\n").input_ids
    between = [image] * 4 + newline
    wanted = between * 2 + [image] * 4  # two tiles and the thumbnail
    ids = inputs["input_ids"][0].tolist()
    start = ids.index(image)
    assert ids[start : start + len(wanted)] == wanted
    assert ids.count(image) == 12
    assert "image_grids" not in inputs
    assert model(**inputs).logits.shape[1] == len(ids)


@pytest.mark.parametrize(("mode", "image"), [("dynamic_s2", {}), ("dynamic", {"max_tiles": 4})])
def test_packed_tiles_train_what_padded_ones_train(tiny, mode: str, image: dict[str, int]):
    """Pictures of other shapes, so that tiles and grids go to the wrong sample if miscounted."""
    model, processor = model_of(tiny, mode, **image)
    model = model.float().train()
    encoder = processor.encoder()
    samples = []
    for number, count in enumerate((1, 0, 2)):
        user = Turn("user", (Part("image"),) * count + (Part("text", "What is"),))
        turns = (user, Turn("assistant", (Part("text", "red " * (number + 1)),)))
        media = tuple(png(40 + 30 * place, 90 - 20 * number) for place in range(count))
        sample = Sample(id=str(number), turns=turns, media=media)
        samples.append(encoder(sample))
        size = (len(samples[-1].input_ids), len(samples[-1].pixel_values))
        assert encoder.measure(sample)[:2] == size
        assert size[1] >= 2 * count
    wanted, wanted_gradients = loss_and_gradients(model, collate(samples, pad_token_id=0))
    model.language_model.set_attn_implementation(PACKED)
    packed = collate_packed(samples[::-1], pad_token_id=0, align=64)
    loss, gradients = loss_and_gradients(model, packed)
    assert loss == pytest.approx(wanted, rel=1e-4)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-3, atol=1e-5, msg=name)


def png(width: int, height: int) -> Media:
    file = io.BytesIO()
    picture(width, height).save(file, "png")
    return Media(kind="image", path=f"{width}.png", data=file.getvalue())


def loss_and_gradients(model: Any, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
