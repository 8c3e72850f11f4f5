"""Properties of norms, activations and rotary embedding for any input.

Each holds by mathematics, not by comparison with the reference: both bodies of an op must have it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from op_check import assert_same_bits
from torch import Tensor

from coat_kernels import ACTIVATIONS, OPS, GroupScaled
from op_cases import run_op

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
given = hypothesis.given

# One example has several rows; the interpreter takes 0.2 s for one.
settings = hypothesis.settings(max_examples=8)

Run = Callable[[str, Sequence[Any]], list[Tensor]]


spikes = st.floats(-(2.0**20), 2.0**20, width=32).map(lambda v: v if abs(v) > 2.0**-20 else 0.0)


@st.composite
def matrices(draw: Any, rows: int, columns: int) -> Tensor:
    """Seeded normals; some rows are zero or of another size, some elements hypothesis's own."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    x = torch.randn(rows, columns, generator=generator)
    size = st.sampled_from([0.0, 2.0**-9, 1.0, 64.0])
    x *= torch.tensor(draw(st.lists(size, min_size=rows, max_size=rows)))[:, None]
    place = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1), spikes)
    for row, column, value in draw(st.lists(place, max_size=6)):
        x[row, column] = value
    return x


def several(number: int) -> Any:
    """So many matrices of one shape."""
    shapes = st.tuples(st.integers(1, 5), st.sampled_from([96, 128]))
    return shapes.flatmap(lambda shape: st.tuples(*[matrices(*shape)] * number))


def run_reference(op: str, args: Sequence[Any]) -> list[Tensor]:
    return run_op(op, OPS[op].reference, args)


class Rows(NamedTuple):
    """What an op makes of a matrix, one row of the results for one of the input."""

    scale: Tensor
    """Of the codes among ``outputs``."""
    outputs: list[Tensor]
    gradient: Tensor
    """Of the input, decoded."""


def norm(
    body: Run, x: Tensor, dy: Tensor, scale: Tensor | None, *, eps: float = 1e-3, centered: bool
) -> Rows:
    """RMSNorm or LayerNorm: statistics, codes, recomputed codes, the kept copy; dx."""
    weight = torch.linspace(-1.5, 1.5, x.shape[1])
    args = (x, None, weight, None, eps, centered, 16, "e4m3")
    _, q, exponents, rstd, mean, own = body("norm_stats", args)
    scale = own if scale is None else scale
    rest = (weight, None, rstd, mean, scale, "e4m3")
    rows, _ = body("norm_apply", (x, None, *rest, True, False))
    _, transposed = body("norm_apply", (q, exponents, *rest, False, True))
    dx, _, _ = body("norm_bwd", (dy, q, exponents, weight, rstd, mean, None))
    statistics = [rstd, mean] if centered else [rstd]
    return Rows(scale, [rows, transposed.t()[: len(x)], q, exponents, *statistics], dx)


def activation_gradient(body: Run, dh: Tensor, a: GroupScaled, kind: str) -> tuple[Tensor, Tensor]:
    """Both passes backward: da decoded, and how far its rounding may move each element."""
    scale, _ = body("activation_bwd_stats", (dh, *a, kind, None, "e4m3", "e5m2"))
    q, _, _ = body("activation_bwd", (dh, *a, kind, "e5m2", True, False, False, scale))
    da = q.float() * scale
    return da, torch.maximum(da.abs() * 2.0**-3, scale * 2.0**-17)


def activation(body: Run, a: Tensor, dh: Tensor, scale: Tensor | None, *, kind: str) -> Rows:
    """An activation: codes, recomputed codes, the kept copy; da."""
    q, exponents, own = body("activation_stats", (a, kind, 16, "e4m3"))
    scale = own if scale is None else scale
    (rows,) = body("activation_apply", (a, kind, scale, "e4m3"))
    dh = torch.zeros(rows.shape)
    stats = (dh, q, exponents, kind, scale, "e4m3", "e4m3")
    _, transposed = body("activation_bwd_stats", stats)
    dh = dh[:, : rows.shape[1]].contiguous()
    da, _ = activation_gradient(body, dh, GroupScaled(q, exponents), kind)
    return Rows(scale, [rows, transposed.t()[: len(a)], q, exponents], da)


