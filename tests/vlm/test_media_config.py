"""Recipes' options of images and videos: none without effect, and what they make of a processor."""

import dataclasses

import pytest

from coat_data.media.sampling import VideoSettings
from coat_data.media.tiling import TiledTransform
from coat_vlm.config import ImageConfig
from coat_vlm.config.model import VideoConfig
from coat_vlm.model.processor import CoatVlmProcessor, build_processor


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"min_tiles": 2}, "min_tiles has no effect with mode: resize"),
        ({"mode": "dynamic", "s2_scales": (28, 56)}, "set mode: dynamic_s2"),
    ],
)
def test_image_options_without_effect(settings: dict, problem: str):
    with pytest.raises(ValueError, match=problem):
        ImageConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"fps": 1.0}, "fps has no effect with sampling: uniform"),
        ({"sampling": "fps"}, "needs model.video.fps"),
    ],
)
def test_video_options_without_effect(settings: dict, problem: str):
    with pytest.raises(ValueError, match=problem):
        VideoConfig(**settings)


def processor_of(tiny, tokenizer, image: ImageConfig, video: VideoConfig) -> CoatVlmProcessor:
    recipe = dataclasses.replace(tiny.recipe(), image=image, video=video)
    return build_processor(recipe, tokenizer, tiny.model().config)


def test_options_reach_the_encoder(tiny, tiny_tokenizer):
    image = ImageConfig(mode="dynamic", min_tiles=2, max_tiles=5, max_pixels=1000)
    video = VideoConfig(sampling="fps", fps=2.0, max_frames=9, time_tokens=True)
    media = processor_of(tiny, tiny_tokenizer, image, video).encoder().media
    assert isinstance(media.transform, TiledTransform)
    assert (media.transform.min_tiles, media.transform.max_tiles) == (2, 5)
    assert media.max_pixels == 1000
    assert media.video == VideoSettings(sampling="fps", fps=2.0, max_frames=9, time_tokens=True)
