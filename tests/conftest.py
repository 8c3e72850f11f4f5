"""Without a GPU, kernels run in Triton's interpreter: set up before any test module is imported."""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads this when it decorates a kernel, so it must be there before coat_kernels is first
    # imported. Programs that tests start inherit it; they launch no kernels on a CPU.
    os.environ["TRITON_INTERPRET"] = "1"

    from exact_interpreter import exact_interpreter

    exact_interpreter()