def heads(columns: int) -> tuple[int, list[int]]:
    """Of q, and the widths of q, k and v, with 32 channels and one head of k."""
    return columns // 32 - 2, [columns - 64, 32, 32]


def rope_gradient(body: Run, dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """FP32, without the rounding to codes: the sum over the tokens of one token at a time.

    Of the first six rows: every one is two launches, which take the interpreter long.
    """
    _, widths = heads(dy.shape[1])
    rows: list[Tensor] = []
    for i, row in enumerate(dy[:6]):
        back = [part[None].contiguous() for part in row.split(widths)]
        embedding = [t[i % len(t)][None] for t in (cos, sin)]
        rows.append(body("rope_gradient", (*back, *embedding, "e5m2", False, False, True))[3])
    return torch.stack(rows)


def rope(body: Run, x: Tensor, dy: Tensor, _: Tensor | None) -> Rows:
    """One rotation for all tokens: q, k, v; their fused gradient."""
    number = heads(x.shape[1])[0]
    angles = torch.linspace(-3, 3, 16).repeat(1, 2)
    embedding = (angles.cos(), angles.sin())
    dx = rope_gradient(body, dy, *embedding)
    return Rows(torch.ones(()), body("rope", (x, *embedding, number, 1)), dx)


def row_op(name: str) -> Callable[..., Rows]:
    """``norm``, ``activation`` or ``rope``, with what it is to be."""
    if name == "rope":
        return rope
    if name.endswith("_norm"):
        return lambda *args: norm(*args, centered=name == "layer_norm")
    return lambda *args: activation(*args, kind=name)


ROW_OPS = pytest.mark.parametrize("name", ["rms_norm", "layer_norm", *ACTIVATIONS, "rope"])


@ROW_OPS
@settings
@given(several(2), st.integers(1, 20))
def test_rows_of_zeros_appended_change_no_other_row(
    run: Run, name: str, pair: tuple[Tensor, ...], extra: int
):
    x, dy = pair
    longer = [torch.cat([t, torch.zeros(extra, t.shape[1])]) for t in pair]
    for body in (run, run_reference):
        plain, padded = row_op(name)(body, x, dy, None), row_op(name)(body, *longer, None)
        assert_same_bits("scale", padded.scale, plain.scale)
        for before, after in zip(plain.outputs, padded.outputs, strict=True):
            assert_same_bits("output", after[: len(x)], before)
            if before.ndim == 2 and before.dtype != torch.uint8:  # values, not exponents
                assert not after[len(x) :].float().any()
        assert_same_bits("gradient", padded.gradient[: len(x)], plain.gradient)
        assert not padded.gradient[len(x) :].any()


@ROW_OPS
@settings
@given(several(4), st.integers(0, 4))
def test_a_row_depends_on_other_rows_through_the_scale_only(
    run: Run, name: str, four: tuple[Tensor, ...], which: int
):
    x, dy, *others = four
    which %= len(x)
    for t, other in zip((x, dy), others, strict=True):
        other[which] = t[which]
    for body in (run, run_reference):
        before = row_op(name)(body, x, dy, None)
        after = row_op(name)(body, *others, before.scale)
        for one, two in zip(before.outputs, after.outputs, strict=True):
            assert_same_bits("output", two[which], one[which])
        if name not in ACTIVATIONS:  # whose gradient is compared with autograd's below
            assert_same_bits("gradient", after.gradient[which], before.gradient[which])


@settings
@given(several(2), st.integers(0, 999))
def test_rope_gradient_is_the_adjoint_of_rope(run: Run, pair: tuple[Tensor, ...], seed: int):
    """Whatever cos and sin are, and where the halves of them differ."""
    x, dy = (t.clamp(-8, 8) for t in pair)
    number, _ = heads(x.shape[1])
    generator = torch.Generator().manual_seed(seed)
    embedding = [2 * torch.rand(len(x), 32, generator=generator) - 1 for _ in range(2)]
    for body in (run, run_reference):
        forward = torch.cat(body("rope", (x, *embedding, number, 1)), -1).double()
        backward = rope_gradient(body, dy, *embedding)
        left, right = (forward * dy).sum(-1), (x.double() * backward).sum(-1)
        size = x.double().norm(dim=-1) * dy.double().norm(dim=-1)
        assert ((left - right).abs() <= 1e-6 * size).all()
