"""Compares precisions on a decoder that reads every text once.

The training documents are joined and cut into sequences of equal length; what is left at the end is
not used. The seed decides the initial weights and the order of the sequences; every precision gets
the same ones. Texts are rows with a field text: JSON lines or Parquet, also compressed. A tokenizer
is trained on them.

The table has each measure of the first precision, and the differences of the others in percent,
with several seeds paired by seed with 95% intervals (Student's t). The same command continues with
the runs that OUT does not contain.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import harness
from coat_cli.command import at_least
from coat_data.containers.open import open_rows
from coat_data.sample import DataError
from coat_vlm.model.processor import train_tokenizer
from decoder import SIZES as DECODERS
from decoder import (
    Corpus,
    DecoderBench,
    Record,
    parse_arithmetic,
    start_run,
    sweep,
    text_loss,
    train_steps,
)

TOKENIZER_CHARACTERS = 32_000_000  # about so many of the training text, evenly spaced
LAST_SHARE = 0.05  # of a run's steps, over which its training loss is averaged
EVALUATIONS = 10  # held-out losses per run, evenly spaced
SIZES = {
    "tiny": replace(DECODERS["tiny"], steps=0),
    "30m": replace(DECODERS["30m"], steps=0),
    "100m": replace(DECODERS["100m"], steps=0, lr=1.2e-3),  # the best of four in BF16
    "350m": replace(
        DECODERS["100m"], hidden_size=1024, num_layers=24, num_heads=16, num_key_value_heads=8,
        intermediate_size=3584, steps=0, lr=8e-4,  # the best of three in BF16
    ),
}  # fmt: skip
"""Values of ``--size``; ``steps``: 0 reads the whole text."""
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's t with 1 to 9 degrees of freedom; the last one also for more."""


