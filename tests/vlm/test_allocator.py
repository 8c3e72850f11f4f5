"""Freed memory is kept: counted in page faults, in a process of its own."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from coat_vlm.train.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.ones(2**20) for _ in range(10)]  # all alive at once, as activations are: 40 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults()
before = faults()
assert keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's mallopt")
def test_freed_tensors_are_used_again_without_page_faults():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before >= 20 * 1000, "the C library already keeps memory; the test shows nothing"
    assert after < before / 20
