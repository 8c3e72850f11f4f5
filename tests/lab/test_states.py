"""Rules for 8-bit moments against the rules written out, and the study's table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coat_bench.rows import read_rows
from coat_cli.main import main
from coat_lab import states
from coat_lab.states import StateRow, draw_gradients, make_dynamic_map, make_rules, measure_errors


def draw(second: bool) -> Tensor:
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)) ** 5
    x[0, :40] *= 1e-9
    x[1, 300:] = 0
    return x.square() if second else x


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_has_256_values(signed: bool) -> None:
    """Written out: the number of leading zeros chooses the decade, the rest is linear."""
    values = make_dynamic_map(signed=signed)
    assert len(values.unique()) == 256
    expected = {0.0, 1.0}
    for decade in range(7):
        count = 2**decade * (1 if signed else 2)
        for step in range(count):
            value = (0.1 + 0.9 * (step + 0.5) / count) * 10.0 ** (decade - 6)
            expected |= {value, -value} if signed else {value}
    torch.testing.assert_close(values.double(), torch.tensor(sorted(expected)).double())


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("rule", ["bitsandbytes", "torchao_8bit"])
def test_values_become_the_nearest_of_the_map(rule: str, second: bool) -> None:
    x = draw(second)
    found = make_rules()[rule](x, second).view(-1, 256)
    values = make_dynamic_map(signed=not second).double()
    for block, quantized in zip(x.view(-1, 256), found, strict=True):
        amax = block.abs().max().item() or 1.0
        scaled = block.double() / amax
        nearest = values[(scaled[:, None] - values).abs().argmin(1)]
        if rule == "bitsandbytes" and not second:
            nearest[(nearest == 0) & (scaled < 0)] = values[values < 0].max()
        torch.testing.assert_close(quantized.double(), nearest * amax, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("rule", "size", "scale"),
    [
        ("e4m3", 128, lambda amax: amax / 448),
        ("torchao_fp8", 256, lambda amax: amax.clamp_min(1e-12) / 448),
        ("te_fp8", 512, lambda amax: amax / 448),
    ],
)
def test_fp8_rules_differ_in_their_blocks(
    rule: str, size: int, scale: Callable[[Tensor], Tensor]
) -> None:
    x = draw(second=True) * 1e-9
    blocks = x.view(-1, size)
    scales = scale(blocks.abs().amax(1, keepdim=True))
    scales = torch.where(scales > 0, scales, 1.0)
    expected = (blocks / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    assert torch.equal(make_rules()[rule](x, True), expected.view(x.shape))


def test_errors_are_those_of_the_formula() -> None:
    """A rule that quarters v doubles the steps of that moment."""

    def quarter(x: Tensor, second: bool) -> Tensor:
        return x / 4 if second else x

    (g,) = draw_gradients(1)
    # After one step m / sqrt(v) is the gradient's sign, but for eps.
    expected = [
        ((row / (row.abs() / 2 + 1e-8) - row / (row.abs() + 1e-8)) ** 2).mean() ** 0.5 for row in g
    ]
    assert measure_errors(quarter, 0.95, 1) == pytest.approx([float(e) for e in expected], rel=1e-4)
    assert measure_errors(make_rules()["fp32"], 0.99, 3) == [0.0] * 4


def test_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(states, "BETAS2", (0.95,))
    monkeypatch.setattr(states, "_SEEDS", 1)
    monkeypatch.setattr(states, "_TASK_STEPS", 20)
    csv = tmp_path / "states.csv"
    assert main(["lab", "states", "--steps", "30", "--csv", str(csv)]) == 0
    rows: dict[Any, float] = {
        (row.rule, row.gradients): row.value for row in read_rows(csv, StateRow, "")
    }
    assert len(rows) == len(make_rules()) * 5
    for kind in ("steady", "falling"):
        exact, dre, plain = (rows[rule, kind] for rule in ("fp32", "dre_e4m3", "e4m3"))
        assert exact == 0 < dre < plain
    assert "| 0.95 | dre_e4m3 | " in capsys.readouterr().out
