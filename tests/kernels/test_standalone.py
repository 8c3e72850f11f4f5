"""The kernel room can be lifted out: it needs torch and triton, and nothing else of the project."""

import os
import subprocess
import sys
from pathlib import Path


def test_ops_on_cpu_tensors_launch_no_kernel():
    """So they work without a GPU and without Triton's interpreter."""
    program = (
        "from coat_kernels import OPS\n"
        "from op_examples import examples\n"
        "for op in OPS:\n"
        "    for args in examples(op, rows=2, columns=16).values():\n"
        "        OPS[op](*args)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
