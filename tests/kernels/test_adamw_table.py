"""AdamW's foreach step: many tensors in one launch, skipped steps, CUDA graphs, large tensors."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from op_check import assert_same_bits, count_steps_between, relative_rms
from torch import Tensor

from coat_kernels import AdamwItem, AdamwTable, adamw_step, new_moment

SETTINGS: dict[str, Any] = {
    "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1,
}  # fmt: skip
RATES = (1e-2, 0.9, 0.95, 1e-8, 0.1)


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def items(device: str) -> list[AdamwItem]:
    """Tensors of two dtypes and two parameter groups, of several chunks, tails, and nothing."""
    made = []
    sizes = (5000, 1, 128, 0, 4096 + 130, 700)
    for i, size in enumerate(sizes):
        dtype = torch.bfloat16 if i in (1, 4) else torch.float32
        p, g = (normal(size + 1, seed).to(device, dtype) for seed in (i, 50 + i))
        # What is cut out of a flat partition starts anywhere.
        p, g = (p[1:], g[1:]) if i == 5 else (p[:-1], g[:-1])
        m, v = new_moment(p), new_moment(p)
        rest = torch.zeros_like(p, dtype=torch.int16) if i == 4 else None
        count = torch.full((), float(i), device=device)
        made.append(AdamwItem(p, g, m, v, count, rest, group=i % 2, index=i))
    return made


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many_tensors_in_one_step(device: str, poisoned_memory: None):
    """As one by one, each with its own count of steps, rates and rounding."""
    together, single = items(device), items("cpu")
    table = AdamwTable(torch.device(device), seed=11)
    rates = [RATES, (torch.tensor(3e-3, device=device), *RATES[1:])]
    scale = torch.tensor(0.25, device=device)
    with np.errstate(all="ignore"):
        table.step(together, rates, scale)
    for item in single:
        adamw_step(
            item.p, item.g, item.m, item.v, **{**SETTINGS, "lr": (1e-2, 3e-3)[item.group]},
            step=int(item.step) + 1, low_bits=item.low_bits, grad_scale=torch.tensor(0.25),
            seed=11, index=item.index,
        )  # fmt: skip
    for found, expected in zip(together, single, strict=True):
        assert found.step == (expected.step + 1 if expected.p.numel() else expected.step)
        assert relative_rms(found.p.cpu(), expected.p) < 1e-6
        for one, other in ((found.m, expected.m), (found.v, expected.v)):
            assert int(count_steps_between(one[0].cpu(), other[0]).sum()) <= 2
            assert relative_rms(one[1].cpu(), other[1]) < 1e-6


@pytest.mark.parametrize("scale", [math.nan, -math.inf])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_scale_that_is_not_finite_skips_the_step(
    device: str, scale: float, poisoned_memory: None
):
    """No byte of a parameter, a moment or a count changes; the next step is an ordinary one."""

    def contents(tensors: list[AdamwItem]) -> list[Any]:
        tensors_of = [(i.p, i.step, *i.m, *i.v, i.low_bits) for i in tensors]
        kept = [t for one in tensors_of for t in one if t is not None]
        return [t.cpu().reshape(-1).view(torch.uint8).tolist() for t in kept]

    skipped, plain = items(device), items(device)
    tables = [AdamwTable(torch.device(device), seed=11) for _ in range(2)]
    before = contents(skipped)
    with np.errstate(all="ignore"):
        tables[0].step(skipped, [RATES, RATES], torch.tensor(scale, device=device))
        assert contents(skipped) == before
        for table, tensors in zip(tables, (skipped, plain), strict=True):
            table.step(tensors, [RATES, RATES], torch.tensor(0.5, device=device))
    assert contents(skipped) == contents(plain) != before


def test_a_gradient_elsewhere_is_found(poisoned_memory: None):
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU here")
    p = torch.zeros(130)
    m, v = new_moment(p), new_moment(p)
    table = AdamwTable(torch.device("cpu"))
    count = torch.zeros(())
    kept = [torch.ones(130), -torch.ones(130)]
    ends = []
    for g in (kept[0], kept[0], kept[1]):
        with np.errstate(all="ignore"):
            table.step([AdamwItem(p, g, m, v, count)], [(1.0, 0.0, 0.0, 0.0, 0.0)])
        ends.append(p[129].item())
    assert ends == pytest.approx([-1, -2, -1])


@pytest.mark.gpu
def test_a_step_in_a_cuda_graph_is_a_step():
    eager, captured = items("cuda"), items("cuda")
    device = torch.device("cuda")
    tables = [AdamwTable(device, seed=11) for _ in range(2)]
    rates = [RATES, RATES]
    for table, tensors in zip(tables, (eager, captured), strict=True):
        table.step(tensors, rates)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tables[1].step(captured, rates)
    for _ in range(2):
        graph.replay()
        tables[0].step(eager, rates)
    for one, other in zip(eager, captured, strict=True):
        assert torch.equal(one.p, other.p)
        assert one.step == other.step


@pytest.mark.gpu
def test_a_tensor_of_more_than_2_31_elements():
    """Its last elements end where a small tensor's do."""
    count, tail = 2**31 + 3 * 4096 + 5, 4096 + 5
    large = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    small = normal(tail).to("cuda", torch.bfloat16)
    ends = []
    for p in (large, small.clone()):
        p[-tail:] = small
        g = p.clone()
        m, v = new_moment(p), new_moment(p)
        adamw_step(p, g, m, v, **SETTINGS, step=1)
        ends.append((p[-tail:].clone(), m[0][-tail:].clone(), m[1][-33:].clone()))
    for one, other in zip(*ends, strict=True):
        assert_same_bits("end", one.cpu(), other.cpu())
