"""Runs a program on two ranks of a CPU, through torchrun."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_on_two_ranks(program: Path, *words: str) -> Any:
    """Return the JSON that the program prints last."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, str(program), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
