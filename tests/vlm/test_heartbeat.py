"""Ranks say what they do; one that others wait for is named."""

import contextlib
import os
from pathlib import Path

import pytest
import torch
from tiny_run import wait_for

from coat_vlm.distributed import World
from coat_vlm.report.run_folder import describe_run, read_run_folder
from coat_vlm.run.heartbeat import FOLDER, Heartbeat, read_states


def world_of(rank: int) -> World:
    return World(rank=rank, size=2, device=torch.device("cpu"))


def test_the_first_rank_names_the_one_that_it_waits_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Heartbeat(tmp_path, "sft", 7, world_of(1), 60, renew_s=0.1) as other:
        other.enter("waiting for data", 7)
        with Heartbeat(tmp_path, "sft", 7, world_of(0), 60, renew_s=0.1, silent_s=0.5) as own:
            wait_for(lambda: any(s.activity == "waiting for data" for s in read_states(tmp_path)))
            own.enter("in a training step", 7)
            told = ""

            def warned() -> bool:
                nonlocal told
                told += capfd.readouterr().err
                return "WARNING" in told

            wait_for(warned)
        assert "rank 0 is in a training step" in told
        assert f"rank 1 (process {os.getpid()} on " in told
        assert "is waiting for data" in told
    assert not list((tmp_path / FOLDER).iterdir()), "an orderly end leaves no file"


def test_a_run_that_failed_a_moment_ago_does_not_run(tmp_path: Path) -> None:
    """Its file is new; the report would say "Training now", and show no command to continue."""
    (tmp_path / "metrics.jsonl").touch()
    with Heartbeat(tmp_path, "sft", 7, world_of(0), 60) as own:
        own.enter("in a training step", 7)
        wait_for(lambda: read_states(tmp_path))
        assert read_run_folder(tmp_path).running
    own = Heartbeat(tmp_path, "sft", 7, world_of(0), 60)
    with contextlib.suppress(ValueError), own:
        own.enter("in a training step", 7)
        raise ValueError("diverged")
    assert not read_run_folder(tmp_path).running
    text, responds = describe_run(tmp_path)
    assert "is stopped by an error while in a training step, for" in text
    assert not responds
