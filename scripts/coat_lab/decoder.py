"""Trains one small decoder on a text in BF16 and in FP8 from the same start, and compares losses.

The loop is plain PyTorch around :func:`coat_vlm.fp8.convert` and :class:`coat_vlm.optim.CoatAdamW`:
BF16 weights, FP32 masters, the same batches for every precision. Held-out loss is that of the
text's last tenth. With an output folder every run's losses are there as soon as it ends, and the
same benchmark started again goes on with the runs that are missing.

``--across`` computes the losses of each trained model in the other precisions, too: it tells what
FP8 costs in the weights from what it costs in a pass.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import TypeAdapter
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

from coat_bench.rows import origin, read_rows, replace_csv, table
from coat_lab.curves import DecoderCurve, read_curves, write_curves
from coat_vlm.config import FP8_PRECISIONS, Fp8Config, Precision
from coat_vlm.fp8 import Arithmetic, arithmetic_of, graph_blocks
from coat_vlm.model.processor import train_tokenizer
from coat_vlm.optim import CoatAdamW, lr_factor

HELD_OUT = 0.1
"""Share of the text, its end, that is not trained on."""
CURVES = "decoder.csv"
SETTINGS = "decoder.json"
ACROSS = "across.csv"


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


def bench_decoder(
    texts: Sequence[Path],
    precisions: Sequence[str],
    seeds: Sequence[int],
    bench: DecoderBench,
    out: Path | None = None,
    *,
    across: bool = False,
) -> Iterator[tuple[list[DecoderCurve], list["AcrossRow"]]]:
    """Train in every precision with every seed, the precisions of one seed after another.

    Args:
        texts: UTF-8 text files, read one after the other.
        precisions: as :func:`arithmetic_called` takes them.
        seeds: of the model's start and of the batches.
        bench: the model and the training.
        out: folder of ``decoder.csv`` (losses), ``decoder.json`` (settings) and ``across.csv``.
            Runs that are there already are not repeated, unless ``across.csv`` lacks them.
        across: also compute each trained model's losses in all the precisions. They replace the
            rows that its run has already; a precision that only these had is computed again, so
            that all rows are of one model.

    Yields:
        After every run: the curves so far, precision by precision as given; and the losses across,
        those of the file, too. A run that is interrupted between the two is not finished.

    Raises:
        ValueError: a precision is unknown, a text is too short, or ``out`` has curves of other
            settings.
        OSError: a text cannot be read, or ``out`` cannot be written.
    """
    for precision in precisions:
        arithmetic_called(precision)
    done = {} if out is None else _open_folder(out, texts, bench)
    rows = [] if out is None or not across else read_across(out / ACROSS)
    corpus = read_corpus(texts, bench)
    precisions, seeds = list(dict.fromkeys(precisions)), list(dict.fromkeys(seeds))
    for run in ((precision, seed) for seed in seeds for precision in precisions):
        there = [row.arithmetic for row in rows if row.run == run]
        if run not in done or (across and not set(precisions) <= set(there)):
            curve, model = train_decoder(corpus, run[0], bench, run[1])
            if across:
                names = list(dict.fromkeys([*precisions, *there]))
                found = losses_across(model, run, names, corpus, bench)
                rows = [*(row for row in rows if row.run != run), *found]
                if out is not None:
                    columns = [field.name for field in fields(AcrossRow)]
                    replace_csv(out / ACROSS, columns, [astuple(row) for row in rows])
            done[run] = curve
            del model
            if out is not None:
                write_curves(out / CURVES, list(done.values()))
        yield [done[key] for key in product(precisions, seeds) if key in done], rows


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
        _, commit, device, version, _ = origin()
        where = {"commit": commit, "device": device, "torch": version}
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
    arithmetic = arithmetic_called(precision)
    torch.manual_seed(seed)
    model = build_decoder(bench).to(device, arithmetic.dtype)
    arithmetic.apply(model)
    graph_blocks(model, arithmetic.fp8 is not None and arithmetic.fp8.cuda_graphs)
    masters = Masters(model, adamw(bench, arithmetic.fp8))
    curve = DecoderCurve(precision, seed)
    batches = islice(drawn_batches(corpus, bench, seed), bench.steps)
    losses = train_steps(model, masters, batches, bench)
    for step, loss in enumerate(
        tqdm(losses, f"{precision}, seed {seed}", bench.steps, unit="step"), start=1
    ):
        curve.training.append(loss)
        if step % bench.eval_every_steps == 0 or step == bench.steps:
            curve.held_out[step] = text_loss(model, corpus.held_out, bench)
    graph_blocks(model, enabled=False)
    return curve, model


def drawn_batches(corpus: Corpus, bench: DecoderBench, seed: int) -> Iterator[Tensor]:
    """Token ids [batch size, tokens] from random places of the training text, without an end."""
    ids, draw = corpus.training, torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - bench.tokens, (bench.batch_size,), generator=draw)
        yield torch.stack([ids[i : i + bench.tokens] for i in starts.tolist()])


def train_steps(
    model: Any, masters: "Masters", batches: Iterable[Tensor], bench: DecoderBench, first: int = 0
) -> Iterator[float]:
    """Take a step on each batch, from the schedule's step ``first`` on; yields its loss."""
    for step, batch in enumerate(batches, first):
        ids = batch.to(model.device)
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        masters.step(lr_factor(step, bench.steps, bench.steps // 10, "cosine", 0.1), bench)
        yield loss.item()


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


def adamw(
    bench: DecoderBench, fp8: Fp8Config | None = None
) -> Callable[[list[nn.Parameter], list[nn.Parameter]], torch.optim.Optimizer]:
    """Builds an optimizer of (decayed, plain) parameters: torch's, or ours if ``fp8`` says so."""

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


@dataclass(frozen=True, slots=True)
class AcrossRow:
    """Losses of one model in one arithmetic, in nats per token."""

    precision: str
    """What it was trained in."""
    seed: int
    arithmetic: str
    """What its losses are computed in."""
    training_text: float
    """Over the text that it was trained on."""
    held_out: float

    @property
    def run(self) -> tuple[str, int]:
        """Precision and seed."""
        return self.precision, self.seed


def losses_across(
    model: nn.Module,
    run: tuple[str, int],
    precisions: Sequence[str],
    corpus: Corpus,
    bench: DecoderBench,
) -> list[AcrossRow]:
    """The losses of a model in the arithmetic of several precisions.

    Args:
        model: from :func:`train_decoder`; stays as it is.
        run: the precision that it was trained in, and the seed.
        precisions: as :func:`arithmetic_called` takes them.
        corpus: the text.
        bench: the model's shape.
    """
    weights = model.state_dict()
    rows = []
    for name in precisions:
        arithmetic = arithmetic_called(name)
        other = build_decoder(bench).to(next(model.parameters()).device, arithmetic.dtype)
        other.load_state_dict(weights)
        arithmetic.apply(other)
        losses = [text_loss(other, ids, bench) for ids in (corpus.training, corpus.held_out)]
        rows.append(AcrossRow(*run, name, *losses))
    return rows


def read_across(path: Path) -> list[AcrossRow]:
    """The rows of a file of ``bench_decoder``, in its order; none if it is not there.

    Raises:
        ValueError: the file is another one.
    """
    if not path.is_file():
        return []
    return read_rows(path, AcrossRow, "coat-vlm bench decoder --across --out")


def format_across(rows: Sequence[AcrossRow]) -> str:
    """Markdown, one line per model: the loss on the training text in each arithmetic."""
    names = list(dict.fromkeys(row.arithmetic for row in rows))
    lines = []
    for run in dict.fromkeys(row.run for row in rows):
        own = {row.arithmetic: f"{row.training_text:.4f}" for row in rows if row.run == run}
        lines.append([*map(str, run), *(own.get(name, "-") for name in names)])
    return table(["trained in", "seed", *(f"training text in {name}" for name in names)], lines)
