"""The kernel room can be lifted out: it needs torch and triton, and nothing else of the project."""

import os
import subprocess
import sys
from pathlib import Path


def test_importing_the_kernels_loads_no_other_room():
    program = (
        "import sys, coat_kernels\n"
        "others = {'coat_vlm', 'coat_data', 'coat_eval', 'transformers', 'deepspeed'}\n"
        "sys.exit(' '.join(others & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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
