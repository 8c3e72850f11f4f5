"""Runs a program on two ranks of a CPU."""

import json
from pathlib import Path
from typing import Any

import started


def run_on_two_ranks(program: Path, *words: str) -> Any:
    """Return the JSON that the program prints last."""
    done = started.run(words, program=program, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
