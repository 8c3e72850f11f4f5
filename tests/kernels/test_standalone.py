"""The kernel room can be lifted out: it needs torch and triton, and nothing else of the project."""

import subprocess
import sys


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
