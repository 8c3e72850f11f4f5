"""Recipes: one YAML file, read into frozen dataclasses; unknown keys are errors.

A recipe names the model, the data of each stage and how each stage trains. ``load_recipe`` reads a
file (or a built-in recipe by name), applies dotted overrides such as ``stages.sft.max_steps=10``
and returns a :class:`Recipe`. This module and those of the model, of the media, of packing and of
evaluation are leaves: they import no other room of the project.
"""

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from coat_vlm.eval_config import EvalSchedule
from coat_vlm.lora_config import LoraTraining
from coat_vlm.media_config import ImageConfig as ImageConfig
from coat_vlm.media_config import VideoConfig as VideoConfig
from coat_vlm.model_config import LanguageConfig as LanguageConfig
from coat_vlm.model_config import ModelConfig, exactly_one
from coat_vlm.model_config import ProjectorConfig as ProjectorConfig
from coat_vlm.model_config import TokenizerConfig as TokenizerConfig
from coat_vlm.model_config import VisionConfig as VisionConfig
from coat_vlm.moment_config import check_moments, moment_codec
from coat_vlm.monitor_config import MonitorConfig
from coat_vlm.packing_config import Packing

_STRICT = ConfigDict(extra="forbid")

Precision = Literal["fp32", "bf16", "fp8_linear", "coat", "coat_lean"]
Fp8Precision = Literal["fp8_linear", "coat", "coat_lean"]
BlockPrecision = Literal["bf16", "fp8_linear", "coat", "coat_lean"]
LinearPrecision = Literal["bf16", "fp8_linear"]
ModuleName = Literal["vision", "projector", "language"]
StageName = Literal["align", "pretrain", "sft"]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

