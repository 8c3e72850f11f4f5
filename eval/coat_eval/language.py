"""The language model of a checkpoint, by itself: what text-only suites ask."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coat_vlm.config import Precision
from coat_vlm.generate import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def load_language_model(
    folder: Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The causal language model inside a checkpoint, and its tokenizer; in evaluation mode.

    Args:
        folder: ``RUN/<stage>/model``, an exported folder, or a language model's own folder (what a
            recipe started from, to see what training on images did to it).
        device: where it goes; the first GPU if there is one, else the CPU.
        dtype: of the weights; by default the checkpoint's on a GPU and FP32 on a CPU.
        precision: compute as a run with this precision does; plainly when absent.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: the folder holds no causal language model, or ``precision`` is given for one
            that is not inside a checkpoint of this project.
    """
    folder = Path(folder)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json; give RUN/sft/model, what coat-vlm export wrote, or the "
            "folder of a language model"
        )
    config = json.loads(config_path.read_text(encoding="utf-8"))
    if config.get("model_type") == "coat_vlm":
        model, processor = load(folder, device, dtype, precision)
        return model.language_model, processor.tokenizer
    if precision is not None:
        raise ValueError(f"precision={precision} is for checkpoints of this project, not {folder}")
    # Here, so that coat_vlm has come before transformers (coat_vlm/torchvision_ops.py).
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted: Any = dtype or (torch.float32 if place.type == "cpu" else "auto")
    language: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=wanted, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return language.to(place).eval(), tokenizer
