"""A recipe's ``model``: vision tower, projector, language model and tokenizer."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from coat_vlm.media_config import ImageConfig, VideoConfig

_STRICT = ConfigDict(extra="forbid")

ProjectorType = Literal["linear", "mlp2x_gelu", "mlp_downsample", "mlp_downsample_3x3_fix"]
Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
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


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class ProjectorConfig:
    """The map from vision features to the language model's embedding space."""

    type: ProjectorType = "mlp_downsample"
    """VILA's projector names."""


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class LanguageConfig:
    """The causal language model: pretrained by name or folder, or from scratch by its config."""

    name_or_path: str | None = None
    """Hub id or local folder; its pretrained weights are kept. Exclusive with ``config``."""
    config: dict[str, Any] | None = None
    """A from-scratch model: ``model_type`` (llama, mistral, qwen2, qwen3, ...) and config keys."""

    def __post_init__(self) -> None:
        exactly_one("model.language", name_or_path=self.name_or_path, config=self.config)


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class TokenizerConfig:
    """The tokenizer: an existing one, or a byte-level BPE trained on the recipe's own texts."""

    name_or_path: str | None = None
    """Hub id or folder; defaults to ``model.language.name_or_path``."""
    train_vocab_size: Positive | None = None
    """Train a byte-level BPE of this size on the texts of all stages (from-scratch models)."""


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
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
