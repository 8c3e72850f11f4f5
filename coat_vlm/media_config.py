"""What a recipe says of images and videos: ``model.image`` and ``model.video``."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")

Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class ImageConfig:
    """How an image becomes the tower's input."""

    mode: Literal["resize", "pad", "dynamic", "dynamic_s2"] = "resize"
    """VILA's names. ``resize`` to a square; ``pad`` to a square with the mean colour first;
    ``dynamic``: tiles in a grid of the image's shape, and a thumbnail; ``dynamic_s2``: tiles at
    several scales, whose features are concatenated (coat_data/tiling.py)."""
    augment: Literal["none", "crop_flip"] = "none"
    """Training only: a random crop of the image padded by 1/8, and a horizontal flip."""
    min_tiles: Positive | None = None
    """``dynamic``: fewest tiles of the grid; default 1."""
    max_tiles: Positive | None = None
    """``dynamic`` and ``dynamic_s2``: most tiles of the (largest) grid; default 12."""
    s2_scales: tuple[Positive, ...] | None = None
    """``dynamic_s2``: sides of the scales in pixels; default one, two and three times the tower's
    (448, 896 and 1344 for a tower of 448)."""
    max_pixels: Positive | None = None
    """Most pixels of an image file, against decompression bombs; default 89 million (Pillow's)."""
    num_video_frames: Positive | None = None
    """The older name of ``model.video.num_frames``."""

    def __post_init__(self) -> None:
        effects = {
            "min_tiles": ("dynamic",),
            "max_tiles": ("dynamic", "dynamic_s2"),
            "s2_scales": ("dynamic_s2",),
        }
        for name, modes in effects.items():
            if getattr(self, name) is not None and self.mode not in modes:
                raise ValueError(
                    f"model.image.{name} has no effect with mode: {self.mode}; remove it, or set "
                    f"mode: {' or '.join(modes)}"
                )
        if self.mode in ("dynamic", "dynamic_s2") and self.augment != "none":
            raise ValueError(
                f"model.image.augment: {self.augment} has no effect with mode: {self.mode}, whose "
                "tiles are not augmented; remove it"
            )


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class VideoConfig:
    """Which frames of a video are shown, and what reads them; each frame is one tile."""

    backend: Literal["auto", "decord", "pyav"] = "auto"
    """``pyav``; ``decord`` in a child process with a time limit, and PyAV for what it does not read
    exactly (needs the decord extra); ``auto``: PyAV, measured to be as fast."""
    sampling: Literal["uniform", "fps", "all"] = "uniform"
    """``uniform`` in time; ``fps`` frames per second, or fewer; ``all`` frames."""
    num_frames: Positive | None = None
    """``uniform``: frames per video; default 8. A shorter video gives fewer."""
    fps: Annotated[float, Field(gt=0.0)] | None = None
    """``fps``: frames per second."""
    max_frames: Positive | None = None
    """``fps`` and ``all``: most frames, from there on uniform in time; default 64."""
    timeout_s: Annotated[float, Field(gt=0.0)] | None = None
    """``decord``: seconds after which a video is given to PyAV; default 30."""
    time_tokens: bool = False
    """Write before each frame when it is shown, as text such as ``<1.5 seconds>``; with
    ``pool_frames`` the mean time of each group."""
    pool_frames: Annotated[int, Field(gt=1)] | None = None
    """Average the projected features of so many consecutive frames, as NVILA does by 8: a group
    takes the tokens of one frame. The last group of a video may be shorter. Not with image mode
    ``dynamic_s2``."""

    def __post_init__(self) -> None:
        effects = {
            "num_frames": ("sampling", self.sampling, self.sampling == "uniform"),
            "fps": ("sampling", self.sampling, self.sampling == "fps"),
            "max_frames": ("sampling", self.sampling, self.sampling != "uniform"),
            "timeout_s": ("backend", self.backend, self.backend == "decord"),
        }
        for name, (option, value, has_effect) in effects.items():
            if getattr(self, name) is not None and not has_effect:
                raise ValueError(
                    f"model.video.{name} has no effect with {option}: {value}; remove one of them"
                )
        if self.sampling == "fps" and self.fps is None:
            raise ValueError("model.video.sampling: fps needs model.video.fps, frames per second")
