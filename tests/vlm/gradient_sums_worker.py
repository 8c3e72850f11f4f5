"""Sums gradients on two ranks; prints how far each sum is from the exact one, as JSON.

Started by ``test_gradient_sums.py``.
"""

import json

import pytest
from summed_gradients import one_gradient, summed

from coat_vlm.distributed import join_world

COUNT = 64


def main() -> None:
    """Sum under each ZeRO stage; rank 0 prints."""
    errors = []
    weight, gain = (COUNT * one_gradient(name) for name in ("weight", "gain"))
    gain *= (COUNT - 1) / COUNT / 2  # of one of two ranks
    with join_world() as world, pytest.MonkeyPatch.context() as patch:
        for low_bits in (False, True):
            found = summed(patch, world, 0, COUNT, low_bits=low_bits, gain=True)
            for total, exact in zip(found, (weight, gain), strict=True):
                errors.append(float((total - exact).norm() / exact.norm()))
        for zero_stage in (1, 2, 3):
            (part,) = summed(patch, world, zero_stage, COUNT)
            half = weight.numel() // 2
            exact = weight[half * world.rank : half * (world.rank + 1)]
            errors.append(float((part[:half] - exact).norm() / exact.norm()))
        errors = [max(both) for both in zip(*world.gather(errors), strict=True)]
    if world.is_main:
        print(json.dumps(errors))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main()
