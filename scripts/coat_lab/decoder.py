"""Trains one small decoder on a text in BF16 and in FP8 from the same start, and compares losses.

The loop is plain PyTorch around :func:`coat_vlm.fp8.convert` and :class:`coat_vlm.optim.CoatAdamW`:
BF16 weights, FP32 masters, the same batches for every precision. Held-out loss is that of the
text's last tenth. With an output folder every run's losses are there as soon as it ends, and the
same benchmark started again goes on with the runs that are missing.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import TypeAdapter
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

from coat_lab.curves import DecoderCurve, read_curves, write_curves
from coat_vlm.checkout import commit
from coat_vlm.config import FP8_PRECISIONS, Fp8Config, Precision
from coat_vlm.fp8 import Arithmetic, arithmetic_of, graph_blocks
from coat_vlm.model.processor import train_tokenizer
from coat_vlm.optim import CoatAdamW, lr_factor

HELD_OUT = 0.1
"""Share of the text, its end, that is not trained on."""
CURVES = "decoder.csv"
SETTINGS = "decoder.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderBench:
    """What is trained; the defaults are the size ``30m`` of :data:`SIZES`."""

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


SIZES = {
    "30m": DecoderBench(),
    "100m": DecoderBench(
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        intermediate_size=2688,
        vocab_size=8192,
        tokens=512,
        steps=300,
        lr=6e-4,
    ),
}
"""What ``--size`` chooses; ``coat-vlm bench decoder --help`` says how many parameters each has."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of a text, int64 [tokens]."""

    training: Tensor
    held_out: Tensor
    """The text's last tenth."""


OnTrained = Callable[[nn.Module, DecoderCurve, Corpus], None]


def bench_decoder(
    texts: Sequence[Path],
    precisions: Sequence[str],
    seeds: Sequence[int],
    bench: DecoderBench,
    out: Path | None = None,
    on_trained: OnTrained | None = None,
    seen: Collection[tuple[str, int]] = (),
) -> Iterator[list[DecoderCurve]]:
    """Train in every precision with every seed, the precisions of one seed after another.

    Args:
        texts: UTF-8 text files, read one after the other.
        precisions: as :func:`arithmetic_called` takes them.
        seeds: of the model's start and of the batches.
        bench: the model and the training.
        out: folder of ``decoder.csv`` (losses) and ``decoder.json`` (settings). Runs that are
            there already are not repeated, but for ``on_trained``.
        on_trained: called with every trained model, before its curve is kept: a run that is
            interrupted there is not finished.
        seen: precision and seed of the runs that ``on_trained`` need not see again.

    Yields:
        After every run: the curves so far, precision by precision as given.

    Raises:
        ValueError: a precision is unknown, a text is too short, or ``out`` has curves of other
            settings.
        OSError: a text cannot be read, or ``out`` cannot be written.
    """
    for precision in precisions:
        arithmetic_called(precision)
    done = {} if out is None else _open_folder(out, texts, bench)
    corpus = read_corpus(texts, bench)
    precisions, seeds = list(dict.fromkeys(precisions)), list(dict.fromkeys(seeds))
    for seed in seeds:
        for precision in precisions:
            unseen = on_trained is not None and (precision, seed) not in seen
            if unseen or (precision, seed) not in done:
                curve, model = train_decoder(corpus, precision, bench, seed)
                done[precision, seed] = curve
                if on_trained is not None:
                    on_trained(model, curve, corpus)
                del model
                if out is not None:
                    write_curves(out / CURVES, list(done.values()))
            yield [done[key] for key in product(precisions, seeds) if key in done]


def _open_folder(
    out: Path, texts: Sequence[Path], bench: DecoderBench
) -> dict[tuple[str, int], DecoderCurve]:
    """Make the folder, or check that it is of these settings; its whole curves."""
    settings = {
        "bench": {**asdict(bench), "betas": list(bench.betas)},
        "texts": [
            {"name": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()}
            for text in texts
        ],
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / SETTINGS
    if path.is_file():
        there = json.loads(path.read_text(encoding="utf-8"))["settings"]
        if there != settings:
            raise ValueError(
                f"{path}: the curves there were made with {there}, these would be with {settings}; "
                "write to another folder"
            )
    else:
        cuda = torch.cuda.is_available()
        where = {
            "commit": commit() or "unknown",
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "torch": torch.__version__,
        }
        text = json.dumps({"settings": settings, "made with": where}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
    curves = read_curves(out / CURVES)
    return {(c.precision, c.seed): c for c in curves if len(c.training) == bench.steps}


def arithmetic_called(name: str) -> Arithmetic:
    """A precision's arithmetic on this machine's device.

    Args:
        name: ``bf16``, ``fp32``, ``fp8_linear``, ``coat`` or ``coat_lean``; behind it may follow
            keys of :class:`coat_vlm.config.Fp8Config`, to see what a part of FP8 costs:
            ``coat,optimizer=adamw,skip_last=1``.

    Raises:
        ValueError: there is no such precision or key, or a key has no effect in it.
    """
    try:
        precision, fp8 = _read_precision(name)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"precision {name!r}: {error}; give fp32, bf16, fp8_linear, coat or coat_lean, FP8 "
            "with keys of a recipe's fp8 section behind it: coat,optimizer=adamw"
        ) from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return arithmetic_of(precision, fp8, device)


def _read_precision(name: str) -> tuple[Precision, Fp8Config | None]:
    precision, *settings = name.split(",")
    checked = TypeAdapter(Precision).validate_python(precision)
    if not settings:
        return checked, None
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting} is no setting, which has the form key=value")
        given[key] = yaml.safe_load(text)
    if checked not in FP8_PRECISIONS:
        raise ValueError(f"{', '.join(given)}: no effect, {precision} is not FP8")
    return checked, TypeAdapter(Fp8Config).validate_python(given)


