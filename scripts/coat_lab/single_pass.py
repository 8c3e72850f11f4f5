"""``coat-vlm lab single-pass``: a decoder that reads every text once, in BF16 and in FP8.

Model, optimizer and training step are those of :mod:`coat_lab.decoder`. The training documents are
joined and cut into rows of equal length. The seed decides the initial weights and the order of the
rows; every precision gets the same ones. What is left at the end of the text is not used.
"""

import csv
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from coat_bench.rows import format_table
from coat_lab.corpus import Corpus, read_corpus, read_questions, score_questions
from coat_lab.curves import DecoderCurve, read_curves, write_csv, write_curves
from coat_lab.decoder import SIZES as DECODERS
from coat_lab.decoder import (
    DecoderBench,
    check_settings,
    parse_arithmetic,
    start_run,
    text_loss,
    train_steps,
    use_gpu_in_turn,
)

CURVES = "single_pass.csv"
RESULTS = "single_pass_results.csv"
SETTINGS = "single_pass.json"
LAST_SHARE = 0.05
"""The training loss of a run is the mean over this last share of its steps."""
EVALUATIONS = 10
"""Held-out losses per run, evenly spaced."""
_BATCH = 64
"""Sequences per forward pass when questions are scored."""
COLUMNS = ("precision", "seed", "measure", "value")
SIZES = {
    "30m": replace(DECODERS["30m"], steps=0),
    "100m": replace(DECODERS["100m"], steps=0, lr=1.2e-3),  # the best of four
    "350m": replace(
        DECODERS["100m"],
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        num_key_value_heads=8,
        intermediate_size=3584,
        steps=0,
        lr=8e-4,  # the best of three
    ),
}
"""Values of ``--size``: those of ``bench decoder``, and a larger one."""
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's t with 1 to 9 degrees of freedom; the last one for more, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinglePass:
    """What the runs have in common."""

    training: tuple[Path, ...]
    held_out: tuple[Path, ...]
    questions: tuple[Path, ...]
    """Files of questions; the accuracy on each is named by the file."""
    bench: DecoderBench
    """``steps``: 0 reads the whole text."""


@dataclass(frozen=True, slots=True)
class Run:
    """One trained model."""

    curve: DecoderCurve
    results: dict[str, float]
    """``tokens per second``, ``training loss``, ``held-out loss``, ``SOURCE, held-out loss`` and
    ``FILE, accuracy`` in percent."""


