"""A whole recipe: model, stages, evaluation sets, and settings of the run."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from coat_vlm.config.fp8 import FP8_PRECISIONS, Fp8Config, MasterWeights, MonitorConfig, Precision
from coat_vlm.config.model import STRICT, ModelConfig, NonNegative, Positive, refuse
from coat_vlm.config.stage import STAGES, FolderName, StageConfig, StageName


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class TrackingConfig:
    """Loggers in addition to metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write event files to RUN/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the wandb extra."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DivergenceConfig:
    """What happens when the loss or the gradient norm leaves its usual range or is not finite."""

    action: Literal["warn", "stop"] = "warn"
    """``warn``: print a warning and mark checkpoints, which then never replace good ones.
    ``stop``: end the run; ``--resume auto`` continues from before the spike."""
    window: Annotated[int, Field(ge=16)] = 128
    """Number of past steps that define the usual range."""
    threshold: Annotated[float, Field(gt=0.0)] = 10.0
    """Robust standard deviations above the median of the window at which a step is out of range."""
    patience: Positive = 5
    """Consecutive steps out of range after which ``stop`` acts."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class MemoryConfig:
    """GPU memory for which ``coat-vlm train`` chooses settings before it starts."""

    gpu_gb: Annotated[float, Field(gt=0.0)]
    """Nominal GPU memory, for example 80. Picks the fastest settings whose planned peak plus 3% is
    at most this number of 10^9 bytes; GPUs have this number of GiB, which leaves memory for CUDA,
    communication and fragmentation."""
    choose: list[str] | None = None
    """Keys to choose: ``stages.NAME.micro_batch_size``, ``stages.NAME.gradient_checkpointing``;
    when absent, the keys that the recipe does not set. ``fp8.recompute_qkv: auto`` becomes ``true``
    if nothing fits without it, or if more stages would need checkpointing. A single process with
    CoatAdamW also gets ``zero_stage: 0``, unless ``master_weights`` is ``fp32``. The chosen values
    are in the run's recipe.yaml."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LimitsConfig:
    """Limits for compressed files, and for images and videos at URLs."""

    archive_bytes: Positive | None = None
    """Maximum unpacked bytes of a compressed file; default 250 times its size, at least 1 GiB."""
    remote_bytes: Positive | None = None
    """Maximum bytes of an image or video over http, held in memory; default 2 GiB."""
    remote_s: Annotated[float, Field(gt=0.0)] | None = None
    """Maximum seconds to fetch an image or video over http; default 300."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class EvalSetConfig:
    """One evaluation set, run by ``coat-vlm eval --model RUN``."""

    task: Literal["yes_no", "multiple_choice", "short_answer"]
    """Extraction and scoring of answers."""
    path: str
    """Folder with questions.jsonl (and, usually, the images)."""
    media_root: str | None = None
    """Folder or URL to which relative image paths are relative; defaults to ``path``."""
    require: dict[str, float] = field(default_factory=dict)
    """Minimum value of a metric, in percent; ``coat-vlm eval --model RUN`` fails below it."""


CHOSEN_IN_STAGES = ("micro_batch_size", "gradient_checkpointing")
"""Keys of a stage that ``memory`` may choose."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Recipe:
    """A whole run: model, stages in order, evaluation sets."""

    name: str
    """Name of the run in the report and in Weights & Biases."""
    output_dir: str
    """The run folder."""
    model: ModelConfig
    stages: dict[StageName, StageConfig]
    """The stages to run; they always run in the order align, pretrain, sft, dpo."""
    init_from: str | None = None
    """A trained model that provides the initial weights, tokenizer and pixel statistics: the
    folder of a run, a model, a checkpoint (``RUN/STAGE/checkpoints/step-...``) or an adapter. Image
    and video settings, template and length come from the recipe. With ``model.pretrained``, a model
    of the same family, whose whole processor is used."""
    seed: NonNegative = 0
    """Seed of initialization and data order."""
    precision: Precision = "bf16"
    """``fp32``; ``bf16``: BF16 weights and arithmetic with FP32 master weights; ``fp8_linear``:
    GEMMs of the blocks in FP8; ``coat``: also saved activations and optimizer states
    (guides/fp8.md). On a CPU, all except ``fp32`` use FP32 weights and round in the linear
    layers."""
    fp8: Fp8Config | None = None
    """Settings of an FP8 precision; the precision's defaults when absent."""
    monitor: MonitorConfig | None = None
    """Periodic comparison of FP8 blocks with BF16; off when absent."""
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    master_weights: MasterWeights = "auto"
    """How FP32 master weights are stored. ``fp32``: DeepSpeed's FP32 copy, 4 bytes
    per trained parameter. ``low_bits``: the BF16 weight is the upper half of the same value, and
    CoatAdamW stores the low 16 bits, 2 bytes; gradients stay in BF16 until the optimizer reads
    them, so a step is also faster. Both are divided by the ranks under ZeRO. ``low_bits`` needs
    precision ``coat`` (or ``fp8.optimizer: coat``). ``auto``: ``low_bits`` with CoatAdamW on a GPU;
    otherwise ``fp32``."""
    memory: MemoryConfig | None = None
    """Choose settings that fit into GPU memory; a stage may then omit ``micro_batch_size``."""
    cudnn_attention: Literal["auto"] | bool = "auto"
    """Allow cuDNN attention where torch prefers it: on Hopper, without packing, where
    it is faster than the flash kernel. ``auto``: except where its gradients may be NaN (tokens
    modulo 128 are 64, and attention has a mask or is not causal; coat_vlm/model/cudnn.py)."""
    num_workers: NonNegative = 2
    """Data loading processes per rank; 0 loads in the training process."""
    data_timeout_s: NonNegative = 600
    """Seconds that a step waits for a loader process before training stops and names the rows; 0,
    or no loader processes (``num_workers: 0``): no limit."""
    collective_timeout_s: Positive = 1800
    """Seconds that a rank waits for the others in a collective operation before it exits;
    longer than any work of a single rank, such as saving the model. After one minute, the main
    process prints which rank is missing."""
    save_total_limit: Positive = 2
    """Checkpoints per stage; older ones are deleted after a new one is complete."""
    async_save: bool = True
    """Continue training while a checkpoint is written from a copy in host memory: 12 bytes per
    trained parameter with FP32 master weights and moments, about 6 with FP8 moments, and the
    weights of frozen modules, divided by the ranks."""
    log_every_steps: Positive = 10
    """Steps between two printed log lines; metrics.jsonl has every step."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    network: Literal["allow", "deny"] = "allow"
    """``allow``: sources and media roots may be URLs, and rows may name images and videos
    at public hosts. ``deny``: neither."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    eval_sets: dict[FolderName, EvalSetConfig] = field(default_factory=dict)
    """Evaluation sets by name; RUN/eval has a folder of this name for each."""
    eval_every: NonNegative = 0
    """Steps between two evaluations during training, on ``eval_samples`` questions of every set
    (also at the end of each stage); 0 turns them off. Weights & Biases shows some
    answers. For validation losses, see ``eval_steps`` of a stage."""
    eval_samples: Positive = 64
    """Questions per set in an evaluation during training: evenly spaced, the same each time."""

    def __post_init__(self) -> None:
        if self.eval_every and not self.eval_sets:
            raise ValueError("eval_every has no effect without eval_sets; add one, or remove it")
        if not self.stages:
            raise ValueError(f"recipe {self.name!r} has no stages; add at least one of {STAGES}")
        self._check_model()
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
            self.fp8.resolved(self.precision)  # raises if the settings contradict the precision
            self._check_graphs(self.fp8)
        self._check_low_bits()
        for name, stage in self.stages.items():
            self._check_lora(f"stages.{name}.lora", stage)
            self._check_sequence_parallel(f"stages.{name}.sequence_parallel", stage)
        self._check_dpo()
        self._check_choose()

    @property
    def optimizer(self) -> Literal["coat", "adamw"]:
        """CoatAdamW or torch's AdamW."""
        if self.precision not in FP8_PRECISIONS:
            return "adamw"
        chosen = (self.fp8 or Fp8Config()).resolved(self.precision).optimizer
        return "coat" if chosen == "coat" else "adamw"

    def has_low_bits(self, *, gpu: bool) -> bool:
        """Whether the optimizer has the low bits of the master weights; resolves ``auto``."""
        if self.master_weights != "auto":
            return self.master_weights == "low_bits"
        return gpu and self.optimizer == "coat"

    def _check_low_bits(self) -> None:
        if self.master_weights == "low_bits" and self.optimizer != "coat":
            raise ValueError(
                f"master_weights: low_bits needs CoatAdamW, but precision: "
                f"{self.precision} uses torch's AdamW; set precision to coat (or "
                "fp8.optimizer to coat), or remove master_weights"
            )

    def _check_lora(self, key: str, stage: StageConfig) -> None:
        lora = stage.lora
        if lora is not None and lora.dora and self.zero_stage == 3:
            raise ValueError(
                f"{key}.dora reads the whole base weight, which peft does not gather with "
                "zero_stage: 3; set zero_stage to 0, 1 or 2, or remove dora"
            )
        if lora is None or lora.quantize is None:
            return
        key = f"{key}.quantize: {lora.quantize}"
        if self.precision in FP8_PRECISIONS:
            raise ValueError(
                f"{key} has no effect with precision: {self.precision}, whose blocks compute in "
                "FP8 (coat stores frozen weights in FP8, 1 byte per parameter); remove quantize, "
                "or set precision to bf16"
            )
        if self.zero_stage == 3:
            raise ValueError(
                f"{key} is not supported with zero_stage: 3, which partitions the weights; set "
                "zero_stage to 0, 1 or 2, or remove quantize"
            )

    def _check_sequence_parallel(self, key: str, stage: StageConfig) -> None:
        size, model = stage.sequence_parallel, self.model
        if size == 1:
            return
        if model.attn_implementation != "sdpa":
            raise ValueError(
                f"{key} needs model.attn_implementation: sdpa, not {model.attn_implementation}; "
                "change one of them"
            )
        if model.max_length < size:
            raise ValueError(
                f"{key}: {size} is more than model.max_length={model.max_length}, so some ranks "
                "would have no tokens; lower it"
            )
        if self.fp8 is not None and self.fp8.cuda_graphs is True:
            raise ValueError(
                f"fp8.cuda_graphs: true is not supported with {key}, whose ranks exchange tokens "
                "inside the blocks; remove one of them"
            )

    def _check_dpo(self) -> None:
        for name, stage in self.stages.items():
            if name == "dpo" and stage.dpo is None:
                raise ValueError(
                    "stages.dpo needs the settings of its loss; add dpo: {beta: 0.1}, or name the "
                    "stage sft"
                )
            if name != "dpo" and stage.dpo is not None:
                raise ValueError(
                    f"stages.{name}.dpo has no effect: only the stage named dpo trains on "
                    "preference pairs; rename the stage, or remove the key"
                )
        if "dpo" not in self.stages:
            return
        fp8 = self.fp8 or Fp8Config()
        refused = {
            "zero_stage: 3": (
                self.zero_stage == 3,
                "the reference shares the frozen weights, which must be whole; set 0, 1 or 2",
            ),
            "memory": (
                self.memory is not None,
                "coat-vlm plan does not count the reference; set micro_batch_size and remove it",
            ),
            "fp8.lm_head": (
                fp8.lm_head not in (None, "bf16"),
                "TRL reads the weight of the output layer; remove it",
            ),
            "fp8.cuda_graphs: true": (
                fp8.cuda_graphs is True,
                "rows have different lengths; remove it",
            ),
        }
        refuse("stages.dpo", refused)

    def _check_choose(self) -> None:
        known = [f"stages.{name}.{key}" for name in self.stages for key in CHOSEN_IN_STAGES]
        for key in (self.memory and self.memory.choose) or ():
            if key not in known:
                raise ValueError(
                    f"memory.choose: {key!r} cannot be chosen; use some of {', '.join(known)}"
                )

    def _check_graphs(self, fp8: Fp8Config) -> None:
        if fp8.cuda_graphs is not True:
            return
        if self.zero_stage == 3:
            raise ValueError(
                "fp8.cuda_graphs: true needs weights at fixed addresses, but zero_stage: 3 moves "
                "them; set zero_stage to 0, 1 or 2, or remove fp8.cuda_graphs"
            )
        for name, stage in self.stages.items():
            if stage.gradient_checkpointing:
                raise ValueError(
                    f"fp8.cuda_graphs: true has no effect with stages.{name}."
                    "gradient_checkpointing; remove one of them"
                )

    def _check_model(self) -> None:
        if self.model.vision is None:
            self._check_text_only()
        if self.model.pretrained is None:
            return
        for name, stage in self.stages.items():
            if stage.template is not None:
                raise ValueError(
                    f"stages.{name}.template has no effect with model.pretrained, whose processor "
                    "writes conversations; remove it"
                )
            if stage.packing is not None and self.model.attn_implementation != "sdpa":
                raise ValueError(
                    f"stages.{name}.packing with model.pretrained needs model.attn_implementation: "
                    f"sdpa, not {self.model.attn_implementation}; remove packing, or set sdpa"
                )

    def _check_text_only(self) -> None:
        for name, stage in self.stages.items():
            for part in ("vision", "projector"):
                if stage.module(part).train:
                    raise ValueError(
                        f"stages.{name}.{part} trains, but the model has none (model.vision: "
                        "null); remove it, or set model.vision"
                    )
        if self.fp8 is not None and (self.fp8.vision or self.fp8.projector != "bf16"):
            raise ValueError(
                "fp8.vision and fp8.projector have no effect with model.vision: null; remove them"
            )
