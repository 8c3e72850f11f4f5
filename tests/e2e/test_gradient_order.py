"""Ranks under ZeRO-2 of which one replays CUDA graphs and the other does not."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coat_vlm.train.gradient_order import GradientOrder

WORKER = Path(__file__).parent / "gradient_order_worker.py"

WHOLE = 10**6
"""Elements of a bucket for all gradients."""


def run(replays: str, bucket: int, order: str) -> dict[str, Any]:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    done = subprocess.run(
        [*launch, str(WORKER), replays, str(bucket), order],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def eager() -> dict[str, Any]:
    return run("none", WHOLE, "as it comes")


@pytest.mark.parametrize("bucket", [WHOLE, 20_000])
def test_gradients_are_those_of_eager_ranks(eager: dict[str, Any], bucket: int) -> None:
    """Equal bit by bit; also if a bucket is full in the middle of a block."""
    found = run("first", bucket, "ordered")
    assert not found["same order"]  # in which autograd computes them
    assert found["grads"] == eager["grads"]
    assert found["norm"] == eager["norm"]


def test_without_the_order_gradients_are_wrong(eager: dict[str, Any]) -> None:
    """Why the class exists: without an error."""
    found = run("first", WHOLE, "as it comes")
    wrong = [name for name, total in found["grads"].items() if total != eager["grads"][name]]
    assert len(wrong) > 10


def test_all_gradients_are_passed_on_once_in_the_first_order() -> None:
    passed: list[Any] = []
    ended: list[int] = []
    optimizer: Any = SimpleNamespace(
        reduce_ready_partitions_and_remove_grads=lambda p, group: passed.append((p, group)),
        independent_gradient_partition_epilogue=lambda: ended.append(len(passed)),
    )
    GradientOrder(optimizer)

    def backward(parameters: str) -> str:
        passed.clear()
        for name in parameters:
            optimizer.reduce_ready_partitions_and_remove_grads(name, "abcdef".index(name))
        optimizer.independent_gradient_partition_epilogue()
        assert all(group == "abcdef".index(name) for name, group in passed)
        assert ended[-1] == len(passed)
        return "".join(name for name, _ in passed)

    assert backward("abcd") == "abcd"
    assert backward("bacd") == "abcd"
    assert backward("dcba") == "abcd"
    assert backward("dca") == "acd"  # b was not used
    assert backward("ebadc") == "abcde"  # e was not used before
    assert backward("edcba") == "abcde"
