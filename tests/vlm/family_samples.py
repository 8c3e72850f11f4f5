"""Rows with images and text for the tests of published families."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from torch import nn

from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.model.families import FAMILIES


def picture(number: int, width: int = 40, height: int = 24) -> Media:
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return Media(kind="image", path=f"{number}.png", data=file.getvalue())


def clip(folder: Path, number: int) -> Media:
    """A video of so many frames, as files of a new folder."""
    folder.mkdir()
    for frame in range(number):
        (folder / f"{frame}.png").write_bytes(picture(10 + frame).data or b"")
    return video(folder, number)


def video(folder: Path | str, number: int) -> Media:
    """The video of so many frames that :func:`clip` wrote."""
    frames = tuple(str(Path(folder) / f"{frame}.png") for frame in range(number))
    return Media(kind="video", path=frames[0], frames=frames, fps=2.0)


def conversation(*media: Media, answers: tuple[str, ...] = ("red", "yes")) -> Sample:
    """Questions with all media in the first one, as a LLaVA row writes them."""
    turns: list[Turn] = []
    for number, answer in enumerate(answers):
        shown = tuple(Part(medium.kind) for medium in media) if not number else ()
        text = ("\n" if shown else "") + f"What color is {number}?"
        turns += [Turn("user", (*shown, Part("text", text)))]
        turns += [Turn("assistant", (Part("text", answer),))]
    return Sample(id="1", turns=tuple(turns), media=media, source="rows.json")


IMAGES = {
    "one image": (picture(1),),
    "wide": (picture(2, 90, 20),),
    "two images": (picture(3), picture(4, 20, 50)),
    "text": (),
}


def sample_of(folder: Path, name: str) -> Sample:
    answers = ("red",) if FAMILIES[folder.name].has_prefix else ("red", "yes")
    return conversation(*IMAGES[name], answers=answers)


def assert_equal_gradients(ours: nn.Module, stock: nn.Module, least: float = 1e-7) -> None:
    """Compare all gradients up to the order of FP32 sums; a missing one is missing in both."""
    gradients = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = gradients[name].grad
        if parameter.grad is None or expected is None:
            assert parameter.grad is expected, name
        else:
            difference = (parameter.grad - expected).norm()
            assert difference <= 1e-4 * expected.norm() + least, name
