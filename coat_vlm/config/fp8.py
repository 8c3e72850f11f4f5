"""A recipe's ``fp8`` and ``monitor`` sections: what is converted to FP8, and its monitoring."""

import dataclasses
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from coat_vlm.config.model import STRICT, NonNegative, Positive

Precision = Literal["fp32", "bf16", "fp8_linear", "coat", "coat_lean"]
Fp8Precision = Literal["fp8_linear", "coat", "coat_lean"]
BlockPrecision = Literal["bf16", "fp8_linear", "coat", "coat_lean"]
MasterWeights = Literal["auto", "fp32", "low_bits"]
LinearPrecision = Literal["bf16", "fp8_linear"]
HeadPrecision = Literal["bf16", "fp8_gradients", "fp8_linear"]
FP8_PRECISIONS: tuple[Fp8Precision, ...] = ("fp8_linear", "coat", "coat_lean")

ROUNDINGS = {"nearest": "dre_e4m3", "stochastic": "dre_e4m3_stochastic"}
"""``fp8.second_moment`` other than ``auto``, which is stochastic -> name of a codec of
``coat_kernels``."""

CudaGraphs = Literal["auto"] | bool
"""Which FP8 blocks are launched as CUDA graphs: those for which the GPU waits, all, or none."""

SecondMoment = Annotated[
    Literal["auto", "nearest", "stochastic"],
    BeforeValidator(lambda value: "stochastic" if value == "chance" else value),  # deprecated name
]


