"""One training stage of a recipe: data, modules, LoRA, DPO, packing, optimizer, length."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from coat_vlm.config.model import STRICT, NonNegative, Positive, refuse, require_exactly_one

ModuleName = Literal["vision", "projector", "language"]
StageName = Literal["align", "pretrain", "sft", "dpo"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
ROW_MULTIPLE = 128
"""Packed sequences are padded to a multiple of this many tokens, which suits the FP8 kernels."""

MODULES: tuple[ModuleName, ...] = ("vision", "projector", "language")
STAGES: tuple[StageName, ...] = ("align", "pretrain", "sft", "dpo")


def check_folder_name(name: str) -> str:
    """Return a name that becomes part of a path; ValueError if it could lead elsewhere."""
    clean = name.isprintable() and not {"/", "\\"} & set(name)
    if not clean or not name or name.startswith(".") or len(name) > 100:
        raise ValueError(
            f"{name!r} is not the name of a folder: use at most 100 printable characters, without "
            "slashes, and no dot at the start"
        )
    return name


FolderName = Annotated[str, AfterValidator(check_folder_name)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class SourceConfig:
    """One data source of a mixture."""

    name: str
    """Name in logs, tables and validation losses."""
    path: str
    """Data file, folder, glob or URL of shards, or list of sources (docs/guides/data.md)."""
    media_root: str | None = None
    """Folder or URL to which relative media paths are relative; defaults to ``path``'s folder."""
    format: str | None = None
    """Row format, as ``coat-vlm data lint`` prints it; recognized by content when absent."""
    follow_links: bool = False
    """Allow symbolic links below the media root that point outside it."""
    repeat: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Passes over this source per epoch (default 1); fractions allowed. Exclusive with weight."""
    weight: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Share of an epoch's samples, relative to the weights of the other sources."""
    select: Annotated[str, Field(pattern=r"^(first|last|random) \d+(\.\d+)?%?$")] | None = None
    """Rows to use: ``first 1000``, ``last 5%``, ``random 10%``; all when absent. ``repeat`` and
    ``weight`` apply to the selected rows."""
    exclude: str | None = None
    """Rows to skip: ``bad_samples.jsonl`` of a run, or the list of ``coat-vlm data overlap``."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns with other names, such as ``{image: img_path}`` (docs/guides/data.md)."""
    ignore_fields: list[str] = field(default_factory=list)
    """Fields to ignore. Other unused fields that look like media or loss weights are an error."""
    supervise: Literal["all", "last"] = "all"
    """Answers of a conversation that are supervised: ``all``, or ``last`` for the last one."""
    boxes: Literal["convert", "keep"] = "convert"
    """``convert``: boxes as the model's family writes them (docs/guides/conversations.md);
    ``keep``: they stay as in the data."""

    def __post_init__(self) -> None:
        if self.repeat is not None and self.weight is not None:
            raise ValueError(
                f"source {self.name!r}: both repeat={self.repeat} and weight={self.weight} are "
                "set; keep repeat (passes per epoch) or weight (share of an epoch)"
            )


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ModuleTraining:
    """Training settings of one module of the model in a stage."""

    train: bool
    """False freezes the module and puts it in evaluation mode."""
    lr: Annotated[float, Field(gt=0.0)] | None = None
    """Peak learning rate; required if ``train`` is true, an error otherwise."""

    def __post_init__(self) -> None:
        if self.train and self.lr is None:
            raise ValueError("train is true but lr is missing; set lr, the peak learning rate")
        if not self.train and self.lr is not None:
            raise ValueError(
                f"lr={self.lr} has no effect because train is false; remove one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LoraTraining:
    """LoRA (Hu et al. 2021, arXiv:2106.09685): y = W x + scale * B A x, W frozen.

    Default rank and alpha are LLaVA-1.5's (haotian-liu/LLaVA, scripts/v1_5/finetune_lora.sh), which
    uses a learning rate of 2e-4 for the adapters and 2e-5 for the projector.
    """

    rank: Annotated[int, Field(gt=0)] = 128
    """Rows of A and columns of B (LLaVA's and VILA's ``lora_r``)."""
    alpha: Annotated[int, Field(gt=0)] = 256
    """Numerator of the scale alpha / rank (``lora_alpha``)."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout probability of an adapter's input (``lora_dropout``). Above 0, only linear layers
    are FP8, and norms, activations and attention save more memory."""
    modules: list[ModuleName] = field(default_factory=lambda: ["language"])
    """Modules that train adapters instead of their weights, with the module's lr."""
    target_modules: list[str] | None = None
    """Linear layers that get an adapter, by the last part of the name, for example ``[q_proj,
    v_proj]``; when absent, all of the modules' blocks and of the projector."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Train weight magnitudes as well (DoRA, Liu et al. 2024, arXiv:2402.09353); not with
    ``zero_stage: 3``."""
    quantize: Literal["nf4"] | None = None
    """``nf4``: frozen linear layers of ``modules`` in NF4 through bitsandbytes (QLoRA, Dettmers et
    al. 2023, arXiv:2305.14314), 0.52 bytes per parameter; with precision ``bf16`` or ``fp32`` and
    ``zero_stage`` 0 to 2."""

    def __post_init__(self) -> None:
        if not self.modules or len(set(self.modules)) < len(self.modules):
            raise ValueError(
                f"modules is {self.modules}; name each of vision, projector, language at most "
                "once, and at least one"
            )
        if self.quantize is not None and self.dora:
            raise ValueError(
                f"dora reads the whole base weight, which quantize: {self.quantize} does not keep; "
                "remove one of them"
            )
        if self.target_modules is not None and not self.target_modules:
            raise ValueError(
                "target_modules is empty, so no layer would get an adapter; name linear layers, or "
                "remove target_modules for all of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DpoTraining:
    """Loss on preference pairs (DPO: Rafailov et al. 2023, arXiv:2305.18290), computed by TRL.

    The reference is the model with which the stage starts.
    """

    beta: Annotated[float, Field(gt=0.0)] = 0.1
    """Weight of the log-ratio to the reference; larger values keep the model closer to it."""
    loss_type: Literal[
        "sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard",
        "apo_zero", "apo_down",
    ] = "sigmoid"  # fmt: skip
    """TRL's ``loss_type``; ``sigmoid`` is DPO."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class PackingConfig:
    """Several whole samples per sequence, without attention between them; ``true``: defaults."""

    tokens: Positive | None = None
    """Tokens per packed sequence, including image tokens: a multiple of 128, at least
    ``model.max_length``; default: the smallest such number."""
    images: Positive | None = None
    """Maximum number of images and frames per packed sequence, to limit the vision tower's
    memory. Samples with more are rejected."""
    buffer: Annotated[int, Field(ge=1, le=1000)] = 1000
    """Number of consecutive samples, in training order, from which sequences are filled."""

    def row_tokens(self, max_length: int) -> int:
        """Return the tokens per sequence; ValueError if ``tokens`` does not suit ``max_length``."""
        aligned = -(-max_length // ROW_MULTIPLE) * ROW_MULTIPLE
        if self.tokens is None:
            return aligned
        if self.tokens < max_length:
            raise ValueError(
                f"packing.tokens={self.tokens} is less than model.max_length={max_length}, and "
                "samples are not truncated; raise packing.tokens or lower model.max_length"
            )
        if self.tokens % ROW_MULTIPLE:
            raise ValueError(
                f"packing.tokens={self.tokens} is not a multiple of {ROW_MULTIPLE}; for example "
                f"use {-(-self.tokens // ROW_MULTIPLE) * ROW_MULTIPLE}"
            )
        return self.tokens


def _read_packing(value: Any) -> Any:
    """Convert ``packing: true`` to the default settings and ``false`` to None."""
    if isinstance(value, bool):
        return {} if value else None
    return value


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class StageConfig:
    """One training stage."""

    data: list[SourceConfig]
    """The training mixture."""
    val_data: list[SourceConfig] = field(default_factory=list)
    """Validation sources; the loss of each is reported every eval_steps and at the end."""
    vision: ModuleTraining = field(default_factory=lambda: ModuleTraining(train=False))
    projector: ModuleTraining = field(default_factory=lambda: ModuleTraining(train=False))
    language: ModuleTraining = field(default_factory=lambda: ModuleTraining(train=False))
    lora: LoraTraining | None = None
    """Train LoRA adapters instead of the weights of the language model or other modules."""
    dpo: DpoTraining | None = None
    """Loss on preference pairs; required in the stage ``dpo`` (docs/guides/adapters.md)."""
    template: Literal["tokenizer", "plain", "vicuna_v1", "chatml"] | None = None
    """Chat template of this stage; the model's when absent."""
    batch_size: Positive
    """Samples (with packing: packed sequences; ``dpo``: pairs) per optimizer step, over all
    ranks."""
    micro_batch_size: Positive
    """Samples (with packing: packed sequences) per forward pass on one rank; must divide batch_size
    / world size."""
    sequence_parallel: Positive = 1
    """Number N of consecutive ranks that share the tokens of each micro-batch
    (docs/guides/long_context.md); divides the ranks and the language model's attention heads. Other
    keys count the N ranks as one."""
    packing: Annotated[PackingConfig | None, BeforeValidator(_read_packing)] = None
    """Pack several samples into one sequence: ``true``, or settings. Validation is not packed."""
    balance: bool = False
    """Measure all rows before training, and balance estimated FLOPs across ranks and micro-batches.
    Packing always does."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """Number of passes over the mixture, rounded up to whole steps. Exclusive with max_steps."""
    max_steps: Positive | None = None
    """Number of optimizer steps. Exclusive with epochs."""
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate schedule after warmup, as in transformers: cosine and linear reach min_lr_ratio
    one step after the last one; a run prints the last step's rate at its start."""
    warmup_ratio: Fraction = 0.03
    """Fraction of the steps in which the learning rate rises linearly from zero."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the schedule, divided by the peak. The last of n steps after
    warmup is above it by (1 - min_lr_ratio) / n (linear) or (1 - min_lr_ratio) sin^2(pi / 2n)."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay of matrices; norms, biases and embeddings are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    eval_steps: NonNegative = 0
    """Steps between two validations; 0 validates only at the end."""
    save_steps: NonNegative = 0
    """Steps between two checkpoints; 0 saves only at the end and after a signal."""
    max_bad_samples: NonNegative = 0
    """Number of bad samples to replace and log before the run stops. Transient I/O errors
    are counted separately, with the same limit."""
    max_skipped_steps: NonNegative = 0
    """Steps skipped because of NaN or infinite gradients before the run stops; the count restarts
    when a run is resumed."""

    def __post_init__(self) -> None:
        require_exactly_one("stage", epochs=self.epochs, max_steps=self.max_steps)
        if not any(self.module(name).train for name in MODULES):
            raise ValueError("no module trains; set train: true and lr for at least one module")
        adapted: list[ModuleName] = [] if self.lora is None else self.lora.modules
        for name in adapted:
            if not self.module(name).train:
                model = "language model" if name == "language" else f"{name} module"
                raise ValueError(
                    f"lora has no effect with a frozen {model}; set {name}: {{train: true, lr: "
                    "2.0e-4}, the learning rate of the adapters, or change lora.modules"
                )
        if self.lr_scheduler_type == "constant" and self.min_lr_ratio:
            raise ValueError(
                "min_lr_ratio has no effect with lr_scheduler_type: constant; remove one of them"
            )
        if self.balance and self.packing is not None:
            raise ValueError(
                "balance has no effect with packing, which measures and balances rows; remove it"
            )
        if self.eval_steps and not self.val_data:
            raise ValueError("eval_steps has no effect without val_data; add val_data")
        self._check_dpo()

    def _check_dpo(self) -> None:
        if self.dpo is None:
            return
        dropout = 0.0 if self.lora is None else self.lora.dropout
        refused = {
            "packing": (
                self.packing is not None,
                "TRL computes one sequence per answer; remove it",
            ),
            "balance": (self.balance, "rows are measured by a single answer; remove it"),
            "sequence_parallel": (
                self.sequence_parallel > 1,
                "TRL needs whole sequences; remove it, and lower micro_batch_size to save memory",
            ),
            "lora.dropout": (
                dropout > 0,
                "TRL turns dropout off, as the reference has none; write dropout: 0",
            ),
        }
        refuse("dpo", refused)

    def count_replicas(self, ranks: int) -> int:
        """Return the data parallel replicas of ``ranks``; ValueError if they do not fit."""
        if ranks % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel: {self.sequence_parallel} does not divide the {ranks} "
                f"process{'es' if ranks > 1 else ''} of the run; start a multiple of it, or change "
                "the key"
            )
        return ranks // self.sequence_parallel

    def module(self, name: ModuleName) -> ModuleTraining:
        """Return the training settings of module ``name``."""
        return getattr(self, name)
