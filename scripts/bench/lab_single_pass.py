"""Compares precisions on a decoder that reads every text once.

The training documents are joined and cut into sequences of equal length; what is left at the end is
not used. The seed decides the initial weights and the order of the sequences; every precision gets
the same ones. Texts are rows with a field text, and a field source for losses by source: JSON lines
or Parquet, also compressed. A tokenizer is trained on them. Questions have llm-foundry's layouts:
query, choices, gold; context_options, continuation, gold; or context and continuation.

The table has each measure of the first precision, and the differences of the others: losses in
percent, accuracies in points, with several seeds paired by seed with 95% intervals (Student's t).
The same command continues with the runs that OUT does not contain.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corpus import Corpus, read_corpus, read_questions, score_questions
from decoder import SIZES as DECODERS
from decoder import DecoderBench, parse_arithmetic, start_run, text_loss, train_steps
from harness import at_least, format_table, make_parser, run_script, say
from sweep import Record, sweep

LAST_SHARE = 0.05
"""The training loss of a run is the mean over this last share of its steps."""
EVALUATIONS = 10
"""Held-out losses per run, evenly spaced."""
_BATCH = 64
"""Sequences per forward pass when questions are scored."""
SIZES = {
    "tiny": replace(DECODERS["tiny"], steps=0),
    "30m": replace(DECODERS["30m"], steps=0),
    "100m": replace(DECODERS["100m"], steps=0, lr=1.2e-3),  # the best of four in BF16
    "350m": replace(
        DECODERS["100m"],
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        num_key_value_heads=8,
        intermediate_size=3584,
        steps=0,
        lr=8e-4,  # the best of three in BF16
    ),
}
"""Values of ``--size``; ``steps``: 0 reads the whole text."""
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's t with 1 to 9 degrees of freedom; the last one also for more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinglePass:
    """What the runs have in common."""

    training: tuple[Path, ...]
    held_out: tuple[Path, ...]
    questions: tuple[Path, ...]
    """Files of questions; the accuracy on each is named by the file."""
    bench: DecoderBench


def train_all(
    setup: SinglePass, precisions: Sequence[str], seeds: Sequence[int], jobs: int, out: Path
) -> dict[tuple[str, int], dict[str, float]]:
    """Train every precision with every seed; returns the measures of each run.

    Raises:
        ValueError: a precision is unknown, the text is too short, two files of questions have the
            same name, or one has another layout, or ``out`` has results of other settings.
        RuntimeError: runs failed; the others are in the folder.
    """
    for precision in precisions:
        parse_arithmetic(precision)
    names = [file.stem for file in setup.questions]
    if len(set(names)) < len(names):
        raise ValueError(
            f"--questions {' '.join(map(str, setup.questions))}: two files have the same name, by "
            "which their accuracies are distinguished; rename one"
        )
    out.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(setup.training, setup.held_out, setup.bench.vocab_size, out)
    count_steps(corpus, setup.bench)
    for file in setup.questions:
        read_questions(file)
    settings: Record = {"bench": asdict(setup.bench)}
    for name in ("training", "held_out", "questions"):
        files = getattr(setup, name)
        settings[name] = [{"name": file.name, "bytes": file.stat().st_size} for file in files]
    keys = [(p, s) for s in dict.fromkeys(seeds) for p in dict.fromkeys(precisions)]
    runs = {f"{p}, seed {s}": (setup, out, p, s) for p, s in keys}
    records = sweep(out, settings, runs, train_one, jobs)
    return {key: records[name]["measures"] for key, name in zip(keys, runs, strict=True)}


def count_steps(corpus: Corpus, bench: DecoderBench) -> int:
    """Return the number of steps; ValueError if the text has too few tokens for them."""
    per_step = bench.tokens * bench.batch_size
    available = len(corpus.training) // per_step
    if not 0 < max(1, bench.steps) <= available:
        raise ValueError(
            f"the training text has {len(corpus.training):,} tokens, enough for {available} steps "
            f"of {per_step:,}; {max(1, bench.steps)} were asked for, and no text is read twice: "
            "give more text or fewer steps"
        )
    shortest = min(corpus.held_out, key=lambda source: len(corpus.held_out[source]))
    if len(corpus.held_out[shortest]) < bench.tokens:
        raise ValueError(
            f"source {shortest} has {len(corpus.held_out[shortest])} held-out tokens, fewer than a "
            f"row of {bench.tokens}; give it more text, or leave it out"
        )
    return bench.steps or available


def train_one(setup: SinglePass, out: Path, precision: str, seed: int) -> Record:
    """Train and evaluate a run; ``out`` has the tokens.

    Returns:
        ``training``: a loss per step, ``held_out``: step -> loss, and ``measures``: tokens per
        second, training loss, held-out loss, also by source, and accuracies in percent.
    """
    corpus = read_corpus(setup.training, setup.held_out, setup.bench.vocab_size, out)
    bench = replace(setup.bench, steps=count_steps(corpus, setup.bench))
    model, master_weights = start_run(precision, bench, seed)
    held_out = torch.cat(list(corpus.held_out.values())).long()
    every = max(1, bench.steps // EVALUATIONS)
    training: list[float] = []
    curve: dict[int, float] = {}
    started, evaluated_s = time.perf_counter(), 0.0
    batches = shuffled_batches(corpus, bench, seed)
    for step, loss in enumerate(train_steps(model, master_weights, batches, bench), 1):
        training.append(loss)
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss of step {step} is {loss}")
        if step % every == 0 or step == bench.steps:
            before = time.perf_counter()
            curve[step] = text_loss(model, held_out, bench)
            evaluated_s += time.perf_counter() - before
    seconds = time.perf_counter() - started - evaluated_s
    last = max(1, round(LAST_SHARE * bench.steps))
    measures = {
        "tokens per second": bench.steps * bench.batch_size * bench.tokens / seconds,
        "training loss": float(np.mean(training[-last:])),
        "held-out loss": curve[bench.steps],
    }
    for source, ids in corpus.held_out.items():
        measures[f"{source}, held-out loss"] = text_loss(model, ids.long(), bench)
    score = partial(score_continuations, model)
    for file in setup.questions:
        share = score_questions(read_questions(file), score, corpus.tokenizer, bench.tokens)
        measures[f"{file.stem}, accuracy"] = share
    return {"training": training, "held_out": curve, "measures": measures}


def shuffled_batches(corpus: Corpus, bench: DecoderBench, seed: int) -> Iterator[Tensor]:
    """Yield ``bench.steps`` batches, int64 [batch size, tokens]; no row is in two of them."""
    count = len(corpus.training) // bench.tokens
    rows = corpus.training[: count * bench.tokens].view(count, bench.tokens)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for step in range(bench.steps):
        yield rows[order[step * bench.batch_size :][: bench.batch_size]].long()


@torch.no_grad()
def score_continuations(
    model: Any, ids: Sequence[list[int]], lengths: Sequence[int]
) -> Iterator[tuple[float, bool]]:
    """Yield the log-likelihood of the last ids of each sequence, and whether greedy ids are equal.

    Args:
        model: a causal language model, which sees padding only behind a sequence.
        ids: token ids of each sequence.
        lengths: how many of the last ids to score, fewer than all.
    """
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # little padding
    scores = [(0.0, False)] * len(ids)
    for begin in range(0, len(order), _BATCH):
        group = order[begin : begin + _BATCH]
        longest = -(-len(ids[group[-1]]) // 64) * 64  # few shapes
        batch = torch.zeros(len(group), longest, dtype=torch.long)
        for row, i in zip(batch, group, strict=True):
            row[: len(ids[i])] = torch.tensor(ids[i])
        batch = batch.to(model.device)
        likelihoods = model.eval()(input_ids=batch).logits[:, :-1].float().log_softmax(-1)
        targets = batch[:, 1:]
        ends = torch.tensor([[len(ids[i]) - 1] for i in group], device=batch.device)
        starts = ends - torch.tensor([[lengths[i]] for i in group], device=batch.device)
        at = torch.arange(longest - 1, device=batch.device)
        scored = (at >= starts) & (at < ends)
        sums = likelihoods.gather(2, targets[..., None])[..., 0].mul(scored).sum(1)
        greedy = ((likelihoods.argmax(-1) == targets) | ~scored).all(1)
        for i, value, same in zip(group, sums.tolist(), greedy.tolist(), strict=True):
            scores[i] = (value, same)
    yield from scores


def format_runs(runs: dict[tuple[str, int], dict[str, float]]) -> str:
    """Format one Markdown table: each measure, and its differences to the first precision."""
    first, *others = dict.fromkeys(precision for precision, _ in runs)
    head = ["measure", first, *(f"{name}: difference" for name in others)]
    lines: list[list[str]] = []
    for measure in next(iter(runs.values())):
        values = {
            name: np.array([m[measure] for (precision, _), m in runs.items() if precision == name])
            for name in (first, *others)
        }
        base = values[first]
        percent = not measure.endswith("accuracy")
        cells = [f"{base.mean():.4f}" if percent else f"{base.mean():.2f}"]
        if measure == "tokens per second":
            cells[0] = f"{base.mean():,.0f}"
        for name in others:
            difference = 100 * (values[name] / base - 1) if percent else values[name] - base
            unit = "%" if percent else " points"
            cells.append(f"{difference.mean():+.2f}{unit}{_format_interval(difference)}")
        lines.append([measure, *cells])
    return format_table(head, lines)


def _format_interval(differences: "np.ndarray[Any, np.dtype[np.float64]]") -> str:
    """Format half of the 95% interval of the mean as `` +- 0.05``; nothing for one value."""
    n = len(differences)
    if n == 1:
        return ""
    half = _T[min(n - 1, len(_T)) - 1] * float(differences.std(ddof=1)) / math.sqrt(n)
    return f" +- {half:.2f}"


EXAMPLES = """\
  python scripts/bench/lab_single_pass.py --text train.jsonl.xz --held-out validation.jsonl.xz \\
      --size 100m --precisions bf16 coat --seeds 0 1 2 --jobs 3 \\
      --questions copa.jsonl piqa.jsonl --out runs/once
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="training documents")
    add("--held-out", type=Path, nargs="+", required=True, metavar="FILE", help="other documents")
    add("--questions", type=Path, nargs="*", default=[], metavar="FILE", help="default none")
    add("--size", choices=SIZES, default="30m", help="of the decoder; default 30m")
    add("--precisions", nargs="+", default=["bf16", "coat"], metavar="NAME",
        help="settings may follow one, as in coat,optimizer=adamw; default bf16 coat")  # fmt: skip
    add("--seeds", type=int, nargs="+", default=[0], help="default 0")
    add("--steps", type=at_least(0), default=0, help="fewer steps than the whole text")
    add("--lr", type=float, help="peak learning rate; default: depends on --size")
    add("--jobs", type=at_least(1), default=1, help="runs at the same time; default 1")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of tokens and runs")
    return parser


def main(args: argparse.Namespace) -> None:
    """Train and print all runs."""
    bench = replace(SIZES[args.size], steps=args.steps)
    if args.lr is not None:
        bench = replace(bench, lr=args.lr)
    if not 0 < bench.lr < math.inf:
        raise ValueError(f"--lr {bench.lr}: must be positive and finite")
    setup = SinglePass(
        training=tuple(args.text),
        held_out=tuple(args.held_out),
        questions=tuple(args.questions),
        bench=bench,
    )
    say(format_runs(train_all(setup, args.precisions, args.seeds, args.jobs, args.out)))


if __name__ == "__main__":
    sys.exit(run_script(build_parser(), main))
