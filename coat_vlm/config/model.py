"""A recipe's ``model``: vision tower, projector, language model, tokenizer, images and videos."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid")
"""Configuration of every dataclass of a recipe: an unknown key is an error."""

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ImageConfig:
    """Preprocessing of images for the vision tower."""

    mode: Literal["resize", "pad", "dynamic", "dynamic_s2"] = "resize"
    """VILA's names. ``resize`` resizes to a square; ``pad`` first pads to a square with the mean
    color; ``dynamic`` cuts a grid of tiles that fits the image's shape, and adds a thumbnail;
    ``dynamic_s2`` cuts tiles at several scales and concatenates their features
    (coat_data/media/tiling.py)."""
    min_tiles: Positive | None = None
    """``dynamic``: minimum number of tiles of the grid; default 1."""
    max_tiles: Positive | None = None
    """``dynamic`` and ``dynamic_s2``: maximum number of tiles of the (largest) grid; default 12."""
    s2_scales: tuple[Positive, ...] | None = None
    """``dynamic_s2``: side lengths of the scales in pixels; default one, two and three times the
    tower's (448, 896 and 1344 for a tower of 448)."""
    max_pixels: Positive | None = None
    """Maximum pixels of an image file, against decompression bombs; default 89 million."""

    def __post_init__(self) -> None:
        require_value("model.image", self, "mode", "min_tiles", "dynamic")
        require_value("model.image", self, "mode", "max_tiles", "dynamic", "dynamic_s2")
        require_value("model.image", self, "mode", "s2_scales", "dynamic_s2")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class VideoConfig:
    """Sampling and decoding of video frames; each sampled frame is one tile.

    With ``model.pretrained`` they change the settings of the family's video processor
    (guides/long_video.md), whose defaults are its own.
    """

    backend: Literal["pyav", "decord"] = "pyav"
    """``decord`` needs the decord extra and runs in a child process with a time limit, with PyAV
    for videos that decord does not read exactly."""
    sampling: Literal["uniform", "fps", "all"] = "uniform"
    """``uniform``: ``num_frames`` evenly spaced; ``fps``: at most ``fps`` per second; ``all``."""
    num_frames: Positive | None = None
    """``uniform``: frames per video; default 8. A shorter video gives fewer."""
    fps: Annotated[float, Field(gt=0.0)] | None = None
    """``fps``: frames per second."""
    max_frames: Positive | None = None
    """``fps`` and ``all``: maximum frames; longer videos are sampled uniformly; default 64."""
    max_frame_pixels: Positive | None = None
    """Maximum number of pixels of a frame in the file; default 33,554,432 (allows 8K)."""
    max_total_pixels: Positive | None = None
    """Maximum number of pixels of all sampled frames, in the tower's size; default 536,870,912."""
    time_tokens: bool = False
    """Insert each frame's (with ``pool_frames`` each group's mean) time before it, such as
    ``<1.5 seconds>``."""
    pool_frames: Annotated[int, Field(gt=1)] | None = None
    """Number of consecutive frames whose projected features are averaged (NVILA: 8), to the tokens
    of one frame. Not supported with image mode ``dynamic_s2``."""

    def __post_init__(self) -> None:
        require_value("model.video", self, "sampling", "num_frames", "uniform")
        require_value("model.video", self, "sampling", "fps", "fps")
        require_value("model.video", self, "sampling", "max_frames", "fps", "all")
        if self.sampling == "fps" and self.fps is None:
            raise ValueError("model.video.sampling: fps needs model.video.fps, frames per second")


