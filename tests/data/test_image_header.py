"""Sizes from headers, and the kinds of files that people have, against Pillow's plain decoding."""

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageOps

from coat_data.containers.media_files import image_suffixes
from coat_data.media.image import image_size, open_image
from coat_data.sample import DataError, Media
from coat_data.tools.export import media_suffix


def media_of(data: bytes) -> Media:
    return Media(kind="image", path="some/picture", data=data)


def encoded(image: Image.Image, form: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def with_chunk_at_the_end(png: bytes, kind: bytes, body: bytes) -> bytes:
    """The PNG with a chunk between its pixels and its end."""
    chunk = len(body).to_bytes(4, "big") + kind + body
    chunk += zlib.crc32(kind + body).to_bytes(4, "big")
    end = png.rindex(b"IEND") - 4
    return png[:end] + chunk + png[end:]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [None, 1, 3, 6, 8])
def test_the_size_is_that_of_the_decoded_upright_image(form: str, orientation: int | None):
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    data = encoded(Image.new("RGB", (30, 20), "red"), form, exif=exif)
    with Image.open(io.BytesIO(data)) as stored:
        expected = ImageOps.exif_transpose(stored).size
    assert expected == ((20, 30) if orientation in (6, 8) else (30, 20))
    assert image_size(media_of(data)) == open_image(media_of(data)).size == expected


def test_exif_behind_the_pixels_of_a_png_is_found():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new("RGB", (30, 20)), "PNG")
    data = with_chunk_at_the_end(data, b"eXIf", exif.tobytes()[6:])
    assert image_size(media_of(data)) == open_image(media_of(data)).size == (20, 30)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_no_pixel_is_decoded_for_the_size(monkeypatch: pytest.MonkeyPatch, form: str):
    data = encoded(Image.new("RGB", (30, 20)), form)
    with Image.open(io.BytesIO(data)) as opened:
        kind = type(opened)
    monkeypatch.setattr(kind, "load", lambda _: pytest.fail("the picture was decoded"))
    assert image_size(media_of(data)) == (30, 20)


def test_grey_of_16_bits_keeps_its_upper_8():
    values = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)  # 0, 257, ..., 65535
    for form in ("PNG", "TIFF"):
        opened = open_image(media_of(encoded(Image.fromarray(values), form)))
        assert opened.mode == "RGB"
        assert np.array_equal(np.asarray(opened)[:, :, 1].ravel(), np.arange(256))


def test_floating_point_pixels_are_refused():
    data = encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    with pytest.raises(DataError, match="floating point"):
        open_image(media_of(data))


def test_cmyk_palette_and_black_and_white_as_pillow_converts_them():
    for mode, form in [("CMYK", "JPEG"), ("P", "PNG"), ("1", "PNG"), ("L", "JPEG")]:
        data = encoded(Image.linear_gradient("L").convert("RGB").convert(mode), form)
        with Image.open(io.BytesIO(data)) as stored:
            expected = np.asarray(stored.convert("RGB"))
        assert np.array_equal(np.asarray(open_image(media_of(data))), expected)


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
        assert "model.image.max_pixels" in raised.value.remedy
    assert Image.MAX_IMAGE_PIXELS == 200


def test_a_broken_header_is_a_data_error(tmp_path: Path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.new("RGB", (9, 9)), "PNG")[:20])
    for given in (path, tmp_path / "missing.png"):
        with pytest.raises(DataError) as raised:
            image_size(given)
        assert raised.value.where == str(given)


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
            read(path)
    unnamed = Media(kind="image", data=path.read_bytes())
    assert media_suffix(unnamed) == ".img"
    assert not started
    assert {".jpg", ".png", ".webp"} <= image_suffixes()
    assert not {".eps", ".ps", ".pdf", ".wmf", ".mpg"} & image_suffixes()