def train_decoder(
    corpus: Corpus, precision: str, bench: DecoderBench, seed: int = 0
) -> tuple[DecoderCurve, nn.Module]:
    """Train on the text in one precision; the losses and the model.

    Args:
        corpus: from :func:`read_corpus`.
        precision: as :func:`arithmetic_called` takes it.
        bench: the model and the training.
        seed: of the model's start and of the batches.

    Raises:
        ValueError: there is no such precision, or FP8 does not fit the model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = corpus.training
    arithmetic = arithmetic_called(precision)
    torch.manual_seed(seed)
    model = build_decoder(bench).to(device, arithmetic.dtype)
    arithmetic.apply(model)
    graph_blocks(model, arithmetic.fp8 is not None and arithmetic.fp8.cuda_graphs)
    masters = Masters(model, _optimizer(arithmetic.fp8, bench))
    curve = DecoderCurve(precision, seed)
    draw = torch.Generator().manual_seed(seed)
    for step in tqdm(range(bench.steps), desc=f"{precision}, seed {seed}", unit="step"):
        starts = torch.randint(0, len(ids) - bench.tokens, (bench.batch_size,), generator=draw)
        batch = torch.stack([ids[i : i + bench.tokens] for i in starts.tolist()]).to(device)
        loss = model.train()(input_ids=batch, labels=batch).loss
        loss.backward()
        masters.step(lr_factor(step, bench.steps, bench.steps // 10, "cosine", 0.1), bench)
        curve.training.append(loss.item())
        if (step + 1) % bench.eval_every_steps == 0 or step + 1 == bench.steps:
            curve.held_out[step + 1] = text_loss(model, corpus.held_out, bench)
    graph_blocks(model, enabled=False)
    return curve, model


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
            return CoatAdamW(groups, betas=bench.betas, codec=fp8.codec(bench.betas[1]))
        return torch.optim.AdamW(groups, betas=bench.betas)

    return build


def read_corpus(texts: Sequence[Path], bench: DecoderBench) -> Corpus:
    """Read and tokenize texts; the tokenizer is trained on what is not held out.

    Args:
        texts: UTF-8 text files, read one after the other as one text.
        bench: vocabulary size and tokens per sequence.

    Raises:
        ValueError: there are too few tokens for a sequence.
        OSError: a text cannot be read.
    """
    parts = [text.read_text(encoding="utf-8") for text in texts]
    ended = [part if part.endswith("\n") else part + "\n" for part in parts[:-1]]
    lines = "".join([*ended, parts[-1]]).splitlines(keepends=True)
    tokenizer = train_tokenizer(lines[: int(len(lines) * (1 - HELD_OUT))], bench.vocab_size)
    encoded = tokenizer(lines, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([token for line in encoded for token in line])
    cut = int(len(ids) * (1 - HELD_OUT))
    if min(cut, len(ids) - cut) <= bench.tokens:
        raise ValueError(
            f"{', '.join(map(str, texts))}: {len(ids)} tokens; the last tenth must hold a sequence "
            f"of {bench.tokens}: give a longer text or fewer tokens per sequence"
        )
    return Corpus(ids[:cut], ids[cut:])


def build_decoder(bench: DecoderBench) -> Any:
    """The decoder with random weights, FP32, of the shape of Qwen2."""
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
    """Mean loss over all whole sequences of a text [tokens], in nats per token."""
    device = model.device
    rows = ids[: len(ids) // bench.tokens * bench.tokens].view(-1, bench.tokens)
    model.eval()
    losses = [
        model(input_ids=chunk.to(device), labels=chunk.to(device)).loss.item() * len(chunk)
        for chunk in rows.split(bench.batch_size)
    ]
    return sum(losses) / len(rows)
