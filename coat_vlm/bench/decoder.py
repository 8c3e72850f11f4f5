"""Trains one small decoder on a text in BF16 and in FP8 from the same start, and compares losses.

The loop is plain PyTorch around :func:`coat_vlm.fp8.convert` and :class:`coat_vlm.optim.CoatAdamW`:
BF16 weights, FP32 masters, the same batches for every precision. Held-out loss is that of the
text's last tenth.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

from coat_vlm.config import Fp8Config, Precision
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.optim import CoatAdamW, lr_factor
from coat_vlm.tokenizer import train_tokenizer

HELD_OUT = 0.1
"""Share of the text, its end, that is not trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderBench:
    """What is trained. The defaults make a model of 30M parameters."""

    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_key_value_heads: int = 4
    intermediate_size: int = 1536
    vocab_size: int = 4096
    tokens: int = 256
    """Tokens per sequence."""
    batch_size: int = 32
    """Sequences per step."""
    steps: int = 200
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    eval_every_steps: int = 20
    seed: int = 0


@dataclass(slots=True)
class DecoderCurve:
    """One precision's losses, in nats per token."""

    precision: Precision
    training: list[float] = field(default_factory=list)
    """Per step."""
    held_out: dict[int, float] = field(default_factory=dict)
    """By step."""

    @property
    def best_step(self) -> int:
        """The step with the lowest held-out loss."""
        return min(self.held_out, key=lambda step: self.held_out[step])


def train_decoder(
    text: Path, precision: Precision, bench: DecoderBench, fp8: Fp8Config | None = None
) -> DecoderCurve:
    """Train on the text in one precision.

    Args:
        text: a UTF-8 text file.
        precision: ``bf16`` or ``coat`` (``fp32`` trains in FP32).
        bench: the model and the training.
        fp8: what ``coat`` converts; its defaults when absent.

    Raises:
        ValueError: the text is too short for one sequence, or FP8 does not fit the model.
        OSError: the text cannot be read.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = _tokens(text, bench)
    cut = int(len(ids) * (1 - HELD_OUT))
    if min(cut, len(ids) - cut) <= bench.tokens:
        raise ValueError(
            f"{text}: {len(ids)} tokens; its last tenth must hold a sequence of {bench.tokens}: "
            "give a longer text or fewer tokens per sequence"
        )
    arithmetic = arithmetic_of(precision, fp8, device)
    torch.manual_seed(bench.seed)
    model = _model(bench).to(device, arithmetic.dtype)
    arithmetic.apply(model)
    masters = Masters(model, _optimizer(arithmetic.fp8, bench))
    curve = DecoderCurve(precision)
    draw = torch.Generator().manual_seed(bench.seed)
    for step in tqdm(range(bench.steps), desc=precision, unit="step"):
        starts = torch.randint(0, cut - bench.tokens, (bench.batch_size,), generator=draw)
        batch = torch.stack([ids[i : i + bench.tokens] for i in starts.tolist()]).to(device)
        loss = model.train()(input_ids=batch, labels=batch).loss
        loss.backward()
        masters.step(lr_factor(step, bench.steps, bench.steps // 10, "cosine", 0.1), bench)
        curve.training.append(loss.item())
        if (step + 1) % bench.eval_every_steps == 0 or step + 1 == bench.steps:
            curve.held_out[step + 1] = _held_out(model, ids[cut:], bench, device)
    return curve


class Masters:
    """FP32 copies of a model's weights that the optimizer works on.

    Args:
        model: the model; its weights follow the copies.
        build: makes the optimizer of (decayed, plain) parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        build: Callable[[list[nn.Parameter], list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._weights = list(model.parameters())
        self._copies = [nn.Parameter(p.detach().float().clone()) for p in self._weights]
        decayed = [p for p in self._copies if p.ndim > 1]
        self.optimizer = build(decayed, [p for p in self._copies if p.ndim == 1])

    def step(self, factor: float, bench: DecoderBench) -> None:
        """Clip the gradients, take a step at ``factor`` times the peak rate, copy the weights."""
        for weight, copy in zip(self._weights, self._copies, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        nn.utils.clip_grad_norm_(self._copies, bench.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = bench.lr * factor
        self.optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(self._weights, self._copies, strict=True):
                weight.copy_(copy)


def _optimizer(
    fp8: Fp8Config | None, bench: DecoderBench
) -> Callable[[list[nn.Parameter], list[nn.Parameter]], torch.optim.Optimizer]:
    def build(decayed: list[nn.Parameter], plain: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": bench.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        if fp8 is not None and fp8.optimizer == "coat":
            return CoatAdamW(groups, betas=bench.betas, released=fp8.released_constants)
        return torch.optim.AdamW(groups, betas=bench.betas)

    return build


def _tokens(text: Path, bench: DecoderBench) -> Tensor:
    """Token ids of the whole text, int64 [tokens]."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    tokenizer = train_tokenizer(lines[: int(len(lines) * (1 - HELD_OUT))], bench.vocab_size)
    encoded = tokenizer(lines, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for line in encoded for token in line])


def _model(bench: DecoderBench) -> Any:
    config = Qwen2Config(
        hidden_size=bench.hidden_size,
        num_hidden_layers=bench.num_layers,
        num_attention_heads=bench.num_heads,
        num_key_value_heads=bench.num_key_value_heads,
        intermediate_size=bench.intermediate_size,
        vocab_size=bench.vocab_size,
        max_position_embeddings=bench.tokens,
        tie_word_embeddings=True,
        initializer_range=bench.hidden_size**-0.5,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@torch.no_grad()
def _held_out(model: Any, ids: Tensor, bench: DecoderBench, device: torch.device) -> float:
    """Mean loss over all whole sequences of the held-out text."""
    rows = ids[: len(ids) // bench.tokens * bench.tokens].view(-1, bench.tokens)
    model.eval()
    losses = [
        model(input_ids=chunk.to(device), labels=chunk.to(device)).loss.item() * len(chunk)
        for chunk in rows.split(bench.batch_size)
    ]
    return sum(losses) / len(rows)


def format_curves(curves: list[DecoderCurve]) -> str:
    """Markdown: held-out losses by step, and the others' difference at the first's best step."""
    first = curves[0]
    head = ["step", *(f"{curve.precision}, held out" for curve in curves)]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for step in first.held_out:
        cells = [f"{curve.held_out[step]:.4f}" for curve in curves]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    best = first.best_step
    for curve in curves[1:]:
        change = 100 * (curve.held_out[best] / first.held_out[best] - 1)
        lines.append(
            f"\n{curve.precision} at {first.precision}'s best step ({best}): {change:+.2f}%"
        )
    return "\n".join(lines)