def train_all(
    setup: SinglePass, precisions: Sequence[str], seeds: Sequence[int], jobs: int, out: Path
) -> Iterator[str]:
    """Train every precision with every seed and write the results after each run.

    Args:
        setup: texts and model.
        precisions: names for :func:`coat_lab.decoder.parse_arithmetic`.
        seeds: seeds of the initial weights and of the order of the rows.
        jobs: runs at the same time, in processes of their own, on all GPUs in turn.
        out: folder of the results. Runs in it are not repeated.

    Yields:
        A line for every run that ended; the last line is a table of all runs in the folder.

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
    _check_settings(setup, out)
    corpus = read_corpus(setup.training, setup.held_out, setup.bench.vocab_size, out)
    _count_steps(corpus, setup.bench)
    for file in setup.questions:
        read_questions(file)
    done = read_runs(out)
    precisions, seeds = list(dict.fromkeys(precisions)), list(dict.fromkeys(seeds))
    todo = [(p, s) for s in seeds for p in precisions if (p, s) not in done]
    failed: list[str] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        runs = {
            pool.submit(train_one, setup, out, p, s, number, bar=jobs == 1): (p, s)
            for number, (p, s) in enumerate(todo)
        }
        for future in as_completed(runs):
            name = "{}, seed {}".format(*runs[future])
            if (error := future.exception()) is not None:
                failed.append(f"{name}: {error}")
                yield f"{name}: {error}"
                continue
            done[runs[future]] = run = future.result()
            _write_runs(out, list(done.values()))
            yield f"{name}: held-out loss {run.results['held-out loss']:.4f}"
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(todo)} runs failed: {'; '.join(failed)}")
    yield format_runs([done[p, s] for p in precisions for s in seeds])


def _check_settings(setup: SinglePass, out: Path) -> None:
    settings = {
        "bench": {**asdict(setup.bench), "betas": list(setup.bench.betas)},
        **{
            name: [{"name": file.name, "bytes": file.stat().st_size} for file in files]
            for name, files in (
                ("training", setup.training),
                ("held_out", setup.held_out),
                ("questions", setup.questions),
            )
        },
    }
    check_settings(out / SETTINGS, settings, "runs")


def _count_steps(corpus: Corpus, bench: DecoderBench) -> int:
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


def train_one(
    setup: SinglePass, out: Path, precision: str, seed: int, number: int, *, bar: bool
) -> Run:
    """Train and evaluate run ``number``; arguments of :func:`train_all`, which made the tokens."""
    use_gpu_in_turn(number)
    corpus = read_corpus(setup.training, setup.held_out, setup.bench.vocab_size, out)
    bench = replace(setup.bench, steps=_count_steps(corpus, setup.bench))
    questions = {file.stem: read_questions(file) for file in setup.questions}
    model, master_weights = start_run(precision, bench, seed)
    held_out = torch.cat(list(corpus.held_out.values())).long()
    curve, every = DecoderCurve(precision, seed), max(1, bench.steps // EVALUATIONS)
    losses = train_steps(model, master_weights, shuffled_batches(corpus, bench, seed), bench)
    started, evaluated_s = time.perf_counter(), 0.0
    name = f"{precision}, seed {seed}"
    for step, loss in enumerate(tqdm(losses, name, bench.steps, unit="step", disable=not bar), 1):
        curve.training.append(loss)
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss of step {step} is {loss}")
        if step % every == 0 or step == bench.steps:
            before = time.perf_counter()
            curve.held_out[step] = text_loss(model, held_out, bench)
            evaluated_s += time.perf_counter() - before
    seconds = time.perf_counter() - started - evaluated_s
    last = max(1, round(LAST_SHARE * bench.steps))
    results = {
        "tokens per second": bench.steps * bench.batch_size * bench.tokens / seconds,
        "training loss": float(np.mean(curve.training[-last:])),
        "held-out loss": curve.held_out[bench.steps],
    }
    for source, ids in corpus.held_out.items():
        results[f"{source}, held-out loss"] = text_loss(model, ids.long(), bench)

    score = partial(score_continuations, model)
    for name, rows in questions.items():
        share = score_questions(rows, score, corpus.tokenizer, bench.tokens)
        results[f"{name}, accuracy"] = share
    return Run(curve, results)


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


def _write_runs(out: Path, runs: Sequence[Run]) -> None:
    write_curves(out / CURVES, [run.curve for run in runs])
    rows = (
        (run.curve.precision, run.curve.seed, *result)
        for run in runs
        for result in run.results.items()
    )
    write_csv(out / RESULTS, COLUMNS, rows)


def read_runs(out: Path) -> dict[tuple[str, int], Run]:
    """Read the runs in a folder of :func:`train_all`, by precision and seed.

    A run whose curve was saved without its results, by a process that was killed, is left out.
    """
    if not (out / RESULTS).is_file():
        return {}
    runs = {(c.precision, c.seed): Run(c, {}) for c in read_curves(out / CURVES)}
    with (out / RESULTS).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            runs[row["precision"], int(row["seed"])].results[row["measure"]] = float(row["value"])
    return {key: run for key, run in runs.items() if run.results}


def format_runs(runs: Sequence[Run]) -> str:
    """Format one Markdown table: each measure, and its differences to the first precision.

    Losses differ in percent of the first precision's, accuracies in points. With several seeds the
    differences are paired by seed and have a 95% interval (Student's t).
    """
    by_precision: dict[str, list[Run]] = {}
    for run in runs:
        by_precision.setdefault(run.curve.precision, []).append(run)
    first, *others = by_precision
    head = ["measure", first, *(f"{name}: difference" for name in others)]
    lines: list[list[str]] = []
    for measure in by_precision[first][0].results:
        values = {
            name: np.array([run.results[measure] for run in group])
            for name, group in by_precision.items()
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
        if measure == "held-out loss":
            cells = [f"{np.exp(values[name]).mean():.3f}" for name in by_precision]
            lines.append(["held-out perplexity", *cells])
    return format_table(head, lines)


def _format_interval(differences: "np.ndarray[Any, np.dtype[np.float64]]") -> str:
    """Format half of the 95% interval of the mean as `` +- 0.05``; nothing for one value."""
    n = len(differences)
    if n == 1:
        return ""
    half = _T[min(n - 1, len(_T)) - 1] * float(differences.std(ddof=1)) / math.sqrt(n)
    return f" +- {half:.2f}"
