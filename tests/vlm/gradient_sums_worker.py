"""Sums gradients on two ranks; prints how far each sum is from the exact one, as JSON.

Started by ``test_gradient_sums.py``.
"""

import json

import pytest
import torch
from summed_gradients import one_gradient, summed
from torch import Tensor

from coat_vlm.distributed import join_world
from coat_vlm.train import engine as train_engine

COUNT = 64


def main() -> None:
    """Sum under each ZeRO stage; rank 0 prints."""
    errors = []
    weight, gain = (COUNT * one_gradient(name) for name in ("weight", "gain"))
    gain *= (COUNT - 1) / COUNT / 2  # of one of two ranks
    with join_world() as world, pytest.MonkeyPatch.context() as patch:

        def add_partitions(zero_stage: int, exact: Tensor, *, gain: bool = False) -> None:
            (part,) = summed(patch, world, zero_stage, COUNT, gain=gain)
            half = exact.numel() // 2
            exact = exact[half * world.rank : half * (world.rank + 1)]
            errors.append(float((part[:half] - exact).norm() / exact.norm()))

        for low_bits in (False, True):
            found = summed(patch, world, 0, COUNT, low_bits=low_bits, gain=True)
            for total, exact in zip(found, (weight, gain), strict=True):
                errors.append(float((total - exact).norm() / exact.norm()))
        for zero_stage in (1, 2, 3):
            add_partitions(zero_stage, weight)
        patch.setitem(train_engine.OPTIONS, 1, {"overlap_comm": True})
        add_partitions(1, torch.cat([weight, 2 * gain]), gain=True)
        errors = [max(both) for both in zip(*world.gather(errors), strict=True)]
    if world.is_main:
        print(json.dumps(errors))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()
