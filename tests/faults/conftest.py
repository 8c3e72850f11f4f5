"""Which fault tests always run, and the processes that they start."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fault_runs import Run, descendants, write_data
from shared_run import small_run, tiny_data

HERE = Path(__file__).parent

__all__ = ["small_run", "tiny_data"]

FAST = (
    "test_a_killed_save_leaves_the_checkpoint_before_it",
    "test_three_kills",
    "test_any_damaged_file_makes_a_resume_fall_back",
    "test_a_killed_launcher_leaves_no_orphan[torchrun-SIGKILL]",
    "test_resume_refuses_changed_data_unless_allowed[1]",
    "test_the_last_save_fails[full disk]",
    "test_a_killed_worker",
    "test_two_signals[2]",
    "test_overwriting_a_run_that_is_evaluated",
    "test_what_cannot_be_saved_ends_a_run_before_its_first_step",
)
"""The faults of every test run; the others need ``-m faults``."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and item.name not in FAST:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """A function that runs an action of ranks.py on several ranks and returns their results."""
    log = tmp_path_factory.mktemp("ranks") / "stderr"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, str(HERE / "ranks.py")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def run(action: str, ranks: int, **values: Any) -> list[Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"action": action, "ranks": ranks, **values}) + "\n")
            process.stdin.flush()
            for line in process.stdout:  # libraries print, too
                if line.startswith("RESULTS "):
                    return json.loads(line.removeprefix("RESULTS "))
            raise AssertionError(log.read_text()[-3000:])

        yield run
        process.stdin.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts processes, and kills those that a failed test leaves."""
    runs: list[Run] = []

    def started(words: Sequence[str | Path], env: dict[str, str] | None = None) -> Run:
        run = Run([str(word) for word in words], tmp_path / f"log-{len(runs)}", env)
        runs.append(run)
        return run

    yield started
    for run in runs:
        if run.process.poll() is not None:
            continue  # its number may belong to another process by now
        for pid in [run.pid, *descendants(run.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        run.process.wait()


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of text, and questions of an evaluation set."""
    return write_data(tmp_path_factory.mktemp("text_data"))
