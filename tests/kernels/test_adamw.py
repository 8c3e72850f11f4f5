"""AdamW with FP8 moments: against the paper's formulas in NumPy, torch's AdamW, and odd groups."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from op_check import Run, assert_same_bits, count_steps_between, relative_rms
from torch import Tensor

from coat_kernels import (
    E4M3,
    adamw_step,
    decode_moment,
    encode_moment,
    join_master,
    new_moment,
    rounding_key,
)
from coat_kernels.master_weights import round_stochastically, split_master

Moment = tuple[Tensor, Tensor, Tensor]
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1

OFF_BY_ONE = 0.002
"""Share of codes that FP32 may round to the other neighbour than 64-bit mantissas do.

0.0003 is seen: a group's smallest element can be what remains of (1 - beta1) g against beta1 m, and
its relative error, however small, moves k and with it all codes of the group.
"""


NO_OPTIONS = (None, None, None, 0)
"""The last arguments of the op: no low bits, no scale of the gradient, no seed."""


class Paper:
    """Section 3 of the paper, one group at a time, with 64-bit mantissas; R_fp8 is 448 / 2^-7."""

    def __init__(self, grid: Any):
        self.grid = grid

    def k(self, group: NDArray[Any]) -> Any:
        """Equation 3, bounded for groups of equal elements, in the precision that is stored."""
        magnitudes = np.abs(group[group != 0])
        ratio = magnitudes.max() / magnitudes.min()
        k = np.log(448 / 2.0**-7) / np.log(ratio) if ratio > 1 else np.inf
        return np.longdouble(np.float16(min(k, 64.0)))

    def encode(self, x: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any]]:
        codes, amax, ks = [], [], []
        for start in range(0, x.size, 128):
            group = x[start : start + 128].astype(np.longdouble)
            k = self.k(group) if group.any() else 1.0
            expanded = np.sign(group) * np.abs(group) ** k  # equation 2
            scale = np.abs(expanded).max() / 448
            codes.append(self.grid.nearest(expanded / scale if scale else expanded, E4M3))
            amax.append(np.abs(group).max())
            ks.append(k)
        return np.concatenate(codes), np.array(amax), np.array(ks)

    def decode(self, moment: Moment) -> NDArray[Any]:
        q, amax, k = (t.double().numpy().astype(np.longdouble).reshape(-1) for t in moment)
        amax, k = (np.repeat(t, 128)[: q.size] for t in (amax, k))
        scale = amax**k / 448
        return np.sign(q) * np.abs(q * scale) ** (1 / k)

    def step(self, p: Tensor, g: Tensor, m: Moment, v: Moment, step: int) -> list[Any]:
        """AdamW (arXiv 1711.05101, algorithm 2): p, and both moments encoded."""
        p64, g64 = (t.double().numpy().reshape(-1) for t in (p, g))
        m64 = BETA1 * self.decode(m) + (1 - BETA1) * g64
        v64 = BETA2 * self.decode(v) + (1 - BETA2) * g64**2
        m_hat, v_hat = m64 / (1 - BETA1**step), v64 / (1 - BETA2**step)
        p64 = p64 - LR * DECAY * p64 - LR * m_hat / (np.sqrt(v_hat) + EPS)
        return [p64, *self.encode(m64), *self.encode(v64)]


def gradient(count: int, step: int) -> Tensor:
    """Of very different size from group to group, and within groups."""
    sizes = torch.Generator().manual_seed(count)
    size = torch.exp2(8 * torch.randn(-(-count // 128), generator=sizes))
    generator = torch.Generator().manual_seed(100 * count + step)
    g = torch.randn(count, generator=generator) * size.repeat_interleave(128)[:count]
    return g * torch.rand(count, generator=generator)


@pytest.mark.parametrize("count", [1, 127, 1000])
def test_steps_follow_the_paper(count: int, run: Run, grid):
    paper = Paper(grid)
    p = torch.randn(count, generator=torch.Generator().manual_seed(count))
    m, v = new_moment(p), new_moment(p)
    off_by_one = []
    for step in range(1, 7):
        g = gradient(count, step)
        expected = paper.step(p, g, m, v, step)
        # Each step starts from the same codes: an early code on the other side of a tie would
        # change all later ones.
        args = (p, g, *m, *v, LR, BETA1, BETA2, EPS, DECAY, step, *NO_OPTIONS)
        p, *moments = run("adamw_step", args)
        m, v = (moments[0], moments[1], moments[2]), (moments[3], moments[4], moments[5])
        assert relative_rms(p, torch.from_numpy(np.float64(expected[0]))) < 1e-6
        for moment, (codes, amax, k) in ((v, expected[4:7]), (m, expected[1:4])):
            assert relative_rms(moment[1], torch.from_numpy(np.float64(amax))) < 1e-6
            assert relative_rms(moment[2], torch.from_numpy(np.float64(k))) < 1e-3
            steps = count_steps_between(moment[0], torch.from_numpy(codes))
            assert steps.amax() <= 1
        off_by_one.append(float(steps.float().mean()))  # of m: v is rounded stochastically
    assert np.mean(off_by_one) <= OFF_BY_ONE, off_by_one


def test_decoded_moments_are_within_half_a_step(grid):
    x = gradient(1000, 0)
    moment = encode_moment(x)
    decoded = decode_moment(moment)
    paper = torch.from_numpy(np.float64(Paper(grid).decode(moment)))
    assert relative_rms(decoded, paper) < 1e-6
    # 1 / 16 is half a step of a normal code; (1 + e)^(1 / k) divides it by k. Subnormals: the
    # smallest codes are rounded to multiples of 2^-9, so check them in the space of codes.
    k = moment[2].repeat_interleave(128)[:1000].double()
    amax = moment[1].repeat_interleave(128)[:1000].double()
    code = 448 * (x.double().abs() / amax) ** k
    assert ((moment[0].double().abs() - code).abs() <= (code / 16).clamp_min(2**-10) * 1.001).all()
    assert torch.equal(decoded.sign(), torch.where(moment[0].float() == 0, 0.0, x.sign()))


def encoded_by_kernel(run: Run, x: Tensor) -> tuple[Moment, Moment]:
    """With both betas zero the moments after one step are exactly x and its square."""
    p = torch.zeros_like(x)
    args = (p, x, *new_moment(p), *new_moment(p), LR, 0.0, 0.0, EPS, 0.0, 1, *NO_OPTIONS)
    _, m_q, m_amax, m_k, v_q, v_amax, v_k = run("adamw_step", args)
    return (m_q, m_amax, m_k), (v_q, v_amax, v_k)


def test_k_is_bounded(run: Run):
    normal = torch.randn(128, generator=torch.Generator().manual_seed(0))
    for _, _, k in encoded_by_kernel(run, torch.cat([normal, torch.full((128,), 3.0)])):
        assert 0 < k[0] < k[1] == 64


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30, 2.0**-149, 0.1])
@pytest.mark.parametrize("count", [1, 130])
def test_constant_groups_are_exact(value: float, count: int, run: Run):
    """Where R = 1 and the paper's k is infinite; the sign of negative ones is kept."""
    x = torch.full((count,), value)
    m, v = encoded_by_kernel(run, x)
    assert torch.equal(decode_moment(m), x)
    assert torch.equal(decode_moment(v), x * x)


