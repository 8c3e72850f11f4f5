"""FP8 training in a loop of your own: ``convert`` for the model, ``CoatAdamW`` for the optimizer.

    python examples/plain_loop.py                 # a random Llama on generated text, on any machine
    python examples/plain_loop.py --precision bf16

``convert`` replaces the decoder blocks by FP8 blocks in place; parameters, their names and
``save_pretrained`` stay. A GPU with FP8 tensor cores runs the Triton kernels; other machines
run the same arithmetic in plain PyTorch.
"""

import argparse
from collections.abc import Iterator

import coat_vlm  # noqa: F401 - before transformers, which then takes any torchvision

# isort: split
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import convert
from coat_vlm.optim import CoatAdamW

VOCABULARY, TOKENS, BATCH = 64, 32, 8


def build_model(precision: str) -> nn.Module:
    """Build a Llama with 0.2M random parameters, the same for every precision."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if precision != "bf16":
        print(convert(model, Fp8Config()))
    return model


def batches(steps: int, batch: int = BATCH) -> Iterator[Tensor]:
    """Yield token ids [batch, TOKENS]; each sequence counts up by 1, 2 or 3."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (batch, 1), generator=generator)
        stride = torch.randint(1, 4, (batch, 1), generator=generator)
        yield (start + stride * torch.arange(TOKENS)) % VOCABULARY


def train(model: nn.Module, steps: int) -> list[float]:
    """Train the model; returns the loss of every step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    # Parameter groups are as in torch's AdamW: lr, betas, eps, weight_decay. The states take 2.1
    # bytes per parameter instead of 8.
    optimizer = CoatAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for ids in batches(steps):
        ids = ids.to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="coat", choices=("bf16", "coat"))
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    for number, loss in enumerate(train(build_model(args.precision), args.steps), 1):
        print(f"step {number:3d}  loss {loss:.6f}")
