"""A recipe's ``fp8`` and ``monitor`` sections: what is converted to FP8, and its monitoring."""

import dataclasses
from typing import Literal

from pydantic.dataclasses import dataclass

from coat_vlm.config.model import STRICT, Positive

Precision = Literal["fp32", "bf16", "fp8_linear", "coat"]
Fp8Precision = Literal["fp8_linear", "coat"]
BlockPrecision = Literal["bf16", "fp8_linear", "coat"]
MasterWeights = Literal["auto", "fp32", "low_bits"]
LinearPrecision = Literal["bf16", "fp8_linear"]
HeadPrecision = Literal["bf16", "fp8_gradients", "fp8_linear"]
FP8_PRECISIONS: tuple[Fp8Precision, ...] = ("fp8_linear", "coat")

CudaGraphs = Literal["auto"] | bool
"""Which FP8 blocks are launched as CUDA graphs: those for which the GPU waits, all, or none."""


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Fp8Config:
    """What becomes FP8 under the precisions ``fp8_linear`` and ``coat``."""

    vision: BlockPrecision | None = None
    """Encoder blocks of the vision tower: SigLIP, CLIP, and the towers in the table of
    docs/reference/fp8_blocks.md; the run's precision when absent."""
    projector: LinearPrecision = "bf16"
    """Linear layers of the projector: there are few, and all image features pass through them."""
    language: BlockPrecision | None = None
    """Decoder blocks of the language model: Llama, Mistral, Qwen, Gemma, and those in the table of
    docs/reference/fp8_blocks.md; the run's precision when absent."""
    lm_head: HeadPrecision | None = None
    """The output layer. ``fp8_gradients``: logits in BF16, and in this project's loss the
    grad-input and grad-weight GEMMs in FP8; ``fp8_linear``: all three GEMMs in FP8, with gradients
    rounded to nearest, which costs more (docs/experiments/fine_tuning.md). When absent,
    ``fp8_gradients`` if ``language`` is ``coat``, otherwise ``bf16``."""
    bf16_forward: tuple[str, ...] | None = None
    """Blocks whose forward GEMMs run in BF16 (FP32 on a CPU) under ``coat``, the most sensitive
    ones (docs/experiments/fine_tuning.md): ``first`` and ``last`` of the tower and of the language
    model, ``all``, or names of modules such as ``language_model.model.layers.3``. When absent,
    ``first`` and ``last`` of parts with at least 6 blocks."""
    group_size: Literal[16, 32, 64, 128] = 16
    """Channels per scale in the quantized activations that norms and activation functions save."""
    recompute_qkv: Literal["auto"] | bool = "auto"
    """Under ``coat``, recompute q, k and v in backward instead of saving them: identical
    results, less memory, 3 to 7% slower. Blocks whose forward GEMMs are BF16 always save them.
    ``auto``: if ``memory`` finds that the recipe does not fit without it, or if the first two
    steps leave less than 3% of the GPU's memory free (not checked with ``cuda_graphs: true`` or
    gradient checkpointing)."""
    weights: Literal["auto", "recompute"] = "auto"
    """Whether the micro-batches of a step share FP8 weights (2 bytes per parameter): ``auto``: if
    gradients are accumulated, no block is a CUDA graph, and the weights fit into half of the free
    GPU memory; ``recompute``: never."""
    cuda_graphs: CudaGraphs = "auto"
    """Launch each block as one CUDA graph, with static memory. ``auto`` decides after two steps: it
    captures blocks if the GPU waits for their launches in at least 3% of the second step, and half
    of the memory that a step leaves free suffices. ``true`` captures all blocks, and pads packed
    sequences to one length. ZeRO 0 to 2; no effect on a CPU, on a frozen tower or with
    recomputation."""
    optimizer: Literal["coat", "adamw"] | None = None
    """``coat``: AdamW with FP8 moments (the second one rounded stochastically); ``adamw``:
    torch's, with FP32 moments. When absent, ``adamw`` under ``fp8_linear`` and ``coat``
    otherwise."""

    def __post_init__(self) -> None:
        blocks = not (self.vision == self.language == "bf16")
        if not blocks and self.projector == "bf16" and self.lm_head in ("bf16", None):
            raise ValueError(
                "fp8 selects nothing: vision, language, projector and lm_head are all bf16; use "
                "precision: bf16, or set one of them"
            )

    def resolved(self, precision: Fp8Precision) -> "Fp8Config":
        """Replace absent values by the precision's; ValueError for settings without effect."""
        vision, language = self.vision or precision, self.language or precision
        of_blocks = {
            "group_size": self.group_size != 16,
            "cuda_graphs": self.cuda_graphs is True,
            "recompute_qkv": self.recompute_qkv is True,
            "bf16_forward": self.bf16_forward is not None,
        }
        for name, given in of_blocks.items():
            if given and "coat" not in (vision, language):
                raise ValueError(
                    f"fp8.{name} has no effect with vision in {vision} and language in "
                    f"{language}: it is about FP8 blocks; remove it, or use coat"
                )
        optimizer = self.optimizer or ("adamw" if precision == "fp8_linear" else "coat")
        head = self.lm_head or ("fp8_gradients" if language == "coat" else "bf16")
        return dataclasses.replace(
            self, vision=vision, language=language, lm_head=head, optimizer=optimizer
        )


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class MonitorConfig:
    """Compares FP8 blocks with BF16 on training inputs; large errors print warnings."""

    every: Positive
    """Steps between two measurements."""
    layers: tuple[str, ...] = ("first", "middle", "last")
    """FP8 blocks to compare: these words, ``all``, or names of modules such as
    ``language_model.model.layers.3``. The input and the output gradient of each are saved until the
    step is over."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise ValueError(
                f"monitor.layers is {list(self.layers)}; it must have at least one entry and no "
                "duplicates: first, middle, last, all, or names of modules"
            )
