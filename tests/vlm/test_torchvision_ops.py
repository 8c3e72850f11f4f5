import subprocess
import sys

import pytest
import torch

from coat_vlm import torchvision_ops
from coat_vlm.torchvision_ops import ensure_torchvision


class _Recorder:
    def __init__(self, namespace, kind):
        self.name, self.schemas = namespace, []

    def define(self, schema):
        self.schemas.append(schema)


@pytest.fixture
def declared(monkeypatch):
    """As in a new process with a CPU torch whose torchvision extension does not load."""
    libraries = []
    monkeypatch.setattr(torchvision_ops, "_libraries", libraries)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.library, "Library", _Recorder)
    monkeypatch.setattr(torch.ops, "load_library", _does_not_load)
    return libraries


def _does_not_load(path):
    raise OSError("libc10_cuda.so: cannot open shared object file")


def test_in_a_new_process_everything_that_needs_torchvision_imports():
    code = (
        "import sys, coat_vlm\n"
        "assert 'transformers' not in sys.modules and 'torchvision' not in sys.modules\n"
        "import torchvision.transforms.v2, open_clip\n"
        "from transformers import SiglipVisionModel, Qwen2ForCausalLM\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_two_operators_are_declared_once(declared):
    ensure_torchvision()
    ensure_torchvision()
    assert len(declared) == 1
    assert declared[0].name == "torchvision"
    names = [schema.partition("(")[0] for schema in declared[0].schemas]
    assert names == ["nms", "qnms"]
    assert all(torch._C.parse_schema(f"torchvision::{s}") for s in declared[0].schemas)
