"""FP8 training in transformers' ``Trainer``: convert the model, pass the optimizer.

    python examples/hf_trainer.py --out /tmp/trainer      # a random Qwen2 on generated text
    python examples/hf_trainer.py --out /tmp/trainer --resume

The Trainer is not patched. Its checkpoints contain the FP8 states, and ``--resume`` continues with
the losses of an uninterrupted run.
"""

import argparse
from pathlib import Path
from typing import Any

import coat_vlm  # noqa: F401 - before transformers, which then takes any torchvision

# isort: split
import torch
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert
from coat_vlm.model.cudnn import set_cudnn_attention
from coat_vlm.optim import CoatAdamW

VOCABULARY, TOKENS = 64, 32


class Counting(Dataset[dict[str, Any]]):
    """Sequences of tokens; each counts up by 1, 2 or 3."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = (7 * index + (1 + index % 3) * torch.arange(TOKENS)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def build_trainer(out: Path, steps: int) -> Trainer:
    """Build a Trainer for a Qwen2 with 0.2M parameters and FP8 blocks."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    print(convert(model, Fp8Config(language="coat")))
    set_cudnn_attention("auto")  # off for calls with a mask whose gradients may be NaN
    optimizer = CoatAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=8, save_steps=20,
        logging_steps=1, lr_scheduler_type="constant", report_to=[], seed=0,
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    # The scheduler is the Trainer's own, made for this optimizer.
    return Trainer(model, arguments, train_dataset=Counting(), optimizers=(optimizer, None))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    args = parser.parse_args()
    trainer = build_trainer(args.out, args.steps)
    trainer.train(resume_from_checkpoint=args.resume or None)
    for row in trainer.state.log_history:
        if "loss" in row:
            print(f"step {row['step']:3.0f}  loss {row['loss']:.6f}")
