"""The step of a recipe on two processes."""

import csv
from pathlib import Path

import pytest
import started


@pytest.mark.parametrize("zero", [2, 3])
def test_two_processes_measure_one_step(tmp_path: Path, zero: int) -> None:
    path = tmp_path / "recipe.csv"
    words = ["bench", "recipe", "quickstart", "--stage", "sft", "--images", "2", "--csv", str(path)]
    words += [f"zero_stage={zero}", "stages.sft.micro_batch_size=3", "model.max_length=64"]
    done = started.run([*words, "--steps", "2", "--warmup", "1"], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = csv.DictReader(path.open())
    assert (row["gpus"], row["zero"], row["problem"]) == ("2", str(zero), "")
    # Two ranks of three rows of 64 tokens, two images of nine each.
    assert (row["tokens"], row["vision_tokens"]) == (str(2 * 3 * 64), str(2 * 3 * 18))
    assert row["supervised_tokens"] == str(2 * 3 * (64 - 1 - 18))
    assert float(row["tok_s_gpu"]) == pytest.approx(3 * 64e3 / float(row["ms"]), rel=1e-3)
    first, last = row["note"].split("loss ")[1].split(" -> ")
    assert float(last) < float(first)


def test_ranks_that_share_tokens_measure_the_step_of_one(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    words = ["bench", "long", "quickstart", "--stage", "sft", "--images", "3", "--csv", str(path)]
    words += ["precision=fp32", "stages.sft.micro_batch_size=2", "model.max_length=65"]
    words += ["--steps", "1"]
    for ranks, more in (1, []), (2, ["stages.sft.sequence_parallel=2", "zero_stage=3"]):
        done = started.run([*words, *more], ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = csv.DictReader(path.open(newline=""))
    assert (two["gpus"], two["zero"], two["sequence_parallel"]) == ("2", "3", "2")
    assert [row["tokens"] for row in (one, two)] == ["130", "130"]
    assert [row["frames"] for row in (one, two)] == ["6", "6"]
    norms, losses = (
        [float(row["note"].split(name)[1].split()[0].strip(";")) for row in (one, two)]
        for name in ("gradient norm ", "loss ")
    )
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
