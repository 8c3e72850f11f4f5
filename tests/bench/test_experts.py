"""The benchmark of a layer with experts, without the clock."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from coat_vlm.fp8.weights import list_stored
from experts import IMPLEMENTATIONS, PUBLISHED, bench, build, read_config

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}  # fmt: skip


def test_the_shape_is_the_published_one() -> None:
    layer = build(read_config(), torch.device("meta"), torch.bfloat16, None).layers[0]
    assert AutoConfig.from_pretrained(PUBLISHED).text_config.num_hidden_layers == 48
    assert sum(p.numel() for p in layer.parameters()) == 623_120_640


@pytest.mark.parametrize("lora", [None, 4])
def test_errors_are_small_and_not_zero(lora: int | None) -> None:
    names = ["hf_eager", "coat_paper"]
    reference, result = bench(names, 2, 24, lora, CPU, read_config(**SMALL))
    assert (reference.problem, result.problem) == ("", "")
    assert (reference.rel_err_out, reference.rel_err_grad) == (0, 0)
    assert 0.005 < (result.rel_err_out or 0) < 0.15
    assert 0.005 < (result.rel_err_grad or 0) < 0.2
    assert result.implementation == ("coat_paper" if lora is None else "coat_paper_lora")
    holder = build(read_config(**SMALL), CPU, torch.float32, lora)
    IMPLEMENTATIONS["coat_paper"](holder)
    assert len(list_stored(holder)) == (0 if lora is None else 4)
