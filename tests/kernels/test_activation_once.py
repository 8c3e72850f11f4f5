"""Activations that read a large tensor once: the guessed scale, and values that saturate."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_bench.check import assert_same_bits
from coat_kernels import (
    ACTIVATIONS,
    OPS,
    activation,
    activation_bwd_stats,
    activation_fwd,
    dequantize_group,
    quantize_group,
    reference,
    share_scales,
)

Run = Callable[[str, Sequence[Any]], list[Tensor]]
Exact = Callable[[Tensor, str], Tensor]
KINDS = pytest.mark.parametrize("kind", ACTIVATIONS)

PLACES = {"nowhere": None, "in the sample": 32, "just above the guess": 33, "far above it": 5}
"""Where one row is larger than the others: rows 0, 16 and 32 are the sample."""

FACTORS = {"nowhere": 1.0, "in the sample": 50.0, "just above the guess": 2.5, "far above it": 50.0}


def make_input(kind: str, place: str) -> Tensor:
    """Return input with 40 rows, which FP8 represents exactly."""
    width = 96 if kind.endswith("_mul") else 48
    draw = torch.Generator().manual_seed(width)
    a = torch.rand(40, width, generator=draw) + 0.5
    row = PLACES[place]
    if row is not None:
        a[row] *= FACTORS[place]
    return dequantize_group(quantize_group(a, 16))


def run_reference(op: str, args: Sequence[Any]) -> list[Tensor]:
    return list(getattr(reference, op)(*args))


def expected_scale(values: Tensor, largest: float) -> Tensor:
    """In FP64: twice the sample's largest magnitude, or the largest of all."""
    guess = 2 * values[[0, 16, 32]].abs().amax()
    return torch.maximum(guess, values.abs().amax()) / largest


@KINDS
@pytest.mark.parametrize("place", PLACES)
def test_the_scale_is_the_guess_or_the_exact_one(
    kind: str, place: str, run: Run, exact_activation: Exact
):
    a = make_input(kind, place)
    h64 = exact_activation(a.double(), kind)
    whole = h64.abs().amax() / 448
    for body in (run, run_reference):
        q, exponents, h, scale = body("activation_once", (a, kind, 16, "e4m3"))
        torch.testing.assert_close(scale.double(), expected_scale(h64, 448.0), rtol=2e-6, atol=0)
        assert (scale > 1.01 * whole) == (place in ("nowhere", "in the sample"))
        half_step = torch.maximum(h64.abs() * 2**-4, scale.double() * 2**-10)
        assert ((h.double() * scale - h64).abs() <= half_step + 1e-6 * h64.abs().amax()).all()
        copy = reference.quantize_group(a, 16, "e4m3")
        for actual, expected in zip((q, exponents), copy, strict=True):
            assert_same_bits("copy", actual, expected)


@pytest.mark.parametrize("body", ["triton", "reference"])
@pytest.mark.parametrize(
    ("row", "sampled"), [(0, True), (256, True), (512, True), (255, False), (511, False)]
)
def test_the_sample_and_the_repetition_reach_all_rows(
    row: int, sampled: bool, body: str, monkeypatch: pytest.MonkeyPatch
):
    """33 sampled rows in three tiles; three programs write 33 tiles again."""
    monkeypatch.setattr(activation, "AGAIN_PROGRAMS", 3)
    a = torch.full((513, 32), 0.5)
    a[row] = 8.0
    h64 = a.double()[:, :16] * torch.sigmoid(a.double()[:, :16]) * a.double()[:, 16:]
    op = getattr(OPS["activation_once"], body)
    _, _, h, scale = op(a, "silu_mul", 16, "e4m3")
    largest = h64.abs().amax() / 448
    torch.testing.assert_close(scale.double(), (1 + sampled) * largest, rtol=2e-6, atol=0)
    half_step = torch.maximum(h64 * 2**-4, scale.double() * 2**-10)
    assert ((h.double() * scale - h64).abs() <= half_step + 1e-6 * h64.amax()).all()


def test_a_sufficient_guess_writes_nothing_again(monkeypatch: pytest.MonkeyPatch):
    """The last launch leaves the output as it is if the guess was not exceeded."""
    last: dict[str, Any] = {}
    launch = activation.launch

    def spoil_before_the_last(kernel: Any, grid: tuple[int, ...], **args: Any) -> None:
        last.clear()
        last.update(args)
        if "guess_ptr" in args and "tiles" in args:
            args["q_ptr"].zero_()
        launch(kernel, grid, **args)

    monkeypatch.setattr(activation, "launch", spoil_before_the_last)
    for place, untouched in (("nowhere", True), ("far above it", False)):
        *_, h, _ = OPS["activation_once"].triton(make_input("gelu", place), "gelu", 16, "e4m3")
        assert last["q_ptr"] is h
        assert (not h.float().any()) == untouched


@KINDS
@pytest.mark.parametrize("row", [16, 17])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_element_never_gives_plausible_numbers(kind: str, row: int, bad: float, run: Run):
    a = make_input(kind, "nowhere")
    a[row, 3] = bad
    *_, h, scale = run("activation_once", (a, kind, 16, "e4m3"))
    assert (h.float() * scale).isnan().all()


@KINDS
def test_large_tensors_are_read_once(kind: str, monkeypatch: pytest.MonkeyPatch):
    a = make_input(kind, "far above it")
    twice, _ = activation_fwd(a, kind, group_size=16)
    monkeypatch.setattr(activation, "ONE_PASS", 40 * 48)
    once, saved = activation_fwd(a, kind, group_size=16)
    assert once.scale == saved.scale == twice.scale, "values above the guess have the exact scale"
    assert_same_bits("the same scale", once.q, twice.q)
    a = make_input(kind, "in the sample")
    once, saved = activation_fwd(a, kind, group_size=16)
    dh = torch.ones(once.q.shape)
    _, again = activation_bwd_stats(dh, saved, kind)
    assert_same_bits("recomputed", again.q[:, :40].t().contiguous(), once.q)
    monkeypatch.setattr(activation, "ONE_PASS", 40 * 48 + 1)
    twice, _ = activation_fwd(a, kind, group_size=16)
    assert once.scale == saved.scale == 2 * twice.scale
    monkeypatch.setattr(activation, "ONE_PASS", 1)
    with share_scales(lambda _: None):
        assert activation_fwd(a, kind, group_size=16)[0].scale == twice.scale
