"""Media in the token sequence: never a mismatch, and lengths known from headers."""

import io
from pathlib import Path
from typing import cast

import pytest
from clips import noise, write_clip
from encoders import encoder_of
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from coat_data.load.encode import EncodedSample, Encoder
from coat_data.media.image import ImageTransform
from coat_data.media.sampling import VideoSettings
from coat_data.media.tiling import TiledTransform
from coat_data.sample import Media, Part, Sample, Turn
from coat_data.text.tokens import Segment

HALF = (0.5, 0.5, 0.5)
TOKENS = 4
TRANSFORMS = {
    "resize": ImageTransform(8, HALF, HALF),
    "dynamic": TiledTransform(8, HALF, HALF, max_tiles=6),
    "dynamic_s2": TiledTransform(8, HALF, HALF, "dynamic_s2", max_tiles=6, scales=(8, 16)),
}


def tokens_of(encode: Encoder, media: Media) -> int:
    """The number of a medium's tokens, from its header alone."""
    text = encode._media_text(encode.media.plan(media))
    return len(encode.tokenizer.encode([Segment("literal", text)])[0])


def image_id(tokenizer) -> int:
    return cast(int, tokenizer.convert_tokens_to_ids("<image>"))


def sample(*media: Media, said: str = "words") -> Sample:
    parts = tuple(part for m in media for part in (Part(m.kind), Part("text", said)))
    turns = (Turn("user", parts or (Part("text", said),)), Turn("assistant", (Part("text", "a"),)))
    return Sample(id="x", turns=turns, media=media, source="rows.json", row=7)


def image(width: int, height: int, form: str = "PNG") -> Media:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, form)
    return Media(kind="image", path=f"{width}x{height}", data=buffer.getvalue())


def clip(path: Path, num_frames: int, cut: float = 1.0) -> Media:
    """A clip of noise, which keeps its size, as far as ``cut`` of its bytes."""
    frames = (noise(32, number) for number in range(num_frames))
    moov_first = {"movflags": "faststart"}
    write_clip(path, frames, options={"g": "5"}, container_options=moov_first)
    data = path.read_bytes()
    return Media(kind="video", path=str(path), data=data[: int(len(data) * cut)])


def num_placeholders(encoded: EncodedSample, tokenizer) -> int:
    return int((encoded.input_ids == image_id(tokenizer)).sum())


@pytest.mark.parametrize("mode", TRANSFORMS)
def test_placeholders_always_match_the_tiles(make_tokenizer, mode: str):
    tokenizer = make_tokenizer("qwen2")
    encode = encoder_of(tokenizer, transform=TRANSFORMS[mode])
    newline = tokenizer("\n").input_ids

    @given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=4))
    def holds(sizes: list[tuple[int, int]]) -> None:
        media = [image(*size) for size in sizes]
        encoded = encode(sample(*media, said="<image> \n"))
        plans = [TRANSFORMS[mode].plan(*size) for size in sizes]
        assert len(encoded.pixel_values) == sum(plan.num_tiles for plan in plans)
        assert bool(encoded.pixel_values.isfinite().all())  # every tile was written
        token_tiles = sum(plan.num_token_tiles for plan in plans)
        assert num_placeholders(encoded, tokenizer) == TOKENS * token_tiles
        lengths = [tokens_of(encode, medium) for medium in media]
        breaks = sum(plan.num_token_tiles - 1 for plan in plans) if mode == "dynamic" else 0
        assert sum(lengths) == TOKENS * token_tiles + breaks * len(newline)
        if mode == "dynamic_s2":
            assert encoded.image_grids is not None
            assert encoded.image_grids.prod(1).sum() == token_tiles
        else:
            assert encoded.image_grids is None

    holds()


def test_tiles_stand_between_line_breaks(tokenizer):
    encode = encoder_of(tokenizer, transform=TRANSFORMS["dynamic"])
    shown = encode(sample(image(16, 8), said="")).input_ids.tolist()
    between = encode.tokenizer.encode([Segment("literal", "<image>\n<image>")])[0][1:-1]
    tile = [image_id(tokenizer)] * TOKENS
    start = shown.index(tile[0])
    stop = start + 3 * TOKENS + 2 * len(between)
    assert [*tile, *between, *tile, *between, *tile] == shown[start:stop]
    decoded = str(tokenizer.decode(between, clean_up_tokenization_spaces=False))
    assert decoded == "\n"


def test_times_are_written_before_frames(tokenizer, tmp_path: Path):
    video = VideoSettings(num_frames=2, time_tokens=True)
    encode = encoder_of(tokenizer, transform=TRANSFORMS["resize"], video=video)
    media = clip(tmp_path / "a.mp4", 20)
    ids = encode(sample(media, said="")).input_ids.tolist()
    text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    pictures = "<image>" * TOKENS
    text = text.removeprefix(tokenizer.bos_token or "")
    # SentencePiece begins anew after a special token.
    text = text.replace(" <", "<")
    assert text.startswith(f"<0.5 seconds>{pictures}<1.5 seconds>{pictures}")
    stop = len(ids) - ids[::-1].index(image_id(tokenizer))
    assert tokens_of(encode, media) == stop - (tokenizer.bos_token is not None)


def test_short_and_damaged_clips_mean_fewer_tokens(make_tokenizer, tmp_path: Path):
    tokenizer = make_tokenizer("qwen2")
    video = VideoSettings(num_frames=6, time_tokens=True)
    encode = encoder_of(tokenizer, transform=TRANSFORMS["dynamic"], video=video)
    whole, short = clip(tmp_path / "a.mp4", 30), clip(tmp_path / "b.mp4", 2)
    cut = clip(tmp_path / "c.mp4", 30, cut=0.6)
    shown = []
    for media in (whole, short, cut):
        encoded = encode(sample(media))
        shown.append(len(encoded.pixel_values))
        assert num_placeholders(encoded, tokenizer) == TOKENS * shown[-1]
        assert encode.media.plan(media).num_tiles >= shown[-1]
        assert tokens_of(encode, media) >= TOKENS * shown[-1]
        assert dict(encoded.counts) == {"video_pyav": 1}
    assert shown[:2] == [6, 2]
    assert 0 < shown[2] < 6