def test_zeros_do_not_widen_the_range_of_a_group(run: Run):
    """Wherever they are, the first lane included."""
    values = torch.rand(128, generator=torch.Generator().manual_seed(0)) + 0.5
    zeros = torch.zeros(128, dtype=torch.bool)
    zeros[[0, 17, 127]] = True
    (q, amax, k), _ = encoded_by_kernel(run, values.masked_fill(zeros, 0.0))
    alone_q, alone_amax, alone_k = encode_moment(values[~zeros])
    assert (amax, k) == (alone_amax, pytest.approx(alone_k, rel=1e-5))
    assert not q.float()[zeros].any()
    assert int(count_steps_between(q[~zeros], alone_q).amax()) <= 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_element_spoils_its_group_only(bad: float, run: Run):
    x = torch.randn(300, generator=torch.Generator().manual_seed(3))
    x[:4] = 0.0
    x[140] = bad
    for moment in encoded_by_kernel(run, x):
        decoded = decode_moment(moment)
        assert decoded[128:256].isnan().all()
        assert decoded[:128].isfinite().all()
        assert decoded[256:].isfinite().all()
    # The next step's decoding, in the kernel: parameters of the group become NaN, others do not.
    p = torch.ones(300)
    (m, v) = encoded_by_kernel(run, x)
    args = (p, torch.ones(300), *m, *v, LR, BETA1, BETA2, EPS, DECAY, 2, *NO_OPTIONS)
    stepped = run("adamw_step", args)[0]
    assert stepped[128:256].isnan().all()
    assert stepped[:128].isfinite().all()
    assert stepped[256:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_close_to_torchs_adamw(dtype: torch.dtype):
    start = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    p, exact = start.clone(), torch.nn.Parameter(start.float().clone())
    m, v = new_moment(p), new_moment(p)
    optimizer = torch.optim.AdamW([exact], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    for step in range(1, 9):
        g = gradient(1000, step).to(dtype)
        exact.grad = g.float()
        optimizer.step()
        adamw_step(p, g, m, v, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, step=step)
        travelled = exact.detach() - start.float()
        rounding = step**0.5 * 2.0**-8 if dtype == torch.bfloat16 else 0.0
        if step == 1:  # the moments are used before they are rounded to FP8
            assert relative_rms(p, exact.detach()) < 1e-6 + rounding
        # One rounding of m (half a step: at most 1 / 16, RMS 0.03, divided by k of about 2), and
        # some more of v, per step, forgotten at the rate of 1 - BETA1.
        error = (p.double() - exact.detach()).norm() / travelled.norm()
        drift = rounding * float(start.norm() / travelled.norm())
        assert error < 0.03 + drift, f"step {step}: {error:.3f} of the way"


def test_any_shape_and_less_than_2_1_bytes_per_parameter():
    p = torch.randn(3, 5, 7)
    moment = new_moment(p)
    assert moment[0].shape == p.shape
    before = p.clone()
    adamw_step(
        p, torch.ones_like(p), moment, new_moment(p), lr=0.1, betas=(0.9, 0.95), eps=1e-8,
        weight_decay=0.0, step=1,
    )  # fmt: skip
    torch.testing.assert_close(p, before - 0.1)
    large = torch.zeros(128 * 8)
    size = sum(t.numel() * t.element_size() for t in new_moment(large))
    assert size == large.numel() * (1 + 6 / 128)


def _normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


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
    values = _normal(4096)
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
    p32 = _normal(300)
    p16, rest = split_master(p32)
    states = [new_moment(p32), new_moment(p32)]
    for step in (1, 2, 3):
        g = _normal(300, step).bfloat16()
        arguments = (*states[0], *states[1], LR, BETA1, BETA2, EPS, DECAY, step)
        p32, *_ = run("adamw_step", (p32, g, *arguments, *NO_OPTIONS))
        p16, *new, rest = run("adamw_step", (p16, g, *arguments, rest, None, None, 0))
        assert_same_bits("master", join_master(p16, rest), p32)
        states = [(new[0], new[1], new[2]), (new[3], new[4], new[5])]
