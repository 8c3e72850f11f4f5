"""Codecs against their formulas, master weights bit by bit, and many tensors in one launch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from op_check import assert_same_bits, count_steps_between, relative_rms
from torch import Tensor

from coat_kernels import (
    CODECS,
    E5M2,
    AdamwItem,
    AdamwTable,
    Codec,
    adamw_step,
    decode_moment,
    encode_moment,
    get_codec,
    join_master,
    new_moment,
    rounding_key,
)
from coat_kernels.master_weights import round_stochastically, split_master
from coat_kernels.moment_formats import REMOVED_CODECS

Run = Callable[[str, Sequence[Any]], list[Tensor]]
SETTINGS: dict[str, Any] = {
    "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1,
}  # fmt: skip
STUDIED = (Codec("dre_e4m3_e5m2", second=E5M2), Codec("e4m3", expand=False))
RATES = (1e-2, 0.9, 0.95, 1e-8, 0.1)


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", [*CODECS.values(), *STUDIED], ids=lambda codec: codec.name)
@pytest.mark.parametrize("second", [False, True], ids=["exp_avg", "exp_avg_sq"])
def test_codes_are_the_nearest_ones_of_the_formula(codec: Codec, second: bool, grid: Any):
    """Also a stochastic codec, without a key; with a key: test_adamw_stochastic.py."""
    fmt = codec.format(second)
    x = normal(1000).square() if second else normal(1000)
    moment = encode_moment(x, codec, second=second)
    groups = np.pad(x.double().numpy(), (0, 24)).reshape(8, 128)
    for i, group in enumerate(groups):
        magnitude = np.abs(group)
        amax = magnitude.max()
        assert moment[1][i] == np.float32(amax)
        k = 1.0
        if codec.expand:
            spread = np.log(amax / magnitude[magnitude > 0].min())
            reaches = {"released": 448 * 448 / 2, "dre_e4m3_stochastic": 448 * 2**7}
            reach = reaches.get(codec.name, fmt.max / fmt.min_subnormal)
            k = np.log(reach) / spread
            if codec.floor_k:
                k = np.floor(k * 16) / 16
            assert moment[2][i].item() == pytest.approx(k, rel=2**-10)
            # What FP16 does to k moves no code by more than one.
            exact = grid.nearest(np.sign(group) * fmt.max * (magnitude / amax) ** k, fmt)
            found = torch.nn.functional.pad(moment[0].view(torch.uint8), (0, 24)).view(8, 128)[i]
            apart = count_steps_between(
                found.view(fmt.dtype), torch.from_numpy(exact).view(fmt.dtype)
            )
            assert apart.amax() <= 1
            k = float(moment[2][i])
        codes = np.sign(group) * fmt.max * (magnitude / amax) ** k
        nearest = torch.from_numpy(grid.nearest(codes, fmt))[: 1000 - 128 * i].view(fmt.dtype)
        stored = moment[0][128 * i : 128 * i + 128]
        assert int((count_steps_between(stored, nearest) > 0).sum()) <= 1  # ties, in FP32
    decoded = decode_moment(moment, codec)
    assert decoded.abs().amax() == x.abs().amax()
    assert relative_rms(decoded, x) < (0.04 if fmt.name == "e4m3" else 0.05)


def test_there_is_no_other_codec():
    with pytest.raises(ValueError, match=r"no codec 'fp4' of moments; use one of dre_e4m3"):
        encode_moment(torch.zeros(3), "fp4")


@pytest.mark.parametrize("codec", STUDIED, ids=lambda codec: codec.name)
def test_codecs_of_studies_have_no_kernel(codec: Codec):
    assert codec.name in REMOVED_CODECS
    with pytest.raises(ValueError, match=f"codec '{codec.name}' .* removed .* with dre_e4m3 or"):
        get_codec(codec.name)
    with pytest.raises(ValueError, match=f"codec '{codec.name}' .* no kernel; use one of dre_e4m3"):
        AdamwTable(torch.device("cpu"), codec)


def test_a_bf16_parameter_and_its_low_bits_are_the_fp32_master():
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    special = [0, 0x7F7FFFFF, 0x7F800000, 0x3F808000, 0x3F818000, 0x00000001, 0x00008000]
    bits = torch.cat([bits, torch.tensor(special), torch.tensor(special) - 2**31]).to(torch.int32)
    values = bits.view(torch.float32)
    p, low_bits = split_master(values)
    assert (p.dtype, low_bits.dtype) == (torch.bfloat16, torch.int16)
    assert_same_bits("master", join_master(p, low_bits), values)
    assert p[values.isnan()].isnan().all()
    is_tie = (bits & 0xFFFF) == 0x8000
    assert_same_bits("rounded", p[~is_tie], values.bfloat16()[~is_tie])


def test_stochastic_rounding_is_right_on_average_and_can_be_repeated():
    values = normal(4096)
    down = (values.view(torch.int32) & -0x10000).view(torch.float32)
    up = (down.view(torch.int32) + 0x10000).view(torch.float32)
    total = torch.zeros(4096, dtype=torch.double)
    for step in range(400):
        rounded = round_stochastically(values, rounding_key(7, step, 3)).float()
        assert ((rounded == down) | (rounded == up)).all()
        total += rounded
    # In units of the step between neighbours the mean of 400 has a deviation of at most 0.025.
    off = (total / 400 - values.double()) / (up - down).double()
    assert off.abs().amax() < 5 * 0.025
    assert abs(off.mean()) < 5 * 0.025 / 4096**0.5
    first, again, other = (
        round_stochastically(values, rounding_key(7, 1, index)) for index in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert round_stochastically(torch.tensor([torch.nan]), 5).isnan()


def test_bf16_with_low_bits_follows_fp32_bit_by_bit(run: Run):
    p32 = normal(300)
    p16, rest = split_master(p32)
    m, v = new_moment(p32), new_moment(p32, second=True)
    states = [m, v]
    for step in (1, 2, 3):
        g = normal(300, step).bfloat16()
        arguments = (*states[0], *states[1], *RATES, step, "dre_e4m3")
        p32, *_ = run("adamw_step", (p32, g, *arguments, None, None, None, 0))
        p16, *new, rest = run("adamw_step", (p16, g, *arguments, rest, None, None, 0))
        assert_same_bits("master", join_master(p16, rest), p32)
        states = [(new[0], new[1], new[2]), (new[3], new[4], new[5])]


def items(device: str, unaligned: bool = True, codec: str = "dre_e4m3") -> list[AdamwItem]:
    """Tensors of two dtypes and two parameter groups, of several chunks, tails, and nothing."""
    made = []
    sizes = (5000, 1, 128, 0, 4096 + 130, 700)
    for i, size in enumerate(sizes):
        dtype = torch.bfloat16 if i in (1, 4) else torch.float32
        p, g = (normal(size + 1, seed).to(device, dtype) for seed in (i, 50 + i))
        # What is cut out of a flat partition starts anywhere.
        p, g = (p[1:], g[1:]) if unaligned and i == 5 else (p[:-1], g[:-1])
        m, v = new_moment(p, codec), new_moment(p, codec, second=True)
        rest = torch.zeros_like(p, dtype=torch.int16) if i == 4 else None
        count = torch.full((), float(i), device=device)
        made.append(AdamwItem(p, g, m, v, count, rest, group=i % 2, index=i))
    return made


@pytest.mark.parametrize("codec", ["dre_e4m3", "dre_e4m3_stochastic"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many_tensors_in_one_step(device: str, codec: str, poisoned_memory: None):
    """As one by one, each with its own count of steps, rates and rounding."""
    together, single = items(device, codec=codec), items("cpu", codec=codec)
    table = AdamwTable(torch.device(device), get_codec(codec), seed=11)
    rates = [RATES, (torch.tensor(3e-3, device=device), *RATES[1:])]
    scale = torch.tensor(0.25, device=device)
    with np.errstate(all="ignore"):
        table.step(together, rates, scale)
    for item in single:
        p16 = item.p.dtype == torch.bfloat16 and item.low_bits is None
        adamw_step(
            item.p, item.g, item.m, item.v, **{**SETTINGS, "lr": (1e-2, 3e-3)[item.group]},
            step=int(item.step) + 1, low_bits=item.low_bits, grad_scale=torch.tensor(0.25),
            seed=11 if p16 or get_codec(codec).second_stochastic else None, index=item.index,
            codec=codec,
        )  # fmt: skip
    for found, expected in zip(together, single, strict=True):
        assert found.step == (expected.step + 1 if expected.p.numel() else expected.step)
        assert relative_rms(found.p.cpu(), expected.p) < 1e-6
        for one, other in ((found.m, expected.m), (found.v, expected.v)):
            assert int(count_steps_between(one[0].cpu(), other[0]).sum()) <= 2
            assert relative_rms(one[1].cpu(), other[1]) < 1e-6


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
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
    tables = [AdamwTable(torch.device(device), get_codec("dre_e4m3"), seed=11) for _ in range(2)]
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
    m, v = new_moment(p), new_moment(p, second=True)
    table = AdamwTable(torch.device("cpu"), get_codec("dre_e4m3"))
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
    tables = [AdamwTable(device, get_codec("dre_e4m3"), seed=11) for _ in range(2)]
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
        m, v = new_moment(p), new_moment(p, second=True)
        adamw_step(p, g, m, v, **SETTINGS, step=1)
        ends.append((p[-tail:].clone(), m[0][-tail:].clone(), m[1][-33:].clone()))
    for one, other in zip(*ends, strict=True):
        assert_same_bits("end", one.cpu(), other.cpu())
