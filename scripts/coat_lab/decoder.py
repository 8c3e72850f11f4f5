"""``coat-vlm bench decoder``: training losses of a small decoder in BF16 and in FP8.

The loop is plain PyTorch around :func:`coat_vlm.fp8.convert` and :class:`coat_vlm.optim.CoatAdamW`:
BF16 weights, FP32 master weights, the same initial weights and batches for every precision. The
held-out loss is measured on the last tenth of the text. With an output folder the losses of a run
are written when the run ends, and the same command continues with the missing runs.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import TypeAdapter
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

from coat_bench.rows import get_origin
from coat_lab.curves import DecoderCurve, read_curves, write_curves
from coat_vlm.config import FP8_PRECISIONS, Fp8Config, Precision
from coat_vlm.fp8 import Arithmetic, SpareMemory, arithmetic_of, find_graphs, graph_blocks
from coat_vlm.model.loss import loss_for_logits
from coat_vlm.model.processor import train_tokenizer
from coat_vlm.optim import CoatAdamW, lr_factor

HELD_OUT = 0.1
"""Share of the text, at its end, that is held out."""
CURVES = "decoder.csv"
SETTINGS = "decoder.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderBench:
    """The model and its training; the defaults are the size ``30m`` of :data:`SIZES`."""

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
"""Values of ``--size``; ``coat-vlm bench decoder --help`` has their parameter counts."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of a text, int64 [tokens]."""

    training: Tensor
    held_out: Tensor
    """The text's last tenth."""


def bench_decoder(
    texts: Sequence[Path],
    precisions: Sequence[str],
    seeds: Sequence[int],
    bench: DecoderBench,
    out: Path | None = None,
) -> Iterator[list[DecoderCurve]]:
    """Train in every precision with every seed, the precisions of one seed after another.

    Args:
        texts: UTF-8 text files, concatenated.
        precisions: names for :func:`parse_arithmetic`.
        seeds: seeds of the initial weights and of the batches.
        bench: the model and the training.
        out: folder of ``decoder.csv`` (losses) and ``decoder.json`` (settings). Runs in it are not
            repeated.

    Yields:
        The curves so far after every run, in the order of ``precisions``.

    Raises:
        ValueError: a precision is unknown, a text is too short, or ``out`` has curves of other
            settings.
        OSError: a text cannot be read, or ``out`` cannot be written.
    """
    for precision in precisions:
        parse_arithmetic(precision)
    done = {} if out is None else _open_folder(out, texts, bench)
    corpus = read_corpus(texts, bench)
    precisions, seeds = list(dict.fromkeys(precisions)), list(dict.fromkeys(seeds))
    for run in ((precision, seed) for seed in seeds for precision in precisions):
        if run not in done:
            done[run] = train_decoder(corpus, run[0], bench, run[1])
            if out is not None:
                write_curves(out / CURVES, list(done.values()))
        yield [done[key] for key in product(precisions, seeds) if key in done]


def _open_folder(
    out: Path, texts: Sequence[Path], bench: DecoderBench
) -> dict[tuple[str, int], DecoderCurve]:
    """Create the folder, or check that it has these settings; returns its complete curves."""
    settings = {
        "bench": {**asdict(bench), "betas": list(bench.betas)},
        "texts": [
            {"name": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()}
            for text in texts
        ],
    }
    out.mkdir(parents=True, exist_ok=True)
    check_settings(out / SETTINGS, settings, "curves")
    curves = read_curves(out / CURVES)
    return {(c.precision, c.seed): c for c in curves if len(c.training) == bench.steps}


