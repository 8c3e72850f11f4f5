"""Real processes of ``coat-vlm`` on a tiny run, and what ends, stops or outlives them."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

import coat_vlm  # noqa: F401 - first, so that torchvision imports

COMMAND = [sys.executable, "-m", "coat_cli.main"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
WAIT_S = 180.0
"""Longest wait for a condition, on a loaded machine."""


class Run:
    """A process with its output, in a session of its own."""

    def __init__(self, words: Sequence[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words,
                env=env or ENV,
                stdout=file,
                stderr=file,
                start_new_session=True,
                # The tests may run under nohup, which would be inherited.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], Any], what: str, limit_s: float = WAIT_S) -> None:
        """Wait until the condition holds while the process runs."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, (what, self.output()[-3000:])
            assert time.monotonic() < deadline, (what, self.output()[-3000:])
            time.sleep(0.02)

    def end(self, timeout: float = WAIT_S) -> int:
        """The status, once it has ended by itself."""
        return self.process.wait(timeout=timeout)

    def send(self, number: int) -> None:
        self.process.send_signal(number)


def find_port() -> int:
    """A free port, for a launcher that does not look for one.

    No other program takes the port before the launcher does: Linux gives ports from 32768 on to
    programs that ask for any, and each worker of pytest-xdist has a range of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 10_000 + 500 * (worker % 45)
    for port in random.sample(range(first, first + 500), 500):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {first} to {first + 499} is free")


def write_programs(folder: Path) -> Path:
    """Write ``coat-vlm`` and the launchers as scripts, also where they are not installed.

    DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES for the ranks, although the tests may have hidden
    the GPUs by an empty value; ``coat-vlm`` then hides them again.

    Returns:
        The folder, for PATH.
    """
    folder.mkdir()
    hidden = ENV.get("CUDA_VISIBLE_DEVICES") == ""
    hide = 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = ""\n' if hidden else ""
    for name, module in (
        ("coat-vlm", "coat_cli.main"),
        ("torchrun", "torch.distributed.run"),
        ("deepspeed", "deepspeed.launcher.runner"),
    ):
        code = f"import sys\n{hide}from {module} import main\nsys.exit(main())\n"
        (folder / name).write_text(f"#!{sys.executable}\n{code}")
        (folder / name).chmod(0o755)
    return folder


def children(pid: int) -> list[int]:
    """The living processes that a process started, from /proc."""
    return _processes_by_parent().get(pid, [])


def descendants(pid: int) -> list[int]:
    """The living processes below one, from /proc."""
    parents, found, left = _processes_by_parent(), [], [pid]
    while left:
        left += (below := parents.get(left.pop(), []))
        found += below
    return found


def _processes_by_parent() -> dict[int, list[int]]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return parents


def alive(pid: int) -> bool:
    """Whether a process runs, or is stopped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def read_folder(folder: Path) -> dict[str, bytes]:
    """All files of a folder, except the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def count_steps(run_dir: Path) -> int:
    """The steps in metrics.jsonl."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count('"step_s"') if metrics.is_file() else 0


def losses(run_dir: Path) -> list[float]:
    """The training losses, of which every step has exactly one."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    return [row["loss"] for row in steps]


def write_data(folder: Path) -> Path:
    """Rows of text (data.json), and questions of an evaluation set."""
    colors = ("red", "green", "blue")
    rows = [
        {
            "id": number,
            "conversations": [
                {"from": "human", "value": f"Color {number}?"},
                {"from": "gpt", "value": " ".join([colors[number % 3]] * (1 + number % 4))},
            ],
        }
        for number in range(24)
    ]
    (folder / "data.json").write_text(json.dumps(rows))
    (folder / "validation.json").write_text(json.dumps(rows * 100))
    questions = [
        {"question_id": str(number), "text": f"Color {number}?", "answer": colors[number % 3]}
        for number in range(400)
    ]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (folder / "questions.jsonl").write_text(lines)
    return folder


def tiny_recipe(data: Path, run_dir: Path, **stage: Any) -> dict[str, Any]:
    """A language model of one small layer; ``stage`` changes its stage."""
    source = {"name": "tiny", "path": str(data / "data.json")}
    language = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
    }
    return {
        "name": "tiny",
        "output_dir": str(run_dir),
        "precision": "fp32",
        "num_workers": 0,
        "tracking": {"tensorboard": False},
        "model": {
            "vision": None,
            "language": {"config": language},
            "tokenizer": {"train_vocab_size": 280},
        },
        "stages": {
            "sft": {
                "data": [source],
                "vision": {"train": False},
                "projector": {"train": False},
                "language": {"train": True, "lr": 3e-3},
                "batch_size": 4,
                "micro_batch_size": 2,
                "max_steps": 40,
                **stage,
            }
        },
    }


def write_recipe(recipe: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(recipe))
    return path