def rounding_of(states: str) -> str | None:
    """Return the ``fp8.second_moment`` that optimizer states were written with.

    Args:
        states: names of optimizer and codec, as checkpoints record them.

    Returns:
        ``nearest``, ``stochastic``, or None for states that do not depend on the setting.
    """
    words = states.split()
    return next((rounding for rounding, codec in ROUNDINGS.items() if codec in words), None)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Fp8Config:
    """What becomes FP8 under the precisions ``fp8_linear``, ``coat`` and ``coat_lean``."""

    vision: BlockPrecision | None = None
    """Encoder blocks of the vision tower: SigLIP, CLIP, and the towers in the table of
    docs/guides/huggingface.md; the run's precision when absent."""
    projector: LinearPrecision = "bf16"
    """Linear layers of the projector: there are few, and all image features pass through them."""
    language: BlockPrecision | None = None
    """Decoder blocks of the language model: Llama, Mistral, Qwen2, Qwen2.5, Qwen3, Gemma 3, and
    those of Qwen2.5-VL and Qwen3-VL; the run's precision when absent."""
    lm_head: HeadPrecision | None = None
    """The output layer. ``fp8_gradients``: logits in BF16, and in this project's loss the
    grad-input and grad-weight GEMMs in FP8; ``fp8_linear``: all three GEMMs in FP8. When absent,
    ``fp8_gradients`` if ``language`` is ``coat`` or ``coat_lean``, otherwise ``bf16``."""
    skip_first: NonNegative = 0
    """Blocks at the beginning of the tower and of the language model that are not converted."""
    skip_last: NonNegative = 0
    """Blocks at the end of the tower and of the language model that are not converted."""
    bf16_forward_first: NonNegative | None = None
    """Blocks at the beginning of the tower and of the language model, under ``coat`` and
    ``coat_lean``, whose forward GEMMs run in BF16 (FP32 on a CPU): their rounding error reaches all
    later blocks and is more than half of what FP8 costs in training loss
    (docs/experiments/fp8_training_loss.md).
    Their saved activations and gradients are FP8 as in other blocks, and attention saves what it
    saves under ``coat``, as a BF16 GEMM cannot be repeated from its FP8 input. When absent, a sixth
    of the blocks, at most two. ``skip_first`` counts from the same block. Does not apply to blocks
    with LoRA adapters."""
    group_size: Literal[16, 32, 64, 128] = 16
    """Channels per scale in the quantized activations that norms and activation functions save."""
    gradients: Literal["e5m2", "e4m3"] | None = None
    """FP8 format of gradients: ``e5m2``, the default, has the wider range, ``e4m3`` half the
    rounding error. In a pass over 50M tokens ``e4m3`` was no better (docs/results.md)."""
    weights: Literal["auto", "cache", "recompute"] = "auto"
    """Whether all micro-batches of a step share FP8 weights (2 bytes per parameter: row-major for
    the forward GEMM and transposed for the grad-input GEMM, one byte each): ``auto`` caches them if
    gradients are accumulated, no block is a CUDA graph and they fit into half of the GPU's free
    memory."""
    cuda_graphs: CudaGraphs = "auto"
    """Launch each block as one CUDA graph, where the GPU would wait for the CPU. The activations of
    such blocks are statically allocated (coat_vlm/fp8/cuda_graphs.py). ``auto`` decides after
    two steps: it captures blocks that the GPU computes faster than the CPU launches them, if half
    of the memory that a step leaves suffices. ``true`` captures all blocks, and pads packed rows to
    one length. ZeRO 0 to 2; no effect on a CPU, on frozen parts and with recomputation."""
    optimizer: Literal["coat", "adamw"] | None = None
    """``coat``: AdamW with FP8 moments; ``adamw``: torch's, with FP32 moments. When absent,
    ``adamw`` under ``fp8_linear`` and ``coat`` otherwise."""
    released_constants: bool = False
    """Dynamic range expansion with the constants of the paper's released kernel."""
    second_moment: SecondMoment = "auto"
    """Rounding of AdamW's second moment v to FP8: ``nearest`` or ``stochastic``. ``auto`` is
    ``stochastic``: a step reduces v by at most a share of 1 - beta2, E4M3 values are up to 12.5%
    apart, and v rounded to nearest stays too large where gradients shrink. ``nearest`` is the
    paper's."""
    reference: bool = False
    """Run the plain PyTorch arithmetic on a GPU without FP8 tensor cores (slow)."""

    def __post_init__(self) -> None:
        if self.optimizer == "adamw":
            self._refuse_moments("fp8.optimizer: adamw")
        if self.released_constants and self.second_moment == "stochastic":
            raise ValueError(
                "fp8.second_moment: stochastic has no effect with fp8.released_constants, whose "
                "kernel rounds to nearest; remove one of them"
            )
        if self.cuda_graphs is True and self.weights == "cache":
            raise ValueError(
                "fp8.cuda_graphs: true quantizes weights in every pass, so fp8.weights: cache "
                "has no effect; remove one of them"
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
        if not blocks and self.projector == "bf16" and self.lm_head in ("bf16", None):
            raise ValueError(
                "fp8 selects nothing: vision, language, projector and lm_head are all bf16; use "
                "precision: bf16, or set one of them"
            )

    def _refuse_moments(self, why: str) -> None:
        """Raise an error if FP8 moments are configured although they have no effect."""
        for name, value in {"released_constants": True, "second_moment": "stochastic"}.items():
            if getattr(self, name) == value:
                raise ValueError(
                    f"fp8.{name} has no effect with {why}; remove it, or set fp8.optimizer: coat"
                )

    @property
    def codec(self) -> str:
        """Codec of AdamW's FP8 moments: a name in ``coat_kernels.CODECS``.

        The codec of ``released_constants`` rounds to nearest.
        """
        if self.released_constants:
            return "released"
        return ROUNDINGS["stochastic" if self.second_moment == "auto" else self.second_moment]

    def resolved(self, precision: Fp8Precision) -> "Fp8Config":
        """Return a copy with the defaults of ``precision`` in place of absent values.

        Raises:
            ValueError: a setting has no effect in this precision.
        """
        vision, language = self.vision or precision, self.language or precision
        own = {"group_size": self.group_size != 16, "cuda_graphs": self.cuda_graphs is True}
        own["bf16_forward_first"] = self.bf16_forward_first is not None
        for name, given in own.items():
            if given and not {vision, language} & {"coat", "coat_lean"}:
                raise ValueError(
                    f"fp8.{name} has no effect with vision in {vision} and language in "
                    f"{language}: it is about FP8 blocks; remove it, or use coat or coat_lean"
                )
        optimizer = self.optimizer or ("adamw" if precision == "fp8_linear" else "coat")
        if optimizer == "adamw":
            self._refuse_moments(f"precision {precision}, whose optimizer is torch's AdamW")
        in_fp8 = language in ("coat", "coat_lean")
        head = self.lm_head or ("fp8_gradients" if in_fp8 else "bf16")
        return dataclasses.replace(
            self, vision=vision, language=language, lm_head=head, optimizer=optimizer
        )


Limit = Annotated[float, Field(gt=0.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class MonitorConfig:
    """Compares FP8 blocks with BF16 every ``every`` steps, on the inputs of training.

    The metrics are in :mod:`coat_vlm.fp8.block_error`. Other steps are not affected.
    """

    every: Positive
    """Steps between two measurements."""
    layers: tuple[str, ...] = ("first", "middle", "last")
    """FP8 blocks of the tower and of the language model to compare: these words, ``all``, or names
    of modules such as ``language_model.model.layers.3``. The input and the output gradient of each
    are saved until the step is over, and both runs take the memory of a whole block."""
    max_error: Limit = 0.25
    """Largest relative error of what a block adds to the residual stream. If the stream is some
    hundred times larger than what the block adds, BF16's own rounding reaches this limit."""
    max_gradient_error: Limit = 0.5
    """Largest relative error of what a block adds to the gradient of its input."""
    max_saturated: Share = 0.1
    """Largest share of a tensor's values that may be at the format's largest value, for tensors
    with one scale per tensor."""
    max_underflowed: Share = 0.25
    """Largest share of a tensor's values that may become zero, for tensors with one scale per
    tensor."""
    action: Literal["warn", "bf16"] = "warn"
    """Action when a value exceeds its limit: ``warn``, or ``bf16``, which also runs the block in
    BF16 from the next step on: in this stage, after a resume, and when the stage's model is
    evaluated. A block in BF16 saves its activations in BF16 and needs their memory. A later stage
    starts with all blocks in FP8 again."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(
                f"monitor.layers is {list(self.layers)}; it must have at least one entry and no "
                "duplicates: first, middle, last, all, or names of modules"
            )