def tokenize(training: Sequence[Path], held_out: Sequence[Path], vocab_size: int) -> Corpus:
    """Tokenize documents, an end token after each; the tokenizer is trained on the first ones.

    DataError: a file cannot be read, or a row has no text.
    """
    texts = [*read_documents(training)]
    every = -(-sum(map(len, texts)) // TOKENIZER_CHARACTERS)
    lines = chain.from_iterable(text.splitlines(keepends=True) for text in texts[::every])
    tokenizer = train_tokenizer(lines, vocab_size)

    def encode(group: Sequence[str]) -> Tensor:
        ids = tokenizer(list(group), add_special_tokens=False)["input_ids"]
        end = tokenizer.eos_token_id
        return torch.tensor([*chain.from_iterable((*document, end) for document in ids)])

    return Corpus(encode(texts), encode([*read_documents(held_out)]))


def read_documents(files: Sequence[Path]) -> Iterator[str]:
    """Yield the texts of files of rows; DataError: one cannot be read, or a row has no text."""
    for file in files:
        for number, row in enumerate(open_rows(file.absolute()).stream()):
            text = row.get("text") if isinstance(row, Mapping) else None
            if not isinstance(text, str):
                raise DataError(f"{file}, row {number}", "has no text in field text", "add it")
            yield text


def train_all(
    training: Sequence[Path],
    held_out: Sequence[Path],
    bench: DecoderBench,
    precisions: Sequence[str],
    seeds: Sequence[int],
    out: Path,
) -> dict[tuple[str, int], dict[str, float]]:
    """Train every precision with every seed; returns the measures of each run."""
    for precision in precisions:
        parse_arithmetic(precision)
    settings: Record = {"bench": asdict(bench)}
    for name, files in (("training", training), ("held_out", held_out)):
        settings[name] = [{"name": file.name, "bytes": file.stat().st_size} for file in files]
    corpus = tokenize(training, held_out, bench.vocab_size)
    bench = replace(bench, steps=count_steps(corpus, bench))
    keys = [(p, s) for s in dict.fromkeys(seeds) for p in dict.fromkeys(precisions)]
    runs = {f"{p}, seed {s}": (bench, corpus, p, s) for p, s in keys}
    records = sweep(out, settings, runs, train_one)
    return {key: records[name]["measures"] for key, name in zip(keys, runs, strict=True)}


def count_steps(corpus: Corpus, bench: DecoderBench) -> int:
    """Return the number of steps; ValueError if the text has too few tokens for them."""
    per_step = bench.tokens * bench.batch_size
    available = len(corpus.training) // per_step
    if not 0 < max(1, bench.steps) <= available or len(corpus.held_out) < bench.tokens:
        raise ValueError(
            f"the training text has {len(corpus.training):,} tokens, enough for {available} steps "
            f"of {per_step:,}, the held-out text {len(corpus.held_out):,}; {max(1, bench.steps)} "
            f"steps were asked for, and a held-out sequence has {bench.tokens}. No text is read "
            "twice: give more text or fewer steps"
        )
    return bench.steps or available


def train_one(bench: DecoderBench, corpus: Corpus, precision: str, seed: int) -> Record:
    """Train and evaluate a run.

    Returns ``training``: a loss per step, ``held_out``: step -> loss, and ``measures``: tokens per
    second, training loss, held-out loss in the run's precision and in BF16.
    """
    model, master_weights = start_run(precision, bench, seed)
    every = max(1, bench.steps // EVALUATIONS)
    training: list[float] = []
    curve: dict[int, float] = {}
    started, evaluated_s = time.perf_counter(), 0.0
    batches = shuffled_batches(corpus.training, bench, seed)
    for step, loss in enumerate(train_steps(model, master_weights, batches, bench), 1):
        training.append(loss)
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss of step {step} is {loss}")
        if step % every == 0 or step == bench.steps:
            before = time.perf_counter()
            curve[step] = text_loss(model, corpus.held_out, bench)
            evaluated_s += time.perf_counter() - before
    seconds = time.perf_counter() - started - evaluated_s
    last = max(1, round(LAST_SHARE * bench.steps))
    plain, _ = start_run("bf16", bench, seed)
    plain.load_state_dict(model.state_dict())
    measures = {
        "tokens per second": bench.steps * bench.batch_size * bench.tokens / seconds,
        "training loss": float(np.mean(training[-last:])),
        "held-out loss": curve[bench.steps],
        "held-out loss in BF16": text_loss(plain, corpus.held_out, bench),
    }
    return {"training": training, "held_out": curve, "measures": measures}


def shuffled_batches(ids: Tensor, bench: DecoderBench, seed: int) -> Iterator[Tensor]:
    """Yield ``bench.steps`` batches, int64 [batch size, tokens]; no sequence is in two of them."""
    count = len(ids) // bench.tokens
    sequences = ids[: count * bench.tokens].view(count, bench.tokens)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for step in range(bench.steps):
        yield sequences[order[step * bench.batch_size :][: bench.batch_size]]


def format_runs(runs: dict[tuple[str, int], dict[str, float]]) -> str:
    """Format one Markdown table: each measure, and its differences to the first precision."""
    first, *others = dict.fromkeys(precision for precision, _ in runs)
    lines: list[list[str]] = []
    for measure in next(iter(runs.values())):
        values = {
            name: np.array([m[measure] for (precision, _), m in runs.items() if precision == name])
            for name in (first, *others)
        }
        mean = values[first].mean()
        cells = [f"{mean:,.0f}" if measure == "tokens per second" else f"{mean:.4f}"]
        for name in others:
            percent = 100 * (values[name] / values[first] - 1)
            cells.append(f"{percent.mean():+.2f}%{format_interval(percent)}")
        lines.append([measure, *cells])
    head = ["measure", first, *(f"{name}: difference" for name in others)]
    return harness.format_table(head, lines)


def format_interval(differences: "np.ndarray[Any, np.dtype[np.float64]]") -> str:
    """Format half of the 95% interval of the mean as `` +- 0.05``; nothing for one value."""
    n = len(differences)
    if n == 1:
        return ""
    half = _T[min(n - 1, len(_T)) - 1] * float(differences.std(ddof=1)) / math.sqrt(n)
    return f" +- {half:.2f}"


EXAMPLES = """\
  python scripts/bench/lab_single_pass.py --text train.jsonl.xz --held-out validation.jsonl.xz \\
      --size 100m --precisions bf16 coat --seeds 0 1 2 --out runs/once
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES, csv=False)
    add = parser.add_argument
    # fmt: off
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="training documents")
    add("--held-out", type=Path, nargs="+", required=True, metavar="FILE", help="other documents")
    add("--size", choices=SIZES, default="30m", help="of the decoder; default 30m")
    add("--precisions", nargs="+", default=["bf16", "coat"], metavar="NAME",
        help="settings may follow one, as in coat,optimizer=adamw; default bf16 coat")
    add("--seeds", type=int, nargs="+", default=[0], help="default 0")
    add("--steps", type=at_least(0), default=0, help="fewer steps than the whole text")
    add("--lr", type=float, help="peak learning rate; default: depends on --size")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of runs")
    # fmt: on
    return parser


def main(args: argparse.Namespace) -> None:
    """Train and print all runs."""
    bench = replace(SIZES[args.size], steps=args.steps)
    if args.lr is not None:
        bench = replace(bench, lr=args.lr)
    runs = train_all(args.text, args.held_out, bench, args.precisions, args.seeds, args.out)
    harness.say(format_runs(runs))


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
