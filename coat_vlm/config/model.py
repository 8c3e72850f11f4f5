"""A recipe's ``model``: vision tower, projector, language model, tokenizer, images and videos."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid")
"""Of all of a recipe's dataclasses: an unknown key is an error."""

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
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


ProjectorType = Literal["linear", "mlp2x_gelu", "mlp_downsample", "mlp_downsample_3x3_fix"]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class VisionConfig:
    """The vision tower: pretrained by name or folder, or from scratch by its own config."""

    library: Literal["transformers", "open_clip"] = "transformers"
    """Which library builds the tower."""
    name_or_path: str | None = None
    """Hub id or local folder; its pretrained weights are kept. Exclusive with ``config``."""
    config: dict[str, Any] | None = None
    """A from-scratch tower: keys of the library's config, with ``model_type`` for transformers."""
    select_layer: int = -2
    """Which hidden state feeds the projector; -1 is the last layer's output, -2 the one before."""
    select_feature: Literal["patch", "cls_patch"] = "patch"
    """``patch`` drops a class token, ``cls_patch`` keeps everything the tower returns."""

    def __post_init__(self) -> None:
        exactly_one("model.vision", name_or_path=self.name_or_path, config=self.config)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ProjectorConfig:
    """The map from vision features to the language model's embedding space."""

    type: ProjectorType = "mlp_downsample"
    """VILA's projector names."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LanguageConfig:
    """The causal language model: pretrained by name or folder, or from scratch by its config."""

    name_or_path: str | None = None
    """Hub id or local folder; its pretrained weights are kept. Exclusive with ``config``."""
    config: dict[str, Any] | None = None
    """A from-scratch model: ``model_type`` (llama, mistral, qwen2, qwen3, ...) and config keys."""

    def __post_init__(self) -> None:
        exactly_one("model.language", name_or_path=self.name_or_path, config=self.config)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class TokenizerConfig:
    """The tokenizer: an existing one, or a byte-level BPE trained on the recipe's own texts."""

    name_or_path: str | None = None
    """Hub id or folder; defaults to ``model.language.name_or_path``."""
    train_vocab_size: Positive | None = None
    """Train a byte-level BPE of this size on the texts of all stages (from-scratch models)."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ModelConfig:
    """The composed model; with ``vision: null`` a language model alone, trained on text."""

    vision: VisionConfig | None
    language: LanguageConfig
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    template: Literal["tokenizer", "plain", "vicuna_v1", "chatml"] = "chatml"
    """Chat template of the model (a stage may use another, e.g. ``plain`` for align)."""
    max_length: Positive = 2048
    """Longest sequence in tokens, image tokens included; a longer sample is a bad sample."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation passed to transformers."""

    def __post_init__(self) -> None:
        if self.vision is None:
            idle = {
                "projector": self.projector != ProjectorConfig(),
                "image": self.image != ImageConfig(),
                "video": self.video != VideoConfig(),
            }
            for name, given in idle.items():
                if given:
                    raise ValueError(
                        f"model.{name} has no effect with model.vision: null, a language model "
                        "alone; remove it, or give model.vision a tower"
                    )
        if self.video.pool_frames is not None and self.image.mode == "dynamic_s2":
            raise ValueError(
                f"model.video.pool_frames={self.video.pool_frames} does not go with model.image."
                "mode: dynamic_s2; remove it, or use resize, pad or dynamic"
            )
        older = self.image.num_video_frames
        if older is not None and (self.video.num_frames or self.video.sampling != "uniform"):
            raise ValueError(
                f"model.image.num_video_frames={older} has no effect beside model.video."
                "num_frames or another sampling than uniform; remove it"
            )


def exactly_one(where: str, **options: object) -> None:
    """Raise ValueError unless one of the options is given; ``where`` is the recipe key."""
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        names = " or ".join(options)
        got = " and ".join(given) if given else "neither"
        raise ValueError(f"{where}: exactly one of {names} is needed, got {got}")
