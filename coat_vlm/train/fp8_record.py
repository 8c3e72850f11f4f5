"""What a run with ``precision: coat`` measures about its FP8 and writes to metrics.jsonl."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coat_data.collate import Batch
from coat_vlm.fp8 import ConversionReport, fp8_blocks, watching
from coat_vlm.fp8.footprint import measure_footprint
from coat_vlm.model.vlm import CoatVlm

Write = Callable[[dict[str, Any]], None]


class Fp8Record:
    """Writes rows of kind ``fp8``; one per stage and process.

    Args:
        stage: the stage's name.
        report: what was converted.
        write: writes a row.
    """

    def __init__(self, stage: str, report: ConversionReport, write: Write) -> None:
        self._stage = stage
        self._write = write
        self._write_row("blocks", 0, converted=report.converted, skipped=report.skipped)

    def footprint(self, model: CoatVlm, batch: Batch) -> None:
        """Measure the activations that each FP8 block keeps, on the first row of ``batch``."""
        if not fp8_blocks(model):  # linear layers alone
            return
        row = _first_row(batch, model)
        device = next(model.parameters()).device
        inputs = {name: value.to(device) for name, value in row.items()}
        # The blocks are measured; logits would only take memory.
        footprint = measure_footprint(model, lambda: model(**inputs, logits_to_keep=1))
        blocks = [
            {"block": name, "fp8_bytes_per_token": fp8, "original_bytes_per_token": original}
            for name, fp8, original in footprint.blocks
        ]
        self._write_row("footprint", 1, blocks=blocks)

    @contextmanager
    def rates(self, step: int) -> Iterator[None]:
        """Count saturated and underflowed values of what runs inside."""
        with watching() as counts:
            yield
        self._write_row("rates", step, rates=counts.rates())

    def states(self, optimizer: Any, step: int) -> None:
        """Measure the optimizer's states on this process, and those that AdamW would have."""
        kept, parameters = _state_size(optimizer)
        original = 0.0
        if parameters:
            like = next(p for p, state in optimizer.state.items() if state)
            original = _original_bytes_per_parameter(like)
        self._write_row(
            "states",
            step,
            optimizer=type(optimizer).__name__,
            bytes=kept,
            parameters=parameters,
            original_bytes_per_parameter=original,
        )

    def _write_row(self, status: str, step: int, **values: Any) -> None:
        self._write({"kind": "fp8", "stage": self._stage, "step": step, "status": status, **values})


def _state_size(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of the states that grow with their parameters, and the elements of these."""
    states = [state for state in optimizer.state.values() if state]
    tensors = [t for state in states for t in state.values() if isinstance(t, Tensor) and t.ndim]
    kept = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return kept, sum(state["exp_avg"].numel() for state in states)


def _original_bytes_per_parameter(like: Tensor) -> float:
    """What torch.optim.AdamW, the optimizer of BF16 runs, keeps for a parameter of this dtype."""
    parameter = torch.zeros(1024, dtype=like.dtype, device=like.device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    kept, parameters = _state_size(optimizer)
    return kept / parameters


def _first_row(batch: Batch, model: CoatVlm) -> dict[str, Tensor]:
    # Without a mask, as the loss runs: padding is on the right.
    rows: dict[str, Tensor] = {"input_ids": batch["input_ids"][:1]}
    grids = batch.get("image_grids")
    groups = batch.get("frame_groups")
    images, tiles = model.images_per_row(rows["input_ids"], grids, groups)[0]
    if images:
        rows["pixel_values"] = batch["pixel_values"][:tiles]
        if grids is not None:
            rows["image_grids"] = grids[:images]
        if groups is not None:
            rows["frame_groups"] = groups[:images]
    return rows
