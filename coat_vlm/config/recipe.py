"""A whole recipe: the model, the stages in order, evaluation sets, and how the run behaves."""

import dataclasses
from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from coat_vlm.config.fp8 import FP8_PRECISIONS, Fp8Config, MonitorConfig, Precision
from coat_vlm.config.model import STRICT, ModelConfig, NonNegative, Positive
from coat_vlm.config.stage import STAGES, StageConfig, StageName


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class TrackingConfig:
    """Where metrics go besides metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write event files to RUN/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the wandb extra."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class EvalSetConfig:
    """One evaluation set, run by ``coat-vlm eval --run``."""

    task: Literal["yes_no", "multiple_choice", "short_answer"]
    """How answers are extracted and scored."""
    path: str
    """Folder with questions.jsonl (and, usually, the images)."""
    media_root: str | None = None
    """Folder or address that relative image paths start from; defaults to ``path``."""
    require: dict[str, float] = field(default_factory=dict)
    """Smallest allowed value of a metric, in percent; ``coat-vlm eval --run`` fails below it."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Recipe:
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
    weights and round in the linear layers (coat_vlm/fp8/convert.py)."""
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
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Evaluation sets by name."""
    eval_every: NonNegative = 0
    """Steps after which the live weights answer ``eval_samples`` questions of every set (and at the
    end of a stage); 0 asks nothing in training. A stage's ``eval_every_steps`` is about losses."""
    eval_samples: Positive = 64
    """Questions per set asked in training: the same ones each time, at even distances."""

    def __post_init__(self) -> None:
        if self.eval_every and not self.eval_sets:
            raise ValueError("eval_every has no effect without eval_sets; add one, or remove it")
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
            self._check_graphs(self.fp8.cuda_graphs)

    def _check_graphs(self, used: bool) -> None:
        """Refuse what moves weights, or runs blocks again, where CUDA graphs are used."""
        if not used:
            return
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
        """The recipe as plain YAML-ready data."""
        return dataclasses.asdict(self)
