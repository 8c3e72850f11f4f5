"""Runs training steps of LoRA with Unsloth, for lab_unsloth.py, and prints a line of JSON.

This process imports nothing of coat-vlm, because Unsloth needs an older transformers and replaces
parts of it.
"""

import argparse
import importlib.metadata
import json
import time
from statistics import median

import unsloth  # pyright: ignore[reportMissingImports] - before torch and transformers

# isort: split
import torch
from unsloth.utils.attention_dispatch import (  # pyright: ignore[reportMissingImports]
    select_attention_backend,
)

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, BATCH, TOKENS = 64, 2, 4096
WARMUP, STEPS = 3, 9


def main(args: argparse.Namespace) -> None:
    """Load the model, train its adapters on one batch, and print times, peak and losses."""
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        args.model, max_seq_length=TOKENS, dtype=torch.bfloat16,
        load_in_4bit=args.weights == "4bit", load_in_16bit=args.weights == "bf16",
        use_gradient_checkpointing=False, local_files_only=True,
    )  # fmt: skip
    model = unsloth.FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=LINEARS,
        use_gradient_checkpointing=False,
    )  # fmt: skip
    unsloth.FastLanguageModel.for_training(model, use_gradient_checkpointing=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (BATCH, TOKENS), generator=generator).to(model.device)
    losses, times = [], []
    for number in range(WARMUP + STEPS):
        if number == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        with torch.autocast(model.device.type, torch.bfloat16):  # as its trainer with bf16=True
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter() - started)
    names = ("unsloth", "transformers", "torch", "triton", "xformers", "peft")
    print(json.dumps({
        "batch": BATCH,
        "tokens": BATCH * TOKENS,
        "ms": median(times[WARMUP:]) * 1e3,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "losses": losses,
        "settings": f"attention {select_attention_backend()}, accumulation 1; LoRA rank {RANK}",
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
    }))  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--weights", choices=("bf16", "4bit"), required=True)
    main(parser.parse_args())
