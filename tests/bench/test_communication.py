"""Collectives counted in steps on CPU ranks, and the estimates next to measured rows."""

import csv
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import communication
from communication import MACHINE, STEPS, Step, estimate_row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guides/8_to_512_gpus.md"
WORKER = Path(__file__).parent / "communication_worker.py"
WHOLE = {
    "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}  # fmt: skip
"""ZeRO-3 gathers a tiny model as it gathers a large one: every block in every pass."""


def case(zero_stage: int, micro_batches: int, sequence_parallel: int = 1, **zero: int) -> Any:
    return {
        "zero_stage": zero_stage, "micro_batches": micro_batches,
        "sequence_parallel": sequence_parallel, "zero": zero,
    }  # fmt: skip


def count(ranks: int, *cases: Any) -> list[dict[str, Any]]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, f"--nproc-per-node={ranks}", str(WORKER), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def sum_sent(counted: dict[str, Any], element: int) -> dict[int, float]:
    """Bytes that a rank sends in rings, by the number of ranks; all-reduces of scalars are none."""
    sent: dict[int, float] = {}
    for key, elements in counted["elements"].items():
        name, ranks, size = key.split()
        if int(size) != element or elements < 1000:
            continue
        factor = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}[name]
        share = factor * (int(ranks) - 1) / int(ranks)
        sent[int(ranks)] = sent.get(int(ranks), 0.0) + share * elements * int(size)
    return sent


def estimated(counted: dict[str, Any], zero: str, micro_batches: int, ranks: int) -> Any:
    billions = counted["parameters"] / 1e9
    step = Step(zero, billions, 0, micro_batches, ranks)
    return {group: pytest.approx(1e9 * gb, rel=1e-4) for group, gb in step.count_sent().items()}


@pytest.mark.slow
def test_two_ranks_send_what_the_script_says() -> None:
    """By stage and number of micro-batches; more than 8 are summed in FP32."""
    stages = [(0, 2), (1, 2), (2, 2), (3, 2), (0, 9), (1, 9), (2, 9)]
    cases = [case(zero, m, **(WHOLE if zero == 3 else {})) for zero, m in stages]
    for (zero, m), counted in zip(stages, count(2, *cases), strict=True):
        sent = sum_sent(counted, 2)
        if m > 8 and zero < 2:
            fp32 = sum_sent(counted, 4)
            sent = {2: sent.get(2, 0.0) + fp32[2]}
        assert sent == estimated(counted, str(zero), m, 2), (zero, m)
        scalars = [n for key, n in counted["elements"].items() if n < 1000 or key[-1] == "8"]
        assert sum(scalars) < 100, counted


@pytest.mark.slow
def test_sequence_parallelism_exchanges_tokens_and_features_and_shares_scales() -> None:
    """Two exchanges per layer and one of image features, in both passes."""
    (counted,) = count(2, case(0, 1, sequence_parallel=2))
    assert counted["calls"]["all_to_all_single 2 2"] == 2 * (2 * 2 + 1)
    assert counted["calls"]["all_reduce 2 4"] == counted["elements"]["all_reduce 2 4"] == 25


@pytest.mark.slow
def test_hpz_gathers_again_within_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "MACHINE", 2)
    plain, hpz = count(4, case(3, 2, **WHOLE), case(3, 2, **WHOLE, zero_hpz_partition_size=2))
    assert sum_sent(plain, 2) == estimated(plain, "3", 2, 4)
    assert sum_sent(hpz, 2) == estimated(hpz, "hpZ", 2, 4)
    assert hpz["losses"] == plain["losses"]


def read_rows() -> list[dict[str, str]]:
    with STEPS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["model"] in communication.MODELS and not row["problem"]]


@pytest.mark.parametrize(
    ("commit", "model", "zero"),
    [
        ("5d3ba05", "qwen2.5-0.5b", "2"),
        ("38e6ca1", "qwen2.5-7b", "2"),
        ("38e6ca1", "qwen2.5-7b", "3"),
    ],
)
def test_the_constants_solve_three_rows(commit: str, model: str, zero: str) -> None:
    rows = read_rows()
    (row,) = [
        row
        for row in rows
        if (row["commit"], row["zero"], row["gpus"]) == (commit, zero, "2")
        and row["implementation"] == "coat_paper"
        and row["model"].endswith(model)
    ]
    estimate = estimate_row(row, rows)
    assert estimate is not None
    assert estimate[1] == pytest.approx(float(row["ms"]), rel=0.003)


def test_communication_by_hand() -> None:
    """8B parameters, ZeRO-2 on two ranks: an all-reduce of 16 GB and an all-gather."""
    step = Step("2", 8.0, 0, 1, 2)
    assert step.count_sent() == {2: 16.0 + 8.0}
    assert step.estimate_communication_ms() == pytest.approx(24.0 / 0.355, rel=0.01)
    # On 64 GPUs behind 50 GB/s per machine; latency is 56 + 7 hops for each of 144 buckets' rings.
    slow = Step("1", 8.0, 0, 1, 64).estimate_communication_ms(400.0)
    assert slow == pytest.approx(1e3 * 48 * 63 / 64 / 50, rel=0.02)
    assert Step("hpZ", 8.0, 764, 1, 8).count_sent() == Step("3", 8.0, 764, 1, 8).count_sent()
    assert Step("hpZ", 8.0, 764, 1, 16).count_sent() == {16: 2 * 16 * 15 / 16, MACHINE: 14.0}
    hpz, zero3 = (Step(zero, 8.0, 764, 4, 16).count_sent() for zero in ("hpZ", "3"))
    assert hpz[16] < zero3[16] / 2


def test_the_tables_of_the_page_are_what_the_script_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, *sections = re.split(
        r"^python (?=scripts/bench/communication.py)", PAGE.read_text(), flags=re.M
    )
    printed, shown = set[str](), set[str]()
    for section in sections:
        monkeypatch.setattr(sys, "argv", section.splitlines()[0].split())
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
        printed |= set(capsys.readouterr().out.splitlines())
        table, *_ = section.split("\n## ")
        shown |= {line for line in table.splitlines() if line.startswith("| ")}
    assert len(sections) == 4
    assert len(shown & printed) > 12
    summary = shown - printed
    assert summary == {line for line in summary if re.match(r"\| (steps|two|four) ", line)}
    assert {line.split(" | ")[1] for line in summary} == {"within 5%", *count_within_5_percent()}


def count_within_5_percent() -> list[str]:
    rows = read_rows()
    last = max(number for number, row in enumerate(rows) if row["commit"] == "38e6ca1")
    counts: dict[tuple[str, str, bool], list[bool]] = {}
    for row in rows[: last + 1]:
        solved = row["implementation"] == "coat_paper" and (
            row["commit"] == "38e6ca1" or (row["commit"], row["zero"]) == ("5d3ba05", "2")
        )
        estimate = estimate_row(row, rows) if row["gpus"] != "1" else None
        if estimate is None or solved:
            continue
        billions = communication.MODELS[row["model"]][0]
        zero = "" if row["gpus"] == "4" else row["zero"]
        big = billions > 2 and zero != "2"
        within = abs(estimate[1] / float(row["ms"]) - 1) < 0.05
        counts.setdefault((row["gpus"], zero, big), []).append(within)
    return [f"{sum(within)} of {len(within)}" for within in counts.values()]
