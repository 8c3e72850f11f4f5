"""The programs in examples/, each against an independent run."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """An example as a module; the folder is not on the path."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_torch_adamw(steps: int) -> list[float]:
    """The plain loop without FP8, written out with torch's optimizer."""
    plain = example("plain_loop")
    model = plain.build_model("bf16").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for ids in plain.batches(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_plain_loop_learns_as_with_torch_adamw() -> None:
    plain, steps = example("plain_loop"), 25
    expected = with_torch_adamw(steps)
    for precision in ("bf16", "coat"):  # FP8 states alone; FP8 blocks as well
        losses = plain.train(plain.build_model(precision), steps)
        assert losses == pytest.approx(expected, rel=0.02)
        assert losses != expected
    assert losses[-1] < 0.6 * losses[0]


def test_the_trainer_resumes_where_it_stopped(tmp_path: Path) -> None:
    hf_trainer = example("hf_trainer")

    def losses(resume: bool) -> dict[int, float]:
        trainer = hf_trainer.build_trainer(tmp_path, 23)
        trainer.train(resume_from_checkpoint=resume or None)
        return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}

    whole = losses(resume=False)
    assert whole[23] < 0.7 * whole[1]
    (tmp_path / "checkpoint-23").rename(tmp_path / "later")
    assert losses(resume=True) == whole  # steps 1 to 20 from the checkpoint's log, the rest anew


@pytest.mark.slow
def test_two_ranks_of_fsdp2_are_the_plain_loop(tmp_path: Path) -> None:
    """They resume halfway, with weights and FP8 states of their shards read back."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = ["--steps", "10", "--resume-at", "5", "--out", str(tmp_path)]
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / "fsdp2.py"), *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 10, done.stderr[-3000:]
    plain = example("plain_loop")
    # Scales of activations are those of half a batch, groups of states those of half a tensor.
    expected = plain.train(plain.build_model("coat"), 10)
    assert losses == pytest.approx(expected, rel=2e-3)
