"""One training stage of a recipe: what trains and how fast, its data, LoRA, packed rows, steps."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from coat_vlm.config.model import STRICT, NonNegative, Positive, exactly_one

ModuleName = Literal["vision", "projector", "language"]
StageName = Literal["align", "pretrain", "sft"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

MODULES: tuple[ModuleName, ...] = ("vision", "projector", "language")
STAGES: tuple[StageName, ...] = ("align", "pretrain", "sft")


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class SourceConfig:
    """One data source of a mixture."""

    name: str
    """Name in logs, tables and validation losses."""
    path: str
    """Data file, folder, pattern or address of shards, or list of sources; see data/README.md."""
    media_root: str | None = None
    """Folder or address that relative media paths start from; defaults to ``path``'s folder."""
    format: str | None = None
    """How to read a row, by a name that ``coat-vlm data lint`` shows; by content when absent."""
    follow_links: bool = False
    """Allow links below the media root that lead out of it."""
    repeat: Annotated[float, Field(gt=0.0)] | None = None
    """Passes over this source per epoch (default 1); fractions allowed. Exclusive with weight."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of the samples of an epoch, relative to the other sources' weights."""
    select: Annotated[str, Field(pattern=r"^(first|last|random) \d+(\.\d+)?%?$")] | None = None
    """Rows that take part: ``first 1000``, ``last 5%``, ``random 10%``; all when absent. ``repeat``
    and ``weight`` are about these."""
    seed: NonNegative | None = None
    """Seed of a random ``select``; the recipe's when absent."""
    exclude: str | None = None
    """A ``bad_samples.jsonl`` of an earlier run, whose rows of this source are left out."""

    def __post_init__(self) -> None:
        if self.seed is not None and not (self.select or "").startswith("random"):
            raise ValueError(
                f"source {self.name!r}: seed={self.seed} has no effect without select: random ...; "
                "remove one of them"
            )
        if self.repeat is not None and self.weight is not None:
            raise ValueError(
                f"source {self.name!r}: both repeat={self.repeat} and weight={self.weight} are "
                "set; keep repeat (passes per epoch) or weight (share of an epoch)"
            )


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ModuleTraining:
    """Whether and how fast one module of the model learns in a stage."""

    train: bool
    """False freezes the module (it is also put in evaluation mode)."""
    lr: Annotated[float, Field(gt=0.0)] | None = None
    """Peak learning rate; required when ``train`` is true, refused when it is false."""

    def __post_init__(self) -> None:
        if self.train and self.lr is None:
            raise ValueError("train is true but lr is missing; give this module a peak lr")
        if not self.train and self.lr is not None:
            raise ValueError(
                f"lr={self.lr} has no effect because train is false; remove one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LoraTraining:
    """LoRA (Hu et al. 2021, arXiv:2106.09685): y = W x + alpha / rank * B A x, W frozen.

    The defaults are those of LLaVA-1.5's LoRA script (haotian-liu/LLaVA,
    scripts/v1_5/finetune_lora.sh), which trains with a learning rate of 2e-4 for the adapters and
    2e-5 for the projector.
    """

    rank: Annotated[int, Field(gt=0)] = 128
    """Rows of A and columns of B (LLaVA's and VILA's ``lora_r``)."""
    alpha: Annotated[int, Field(gt=0)] = 256
    """Numerator of the scale (``lora_alpha``)."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Probability that an entry of an adapter's input is dropped in training (``lora_dropout``)."""
    targets: list[str] | None = None
    """Last parts of the names of the linear layers that get an adapter, ``[q_proj, v_proj]`` say;
    all of the language model but its output layer when absent."""

    def __post_init__(self) -> None:
        if self.targets is not None and not self.targets:
            raise ValueError(
                "targets is empty, so nothing would get an adapter; name linear layers, or leave "
                "targets out for all of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class PackingConfig:
    """Several samples in one row, none cut, none seeing another; ``true`` takes the defaults."""

    tokens: Positive | None = None
    """Tokens of a row, image tokens included: a multiple of ``align`` and at least
    ``model.max_length``, which is the default (rounded up)."""
    images: Positive | None = None
    """Images and frames of a row, which limit the vision tower's memory; any number when absent.
    A sample with more is a bad sample."""
    buffer: Annotated[int, Field(ge=1, le=1000)] = 1000
    """Samples that are looked at together, in the order of training, to fill rows."""
    align: Positive = 128
    """Rows are filled up to a multiple of this many tokens (128 suits FP8 kernels)."""

    def row_tokens(self, max_length: int) -> int:
        """Tokens of a row for a model of this ``max_length``.

        Raises:
            ValueError: the longest sample would not fit, or ``tokens`` is no multiple of ``align``.
        """
        aligned = -(-max_length // self.align) * self.align
        if self.tokens is None:
            return aligned
        if self.tokens < max_length:
            raise ValueError(
                f"packing.tokens={self.tokens} is less than model.max_length={max_length}, and no "
                "sample is ever cut; raise packing.tokens or lower model.max_length"
            )
        if self.tokens % self.align:
            raise ValueError(
                f"packing.tokens={self.tokens} is not a multiple of packing.align={self.align}; "
                f"choose {self.tokens // self.align * self.align + self.align}, say"
            )
        return self.tokens


def _switch(value: Any) -> Any:
    """``packing: true`` and ``false`` for the defaults and for none."""
    if isinstance(value, bool):
        return {} if value else None
    return value


Packing = Annotated[PackingConfig | None, BeforeValidator(_switch)]
"""A stage's ``packing`` key."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class StageConfig:
    """One training stage."""

    data: list[SourceConfig]
    """The training mixture."""
    val_data: list[SourceConfig] = field(default_factory=list)
    """Validation sources; each one's loss is reported at the end and every eval_every_steps."""
    vision: ModuleTraining = field(default_factory=lambda: ModuleTraining(train=False))
    projector: ModuleTraining = field(default_factory=lambda: ModuleTraining(train=False))
    language: ModuleTraining = field(default_factory=lambda: ModuleTraining(train=False))
    lora: LoraTraining | None = None
    """Train the language model by LoRA adapters on its frozen weights, at ``language``'s lr."""
    template: Literal["tokenizer", "plain", "vicuna_v1", "chatml"] | None = None
    """Chat template of this stage; the model's when absent."""
    batch_size: Positive
    """Samples (packed: rows) per optimizer step, over all ranks and micro-batches."""
    micro_batch_size: Positive
    """Samples (packed: rows) per forward pass on one rank; must divide batch_size / world size."""
    packing: Packing = None
    """Fill rows with several samples; ``true``, or settings. Validation is not packed."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """Length in passes over the mixture. Exclusive with max_steps."""
    max_steps: Positive | None = None
    """Length in optimizer steps. Exclusive with epochs."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warmup; cosine and linear end at min_lr_ratio."""
    warmup_ratio: Fraction = 0.03
    """Share of the steps in which the learning rate rises linearly from zero."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate over the peak."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay of matrices; norms, biases and embeddings have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW's epsilon."""
    grad_clip: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    eval_every_steps: NonNegative = 0
    """Validation interval; 0 validates at the end only."""
    save_every_steps: NonNegative = 0
    """Checkpoint interval; 0 saves at the end only."""
    max_bad_samples: NonNegative = 0
    """Bad samples that may be replaced and listed before the run stops; and as many, counted by
    themselves, that a network or server failed to give."""
    max_skipped_steps: NonNegative = 0
    """Steps that may be skipped because a gradient is NaN or infinite before the run stops;
    counted anew when a run is resumed."""
    max_bad_fraction: Fraction | None = None
    """Beyond max_bad_samples: bad samples allowed as a share of all samples met so far."""

    def __post_init__(self) -> None:
        exactly_one("stage", epochs=self.epochs, max_steps=self.max_steps)
        if not any(self.module(name).train for name in MODULES):
            raise ValueError("no module trains; set train: true and lr for at least one module")
        if self.lora is not None and not self.language.train:
            raise ValueError(
                "lora has no effect with a frozen language model; set language: {train: true, "
                "lr: 2.0e-4}, the learning rate of the adapters, or remove lora"
            )
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ValueError(
                "min_lr_ratio has no effect with schedule: constant; remove one of them"
            )
        if self.eval_every_steps and not self.val_data:
            raise ValueError("eval_every_steps has no effect without val_data; add val_data")
        if self.max_bad_fraction is not None and not self.max_bad_samples:
            raise ValueError(
                "max_bad_fraction needs max_bad_samples, the number that is allowed while too few "
                "samples are met for a share to say anything; add it"
            )

    def module(self, name: ModuleName) -> ModuleTraining:
        """The training settings of module ``name``."""
        return {"vision": self.vision, "projector": self.projector, "language": self.language}[name]
