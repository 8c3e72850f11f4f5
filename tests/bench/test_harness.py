"""Result files, arguments and the clock of the benchmarks."""

import csv
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

import harness
from adamw import AdamwResult
from gemm import GemmResult
from harness import Result, VersionedResult, append_results, measure_median_us, read_results
from lab_fork import ForkResult
from layer import LayerResult
from long import LongResult
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
    assert read_results(path, Measured)[1] == Measured(*ORIGIN, "second", problem="a, b")
    path.write_text("other,columns\n")
    with pytest.raises(ValueError, match=r"has the columns \['other', 'columns'\]"):
        append_results(path, [Measured(*ORIGIN, "fourth")])
    assert path.read_text() == "other,columns\n"


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "layer": LayerResult, "kernels": OpResult, "gemm": GemmResult, "adamw": AdamwResult,
        "long": LongResult, "step": StepResult, "fork": ForkResult,
    }.items(),
)  # fmt: skip
def test_committed_files_have_the_columns_of_their_results(name: str, kind: type[Result]) -> None:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        assert next(csv.reader(file)) == [field.name for field in fields(kind)]


def test_tables() -> None:
    results = [Measured(*ORIGIN, "x", 1234.56), Measured(*ORIGIN, "y")]
    columns = {"name": "name", "ms": "ms:1", "note": lambda result: result.name * 2}
    assert harness.format_results(results, columns).splitlines() == [
        "| name | ms | note |",
        "| --- | --- | --- |",
        "| x | 1,234.6 | xx |",
        "| y | - | yy |",
    ]


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


def test_a_profile_has_the_operators_of_a_cpu() -> None:
    x = torch.randn(64, 64)
    table = harness.profile_step(lambda: [x @ x for _ in range(3)], torch.device("cpu"))
    assert "ms under the profiler" in table
    assert "aten::mm" in table


def test_a_script_runs_alone_and_an_error_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS["lab_formats"]), "--formats", "e0m0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("lab_formats.py: format 'e0m0' cannot exist")


def test_no_script_is_called_like_a_module_that_others_import() -> None:
    """The folder is first on sys.path; transformers looks for a package called kernels."""
    names = {path.stem for path in (ROOT / "scripts" / "bench").glob("*.py")}
    assert not names & (sys.stdlib_module_names | {"kernels", "datasets", "evaluate", "data"})


class FakeGpu:
    """``torch.cuda`` of a GPU whose time goes on only when it works."""

    def __init__(self, replays_ms: list[float]) -> None:
        self.now_ms = 0.0
        self.replays_ms = replays_ms
        self.log: list[str] = []
        self.capturing = False

    def call(self) -> None:
        self.log.append("captured" if self.capturing else "warm-up")

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def Stream(self) -> Any:  # noqa: N802
        gpu = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                gpu.log.append("wait")

        return Stream()

    current_stream = Stream

    def CUDAGraph(self) -> Any:  # noqa: N802
        gpu = self

        class Graph:
            def replay(self) -> None:
                count = gpu.log.count("replay")
                gpu.log.append("replay")
                gpu.now_ms += gpu.replays_ms[count % len(gpu.replays_ms)]

        return Graph()

    @contextmanager
    def graph(self, graph: Any, stream: Any) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        except RuntimeError:
            raise RuntimeError("CUDA error: failed due to a previous error") from None
        finally:
            self.capturing = False

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        gpu = self

        class Event:
            ms = -1.0

            def record(self) -> None:
                self.ms = gpu.now_ms

            def elapsed_time(self, end: Any) -> float:
                return end.ms - self.ms

        return Event()

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def zero_(self) -> None:
        self.log.append("flush")
        self.now_ms += 7.0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    # Five replays of a measured batch are slow, as is the whole batch before it.
    gpu = FakeGpu([9.0] * 30 + [0.002] * 25 + [9.0] * 5)
    monkeypatch.setattr(harness, "cuda", gpu)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: gpu)
    monkeypatch.setattr(harness, "_WARMUP_S", 0.0)
    monkeypatch.setattr(harness, "_MEASURED_S", 0.0)
    return gpu


def test_the_time_is_the_median_of_replays_after_a_flush(fake: FakeGpu) -> None:
    assert measure_median_us(fake.call) == pytest.approx(2.0)
    calls = [what for what in fake.log if what not in ("wait", "synchronize")]
    assert calls[:-120] == ["warm-up"] * 3 + ["captured"]
    assert calls[-120:] == ["flush", "replay"] * 60
    assert (fake.log[0], fake.log[-1]) == ("wait", "synchronize")


@pytest.mark.parametrize(
    ("when", "message"),
    [(True, r"^cannot be captured in a CUDA graph: no sync$"), (False, r"^no sync\nmore$")],
)
def test_errors_of_a_call(fake: FakeGpu, when: bool, message: str) -> None:
    def fails() -> None:
        if fake.capturing == when:
            raise RuntimeError("no sync\nmore")

    with pytest.raises(RuntimeError, match=message):
        measure_median_us(fails)
    assert "replay" not in fake.log


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
