"""Run in an environment with transformers 4.57: compares the logits of folders with the base's.

python in_transformers4.py BASE FOLDER... prints a line of JSON: the largest difference by folder,
0.0 for equal logits, or the family's name if this version does not know it. A folder with
adapter_config.json is loaded on the base with peft.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

transformers.logging.set_verbosity_error()
OPERATORS = Path(__file__).parents[2] / "coat_vlm" / "torchvision_ops.py"
QUESTION = [{"type": "image"}, {"type": "text", "text": "What color is the circle?"}]


def compute_logits(folder: Path, base: Path) -> torch.Tensor:
    is_adapter = (folder / "adapter_config.json").is_file()
    source = base if is_adapter else folder
    loaded: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        source, dtype=torch.float32, output_loading_info=True
    )
    model, found = loaded
    assert not found["unexpected_keys"], found
    assert set(found["missing_keys"]) <= {"lm_head.weight"}, found  # tied
    if is_adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, folder)
    processor = transformers.AutoProcessor.from_pretrained(source)
    text = processor.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    batch = processor(text=[text], images=[[Image.fromarray(pixels)]], return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**batch).logits


if __name__ == "__main__":
    assert transformers.__version__.startswith("4.57."), transformers.__version__
    operators = runpy.run_path(str(OPERATORS))  # declared as long as this name holds them
    operators["ensure_torchvision"]()
    base, *folders = map(Path, sys.argv[1:])
    kind = json.loads((base / "config.json").read_text())["model_type"]
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        expected = compute_logits(base, base)
        differences = [(compute_logits(f, base) - expected).abs().max().item() for f in folders]
        found = dict(zip(map(str, folders), differences, strict=True))
    else:
        found = kind
    sys.stdout.write(json.dumps(found) + "\n")
