"""CoatAdamW's options: masters, gradients that are not finite, states that do not fit."""

import io
from typing import Any

import pytest
import torch
from op_check import assert_same_bits
from torch import nn

from coat_kernels import join_master
from coat_vlm.optim import CoatAdamW

SIZES = ((3, 50), (129,), (7,), (600_000,))
"""Small ones are updated together, the last one by itself."""


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def set_gradients(params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (factor * torch.randn(p.shape, generator=generator).bfloat16()).to(p.dtype)


def state_of(params: list[nn.Parameter], **options: Any) -> tuple[CoatAdamW, dict[str, Any]]:
    optimizer = CoatAdamW(params, lr=1e-2, **options)
    set_gradients(params, 0)
    optimizer.step()
    return optimizer, optimizer.state_dict()


def test_a_bf16_run_with_low_bits_is_the_fp32_run() -> None:
    full = parameters(torch.bfloat16)
    full = [nn.Parameter(p.detach().float()) for p in full]
    half = parameters(torch.bfloat16)
    first = CoatAdamW(full, lr=1e-2)
    second = CoatAdamW(half, lr=1e-2, master="bf16_low_bits")
    for step in range(3):
        for params, optimizer in ((full, first), (half, second)):
            set_gradients(params, step)
            optimizer.step()
    for p32, p16 in zip(full, half, strict=True):
        rest = second.state[p16]["master_low_bits"]
        assert_same_bits("master", join_master(p16.detach(), rest), p32.detach())
        assert_same_bits("moment", second.state[p16]["exp_avg"], first.state[p32]["exp_avg"])


@pytest.mark.parametrize("master", ["fp32", "bf16_low_bits", "bf16_stochastic"])
def test_a_resumed_step_is_the_same(master: Any) -> None:
    """Stochastic rounding depends only on the number of the step."""
    ends = []
    for _ in range(2):
        params = parameters(torch.bfloat16 if master != "fp32" else torch.float32)
        optimizer, saved = state_of(params, master=master, seed=3)
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        values = [p.detach().clone() for p in params]
        set_gradients(params, 1)
        optimizer.step()
        again = [nn.Parameter(value) for value in values]
        resumed = CoatAdamW(again, lr=1e-2, master=master, seed=3)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        set_gradients(again, 1)
        resumed.step()
        ends += [(optimizer, params), (resumed, again)]
    expected, wanted = ends[0]
    for found, params in ends[1:]:
        for p, other in zip(params, wanted, strict=True):
            assert_same_bits("parameter", p.detach(), other.detach())
            for key, value in expected.state[other].items():
                assert_same_bits(key, found.state[p][key], value)


def test_small_steps_count_on_average_with_stochastic_rounding() -> None:
    """Steps of 1e-4 are far below half a step of BF16 near 1: rounded to nearest they are lost."""
    moved = {}
    for master in ("fp32", "bf16_stochastic"):
        p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = CoatAdamW([p], lr=1e-4, weight_decay=0.0, master=master)  # pyright: ignore[reportArgumentType]
        for _ in range(10):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[master] = (1 - p.detach().double()).mean().item()
    assert moved["fp32"] == 0
    # Each step of 1e-4 in units of 2^-8: standard deviation 2^-8 sqrt(10 * 0.026 / 4096).
    assert moved["bf16_stochastic"] == pytest.approx(1e-3, abs=5 * 2**-8 * (0.26 / 4096) ** 0.5)


def test_groups_have_their_own_rates_and_can_be_added() -> None:
    params, exact = parameters(), parameters()
    optimizer = CoatAdamW([{"params": params[:2], "lr": 1e-2}], weight_decay=0.0)
    optimizer.add_param_group({"params": params[2:], "lr": 1e-3, "weight_decay": 0.5})
    twin = torch.optim.AdamW(
        [
            {"params": exact[:2], "lr": 1e-2},
            {"params": exact[2:], "lr": 1e-3, "weight_decay": 0.5},
        ],
        weight_decay=0.0,
    )
    for group, step in ((params, optimizer.step), (exact, twin.step)):
        set_gradients(group, 0)
        step()
    for one, other in zip(params, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def without_low_bits(state: dict[str, Any]) -> None:
    del state["state"][0]["master_low_bits"]


def of_groups_of_64(state: dict[str, Any]) -> None:
    for key in ("exp_avg_amax", "exp_avg_sq_amax"):
        state["state"][1][key] = state["state"][1][key].repeat_interleave(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_low_bits, r"parameter 0 of group 0 has .* lacks \['master_low_bits'\]"),
        (of_groups_of_64, r"saved exp_avg_amax of parameter 1 of group 0 .* \(4,\), not .* \(2,\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    params = parameters(torch.bfloat16)
    _, state = state_of(params, master="bf16_low_bits")
    CoatAdamW(params, master="bf16_low_bits").load_state_dict(state)
    change(state)
    with pytest.raises(ValueError, match=message):
        CoatAdamW(params, master="bf16_low_bits").load_state_dict(state)


def test_groups_are_checked_and_empty_parameters_do_no_harm() -> None:
    weight, nothing = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(0))
    with pytest.raises(ValueError, match="master='bf16'; use one of fp32"):
        CoatAdamW([{"params": [weight], "master": "bf16"}])
    optimizer = CoatAdamW([weight, nothing], lr=0.1)
    with pytest.raises(ValueError, match="master='fp4'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "master": "fp4"})
    assert len(optimizer.param_groups) == 1
    weight.grad, nothing.grad = torch.ones(8), torch.ones(0)
    optimizer.step()
    assert (weight < 1).all()
    other = CoatAdamW([weight, nothing], master="bf16_stochastic")
    with pytest.raises(ValueError, match="the saved state has master 'fp32'"):
        other.load_state_dict(optimizer.state_dict())