MODULES: tuple[ModuleName, ...] = ("vision", "projector", "language")
STAGES: tuple[StageName, ...] = ("align", "pretrain", "sft")
FP8_PRECISIONS: tuple[Fp8Precision, ...] = ("fp8_linear", "coat", "coat_lean")


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
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


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
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


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
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


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Fp8Config:
    """What becomes FP8 under the precisions ``fp8_linear``, ``coat`` and ``coat_lean``."""

    vision: BlockPrecision | None = None
    """Encoder blocks of the vision tower (SigLIP and CLIP); the run's precision when absent."""
    projector: LinearPrecision = "bf16"
    """Linear layers of the projector: few, and all image features pass through them."""
    language: BlockPrecision | None = None
    """Decoder blocks of the language model (Llama, Mistral, Qwen2/2.5, Qwen3), likewise."""
    lm_head: LinearPrecision = "bf16"
    """The output layer."""
    skip_first: NonNegative = 0
    """Blocks at the beginning of the tower and of the language model that stay as they are."""
    skip_last: NonNegative = 0
    """Blocks at the end of the tower and of the language model that stay as they are."""
    bf16_forward_first: NonNegative | None = None
    """Blocks at the beginning of the tower and of the language model, under ``coat`` and
    ``coat_lean``, whose forward products are BF16 (FP32 on a CPU): their rounding reaches all later
    blocks and is more than half of what FP8 costs in training loss (docs/results.md). What they
    keep and their gradients are FP8 as elsewhere, attention's as under ``coat``. When absent a
    sixth of the blocks, at most two; ``skip_first`` counts from the same block. Blocks with LoRA
    adapters are none."""
    group_size: Literal[16, 32, 64, 128] = 16
    """Channels that share a scale in the FP8 copies that norms and activations keep. (Those of
    attention under ``coat_lean`` have one scale per head and token, or the largest group.)"""
    gradients: Literal["e5m2", "e4m3"] | None = None
    """Format of gradients in FP8: ``e4m3`` halves their rounding, ``e5m2`` reaches smaller ones.
    When absent, ``e4m3`` in blocks under ``coat_lean`` and ``e5m2`` elsewhere."""
    weights: Literal["auto", "cache", "recompute"] = "auto"
    """Whether FP8 weights stay for all micro-batches of a step (2 bytes per parameter):
    ``auto`` keeps them where gradients are accumulated and the GPU's memory has room."""
    cuda_graphs: bool = False
    """Launch each block as one CUDA graph, for models so small that the GPU waits for the CPU;
    activations then keep their memory between steps, and packed rows are filled up
    (coat_vlm/fp8/graphs.py). ZeRO 0 to 2; no effect on a CPU and on frozen parts."""
    optimizer: Literal["coat", "adamw"] | None = None
    """``coat``: AdamW with FP8 moments; ``adamw``: torch's, with FP32 moments. When absent,
    ``adamw`` under ``fp8_linear`` and ``coat`` otherwise."""
    released_constants: bool = False
    """Dynamic range expansion with the constants of the paper's released kernel."""
    second_moment: Literal["auto", "nearest", "chance"] = "auto"
    """How FP8 codes of AdamW's second moment v are rounded: ``nearest``, or up or down by
    ``chance``. ``auto`` takes ``chance`` in a stage whose beta2 is above 0.99: at 0.999 a step
    moves v by 0.1%, codes are up to 12.5% apart, and to nearest v stays where it is (0.95 and
    0.999 were measured, nothing between them)."""
    reference: bool = False
    """Run the plain PyTorch arithmetic on a GPU without FP8 tensor cores (slow)."""

    def __post_init__(self) -> None:
        why = "fp8.optimizer: adamw" if self.optimizer == "adamw" else ""
        check_moments(self.released_constants, self.second_moment, why)
        if self.cuda_graphs and self.weights == "cache":
            raise ValueError(
                "fp8.cuda_graphs quantizes weights in every pass, so fp8.weights: cache has no "
                "effect; remove one of them"
            )
        if 0 < (self.bf16_forward_first or 0) <= self.skip_first:
            raise ValueError(
                f"fp8.bf16_forward_first: {self.bf16_forward_first} has no effect with "
                f"fp8.skip_first: {self.skip_first}, as both count from the first block: give more "
                "than skip_first, 0, or nothing"
            )
        blocks = not (self.vision == self.language == "bf16")
        unset = {"skip_first": 0, "skip_last": 0, "bf16_forward_first": None, "group_size": 16}
        for name, value in unset.items():
            if getattr(self, name) != value and not blocks:
                raise ValueError(
                    f"fp8.{name} has no effect with fp8.vision and fp8.language bf16: it is about "
                    "blocks; remove it, or convert blocks"
                )
        if not blocks and self.projector == self.lm_head == "bf16":
            raise ValueError(
                "fp8 selects nothing: vision, language, projector and lm_head are all bf16; use "
                "precision: bf16, or set one of them"
            )

    def codec(self, beta2: float) -> str:
        """Of AdamW's FP8 moments in a stage with this beta2: a name in ``coat_kernels.CODECS``."""
        return moment_codec(self.released_constants, self.second_moment, beta2)

    def resolved(self, precision: Fp8Precision) -> "Fp8Config":
        """The same with nothing absent, for a run in this precision.

        Raises:
            ValueError: a setting has no effect in it.
        """
        vision, language = self.vision or precision, self.language or precision
        given = {
            "group_size": self.group_size != 16,
            "cuda_graphs": self.cuda_graphs,
            "bf16_forward_first": self.bf16_forward_first is not None,
        }
        for name, is_given in given.items():
            if is_given and not {vision, language} & {"coat", "coat_lean"}:
                raise ValueError(
                    f"fp8.{name} has no effect with vision in {vision} and language in "
                    f"{language}: it is about FP8 blocks; remove it, or use coat or coat_lean"
                )
        optimizer = self.optimizer or ("adamw" if precision == "fp8_linear" else "coat")
        if optimizer == "adamw":
            why = f"precision {precision}, whose optimizer is torch's AdamW"
            check_moments(self.released_constants, self.second_moment, why)
        return dataclasses.replace(self, vision=vision, language=language, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class TrackingConfig:
    """Where metrics go besides metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write event files to RUN/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the wandb extra."""


@dataclass(frozen=True, kw_only=True, slots=True, config=_STRICT)
class Recipe(EvalSchedule):
    """A whole run: model, stages in order, evaluation sets."""

    name: str
    """Name in the report and of the default output folder."""
    output_dir: str
    """The run folder."""
    model: ModelConfig
    stages: dict[StageName, StageConfig]
    """The stages to run; they always run in the order align, pretrain, sft."""
    init_from: str | None = None
    """Composed checkpoint folder to start from instead of ``model``'s initial weights: its weights,
    tokenizer and pixel statistics. Images, videos, template and length are the recipe's."""
    seed: int = 0
    """Seed of initialisation, data order and augmentation."""
    precision: Precision = "bf16"
    """``fp32``: all FP32; ``bf16``: BF16 weights and arithmetic with FP32 master weights;
    ``fp8_linear``: the blocks' GEMMs in FP8; ``coat``: also kept activations and optimizer states;
    ``coat_lean``: also what attention keeps (docs/design.md). On a CPU all but the first keep FP32
    weights and round in the linear layers (coat_vlm/fp8/arithmetic.py)."""
    fp8: Fp8Config | None = None
    """What an FP8 precision makes FP8; its defaults when absent."""
    monitor: MonitorConfig | None = None
    """Compare FP8 blocks with BF16 every so many steps; nothing is compared when absent."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    cudnn_attention: bool = False
    """Let cuDNN's attention run where torch prefers it: on Hopper, for rows that are not packed; it
    is faster than the flash kernel (``coat-vlm bench step --attention`` tells by how much). It gave
    NaN gradients once, in rows of 64 tokens (docs/results.md); steps with such gradients change
    nothing and are counted."""
    num_workers: NonNegative = 2
    """Data loading processes per rank; 0 loads in the training process."""
    save_total_limit: Positive = 2
    """Checkpoints kept per stage; older ones are deleted after a new one is complete."""
    log_every_steps: Positive = 10
    """Interval of the printed log line; metrics.jsonl has every step."""
    log_phases: bool = False
    """Time the phases of every step of the main process: data, copy, forward, backward, optimizer
    (``phases`` in metrics.jsonl)."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        EvalSchedule.__post_init__(self)
        if not self.stages:
            raise ValueError(f"recipe {self.name!r} has no stages; add at least one of {STAGES}")
        if self.model.vision is None:
            self._check_text_only()
        for name, stage in self.stages.items():
            if stage.packing is not None:
                try:
                    stage.packing.row_tokens(self.model.max_length)
                except ValueError as error:
                    raise ValueError(f"stages.{name}: {error}") from None
        for key in ("fp8", "monitor"):
            if getattr(self, key) is not None and self.precision not in FP8_PRECISIONS:
                raise ValueError(
                    f"{key} has no effect with precision: {self.precision}; set precision to one "
                    f"of {', '.join(FP8_PRECISIONS)}, or remove {key}"
                )
        if self.fp8 is not None and self.precision in FP8_PRECISIONS:
            self.fp8.resolved(self.precision)  # complains before anything is touched
            if self.fp8.cuda_graphs:
                self._check_graphs()

    def _check_graphs(self) -> None:
        """Refuse what moves weights, or runs blocks again."""
        if self.zero_stage == 3:
            raise ValueError(
                "fp8.cuda_graphs needs weights that stay in their place, and zero_stage: 3 moves "
                "them; set zero_stage to 0, 1 or 2, or remove fp8.cuda_graphs"
            )
        for name, stage in self.stages.items():
            if stage.gradient_checkpointing:
                raise ValueError(
                    f"fp8.cuda_graphs has no effect with stages.{name}.gradient_checkpointing; "
                    "remove one of them"
                )

    def _check_text_only(self) -> None:
        """Refuse what would train or convert a tower or projector that is not there."""
        for name, stage in self.stages.items():
            for part in ("vision", "projector"):
                if stage.module(part).train:
                    raise ValueError(
                        f"stages.{name}.{part} trains, but the model has none (model.vision: "
                        "null); remove it, or give model.vision a tower"
                    )
        if self.fp8 is not None and (self.fp8.vision or self.fp8.projector != "bf16"):
            raise ValueError(
                "fp8.vision and fp8.projector have no effect with model.vision: null; remove them"
            )

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain YAML-ready data, evaluation last as in a recipe's file."""
        data = dataclasses.asdict(self)
        last = {each.name: data.pop(each.name) for each in dataclasses.fields(EvalSchedule)}
        return data | last
