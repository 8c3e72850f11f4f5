"""FP8 fine-tuning of a trained model in TRL: supervised, with preferences, with rewards.

    python examples/trl_trainers.py sft --model runs/quickstart/sft/model --out runs/trl
    python examples/trl_trainers.py dpo --model runs/quickstart/sft/model --out runs/trl
    python examples/trl_trainers.py grpo --model runs/quickstart/sft/model --out runs/trl

The trainers are not patched. The pictures are squares of one color, and the question is the color.
DPO prefers the right color to another one; the reward of GRPO is 1 for an answer that begins with
the right color. docs/guides/adapters.md says which settings differ for other models.
"""

import argparse
from pathlib import Path
from typing import Any

import coat_vlm  # noqa: F401 - before transformers, which then takes any torchvision

# isort: split
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert
from coat_vlm.model.cudnn import set_cudnn_attention
from coat_vlm.optim import CoatAdamW

ON_GPU = torch.cuda.is_available()
COLORS = ("red", "green", "blue", "yellow")


def rows(count: int) -> Dataset:
    """Make rows of a picture, a question, the right color and a wrong one."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        color, wrong = COLORS[number % 4], COLORS[(number + 1 + number // 4 % 3) % 4]
        row: dict[str, Any] = {
            "images": [Image.new("RGB", (32, 32), color)],
            "prompt": [{"role": "user", "content": "Which color?"}],
            "color": color,
        }
        for name, answer in (("completion", color), ("chosen", color), ("rejected", wrong)):
            row[name] = [{"role": "assistant", "content": answer}]
        found.append(row)
    return Dataset.from_list(found)


def load(folder: Path) -> PreTrainedModel:
    """Load the model in FP32 (on a GPU BF16) with FP8 blocks."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    convert(model, Fp8Config())
    return model


def begins_with_color(completions: list[Any], color: list[str], **_: Any) -> list[float]:
    """Return 1 for answers that begin with the color of their row, else 0."""
    answers = [completion[0]["content"] for completion in completions]
    return [float(a.startswith(c)) for a, c in zip(answers, color, strict=True)]


def build_trainer(method: str, folder: Path, out: Path, steps: int, lr: float = 1e-4) -> Any:
    """Build TRL's trainer of a method (sft, dpo or grpo)."""
    set_cudnn_attention("auto")  # off for calls with a mask whose gradients may be NaN
    model, processor = load(folder), AutoProcessor.from_pretrained(folder)
    # Without master weights, BF16 weights would round small updates away.
    master = "bf16_low_bits" if ON_GPU else "fp32"
    optimizer = CoatAdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), master=master)
    settings: dict[str, Any] = {
        "output_dir": str(out), "max_steps": steps, "per_device_train_batch_size": 4,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "seed": 0,
        "lr_scheduler_type": "constant", "dataloader_pin_memory": ON_GPU,
        "bf16": False,  # no autocast: the weights have the dtype already
    }  # fmt: skip
    shared: dict[str, Any] = {
        "model": model, "processing_class": processor, "optimizers": (optimizer, None),
    }  # fmt: skip
    if method == "sft":
        data = rows(64).select_columns(["images", "prompt", "completion"])
        return SFTTrainer(args=SFTConfig(**settings), train_dataset=data, **shared)
    if method == "dpo":
        data = rows(64).select_columns(["images", "prompt", "chosen", "rejected"])
        # The reference has the same FP8 blocks, so that both begin with equal probabilities.
        arguments = DPOConfig(**settings)
        return DPOTrainer(ref_model=load(folder), args=arguments, train_dataset=data, **shared)
    data = rows(64).select_columns(["images", "prompt", "color"])
    sampling = GRPOConfig(**settings, num_generations=4, max_completion_length=8, temperature=1.0)
    return GRPOTrainer(reward_funcs=begins_with_color, args=sampling, train_dataset=data, **shared)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=("sft", "dpo", "grpo"))
    parser.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained model")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    trainer = build_trainer(args.method, args.model, args.out, args.steps)
    trainer.train()
    trainer.save_model(str(args.out / "model"))
    for row in trainer.state.log_history:
        if "loss" in row:
            print(f"step {row['step']:3.0f}  loss {row['loss']:.6f}")
