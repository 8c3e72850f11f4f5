"""The small decoder of the studies, and their sweeps: Qwen2's architecture, random weights.

The loop is plain PyTorch around :func:`coat_vlm.fp8.convert` and :class:`coat_vlm.optim.CoatAdamW`:
BF16 weights (FP32 on a CPU), FP32 master weights, the same initial weights and batches for every
precision.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
import yaml
from pydantic import TypeAdapter
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

from coat_data.saved_files import write_text
from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import Arithmetic, SpareMemory, arithmetic_of, find_graphs, graph_blocks
from coat_vlm.model.loss import loss_for_logits
from coat_vlm.model.processor import train_tokenizer
from coat_vlm.optim import CoatAdamW, lr_factor
from harness import PRECISIONS, choose_precision, get_origin

HELD_OUT = 0.1
"""Share of the text, at its end, that is held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderBench:
    """The model and its training; the defaults are the size ``30m``."""

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
    max_grad_norm: float = 1.0
    eval_steps: int = 20


SIZES = {
    "tiny": DecoderBench(
        hidden_size=64, num_layers=2, intermediate_size=128, vocab_size=300, tokens=32,
        batch_size=8, steps=30,
    ),
    "30m": DecoderBench(),
    "100m": DecoderBench(
        hidden_size=768, num_layers=12, num_heads=12, intermediate_size=2688, vocab_size=8192,
        tokens=512, steps=300, lr=6e-4,
    ),
}  # fmt: skip
"""Values of ``--size``: 27.3M parameters (30m) and 99.5M (100m)."""


class Corpus(NamedTuple):
    """Token ids of a text, int64 [tokens]."""

    training: Tensor
    held_out: Tensor
    """The text's last tenth."""


def parse_arithmetic(name: str) -> Arithmetic:
    """Return the arithmetic of a precision on this machine's device.

    ``name`` is ``fp32`` or one of ``harness.PRECISIONS``. Keys of a recipe's ``fp8`` section may
    follow an FP8 precision: ``coat,optimizer=adamw``. Raises ValueError if they mean nothing.
    """
    first, *settings = re.split(r",(?![^\[]*\])", name)  # not at the commas of a list
    if first not in ("fp32", *PRECISIONS) or (settings and first in ("fp32", "bf16")):
        raise ValueError(
            f"precision {name!r}: give fp32, {', '.join(PRECISIONS)}, FP8 followed by keys of a "
            "recipe's fp8 section: coat,optimizer=adamw"
        )
    precision, fp8 = ("fp32", None) if first == "fp32" else choose_precision(first)
    if settings:
        adapter = TypeAdapter(Fp8Config)
        keys = adapter.dump_python(fp8 or Fp8Config(), exclude_defaults=True)
        keys |= {key: yaml.safe_load(text) for key, _, text in (s.partition("=") for s in settings)}
        fp8 = adapter.validate_python(keys)
    return arithmetic_of(precision, fp8, get_device())


def get_device() -> torch.device:
    """Return this machine's GPU, or the CPU if it has none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def start_run(precision: str, bench: DecoderBench, seed: int) -> tuple[Any, "MasterWeights"]:
    """Build the decoder of a run with its optimizer, in the arithmetic of a precision."""
    arithmetic = parse_arithmetic(precision)
    torch.manual_seed(seed)
    model = build_decoder(bench).to(get_device(), arithmetic.dtype)
    arithmetic.apply(model)
    graph_blocks(model, arithmetic.fp8 is not None and arithmetic.fp8.cuda_graphs)
    return model, MasterWeights(model, bench, arithmetic.fp8)


def draw_batches(corpus: Corpus, bench: DecoderBench, seed: int) -> Iterator[Tensor]:
    """Yield token ids [batch size, tokens] from random positions of the training text, forever."""
    ids, draw = corpus.training, torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - bench.tokens, (bench.batch_size,), generator=draw)
        yield torch.stack([ids[i : i + bench.tokens] for i in starts.tolist()])


def train_steps(
    model: Any,
    master_weights: "MasterWeights",
    batches: Iterable[Tensor],
    bench: DecoderBench,
    first: int = 0,
) -> Iterator[float]:
    """Take a step on each batch and yield its loss; the schedule starts at step ``first``."""
    spare = SpareMemory("recompute", 0, model.device, find_graphs(model))
    try:
        for step, batch in enumerate(batches, first):
            ids = batch.to(model.device)
            loss = training_loss(model, ids)
            loss.backward()
            factor = lr_factor(step, bench.steps, bench.steps // 10, "cosine", 0.1)
            master_weights.step(factor, bench)
            spare.after_step()
            yield loss.item()
    finally:
        graph_blocks(model, enabled=False)  # blocks and graphs hold each other


def training_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the mean loss [] of sequences [B, T] as training computes it, in ``model.train()``."""
    with loss_for_logits(model.get_output_embeddings(), ids):
        return model.train()(input_ids=ids).logits


