"""A run leaves no thread of its process groups behind, in a process of its own."""

from pathlib import Path

import pytest
import started

PROGRAM = """
import os
from pathlib import Path
import torch
from torch.distributed import all_reduce, new_group
from coat_vlm.distributed import join_world

def gloo():
    return [task for task in Path("/proc/self/task").iterdir() if "gloo" in names(task)]

def names(task):
    return (task / "comm").read_text()

def train(world):
    engine = [new_group([0])]
    engine.append(engine)  # like DeepSpeed's, it goes with the garbage only
    all_reduce(torch.zeros(1), group=engine[0])  # by now the threads are there
    assert gloo()
    assert world.sum([2.0]) == [2.0]
    {end}

for _ in range(2):
    try:
        with join_world() as world:
            train(world)
    except ValueError as error:
        print(repr(error))
    print(len(gloo()), "MASTER_PORT" in os.environ)
"""


@pytest.mark.parametrize("end", ["pass", "raise ValueError('bad row')"])
def test_a_world_is_left_at_every_end_and_can_be_joined_again(end: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end))
    done = started.run([], program=program)
    # The port of a process alone is not handed on to those that it starts later.
    assert done.returncode == 0, done.stderr[-2000:]
    raised = [] if end == "pass" else ["ValueError('bad row')"]
    assert done.stdout.splitlines() == [*raised, "0 False"] * 2
