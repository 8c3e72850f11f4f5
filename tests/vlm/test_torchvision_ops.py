import subprocess
import sys


def test_in_a_new_process_everything_that_needs_torchvision_imports():
    code = (
        "import sys, coat_vlm\n"
        "assert 'transformers' not in sys.modules and 'torchvision' not in sys.modules\n"
        "import torchvision.transforms.v2, open_clip\n"
        "from transformers import SiglipVisionModel, Qwen2ForCausalLM\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
