"""Stochastic rounding of second moments: neighbors, means, ends of the range, keys, kernels."""

from typing import Any

import pytest
import torch
from op_check import Run, assert_same_bits, count_steps_between
from torch import Tensor

from coat_kernels import (
    adamw_step,
    decode_moment,
    encode_moment,
    new_moment,
    reference,
    rounding_key,
)
from coat_kernels.master_weights import MOMENT_SALT, random_words, round_stochastically

GRID = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""All finite non-negative codes."""


def values(spread: float, count: int = 128) -> Tensor:
    """Positive, FP32, from 1 down to 2^-spread, which makes k about 14.8 / spread."""
    x = torch.exp2(-spread * torch.rand(count, generator=torch.Generator().manual_seed(0)))
    x[:2] = torch.tensor([1.0, 2.0**-spread])
    return x


def neighbours(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One group's codes before rounding, and the codes below and above, in FP64."""
    code = 448 * (x.double() / x.double().amax()) ** k.double()
    above = torch.searchsorted(GRID, code).clamp(1, 126)
    return code, GRID[above - 1], GRID[above]


@pytest.mark.parametrize("spread", [1.0, 14.8, 120.0])
def test_codes_are_the_neighbours_of_the_formula(spread: float):
    x = values(spread)
    nearest = encode_moment(x)
    code, below, above = neighbours(x, nearest[2])
    for step in range(20):
        q, amax, k = encode_moment(x, rounding_key(1, step, 0))
        assert_same_bits("amax", amax, nearest[1])
        assert_same_bits("k", k, nearest[2])
        found = q.double()
        # What FP32 makes of a code next to one of the format may be on its other side.
        on_grid = ((code - below) < 1e-4 * code) | ((above - code) < 1e-4 * code)
        assert ((found == below) | (found == above) | on_grid).all()
        assert (count_steps_between(q, nearest[0]) <= 1).all()
        assert found.amin() > 0
        assert decode_moment((q, amax, k))[0] == 1


@pytest.mark.parametrize("spread", [5.0, 14.8, 50.0], ids=["k=3", "k=1", "k=0.3"])
def test_the_mean_of_the_decoded_moment_is_right(spread: float):
    """Where nearest's is not; from code 2^-5 on, above which a first-order correction is enough."""
    x, keys, groups = values(spread, 128), 100, 40
    *_, k = nearest = encode_moment(x)
    code, below, above = neighbours(x, k)
    decoded = [
        decode_moment(encode_moment(x.repeat(groups), rounding_key(0, step, 0)))
        for step in range(keys)
    ]
    relative = torch.cat(decoded).double().view(-1, 128) / x - 1
    mean = relative.mean(0)
    error = relative.std(0) / len(relative) ** 0.5
    normal = code >= 2.0**-5
    # The next term of v ~ code^(1/k): a third of (h / code)^3 |1/k (1/k - 1) (1/k - 2)|, at most
    # p (1 - p) (2p - 1) = 0.1 of it, h / code being the distance of the neighbours.
    inverse = 1 / k.double()
    third = (inverse * (inverse - 1) * (inverse - 2)).abs() * ((above - below) / code) ** 3
    assert (mean.abs() <= 5 * error + 0.1 * third + 1e-5)[normal].all()
    pooled = error[normal].square().sum().sqrt() / normal.sum()
    assert abs(mean[normal].mean()) <= 5 * pooled + 0.1 * third[normal].mean() + 1e-5
    lost = (decode_moment(nearest).double() / x - 1)[normal]
    assert lost.abs().mean() > 10 * mean[normal].abs().mean()


def test_a_positive_moment_never_becomes_zero():
    """Also far below the smallest code, and in a group of one value; zeros stay zeros."""
    x = values(120.0, 300)
    x[100:120] = 0.0
    x[256:] = 0.7
    x[128], x[129] = 1e-30, 1e-37
    for step in range(50):
        moment = encode_moment(x, rounding_key(3, step, 1))
        assert torch.equal(moment[0].float() == 0, x == 0)
        decoded = decode_moment(moment)
        assert torch.equal(decoded[256:], x[256:])
        for group in range(3):
            assert decoded[128 * group :][:128].amax() == x[128 * group :][:128].amax()
    assert not encode_moment(torch.zeros(130), 5)[0].float().any()


def test_codes_and_parameters_have_other_random_numbers():
    x = torch.ones(4096)
    bits = [random_words(x, key) for key in (77, 77 ^ MOMENT_SALT)]
    rounded = round_stochastically(x + 2.0**-8, 77) > 1  # halfway between neighbours
    assert torch.equal(rounded, (bits[0] & 0xFFFF) >= 0x8000)
    highs = (bits[1] >> 8).float() * 2.0**-24
    both = torch.stack([rounded.float(), highs])
    assert abs(torch.corrcoef(both)[0, 1]) < 5 / 4096**0.5


def gradient(step: int, count: int = 700) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(step))


def step_arguments(step: int, seed: int | None = None, index: int = 0) -> tuple[Any, ...]:
    """Of the op, from the moments that the reference's first step leaves."""
    p = torch.zeros(700)
    m, v = new_moment(p), new_moment(p)
    adamw_step(
        p, gradient(0), m, v, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=1
    )  # fmt: skip
    rates = (1e-2, 0.9, 0.999, 1e-8, 0.1)
    return (p, gradient(1), *m, *v, *rates, step, None, None, seed, index)


def test_the_kernel_rounds_like_the_reference(run: Run):
    """A whole chunk's end and its groups; then steps that differ in one part of their key."""
    ends = []
    for case in ((2, None, 0), (2, None, 0), (3, None, 0), (2, 5, 0), (2, None, 1)):
        arguments = step_arguments(*case)
        found = run("adamw_step", arguments)
        expected = [t.clone() if isinstance(t, Tensor) else t for t in arguments]
        step: Any = reference.adamw_step
        step(*expected)
        codes = count_steps_between(found[4], expected[5])
        # A group whose k FP16 rounds the other way has codes of its own; none is seen here.
        assert codes.amax() <= 1
        assert (codes > 0).float().mean() <= 0.002
        ends.append(found[4])
    assert_same_bits("again", ends[1], ends[0])
    for other in ends[2:]:
        assert (count_steps_between(other, ends[0]) > 0).float().mean() > 0.1
