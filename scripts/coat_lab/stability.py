"""``coat-vlm lab stability``: which training runs diverge in reduced precision.

The decoder of ``coat-vlm bench decoder`` is trained once per variant, learning rate and seed, after
arXiv 2405.18710. A variant is a precision of ``bench decoder`` (``bf16``, ``coat``, ...) or a
simulated format:

    FORMAT[,SCALES][:OPERANDS@PARTS@FIRST-LAST]

    e8m3                  all operands of all linear layers of the blocks without 4 of BF16's bits
    e4m3,tensor:xw        forward GEMMs in E4M3 with one scale per tensor
    e5m2:dvga@@0-3        both gradient GEMMs of the first four blocks, without scales

Formats and scales: ``number_formats.py``, by default no scales, as in the paper; but values are
rounded to nearest, where the paper truncates. What follows the colon is as in ``lab fork``, by
default xwdvga: all six operands of the three GEMMs. Products and all else are those of BF16 (FP32
on a CPU); the optimizer is torch's AdamW, in ``coat`` and ``coat_lean`` theirs.

The outcome of a run is one of

    trained       none of the following
    not finite    a loss is infinite or NaN; the run ends there
    rose          the mean of the last 20 losses is more than 0.25 nats above the lowest such mean
    not learned   that mean is above the entropy of the text's token frequencies

and all but the first count as diverged. Sharpness is that of :func:`compute_sharpness` on eight
held-out sequences. Each run writes one JSON file with all losses when it ends; the same command
goes on with the missing runs.
"""

import json
import math
import multiprocessing
import os
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from coat_bench.rows import Row, append_rows, format_table, get_origin
from coat_data.saved_files import write_text
from coat_lab import decoder
from coat_lab.curves import LAST_STEPS
from coat_lab.decoder import Corpus, DecoderBench, MasterWeights
from coat_lab.fork import OPERANDS, apply_variant, parse_variant, weight_gradients
from coat_lab.number_formats import parse_format, parse_scaling, quantize
from coat_vlm.report.plots import COLORS

EPSILON = 1e-3
"""Relative size of the box of logits (Keskar et al., arXiv 1609.04836, section 2.2.2)."""
RISE = 0.25
"""Nats."""
SEQUENCES = 8
"""Held-out sequences whose sharpness is measured."""
TRAINED = "trained"
_STYLES = ("-", "--", ":", "-.")


@dataclass(slots=True)
class StabilityRow(Row):
    """One run; the columns of ``stability.csv``."""

    variant: str
    lr: float
    seed: int
    outcome: str
    steps: int
    """Steps until the run ended."""
    final_loss: float
    """Mean of the last 20 training losses, nats per token."""
    lowest_loss: float
    """Lowest mean of 20 consecutive training losses."""
    held_out_loss: float
    sharpness: float
    """At the last measurement."""
    max_sharpness: float


@dataclass(frozen=True, slots=True)
class Run:
    """A run's place in the sweep."""

    variant: str
    lr: float
    seed: int

    @property
    def file(self) -> str:
        """Name of the run's file; two runs have different ones."""
        variant = urllib.parse.quote(self.variant, safe="@:,+")
        return f"{variant}_lr{self.lr!r}_seed{self.seed}.json"


@dataclass(slots=True)
class RunCurve:
    """What is measured during a run."""

    losses: list[float] = field(default_factory=list)
    """Training loss of each step, nats per token."""
    sharpness: dict[int, float] = field(default_factory=dict)
    """Step, counted from 1 -> sharpness."""
    held_out_loss: float = math.nan


