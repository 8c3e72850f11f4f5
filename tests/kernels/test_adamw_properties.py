"""Properties of AdamW with FP8 moments for any input.

Each holds by mathematics, not by comparison with the reference: both bodies of the op must have it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from op_check import assert_same_bits
from torch import Tensor

from coat_kernels import OPS, new_moment
from op_cases import run_op

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
given = hypothesis.given


Run = Callable[[str, Sequence[Any]], list[Tensor]]
Moments = tuple[Tensor, ...]
LR, DECAY = 2.0**-7, 0.125


def run_reference(op: str, args: Sequence[Any]) -> list[Tensor]:
    return run_op(op, OPS[op].reference, args)


@st.composite
def vector(draw: Any) -> Tensor:
    """Two groups and 44 elements: seeded normals of three sizes, and some of hypothesis's own."""
    x = torch.randn(300, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    size = st.sampled_from([0.0, 2.0**-9, 1.0, 64.0])
    x *= torch.tensor(draw(st.lists(size, min_size=3, max_size=3))).repeat_interleave(128)[:300]
    spike = st.floats(-(2.0**20), 2.0**20, width=32).map(lambda v: v if abs(v) > 2.0**-20 else 0.0)
    for place, value in draw(st.lists(st.tuples(st.integers(0, 299), spike), max_size=6)):
        x[place] = value
    return x


def vectors(number: int) -> Any:
    """So many of them: parameters and gradients."""
    return st.tuples(*[vector()] * number)


def adamw(
    body: Run, p: Tensor, g: Tensor, moments: Moments, step: int = 1, *,
    decay: float = DECAY, eps: float = 2.0**-20,
) -> tuple[Tensor, Moments]:  # fmt: skip
    """The parameters and the six tensors of the moments after a step."""
    options = (None, None, None, 0)
    p, *new = body("adamw_step", (p, g, *moments, LR, 0.9, 0.99, eps, decay, step, *options))
    return p, tuple(new)


def zero_moments(p: Tensor) -> Moments:
    return (*new_moment(p), *new_moment(p))


def group(tensors: Sequence[Tensor], which: int) -> list[Tensor]:
    """Elements and metadata of one group."""
    elements = slice(128 * which, 128 * which + 128)
    return [t[elements] if len(t) == 300 else t[which] for t in tensors]


@given(vectors(6), st.integers(0, 2))
def test_a_group_of_elements_depends_on_no_other(run: Run, tensors: tuple[Tensor, ...], which: int):
    own, others = tensors[:3], tensors[3:]
    for mine, other in zip(own, others, strict=True):
        group([other], which)[0].copy_(group([mine], which)[0])
    for body in (run, run_reference):
        ends = []
        for p, first, second in (own, others):
            there, moments = adamw(body, p, first, zero_moments(p), 1)
            there, moments = adamw(body, there, second, moments, 2)
            ends.append(group([there, *moments], which))
        for one, other in zip(*ends, strict=True):
            assert_same_bits("group", other, one)


@given(vectors(3), st.integers(-20, 20))
def test_a_step_does_not_see_a_power_of_two_of_gradients_and_epsilon(
    run: Run, tensors: tuple[Tensor, ...], power: int
):
    p, *gradients = tensors
    for body in (run, run_reference):
        ends = []
        for factor in (1.0, 2.0**power):
            there, moments = p, zero_moments(p)
            for step, g in enumerate(gradients, start=1):
                there, moments = adamw(
                    body, there, g * factor, moments, step,
                    eps=2.0**-20 * factor,
                )  # fmt: skip
            m, m_amax, m_k, v, v_amax, v_k = moments
            ends.append((there, m, m_amax / factor, m_k, v, v_amax / factor**2, v_k))
        for one, other in zip(*ends, strict=True):
            assert_same_bits("scaled", other, one)
