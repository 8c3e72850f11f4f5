"""Estimates the memory of CUDA graphs of FP8 blocks (``fp8.cuda_graphs``).

Graphs hold the activations that their blocks save, also in the optimizer step, with the temporary
tensors of one block and static copies of its input and output. :data:`OVERHEAD` was measured on an
H200 (docs/experiments/cuda_graphs.md): the graphs of 26 and 24 blocks took 1.20 to 1.33 times the
activations, and the peak of a step rose by 0.16 to 0.38 of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coat_vlm.config import CudaGraphs
from coat_vlm.fp8 import fp8_blocks
from coat_vlm.fp8.memory_choices import RowLoad, choose_rows
from coat_vlm.model.vlm import CoatVlm
from coat_vlm.plan.activations import Activations
from coat_vlm.plan.zero import RankMemory

OVERHEAD = 0.33
"""What graphs take besides the saved activations, as a share of these."""


@dataclass(frozen=True, slots=True)
class PlannedGraphs:
    """The rows of blocks that may be captured as CUDA graphs."""

    mode: CudaGraphs
    """``fp8.cuda_graphs`` of the stage: False where graphs are not supported."""
    blocks: dict[str, tuple[int, int]]
    """Part of the model -> number of its FP8 blocks and of their parameters."""
    tokens: dict[str, int]
    """Part -> tokens of a row of a micro-batch."""

    def find_captured(
        self, activations: Activations, micro_batch: int, spare: float, *, accumulates: bool
    ) -> dict[str, RowLoad]:
        """Return the rows of blocks that training captures, with ``spare`` bytes under ``auto``."""
        loads = {
            part: RowLoad(*counts, self.tokens[part] * micro_batch, activations.saved[part])
            for part, counts in self.blocks.items()
        }
        if self.mode != "auto":
            return loads if self.mode else {}
        chosen = choose_rows(list(loads.values()), spare, accumulates=accumulates)
        return {part: loads[part] for part, taken in zip(loads, chosen, strict=True) if taken}


def plan_graphs(
    model: CoatVlm, mode: CudaGraphs, row_tokens: int, row_images: int
) -> PlannedGraphs:
    """Count the blocks of a converted model that have a backward pass.

    A frozen language model has one, for the gradients of what is before it. ``row_images`` are the
    tiles of a row.
    """
    vision = model.config.vision_config
    patches = 0 if vision is None else (vision.image_size // vision.patch_size) ** 2
    blocks: dict[str, tuple[int, int]] = {}
    for name, block in fp8_blocks(model, adapted=False):
        part = "vision" if name.startswith("vision_tower") else "language"
        if part == "vision" and not any(p.requires_grad for p in block.parameters()):
            continue
        number, parameters = blocks.get(part, (0, 0))
        own = sum(p.numel() for p in block.parameters())
        blocks[part] = (number + 1, parameters + own)
    return PlannedGraphs(mode, blocks, {"vision": row_images * patches, "language": row_tokens})


def add_graphs(memory: RankMemory, captured: Sequence[RowLoad]) -> RankMemory:
    """Add the memory of captured rows of blocks to both peaks of a rank."""
    saved = sum(load.saved for load in captured)
    return replace(
        memory,
        backward_peak=memory.backward_peak + OVERHEAD * saved,
        step_peak=memory.step_peak + (1 + OVERHEAD) * saved,
    )