def compute_sharpness(logits: Tensor, targets: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Compute the sharpness of the loss in the logits, FP32 [].

    Keskar's sharpness (arXiv 1609.04836, equation 3) of the logits instead of the weights, as
    arXiv 2405.18710 proposes, here of all tokens:

        100 (max L(z + d) - L(z)) / (1 + L(z))   over all d with |d_j| <= epsilon (|z_j| + 1)

    The cross-entropy falls with the target's logit and rises with every other one, so the maximum
    is at one corner of the box, without a search.

    Args:
        logits: [tokens, vocabulary].
        targets: token ids [tokens].
        epsilon: relative size of the box.
    """
    z = logits.float()
    width = epsilon * (z.abs() + 1)
    worst = (z + width).scatter(1, targets[:, None], (z - width).gather(1, targets[:, None]))
    loss = F.cross_entropy(z, targets)
    return 100 * (F.cross_entropy(worst, targets) - loss) / (1 + loss)


def build_variant(bench: DecoderBench, variant: str) -> tuple[Any, MasterWeights]:
    """Build the decoder of a variant, with its optimizer, on the GPU if there is one.

    Raises:
        ValueError: there is no such variant; see the module's docstring.
    """
    device = decoder.get_device()
    model, fp8 = decoder.build_decoder(bench), None
    described, _, where = variant.partition(":")
    name, _, scales = described.partition(",")
    if re.match(r"(e|int)\d", name):
        model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        fmt, scaling = parse_format(name), parse_scaling(scales or "none")
        if scaling.static:
            raise ValueError(f"variant {variant!r}: static scales are for converted models")

        def rounding(letter: str, x: Tensor) -> Tensor:
            return quantize(x, fmt, scaling, "weight" if letter in "wv" else "input")

        parse_variant(where or OPERANDS, bench.num_layers)  # refuses a precision
        apply_variant(model, where or OPERANDS, rounding)
    else:
        arithmetic = decoder.parse_arithmetic(variant)
        fp8 = arithmetic.fp8
        arithmetic.apply(model.to(device, arithmetic.dtype))
    return model, MasterWeights(model, bench, fp8)


def train_run(corpus: Corpus, bench: DecoderBench, run: Run) -> RunCurve:
    """Train one run until its end or until a loss is not finite.

    Args:
        corpus: from :func:`coat_lab.decoder.read_corpus`.
        bench: the model and the training; the run replaces its learning rate.
        run: the run.

    Raises:
        ValueError: there is no such variant.
    """
    torch.manual_seed(run.seed)
    bench = replace(bench, lr=run.lr)
    model, master_weights = build_variant(bench, run.variant)
    ids = corpus.held_out[: len(corpus.held_out) // bench.tokens * bench.tokens]
    ids = ids.view(-1, bench.tokens)[:SEQUENCES].to(model.device)
    batches = islice(decoder.draw_batches(corpus, bench, run.seed), bench.steps)
    curve = RunCurve()
    for loss in decoder.train_steps(model, master_weights, batches, bench):
        curve.losses.append(loss)
        step = len(curve.losses)
        if not math.isfinite(loss):
            return curve
        if step % bench.eval_steps == 0 or step == bench.steps:
            with torch.no_grad():
                logits = model.eval()(input_ids=ids).logits[:, :-1].flatten(0, 1)
            curve.sharpness[step] = compute_sharpness(logits, ids[:, 1:].flatten()).item()
    curve.held_out_loss = decoder.text_loss(model, corpus.held_out, bench)
    return curve


def compute_token_entropy(ids: Tensor) -> float:
    """Return the loss, in nats, of predicting every token by its frequency in the text [tokens]."""
    shares = torch.bincount(ids).double() / len(ids)
    return float(torch.special.entr(shares).sum())


def find_outcome(losses: Sequence[float], token_entropy: float) -> tuple[str, float, float]:
    """Return the outcome of a run, and the last and the lowest mean of 20 losses."""
    width = min(LAST_STEPS, len(losses))
    means = np.convolve(losses, np.full(width, 1 / width), "valid")
    finite = means[np.isfinite(means)]
    last, lowest = float(means[-1]), float(finite.min()) if len(finite) else math.nan
    if not np.isfinite(losses).all():
        return "not finite", last, lowest
    if last > token_entropy:
        return "not learned", last, lowest
    return ("rose" if last > lowest + RISE else TRAINED), last, lowest


def sweep(
    texts: Sequence[Path],
    bench: DecoderBench,
    variants: Sequence[str],
    lrs: Sequence[float],
    seeds: Sequence[int],
    out: Path,
    jobs: int = 1,
) -> list[StabilityRow]:
    """Train all runs that are missing in a folder, and summarize all of them there.

    Args:
        texts: UTF-8 text files to train on.
        bench: the model and the training, at least 20 steps.
        variants: see the module's docstring.
        lrs: peak learning rates.
        seeds: seeds of initial weights and batches.
        out: folder of ``runs/*.json``, ``stability.csv`` and ``stability.svg``.
        jobs: processes that train at the same time, on all GPUs in turn or on the CPU's cores.

    Raises:
        ValueError: there is no such variant or learning rate, the groups of its scales do not
            divide a layer's channels, there are too few steps, or the folder has runs of other
            settings.
        OSError: a text cannot be read, or the folder cannot be written.
    """
    if bench.steps < LAST_STEPS or jobs < 1:
        raise ValueError(
            f"{bench.steps} steps, {jobs} jobs: allowed are at least {LAST_STEPS} steps, the "
            "losses of which are averaged, and at least 1 job"
        )
    for lr in lrs:
        if not 0 < lr < math.inf:
            raise ValueError(f"--lrs {lr}: must be above 0 and finite")
    ids = torch.zeros(1, bench.tokens, dtype=torch.int64, device=decoder.get_device())
    for variant in variants:  # raises before any training, also if groups do not divide a layer
        weight_gradients(build_variant(bench, variant)[0], ids)
    runs = [
        Run(*run) for run in product(dict.fromkeys(variants), sorted(set(lrs)), sorted(set(seeds)))
    ]
    settings = json.loads(json.dumps(asdict(replace(bench, lr=0.0))))
    settings["texts"] = [sha256(text.read_bytes()).hexdigest() for text in texts]
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [run for run in runs if not _is_done(folder / run.file, settings)]
    corpus = decoder.read_corpus(texts, bench)
    settings_of = {"settings": settings, "entropy": compute_token_entropy(corpus.training)}
    for run, curve in tqdm(
        _train_all(corpus, bench, missing, jobs), "runs", len(missing), unit="run", disable=None
    ):
        origin = dict(zip([f.name for f in fields(Row)], get_origin(), strict=True))
        record = {"run": asdict(run), "made with": origin, **asdict(curve), **settings_of}
        write_text(folder / run.file, json.dumps(record) + "\n")
    rows = [read_run(folder / run.file) for run in runs]
    table = out / "stability.csv"
    table.unlink(missing_ok=True)
    append_rows(table, rows)
    draw_rows(rows, out / "stability.svg")
    return rows


def _is_done(path: Path, settings: dict[str, Any]) -> bool:
    if not path.is_file():
        return False
    there = json.loads(path.read_text(encoding="utf-8"))["settings"]
    if there != settings:
        changed = sorted(key for key in settings if there.get(key) != settings[key])
        raise ValueError(
            f"{path}: was trained with other values of {', '.join(changed)}; write to another "
            "folder"
        )
    return True


def _train_all(
    corpus: Corpus, bench: DecoderBench, runs: Sequence[Run], jobs: int
) -> Iterator[tuple[Run, RunCurve]]:
    """Yield every run with its curve when it ends; an error is raised after the other runs."""
    if jobs == 1 or len(runs) < 2:
        yield from ((run, train_run(corpus, bench, run)) for run in runs)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    start = partial(_start_worker, corpus.training.numpy(), corpus.held_out.numpy(), threads)
    # A forked process cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(runs)), context, start) as pool:
        futures = {
            pool.submit(_train_in_worker, bench, run, number): run
            for number, run in enumerate(runs)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()


_worker_corpus: Corpus | None = None


def _start_worker(training: np.ndarray, held_out: np.ndarray, threads: int) -> None:
    global _worker_corpus
    _worker_corpus = Corpus(torch.from_numpy(training), torch.from_numpy(held_out))
    torch.set_num_threads(threads)


def _train_in_worker(bench: DecoderBench, run: Run, number: int) -> RunCurve:
    assert _worker_corpus is not None
    decoder.use_gpu_in_turn(number)
    return train_run(_worker_corpus, bench, run)


def read_run(path: Path) -> StabilityRow:
    """Read a run's file and return its row."""
    record = json.loads(path.read_text(encoding="utf-8"))
    losses, sharpness = record["losses"], list(record["sharpness"].values()) or [math.nan]
    outcome, final, lowest = find_outcome(losses, record["entropy"])
    return StabilityRow(
        **record["made with"],
        **record["run"],
        outcome=outcome,
        steps=len(losses),
        final_loss=final,
        lowest_loss=lowest,
        held_out_loss=record["held_out_loss"],
        sharpness=sharpness[-1],
        max_sharpness=max(sharpness),
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of all seeds of a variant at a learning rate."""

    runs: int
    diverged: dict[str, int]
    """Outcome -> number of runs, without the runs that were trained."""
    loss: float
    """Mean final training loss of the runs that did not diverge; NaN without any."""
    spread: float
    """Standard deviation of these losses; 0 with one."""
    sharpness: float
    """Mean of the same runs at their ends."""


def summarize(rows: Sequence[StabilityRow]) -> dict[str, dict[float, Cell]]:
    """Return variant -> learning rate -> the runs of all seeds."""
    groups: dict[tuple[str, float], list[StabilityRow]] = {}
    for row in rows:
        groups.setdefault((row.variant, row.lr), []).append(row)
    cells: dict[str, dict[float, Cell]] = {}
    for (variant, lr), group in groups.items():
        trained = [row for row in group if row.outcome == TRAINED]
        losses = [row.final_loss for row in trained]
        cells.setdefault(variant, {})[lr] = Cell(
            runs=len(group),
            diverged=dict(Counter(row.outcome for row in group if row.outcome != TRAINED)),
            loss=float(np.mean(losses)) if losses else math.nan,
            spread=float(np.std(losses, ddof=1)) if len(losses) > 1 else 0.0,
            sharpness=float(np.mean([row.sharpness for row in trained])) if trained else math.nan,
        )
    return cells


def format_rows(rows: Sequence[StabilityRow]) -> str:
    """Format a Markdown table: diverged runs; loss, its spread and sharpness of the others."""
    lrs = sorted({row.lr for row in rows})
    lines = []
    for variant, cells in summarize(rows).items():
        texts = []
        for cell in (cells[lr] for lr in lrs):
            parts = [f"{number}/{cell.runs} {what}" for what, number in cell.diverged.items()]
            if not math.isnan(cell.loss):
                parts.append(f"{cell.loss:.3f} ({cell.spread:.3f}), sharpness {cell.sharpness:.2f}")
            texts.append("; ".join(parts))
        lines.append([variant, *texts])
    return format_table(["variant", *(f"lr {lr:g}: loss (sd)" for lr in lrs)], lines)


def draw_rows(rows: Sequence[StabilityRow], out: Path) -> None:
    """Draw the share of diverged runs, the final loss and the sharpness against the learning rate.

    Args:
        rows: what to draw.
        out: the SVG to write.
    """
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 3)
    titles = ("share of diverged runs", "final training loss, nats per token", "sharpness")
    for number, (variant, cells) in enumerate(summarize(rows).items()):
        lrs, found = list(cells), list(cells.values())
        look: dict[str, Any] = {
            "color": COLORS[number % len(COLORS)],
            "linestyle": _STYLES[number // len(COLORS) % len(_STYLES)],
            "linewidth": 0.9,
            "marker": "o",
            "markersize": 3,
        }
        panels[0].plot(
            lrs, [sum(c.diverged.values()) / c.runs for c in found], label=variant, **look
        )
        losses, spreads = [c.loss for c in found], [c.spread for c in found]
        panels[1].errorbar(lrs, losses, spreads, capsize=2, **look)
        panels[2].plot(lrs, [c.sharpness for c in found], **look)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xscale("log")
        axes.set_xlabel("peak learning rate")
        axes.set_title(title, fontsize=9)
        axes.grid(linewidth=0.3)
    panels[0].legend(frameon=False, fontsize=7)
    figure.savefig(out, metadata={"Date": None})
