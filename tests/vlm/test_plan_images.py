"""Tiles of a row that ``coat-vlm plan`` counts, against the tiles that training makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coat_data.media.tiling import TiledTransform
from coat_vlm.config import Recipe, SourceConfig
from coat_vlm.config.load import load_recipe
from coat_vlm.config.model import ImageConfig
from coat_vlm.config.stage import PackingConfig
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.plan.rows import count_images_per_row

MODES: dict[str, dict[str, Any]] = {
    "dynamic": {"max_tiles": 6},
    "dynamic_s2": {"s2_scales": (32, 64, 96), "max_tiles": 9},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    Image.new("RGB", (640, 96)).save(tmp_path / "a.png")
    row = '{"image": "a.png", "conversations": [{"from": "human", "value": "?"}, '
    (tmp_path / "a.jsonl").write_text(row + '{"from": "gpt", "value": "a"}]}\n')
    recipe = load_recipe("quickstart")
    source = SourceConfig(name="a", path=str(tmp_path / "a.jsonl"))
    return replace(recipe, stages={"sft": replace(recipe.stages["sft"], data=[source])})


def model_of(scales: Any) -> CoatVlmConfig:
    return CoatVlmConfig(
        vision_config={"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
        text_config={"model_type": "qwen2"},
        s2_scales=None if scales is None else list(scales),
    )


@pytest.mark.parametrize("mode", ["resize", "dynamic", "dynamic_s2"])
def test_tiles_are_those_of_training_at_most(recipe: Recipe, mode: Any) -> None:
    settings = MODES.get(mode, {})
    image = ImageConfig(mode=mode, **settings)
    recipe = replace(recipe, model=replace(recipe.model, image=image))
    model = model_of(settings.get("s2_scales"))
    found, _ = count_images_per_row(recipe, recipe.stages["sft"], 256, model)
    if mode == "resize":
        assert found == 1
        return
    transform = TiledTransform(
        32, (0.5,) * 3, (0.5,) * 3, mode=mode, max_tiles=settings["max_tiles"],
        scales=settings.get("s2_scales", ()),
    )  # fmt: skip
    made = [transform.plan(*size).num_tiles for size in ((640, 96), (64, 64), (96, 640))]
    assert max(made) <= found <= max(made) + 1


def test_packed_rows_are_full_of_tiles(recipe: Recipe) -> None:
    stage = replace(recipe.stages["sft"], packing=PackingConfig())
    plain, scaled = model_of(None), model_of((32, 64, 96))
    assert count_images_per_row(recipe, stage, 256, plain)[0] == 255 // plain.tokens_per_image
    of_scales = count_images_per_row(recipe, stage, 9 * scaled.tokens_per_image + 1, scaled)[0]
    assert of_scales == 1 + 4 + 9
    stage = replace(stage, packing=PackingConfig(images=5))
    assert count_images_per_row(recipe, stage, 256, plain) == (5, "packing.images")