def check_settings(path: Path, settings: Mapping[str, Any], what: str) -> None:
    """Write the settings of a folder's runs to a JSON file, or compare them with it.

    Args:
        path: the file.
        settings: plain JSON.
        what: what the folder contains, for the message.

    Raises:
        ValueError: the file has other settings.
    """
    if not path.is_file():
        _, commit, device, version, _ = get_origin()
        where = {"commit": commit, "device": device, "torch": version}
        text = json.dumps({"settings": settings, "made with": where}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
        return
    there = json.loads(path.read_text(encoding="utf-8"))["settings"]
    if there != settings:
        raise ValueError(
            f"{path}: its {what} were made with {there}, the settings are now {settings}; write to "
            "another folder"
        )


def parse_arithmetic(name: str) -> Arithmetic:
    """Return the arithmetic of a precision on this machine's device.

    Args:
        name: ``bf16``, ``fp32``, ``fp8_linear``, ``coat`` or ``coat_lean``. Keys of
            :class:`coat_vlm.config.Fp8Config` may follow an FP8 precision, to measure the cost of a
            part of FP8: ``coat,optimizer=adamw,skip_last=1``.

    Raises:
        ValueError: there is no such precision or key, or a key has no effect in it.
    """
    first, *settings = name.split(",")
    try:
        precision = TypeAdapter(Precision).validate_python(first)
        for setting in settings:
            if "=" not in setting:
                raise ValueError(f"{setting} is no setting, which has the form key=value")  # noqa: TRY301
        given = {key: yaml.safe_load(text) for key, text in (s.split("=", 1) for s in settings)}
        if given and precision not in FP8_PRECISIONS:
            raise ValueError(f"{', '.join(given)}: no effect, {precision} is not FP8")  # noqa: TRY301
        fp8 = TypeAdapter(Fp8Config).validate_python(given) if given else None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"precision {name!r}: {error}; give fp32, bf16, fp8_linear, coat or coat_lean, FP8 "
            "followed by keys of a recipe's fp8 section: coat,optimizer=adamw"
        ) from error
    return arithmetic_of(precision, fp8, get_device())


def get_device() -> torch.device:
    """Return this machine's GPU, or the CPU if it has none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def use_gpu_in_turn(number: int) -> None:
    """Make one of this machine's GPUs the current one, in turn by the number of a run."""
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())


def train_decoder(
    corpus: Corpus, precision: str, bench: DecoderBench, seed: int = 0
) -> DecoderCurve:
    """Train on the text in one precision and return the losses.

    Args:
        corpus: from :func:`read_corpus`.
        precision: a name for :func:`parse_arithmetic`.
        bench: the model and the training.
        seed: seed of the initial weights and of the batches.

    Raises:
        ValueError: there is no such precision, or FP8 does not fit the model.
    """
    model, master_weights = start_run(precision, bench, seed)
    curve = DecoderCurve(precision, seed)
    batches = islice(draw_batches(corpus, bench, seed), bench.steps)
    losses = train_steps(model, master_weights, batches, bench)
    for step, loss in enumerate(
        tqdm(losses, f"{precision}, seed {seed}", bench.steps, unit="step"), start=1
    ):
        curve.training.append(loss)
        if step % bench.eval_steps == 0 or step == bench.steps:
            curve.held_out[step] = text_loss(model, corpus.held_out, bench)
    return curve


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

    Args:
        model: the model; each step copies the master weights into its weights.
        bench: learning rate, betas and weight decay.
        fp8: chooses :class:`CoatAdamW`; torch's AdamW by default.
    """

    def __init__(self, model: nn.Module, bench: DecoderBench, fp8: Fp8Config | None = None) -> None:
        self._weights = list(model.parameters())
        self._copies = [nn.Parameter(p.detach().float().clone()) for p in self._weights]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._copies if p.ndim > 1], "weight_decay": bench.weight_decay},
            {"params": [p for p in self._copies if p.ndim == 1], "weight_decay": 0.0},
        ]
        if fp8 is not None and fp8.optimizer == "coat":
            self.optimizer = CoatAdamW(groups, betas=bench.betas, codec=fp8.codec)
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
        with torch.no_grad():
            for weight, copy in zip(self._weights, self._copies, strict=True):
                weight.copy_(copy)


def read_corpus(texts: Sequence[Path], bench: DecoderBench) -> Corpus:
    """Read and tokenize texts; the tokenizer is trained on the training part.

    Args:
        texts: UTF-8 text files, concatenated.
        bench: vocabulary size and tokens per sequence.

    Raises:
        ValueError: there are too few tokens for a sequence.
        OSError: a text cannot be read.
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
