"""``import coat_vlm`` registers with transformers' Auto classes, and imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

from coat_vlm import torchvision_ops

# Makes torchvision importable where its wheel does not fit torch's; imports nothing of ours.
TORCHVISION = "import runpy; kept = runpy.run_path(sys.argv[2]); kept['ensure_torchvision']()\n"
AUTO = (
    "from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText\n"
    "from transformers import AutoProcessor, AutoTokenizer\n"
)
LOAD = (
    "folder = sys.argv[1]\n"
    "loaded = [auto.from_pretrained(folder) for auto in (AutoConfig, AutoModel,"
    " AutoModelForImageTextToText, AutoProcessor, AutoTokenizer)]\n"
    "print(*(type(one).__name__ for one in loaded))\n"
    "assert type(AutoModel.from_config(loaded[0])) is type(loaded[1])\n"
    "from coat_vlm.model import CoatVlm, CoatVlmConfig, CoatVlmProcessor\n"
    "assert tuple(map(type, (loaded[1], loaded[0], loaded[3]))) == "
    "(CoatVlm, CoatVlmConfig, CoatVlmProcessor)\n"
)


def run(code: str, *arguments: str) -> str:
    """Run code in another process, whose modules are only those that it imports."""
    command = [sys.executable, "-c", f"import sys\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "order", ["coat_vlm first", pytest.param("transformers first", marks=pytest.mark.slow)]
)
def test_one_import_registers_with_all_auto_classes(checkpoint: Path, order: str):
    own = "import coat_vlm\n"
    code = own + AUTO if order == "coat_vlm first" else TORCHVISION + AUTO + own
    names = run(code + LOAD, str(checkpoint), str(torchvision_ops.__file__)).split()
    assert names[:4] == ["CoatVlmConfig", "CoatVlm", "CoatVlm", "CoatVlmProcessor"]


def test_the_import_adds_only_small_modules_of_its_own():
    run("import coat_vlm\nassert not {'torch', 'transformers'} & set(sys.modules)")
    added = run(
        "from transformers.configuration_utils import PreTrainedConfig\n"
        "before = set(sys.modules)\n"
        "import coat_vlm\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "print(*(name for name in set(sys.modules) - before if name.startswith(('coat_', 'tr'))))"
    )
    assert set(added.split()) <= {
        "coat_data",
        "coat_vlm",
        "coat_vlm.auto_classes",
        "coat_vlm.torchvision_ops",
    }
