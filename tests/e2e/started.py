"""`coat-vlm` in processes of its own, without the ten seconds that their imports take.

:func:`run` has each process forked from one that has imported what training needs and run nothing:
it has no threads yet, whose locks a fork would leave closed for ever. That one is this file as a
program; it is started at the first use, and ends with the tests. What a launcher, a signal or a
limit of the process is the subject of a test, the test starts the real command.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    # DeepSpeed imports its Muon, and with it torch's compiler, to see whether the optimizer is one.
    *("coat_vlm.train.run", "coat_vlm.train.checks", "deepspeed.runtime.zero.muon.muon_optimizer"),
    *("coat_vlm.model.processor", "coat_vlm.plan.measure", "tensorboard"),
    *("torch.utils.tensorboard", "torch._dynamo", "transformers.modeling_utils"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama"),
    *("transformers.models.siglip.modeling_siglip", "transformers.models.auto.modeling_auto"),
)
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""

GRACE_S = 5.0
"""What the other ranks have to end by themselves when one has failed."""


def run(
    words: Sequence[str],
    *,
    program: Path | None = None,
    text: str = "",
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> "subprocess.CompletedProcess[str]":
    """``coat-vlm`` with these words, as subprocess.run would report it.

    Args:
        words: the command line without its first word.
        program: a Python file that is run instead.
        text: what it reads from stdin.
        ranks: so many processes of one run; the status is that of the first that failed.
        env: all environment variables; those of the tests when absent.
        timeout: seconds after which they are killed.

    Raises:
        subprocess.TimeoutExpired: they were.
    """
    environment = dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        request: dict[str, Any] = {"words": [*words], "ranks": ranks, "env": environment}
        request |= {"folder": folder, "cwd": str(Path.cwd()), "timeout": timeout}
        request["program"] = program and str(program)
        Path(folder, "stdin").write_text(text)
        status = _asked(_parent(), request)
        stdout, stderr = (
            Path(folder, name).read_text(encoding="utf-8", errors="replace")
            for name in ("stdout", "stderr")
        )
    if status is None:
        raise subprocess.TimeoutExpired([*words], timeout, stdout, stderr)
    return subprocess.CompletedProcess([*words], status, stdout, stderr)


def import_all() -> None:
    """Import what training needs, before forks."""
    for name in IMPORTED:
        importlib.import_module(name)
    # This finds out which operations of DeepSpeed could be compiled, which takes most of a second.
    from deepspeed.ops import __compatible_ops__  # noqa: F401


def _asked(parent: "subprocess.Popen[str]", request: dict[str, Any]) -> int | None:
    """The status of a run; whatever keeps it from being known ends the parent with its runs."""
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        parent.stdin.write(json.dumps(request) + "\n")
        parent.stdin.flush()
        return json.loads(parent.stdout.readline() or _ended(parent))
    except BaseException:
        parent.kill()
        _parent.cache_clear()
        raise


def _ended(parent: "subprocess.Popen[str]") -> NoReturn:
    raise RuntimeError(f"{__file__} ended with status {parent.wait()}")


@functools.cache
def _parent() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the tests
    )
    atexit.register(process.kill)
    return process


def _become(request: dict[str, Any], rank: int, port: int) -> None:
    """Make this process, just forked, what a launcher would have started."""
    os.setsid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["ranks"] > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"]}
        places |= {"LOCAL_WORLD_SIZE": request["ranks"], "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({name: str(v) for name, v in {**places, "MASTER_PORT": port}.items()})
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        path = os.path.join(request["folder"], name)  # noqa: PTH118 - pathlib has no open flags
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = [request["program"] or "coat-vlm", *request["words"]]


def _run_program(words: list[str]) -> int:
    """Do what ``python WORDS`` does."""
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
    return 0


def exit_with(command: Callable[[list[str]], int], words: list[str]) -> NoReturn:
    """End this process as Python would, but for taking all modules apart, which takes seconds."""
    status: Any = 1
    try:
        status = command(words)
    except SystemExit as stopped:
        status = stopped.code
        if isinstance(status, str):
            sys.stderr.write(f"{status}\n")
            status = 1
    except BaseException:  # as the interpreter's own end of a program
        traceback.print_exc()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _wait(children: list[int], timeout: float) -> int | None:
    """The status of all: None when the time was over, else the first that is not zero."""
    deadline = time.monotonic() + timeout
    first, left = 0, set(children)
    while left:
        for child in sorted(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            left.discard(child)
            code = os.waitstatus_to_exitcode(status)
            if code and not first:
                first, deadline = code, min(deadline, time.monotonic() + GRACE_S)
        if left and time.monotonic() > deadline:
            for child in left:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return first or None
        time.sleep(0.005)
    return first


def main() -> int:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some of what is imported speaks
    import_all()
    from coat_cli.main import main as coat_vlm

    gc.freeze()  # nothing of it is looked at again, and so copied, in the forks
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(request["ranks"]):
            children.append(os.fork())
            if not children[-1]:
                replies.close()
                _become(request, rank, port)
                if request["program"]:
                    exit_with(_run_program, sys.argv)
                exit_with(coat_vlm, request["words"])
        replies.write(json.dumps(_wait(children, request["timeout"])) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
