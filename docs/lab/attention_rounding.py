"""What 8-bit tensors of attention do to gradients: "One pass over 50M tokens" in 2026-11.md.

``python docs/lab/attention_rounding.py TEXT [STEPS]`` trains a decoder of 2M parameters in FP32 on
the bytes of a file. Then it rounds one tensor at a time in attention (``ROUNDINGS``), and compares
the gradients of the weights of q and k with the exact ones, on 16 further batches.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coat_vlm  # noqa: F401  # isort: skip - first, so that torchvision imports
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BATCH, TOKENS, PEAK_LR, BATCHES = 4, 256, 6e-3, 16


def to_e4m3(x: Tensor) -> Tensor:
    """Round to E4M3 with one scale."""
    scale = x.abs().amax() / 448.0
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def to_int8(x: Tensor) -> Tensor:
    """Round to integers up to 112 with a power of two as scale, per head and token."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 112.0)))
    return (x / scale).round() * scale


def unrounded(x: Tensor) -> Tensor:
    """Return x."""
    return x


ROUNDINGS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "exact": (unrounded, unrounded),
    "q, k, v in INT8, in both passes": (to_int8, unrounded),
    "o in E4M3, in the backward pass": (unrounded, to_e4m3),
    "o in BF16, in the backward pass": (unrounded, lambda x: x.bfloat16().float()),
}
"""Name -> rounding of q, k and v, and of o."""

_current = ROUNDINGS["exact"]


class Attention(torch.autograd.Function):
    """Causal attention of heads [B, H, T, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute softmax(q k^T) v of rounded q, k, v; gradients pass the rounding unchanged."""
        q, k, v = map(_current[0], (q, k, v))
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        p = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf).softmax(-1)
        ctx.save_for_backward(q, k, v, p, p @ v)
        return p @ v

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gradients as flash attention does: with the row sums of do * o, o rounded."""
        q, k, v, p, o = ctx.saved_tensors
        (do,) = grad_outputs
        row_sums = (do * _current[1](o)).sum(-1, keepdim=True)
        ds = p * (do @ v.mT - row_sums) / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, p.mT @ do


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Call :class:`Attention` through transformers' interface."""
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    return Attention.apply(q, k, v).transpose(1, 2), None


def compute_grads(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Compute the gradients of the weights of q and k, by name and layer."""
    model.zero_grad()
    compute_loss(model, ids).backward()
    named = model.named_parameters()
    return {
        f"{name.split('.')[-2][0]}{name.split('.')[2]}": parameter.grad.clone()
        for name, parameter in named
        if name.endswith(("q_proj.weight", "k_proj.weight")) and parameter.grad is not None
    }


def compute_loss(model: Any, ids: Tensor) -> Tensor:
    """Compute the mean loss of the next bytes."""
    return F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    """Train, then print the error of every gradient under every rounding."""
    global _current
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 600
    ALL_ATTENTION_FUNCTIONS["rounded"] = attend
    data = torch.frombuffer(bytearray(Path(sys.argv[1]).read_bytes()), dtype=torch.uint8)
    rows = data[: len(data) // TOKENS * TOKENS].view(-1, TOKENS)
    torch.manual_seed(0)
    batches = rows[torch.randperm(len(rows))].long().split(BATCH)
    config = Qwen2Config(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=576, vocab_size=256, max_position_embeddings=TOKENS, use_cache=False,
        tie_word_embeddings=True, initializer_range=192**-0.5,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="rounded")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / (0.1 * steps))
        loss = compute_loss(model, batches[step % (len(batches) - BATCHES - 1)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(f"loss {loss.item():.3f} after {steps} steps\n")
    errors: dict[str, dict[str, float]] = {}
    sizes: dict[str, float] = {}
    for ids in batches[-BATCHES - 1 : -1]:
        grads = {}
        for name, _current in ROUNDINGS.items():  # read by Attention
            grads[name] = compute_grads(model, ids)
        for key, exact in grads["exact"].items():
            sizes[key] = sizes.get(key, 0.0) + exact.square().sum().item()
            for name, found in grads.items():
                error = (found[key] - exact).square().sum().item()
                errors.setdefault(name, {})[key] = errors.get(name, {}).get(key, 0.0) + error
    for name, sums in errors.items():
        text = ", ".join(f"{key} {math.sqrt(sums[key] / sizes[key]):.3f}" for key in sizes)
        sys.stdout.write(f"{name}: {text}\n")


if __name__ == "__main__":
    main()