ProjectorType = Literal["linear", "mlp2x_gelu", "mlp_downsample", "mlp_downsample_3x3_fix"]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class VisionConfig:
    """The vision tower: pretrained (``name_or_path``) or randomly initialized (``config``)."""

    library: Literal["transformers", "open_clip"] = "transformers"
    """Library that builds the tower."""
    name_or_path: str | None = None
    """Hub id or local folder of a pretrained tower (guides/composed.md has the types). Exclusive
    with ``config``."""
    config: dict[str, Any] | None = None
    """The library's config for a randomly initialized tower, with ``model_type`` for
    transformers."""
    select_layer: int = -2
    """Hidden state that feeds the projector; -1 is the last layer's output, -2 the one before."""
    select_feature: Literal["patch", "cls_patch"] = "patch"
    """``patch`` drops a class token, ``cls_patch`` uses all tokens of the tower."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ProjectorConfig:
    """The map from vision features to the language model's embedding space."""

    type: ProjectorType = "mlp_downsample"
    """VILA's projector names."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LanguageConfig:
    """The causal language model: pretrained, or randomly initialized from ``config``."""

    name_or_path: str | None = None
    """Hub id or local folder of a pretrained model. Exclusive with ``config``."""
    config: dict[str, Any] | None = None
    """Config of a randomly initialized model, with ``model_type`` (llama, mistral, qwen3, ...)."""
    rope_theta: Annotated[float, Field(gt=0.0)] | None = None
    """Base of the rotary embedding, also of ``init_from``, to extend the context to
    ``model.max_length`` (LongVILA: 1.53e7 for 131,072 tokens); train after it."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class TokenizerConfig:
    """The tokenizer: a pretrained one, or a byte-level BPE trained on the recipe's texts."""

    name_or_path: str | None = None
    """Hub id or folder; defaults to ``model.language.name_or_path``."""
    train_vocab_size: Positive | None = None
    """Train a byte-level BPE of this size on the texts of all stages."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ModelConfig:
    """A composed model, or a published one (``pretrained``).

    With ``vision: null`` a composed model is only a language model, trained on text.
    """

    pretrained: str | None = None
    """Hub id or local folder of a published vision-language model, which is trained with its own
    processor and chat template (docs/reference/models.md has the families). The only other keys
    that may be set are ``max_length``, ``max_pixels``, ``video`` and ``attn_implementation``."""
    vision: VisionConfig | None = field(default_factory=VisionConfig)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    template: Literal["tokenizer", "plain", "vicuna_v1", "chatml"] | None = None
    """Chat template of the model, ``chatml`` when absent; a stage may override it, for example
    LLaVA-1.5's align with ``plain``. A published model has its own."""
    max_length: Positive = 2048
    """Maximum tokens of a sample, including image tokens; longer samples are rejected, not
    truncated."""
    max_pixels: Positive | None = None
    """Maximum pixels of an image (Qwen-VL, also of a frame; GLM-V); larger ones are scaled
    down. A token covers 28 x 28 or 32 x 32 pixels. The processor's value when absent."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation passed to transformers."""

    def __post_init__(self) -> None:
        if self.pretrained is not None:
            self._check_unset(
                ("vision", "language", "projector", "tokenizer", "image", "template"),
                "has no effect with model.pretrained, whose model and processor determine it; "
                "remove it, or name the parts of a new model instead of model.pretrained",
            )
            video, why = self.video, "the family's processor reads frames in its own way; remove it"
            refused = {"sampling: all": video.sampling == "all", "time_tokens": video.time_tokens}
            refused |= {"pool_frames": video.pool_frames is not None}
            given = {f"model.video.{key}": (is_set, why) for key, is_set in refused.items()}
            refuse("model.pretrained", given)
            return
        if self.max_pixels is not None:
            raise ValueError(
                "model.max_pixels has no effect without model.pretrained; remove it, and choose "
                "the tiles of an image with model.image"
            )
        for name in ("vision", "language"):
            part = getattr(self, name)
            if part is not None:
                options = {"name_or_path": part.name_or_path, "config": part.config}
                require_exactly_one(f"model.{name}", **options)
        if self.vision is None:
            self._check_unset(
                ("projector", "image", "video"),
                "has no effect without a vision tower (model.vision: null); remove it, or set "
                "model.vision",
            )
        if self.video.pool_frames is not None and self.image.mode == "dynamic_s2":
            raise ValueError(
                f"model.video.pool_frames={self.video.pool_frames} is not supported with model."
                "image.mode: dynamic_s2; remove it, or use resize, pad or dynamic"
            )

    def _check_unset(self, names: Sequence[str], problem: str) -> None:
        for field_ in dataclasses.fields(self):
            make = field_.default_factory
            default = field_.default if make is dataclasses.MISSING else make()
            if field_.name in names and getattr(self, field_.name) != default:
                raise ValueError(f"model.{field_.name} {problem}")


def require_value(where: str, settings: object, option: str, key: str, *values: str) -> None:
    """Raise ValueError if ``key`` is set without a value of ``option`` that uses it."""
    value = getattr(settings, option)
    if getattr(settings, key) is not None and value not in values:
        raise ValueError(
            f"{where}.{key} has no effect with {option}: {value}; remove it, or set {option}: "
            f"{' or '.join(values)}"
        )


def refuse(where: str, refused: Mapping[str, tuple[bool, str]]) -> None:
    """Raise ValueError for the first key that is given (key -> whether it is, and why not)."""
    for key, (given, why) in refused.items():
        if given:
            raise ValueError(f"{key} is not supported with {where}: {why}")


def require_exactly_one(where: str, **options: object) -> None:
    """Raise ValueError unless exactly one option is given; ``where`` is the recipe key."""
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        names = " or ".join(options)
        got = " and ".join(given) if given else "neither"
        raise ValueError(f"{where}: exactly one of {names} is required, got {got}")
