"""Freed memory is kept: counted in page faults, in a process of its own."""

import subprocess
import sys

PROGRAM = """
import resource, torch
from coat_vlm.distributed import join_world

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.ones(2**20) for _ in range(10)]  # all alive at once, as activations are: 40 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
if {keep}:
    joined = join_world()
    joined.__enter__()
faults()
print(faults())
"""


def page_faults(keep: bool) -> int:
    """Of 20 times 10,240 pages that are written to."""
    command = [sys.executable, "-c", PROGRAM.format(keep=keep)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


def test_training_uses_freed_memory_again_without_page_faults() -> None:
    kept, returned = page_faults(keep=True), page_faults(keep=False)
    assert kept < 20 * 10_240 / 100
    # With huge pages a system has few faults either way; never more because memory is kept.
    assert kept <= returned
