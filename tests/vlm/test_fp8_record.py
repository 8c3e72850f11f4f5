"""What a run with ``precision: coat`` writes about its optimizer's states."""

import pytest
import torch
from torch import nn

from coat_vlm.optim import CoatAdamW
from coat_vlm.train.fp8_monitor import measure_states


@pytest.mark.parametrize(("dtype", "original"), [(torch.float32, 8.0), (torch.bfloat16, 4.0)])
def test_states_are_measured_against_adamws_on_the_same_dtype(
    dtype: torch.dtype, original: float
) -> None:
    """FP32 masters, as under DeepSpeed, and weights without masters, whose moments are BF16."""
    weights = [nn.Parameter(torch.randn(size, dtype=dtype)) for size in (128 * 64, 128 * 3)]
    kept = {}
    for kind in (CoatAdamW, torch.optim.AdamW):
        optimizer = kind(weights)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        row = measure_states(optimizer)
        assert row["optimizer"] == kind.__name__
        assert row["parameters"] == 128 * 67
        assert row["original_bytes_per_parameter"] == original
        kept[kind] = row["bytes"] / row["parameters"]
    assert kept == {CoatAdamW: 2 + 12 / 128, torch.optim.AdamW: original}
