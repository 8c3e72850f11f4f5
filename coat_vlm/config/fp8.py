"""A recipe's ``fp8`` and ``monitor`` sections: what becomes FP8, and what watches it."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from coat_vlm.config.model import STRICT, NonNegative, Positive

Precision = Literal["fp32", "bf16", "fp8_linear", "coat", "coat_lean"]
Fp8Precision = Literal["fp8_linear", "coat", "coat_lean"]
BlockPrecision = Literal["bf16", "fp8_linear", "coat", "coat_lean"]
LinearPrecision = Literal["bf16", "fp8_linear"]
FP8_PRECISIONS: tuple[Fp8Precision, ...] = ("fp8_linear", "coat", "coat_lean")

ROUNDINGS = {"nearest": "dre_e4m3", "chance": "dre_e4m3_chance"}
"""What ``fp8.second_moment`` may be but for ``auto`` -> its codec in ``coat_kernels.CODECS``."""

NEAREST_UP_TO = 0.99
"""The largest beta2 with which ``auto`` rounds to nearest. At 0.95 runs
with it end near BF16, at 0.999 they are behind (docs/results.md); between, none was compared."""


def rounding_of(states: str) -> str | None:
    """The ``fp8.second_moment`` that made optimizer states.

    Args:
        states: name of optimizer and codec, as checkpoints record it.

    Returns:
        ``nearest``, ``chance``, or None for states that this setting does not make.
    """
    words = states.split()
    return next((rounding for rounding, codec in ROUNDINGS.items() if codec in words), None)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
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
        if self.optimizer == "adamw":
            self._refuse_moments("fp8.optimizer: adamw")
        if self.released_constants and self.second_moment == "chance":
            raise ValueError(
                "fp8.second_moment: chance has no effect with fp8.released_constants, whose kernel "
                "rounds to nearest; remove one of them"
            )
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

    def _refuse_moments(self, why: str) -> None:
        """Refuse settings of FP8 moments, which have no effect for the reason given."""
        for name, value in {"released_constants": True, "second_moment": "chance"}.items():
            if getattr(self, name) == value:
                raise ValueError(
                    f"fp8.{name} has no effect with {why}; remove it, or set fp8.optimizer: coat"
                )

    def codec(self, beta2: float) -> str:
        """The codec of AdamW's FP8 moments in a stage: a name in ``coat_kernels.CODECS``.

        A step moves the second moment v by up to 1 - beta2 of itself where gradients shrink: 0.1%
        at 0.999. Neighbouring E4M3 values are up to 12.5% apart, so rounding to nearest puts v back
        where it was, and it stays too large (kernels/README.md). Stochastic rounding is right on
        average, at the price of more variance, which costs where beta2 is small. So ``auto``
        chooses by beta2. The codec of ``released_constants`` rounds to nearest.

        Args:
            beta2: the stage's second decay rate.
        """
        if self.released_constants:
            return "released"
        rounding = self.second_moment
        if rounding == "auto":
            rounding = "chance" if beta2 > NEAREST_UP_TO else "nearest"
        return ROUNDINGS[rounding]

    def resolved(self, precision: Fp8Precision) -> "Fp8Config":
        """The same with nothing absent, for a run in this precision.

        Raises:
            ValueError: a setting has no effect in it.
        """
        vision, language = self.vision or precision, self.language or precision
        unset = {"group_size": 16, "cuda_graphs": False, "bf16_forward_first": None}
        for name, value in unset.items():
            if getattr(self, name) != value and not {vision, language} & {"coat", "coat_lean"}:
                raise ValueError(
                    f"fp8.{name} has no effect with vision in {vision} and language in "
                    f"{language}: it is about FP8 blocks; remove it, or use coat or coat_lean"
                )
        optimizer = self.optimizer or ("adamw" if precision == "fp8_linear" else "coat")
        if optimizer == "adamw":
            self._refuse_moments(f"precision {precision}, whose optimizer is torch's AdamW")
        return dataclasses.replace(self, vision=vision, language=language, optimizer=optimizer)


Limit = Annotated[float, Field(gt=0.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class MonitorConfig:
    """Every so many steps a few FP8 blocks run once more, in FP8 and in BF16, on a live input.

    What is measured: :mod:`coat_vlm.fp8.block_error`. Other steps are as without a monitor.
    """

    every: Positive
    """Steps between two measurements."""
    layers: tuple[str, ...] = ("first", "middle", "last")
    """Which of the tower's and of the language model's FP8 blocks: these words, ``all``, or names
    of modules such as ``language_model.model.layers.3``. Of each, the input and the output's
    gradient are kept until the step is over, and both runs take the memory of a whole block."""
    max_error: Limit = 0.25
    """Largest relative error of what a block adds to the residual stream. Where the stream is some
    hundred times larger than that, BF16's own rounding reaches this limit."""
    max_gradient_error: Limit = 0.5
    """Largest relative error of what a block adds to the gradient of its input."""
    max_saturated: Share = 0.1
    """Largest share of the values of a tensor that may be at the format's largest value; of kinds
    with one scale per tensor."""
    max_underflowed: Share = 0.25
    """Largest share of the values of a tensor that may become zero, likewise."""
    action: Literal["warn", "bf16"] = "warn"
    """What follows from a value beyond its limit: a warning, or also that the block computes in
    BF16 from the next step on: in this stage, where it is resumed, and where its model is
    evaluated. Such a block keeps its activations in BF16 and takes their memory. A later stage
    starts with all blocks in FP8 again."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(
                f"monitor.layers is {list(self.layers)}; allowed: different ones of first, middle, "
                "last, all and names of modules, one at least"
            )
