"""Result files, arguments and the clock of the benchmarks."""

import csv
import runpy
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from adamw import AdamwResult
from harness import Result, VersionedResult, append_results, measure_median_us
from lab_fork import ForkResult
from layer import LayerResult
from ops import OpResult
from step import StepResult

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "kernels" / "benchmarks" / "results"
SCRIPTS = {
    path.stem: path
    for path in sorted((ROOT / "scripts" / "bench").glob("*.py"))
    if "build_parser" in path.read_text()
}
ORIGIN = ("2026-01-31", "abc", "NVIDIA H200", "2.11.0", "3.6.0")


@dataclass(slots=True)
class Measured(VersionedResult):
    name: str
    ms: float | None = None
    problem: str = ""


def test_results_are_appended_to_a_file_of_the_same_columns(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    append_results(path, [Measured(*ORIGIN, "first", 1.25)])
    append_results(path, [Measured(*ORIGIN, "second", problem="a, b"), Measured(*ORIGIN, "third")])
    read = list(csv.DictReader(path.open(newline="")))
    assert [row["name"] for row in read] == ["first", "second", "third"]
    assert [row["ms"] for row in read] == ["1.2500", "", ""]
    assert tuple(read[0].values())[:5] == ORIGIN
    assert read[1]["problem"] == "a, b"
    path.write_text("other,columns\n")
    with pytest.raises(ValueError, match=r"has the columns \['other', 'columns'\]"):
        append_results(path, [Measured(*ORIGIN, "fourth")])
    assert path.read_text() == "other,columns\n"


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "layer": LayerResult, "kernels": OpResult, "adamw": AdamwResult,
        "step": StepResult, "fork": ForkResult,
    }.items(),
)  # fmt: skip
def test_committed_files_have_the_columns_of_their_results(name: str, kind: type[Result]) -> None:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        assert next(csv.reader(file)) == [field.name for field in fields(kind)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_of_every_script_parse(name: str) -> None:
    parser = runpy.run_path(str(SCRIPTS[name]))["build_parser"]()
    block = parser.epilog.removeprefix("examples:\n").split("\n\n")[0].replace("\\\n", " ")
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert commands
    for command in commands:
        script = next(word for word in command if word.endswith(".py"))
        assert script == f"scripts/bench/{name}.py"
        parser.parse_intermixed_args(command[command.index(script) + 1 :])


def test_a_script_runs_alone_and_an_error_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS["lab_formats"]), "--formats", "e0m0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("lab_formats.py: format 'e0m0' cannot exist")


@pytest.mark.gpu
def test_on_a_gpu_a_large_op_takes_what_do_bench_says() -> None:
    from triton.testing import do_bench

    # Not a copy: in a graph it is a memcpy node, which runs slower.
    x = torch.zeros(2**28, device="cuda")
    y = torch.empty_like(x)
    expected: Any = do_bench(lambda: torch.add(x, 1, out=y), return_mode="median")
    assert measure_median_us(lambda: torch.add(x, 1, out=y)) == pytest.approx(
        1e3 * expected, rel=0.25
    )


@pytest.mark.gpu
def test_on_a_gpu_launches_are_left_out_and_the_work_is_not() -> None:
    x = torch.zeros(2**20, device="cuda")

    def slow_to_launch() -> None:
        time.sleep(1e-3)
        x.add_(1)

    # 4 MiB read and written: a few microseconds.
    assert 0.5 < measure_median_us(slow_to_launch) < 100
    assert x[0].item() >= 60