class MasterWeights:
    """FP32 master weights of a model, and the optimizer that updates them.

    Each step copies the master weights into the model's. ``fp8`` chooses :class:`CoatAdamW`;
    torch's AdamW by default.
    """

    def __init__(self, model: nn.Module, bench: DecoderBench, fp8: Fp8Config | None = None) -> None:
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._copies = [nn.Parameter(p.detach().float().clone()) for p in self._weights]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._copies if p.ndim > 1], "weight_decay": bench.weight_decay},
            {"params": [p for p in self._copies if p.ndim == 1], "weight_decay": 0.0},
        ]
        if fp8 is not None and fp8.optimizer == "coat":
            self.optimizer = CoatAdamW(groups, betas=bench.betas)
        else:
            self.optimizer = torch.optim.AdamW(groups, betas=bench.betas)

    def step(self, factor: float, bench: DecoderBench) -> None:
        """Clip the gradients, take a step at ``factor`` times the peak rate, update the model."""
        for weight, copy in zip(self._weights, self._copies, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        nn.utils.clip_grad_norm_(self._copies, bench.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = bench.lr * factor
        self.optimizer.step()
        self._update_model()

    def state_dict(self) -> dict[str, Any]:
        """Return master weights and optimizer states."""
        return {"weights": self._copies, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with master weights and optimizer states."""
        for copy, saved in zip(self._copies, state["weights"], strict=True):
            copy.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self._update_model()

    @torch.no_grad()
    def _update_model(self) -> None:
        for weight, copy in zip(self._weights, self._copies, strict=True):
            weight.copy_(copy)


def read_corpus(texts: Sequence[Path], bench: DecoderBench) -> Corpus:
    """Tokenize concatenated UTF-8 texts; the tokenizer is trained on the training part.

    ValueError: there are too few tokens for a sequence.
    """
    parts = [text.read_text(encoding="utf-8") for text in texts]
    ended = [part if part.endswith("\n") else part + "\n" for part in parts[:-1]]
    lines = "".join([*ended, parts[-1]]).splitlines(keepends=True)
    if not lines:
        raise ValueError(f"{', '.join(map(str, texts))}: there is no text; give a longer one")
    tokenizer = train_tokenizer(lines[: int(len(lines) * (1 - HELD_OUT))], bench.vocab_size)
    encoded = tokenizer(lines, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([token for line in encoded for token in line])
    cut = int(len(ids) * (1 - HELD_OUT))
    if min(cut, len(ids) - cut) <= bench.tokens:
        raise ValueError(
            f"{', '.join(map(str, texts))}: {len(ids)} tokens; the last tenth must contain a "
            f"sequence of {bench.tokens}: give a longer text or fewer tokens per sequence"
        )
    return Corpus(ids[:cut], ids[cut:])


def build_decoder(bench: DecoderBench) -> Any:
    """Build the decoder: Qwen2's architecture, random FP32 weights."""
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
def text_loss(model: Any, ids: Tensor, bench: DecoderBench) -> float:
    """Return the mean loss over all complete sequences of a text [tokens], in nats per token."""
    device = model.device
    rows = ids[: len(ids) // bench.tokens * bench.tokens].view(-1, bench.tokens)
    model.eval()
    losses = [
        model(input_ids=chunk.to(device), labels=chunk.to(device)).loss.item() * len(chunk)
        for chunk in rows.split(bench.batch_size)
    ]
    return sum(losses) / len(rows)


Record = dict[str, Any]
"""What a run measured, plain JSON."""


def sweep(
    out: Path, settings: Record, runs: Mapping[str, tuple[Any, ...]], train: Callable[..., Record]
) -> dict[str, Record]:
    """Train the runs that are missing in folder ``out``; returns the records of all.

    The folder has ``settings.json``, plain JSON that is common to its runs, and ``runs/NAME.json``
    per finished run. ``runs`` maps names to arguments of ``train``. Raises ValueError if the folder
    has runs of other settings.
    """
    (out / "runs").mkdir(parents=True, exist_ok=True)
    check_settings(out / "settings.json", settings)
    files = {name: out / "runs" / f"{quote(name, safe='@:,+ ')}.json" for name in runs}
    missing = [name for name, file in files.items() if not file.is_file()]
    for name in tqdm(missing, "runs", unit="run", disable=None):
        record = train(*runs[name]) | {"origin": get_origin()}
        write_text(files[name], json.dumps(record) + "\n")
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}


def check_settings(path: Path, settings: Record) -> None:
    """Write the settings to a JSON file, or raise ValueError if it has others."""
    settings = json.loads(json.dumps(settings))
    if not path.is_file():
        write_text(path, json.dumps(settings, indent=1) + "\n")
        return
    previous = json.loads(path.read_text(encoding="utf-8"))
    if previous != settings:
        changed = sorted(
            key for key in {*settings, *previous} if previous.get(key) != settings.get(key)
        )
        raise ValueError(
            f"{path}: the runs had different values of {', '.join(changed)}; write to another "
            "folder"
        )
