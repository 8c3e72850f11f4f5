"""The plan's peaks against those of DeepSpeed's engines, counted on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "plan_zero_worker.py"
TRAINED = 1_576_192
"""Parameters of the worker's projector and language model: the bucket holds them all."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "dtype", "accumulation", "bucket"),
    [
        (1, "bf16", 2, 200_000),
        (2, "bf16", 2, TRAINED),
        (1, "low_bits", 2, TRAINED),
        (2, "bf16", 9, TRAINED),
        (1, "low_bits", 9, TRAINED),
        (2, "low_bits", 2, TRAINED),
        (2, "low_bits", 9, TRAINED),
    ],
    ids=[
        *("small-buckets", "two-ranks", "low-bits", "fp32-sums", "fp32-sums-low-bits"),
        *("two-ranks-low-bits", "two-ranks-fp32-sums-low-bits"),
    ],
)
def test_the_peaks_are_those_of_deepspeed(
    ranks: int, dtype: str, accumulation: int, bucket: int
) -> None:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, str(WORKER), dtype, str(accumulation), str(bucket)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PLAN ")]
    assert len(lines) == 4, done.stderr[-3000:]
    for line in lines:
        row = json.loads(line.removeprefix("PLAN "))
        # Partitions hold whole tensors; a flush needs a little more than what it moves. How long a
        # gradient waits for the other rank differs from run to run: 3.2% above the plan were seen.
        tolerance = 0.001 if ranks == 1 else 0.04
        if (ranks, row["zero_stage"]) == (1, 3) and accumulation > 1:
            # The plan is up to a gradient of the output layer too high, never too low.
            assert row["passes"] <= 1.001 * row["planned_passes"], row
            tolerance = 0.015
        assert row["planned_passes"] == pytest.approx(row["passes"], rel=tolerance), row
        if ranks == 1 and dtype == "low_bits" and accumulation > 2:
            # The FP32 sums of earlier groups are freed when those of the largest are rounded.
            assert row["step"] <= 1.001 * row["planned_step"] or not row["zero_stage"], row
            tolerance = 0.03
        # On a CPU CoatAdamW joins small tensors, which takes memory that a GPU's kernel does not.
        joins = row["step"] > 1.02 * row["planned_step"] and row["zero_stage"] == 0
        if dtype == "low_bits" and row["zero_stage"] == 3:
            # DeepSpeed would also hold a copy of the weights until the engine is complete.
            assert row["building"] <= row["planned_building"], row
        if not joins:
            assert row["planned_step"] == pytest.approx(row["step"], rel=tolerance), row
