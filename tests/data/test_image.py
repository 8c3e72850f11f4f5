"""Image opening and transforms, against transformers' PIL image processors and plain NumPy."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from coat_data.containers.media_files import image_suffixes
from coat_data.media.image import ImageTransform, image_size, open_image
from coat_data.sample import DataError, Media
from coat_data.tools.export import media_suffix

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(values, "RGBA").convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def one_tile(transform: ImageTransform, image: Image.Image) -> torch.Tensor:
    pixels = torch.empty(1, 3, transform.size, transform.size)
    transform.write(image, pixels.numpy())
    return pixels[0]


def media_of(data: bytes) -> Media:
    return Media(kind="image", path="some/picture", data=data)


def opened(data: bytes) -> Image.Image:
    return open_image(media_of(data))


@pytest.mark.parametrize(
    ("size", "mode"),
    [((224, 224), "RGB"), ((31, 77), "L"), ((500, 20), "P"), ((1, 1), "1"), ((64, 48), "CMYK")],
)
def test_resize_equals_siglip(size: tuple[int, int], mode: str):
    image = noise(*size).convert(mode)
    form = "TIFF" if mode == "CMYK" else "PNG"
    reference = SiglipImageProcessorPil(size={"height": 56, "width": 56})
    expected = reference(image, return_tensors="pt").pixel_values[0]
    actual = one_tile(ImageTransform(56, HALF, HALF), opened(encoded(image, form)))
    assert actual.dtype == torch.float32
    assert actual.shape == (3, 56, 56)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_laid_over_white(mode: str):
    stored = noise(20, 10, mode="RGBA").convert(mode)
    data = encoded(stored)
    with Image.open(io.BytesIO(data)) as reopened:
        values = np.asarray(reopened.convert("RGBA")).astype(float)
    opacity = values[:, :, 3:] / 255
    expected = values[:, :, :3] * opacity + 255 * (1 - opacity)
    assert opacity.min() < 1
    actual = np.asarray(opened(data))
    assert np.abs(actual - expected).max() <= 1  # Pillow composites in integers


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int):
    """A picture with red at the top left, stored the way a camera held differently stores it."""
    upright = Image.new("RGB", (32, 16), "blue")
    upright.paste("red", (0, 0, 16, 8))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    actual = opened(encoded(stored, "PNG", exif=exif))
    assert np.array_equal(np.asarray(actual), np.asarray(upright))
    for form in ("PNG", "JPEG", "WEBP", "TIFF"):
        media = media_of(encoded(stored, form, exif=exif))
        assert image_size(media) == open_image(media).size == (32, 16)


@pytest.mark.parametrize("damage", ["missing", "truncated", "text", "folder", "header"])
def test_unreadable_images_name_the_path(tmp_path: Path, damage: str):
    path = tmp_path / "bad.jpg"
    whole = encoded(noise(64, 64), "JPEG")
    content = {"truncated": whole[:-200], "text": b"<html>", "header": whole[:10]}
    if damage == "folder":
        path.mkdir()
    elif damage in content:
        path.write_bytes(content[damage])
    for act in (open_image, image_size) if damage != "truncated" else (open_image,):
        with pytest.raises(DataError, match=r"bad\.jpg") as raised:
            act(Media(kind="image", path=str(path)))
        assert raised.value.where == str(path)
        assert raised.value.remedy


def test_heic_names_the_package_that_reads_it():
    """It was an unreadable image without a hint."""
    data = b"\0\0\0\x1cftypheic" + bytes(40)
    with pytest.raises(DataError, match="pip install pillow-heif, or convert it to JPEG"):
        open_image(media_of(data))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about the damage
@pytest.mark.parametrize("form", ["PNG", "GIF", "TIFF"])
def test_damage_never_shows_another_error(form: str):
    """Every truncation of a file either still decodes or is a DataError."""
    whole = encoded(noise(16, 16), form)
    failed = 0
    for length in range(0, len(whole), 7):
        try:
            opened(whole[:length])
        except DataError:
            failed += 1
    assert failed > 5


def test_grey_of_16_bits_keeps_its_upper_8():
    values = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)  # 0, 257, ..., 65535
    for form in ("PNG", "TIFF"):
        opened = open_image(media_of(encoded(Image.fromarray(values), form)))
        assert opened.mode == "RGB"
        assert np.array_equal(np.asarray(opened)[:, :, 1].ravel(), np.arange(256))


def test_floating_point_pixels_are_refused():
    data = encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    with pytest.raises(DataError, match="floating-point"):
        open_image(media_of(data))


def test_of_an_animation_the_first_frame():
    frames = [Image.new("RGB", (9, 7), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert open_image(media_of(data)).getcolors() == [(63, (255, 0, 0))]
    assert image_size(media_of(data)) == (9, 7)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_limit_of_pixels_can_be_lowered_and_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    data = encoded(Image.new("L", (100, 30)), "PNG")  # 15 times Pillow's limit: it would refuse
    assert open_image(media_of(data), max_pixels=3000).size == (100, 30)
    assert image_size(media_of(data), max_pixels=3000) == (100, 30)
    for limit in (2999, 1000):
        with pytest.raises(DataError, match="larger than allowed") as raised:
            open_image(media_of(data), max_pixels=limit)
        # Of a published model the limit cannot be raised, and the remedy was to raise it.
        assert raised.value.remedy.startswith("scale the image down; for a composed model")
    assert Image.MAX_IMAGE_PIXELS == 200


def test_a_file_for_ghostscript_is_no_image_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **_: started.append(given))
    path = tmp_path / "x.jpg"
    Image.new("RGB", (10, 10)).save(path, "EPS")
    with Image.open(path) as opened:
        assert opened.format == "EPS"  # what Pillow takes it for
    for read in (open_image, image_size):
        with pytest.raises(DataError, match="cannot be read"):
            read(Media(kind="image", path=str(path)))
    unnamed = Media(kind="image", data=path.read_bytes())
    assert media_suffix(unnamed) == ".img"
    assert not started
    assert {".jpg", ".png", ".webp"} <= image_suffixes()
    assert not {".eps", ".ps", ".pdf", ".wmf", ".mpg"} & image_suffixes()
