"""The line a user reads."""

from typing import Any

import pytest
import torch

from coat_vlm.distributed import World
from coat_vlm.train.tracking import StepLine

TWO = World(rank=0, size=2, device=torch.device("cuda", 0))


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.23456,
        "grad_norm": 0.8712,
        "lr": {"vision": 2e-6, "projector": 2e-5, "language": 2e-5},
        "tokens": 24_690,
        "vision_tokens": 12_288,
        "tflop": {"vision": 500.0, "language": 1148.0},
        "step_s": 2.0,
        "data_wait_s": 0.006,
        "peak_memory_mb": 51_200.0,
    } | changes


def lines(capsys: pytest.CaptureFixture[str], *rows: dict[str, Any], **changes: Any) -> list[str]:
    """What is printed for these entries."""
    settings = {"stage": "sft", "total_steps": 5198, "done": 0, "every": 2, "world": TWO}
    line = StepLine(**(settings | changes))
    for each in rows:
        line.show(each)
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_a_log_file_gets_a_whole_line_at_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: rates of both steps, 4 s; 2 * 1648 TFLOP in 4 s on two GPUs are 412 each."""
    assert lines(capsys, row(119), row(120)) == [
        "sft step 120/5198 loss 1.2346 grad 0.871 lr 2.0e-06/2.0e-05 tokens/s 12,345 "
        "(vision 6,144) TFLOP/s 412 wait 0.3% mem 51.2 GB eta 2:49:16"
    ]


def test_rates_are_those_of_steady_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 3 steps of 24,690 tokens in 2 s each; compiling and measuring stand apart."""
    compiling = row(3, step_s=30.0)
    measured = row(7, step_s=11.6, peak_memory_mb=None)
    rows = [compiling, *(row(step) for step in (4, 5, 6)), measured]
    (line,) = lines(capsys, *rows, done=2, every=7)
    assert "tokens/s 12,345 (vision 6,144) TFLOP/s 412 wait 0.3% mem 51.2 GB " in line
    assert line.endswith("mem 51.2 GB first step 30.0 s measured step 11.6 s eta 2:53:02")
