"""Measures which training runs of a small decoder diverge in reduced precision (arXiv 2405.18710).

The decoder is trained once per variant, learning rate and seed. A variant is a precision (bf16,
coat, ...) or a simulated format:

    FORMAT[,SCALES][:OPERANDS@PARTS@FIRST-LAST]

    e8m3                  all operands of all linear layers of the blocks without 4 of BF16's bits
    e4m3,tensor:xw        forward GEMMs in E4M3 with one scale per tensor
    e5m2:dvga@@0-3        both gradient GEMMs of the first four blocks, without scales

Formats and scales: see lab_formats.py; by default no scales, as in the paper, but values are
rounded to nearest, where the paper truncates. What follows the colon is as in lab_fork.py, by
default all six operands. All else is as in BF16 (FP32 on a CPU); the optimizer is torch's AdamW, in
the coat precisions theirs.

The outcome of a run is one of

    trained       none of the following
    not finite    a loss is infinite or NaN; the run ends there
    rose          the mean of the last 20 losses is more than 0.25 nats above the lowest such mean
    not learned   that mean is above the entropy of the text's token frequencies

Sharpness: see compute_sharpness, on eight held-out sequences. OUT has one file per run and
stability.csv. The same command continues a sweep, also with more variants, rates or seeds.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import harness
from decoder import (
    SIZES,
    Corpus,
    DecoderBench,
    MasterWeights,
    Record,
    build_decoder,
    draw_batches,
    get_device,
    parse_arithmetic,
    read_corpus,
    sweep,
    text_loss,
    train_steps,
)
from harness import VersionedResult
from lab_fork import OPERANDS, apply_variant, parse_variant, weight_gradients
from lab_formats import parse_format, parse_scaling, quantize

EPSILON = 1e-3
"""Relative size of the box of logits (Keskar et al., arXiv 1609.04836, section 2.2.2)."""
RISE = 0.25
"""Nats."""
SEQUENCES = 8
"""Held-out sequences whose sharpness is measured."""
LAST_STEPS = 20
TRAINED = "trained"


@dataclass(slots=True)
class StabilityResult(VersionedResult):
    """One run; the columns of ``stability.csv``."""

    variant: str
    lr: float
    seed: int
    outcome: str
    steps: int
    final_loss: float
    lowest_loss: float
    held_out_loss: float
    sharpness: float
    max_sharpness: float


def compute_sharpness(logits: Tensor, targets: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Compute the sharpness of the loss in the logits, FP32 [].

    Keskar's sharpness (arXiv 1609.04836, equation 3) of the logits instead of the weights, as
    arXiv 2405.18710 proposes, here of all tokens:

        100 (max L(z + d) - L(z)) / (1 + L(z))   over all d with |d_j| <= epsilon (|z_j| + 1)

    The cross-entropy falls with the target's logit and rises with every other one, so the maximum
    is at one corner of the box, without a search.
    """
    z = logits.float()
    width = epsilon * (z.abs() + 1)
    worst = (z + width).scatter(1, targets[:, None], (z - width).gather(1, targets[:, None]))
    loss = F.cross_entropy(z, targets)
    return 100 * (F.cross_entropy(worst, targets) - loss) / (1 + loss)


def build_variant(bench: DecoderBench, variant: str) -> tuple[Any, MasterWeights]:
    """Build the decoder of a variant, with its optimizer, on the GPU if there is one.

    ValueError: there is no such variant; see the module's docstring.
    """
    device = get_device()
    model, fp8 = build_decoder(bench), None
    described, _, where = variant.partition(":")
    name, _, scales = described.partition(",")
    if re.match(r"(e|int)\d", name):
        model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        fmt, scaling = parse_format(name), parse_scaling(scales or "none")

        def rounding(_: str, x: Tensor) -> Tensor:
            return quantize(x, fmt, scaling)

        parse_variant(where or OPERANDS, bench.num_layers)  # refuses a precision
        apply_variant(model, where or OPERANDS, rounding)
    else:
        arithmetic = parse_arithmetic(variant)
        fp8 = arithmetic.fp8
        arithmetic.apply(model.to(device, arithmetic.dtype))
    return model, MasterWeights(model, bench, fp8)


def train_run(corpus: Corpus, bench: DecoderBench, variant: str, lr: float, seed: int) -> Record:
    """Train one run until its end or until a loss is not finite."""
    torch.manual_seed(seed)
    bench = replace(bench, lr=lr)
    model, master_weights = build_variant(bench, variant)
    ids = corpus.held_out[: len(corpus.held_out) // bench.tokens * bench.tokens]
    ids = ids.view(-1, bench.tokens)[:SEQUENCES].to(model.device)
    batches = islice(draw_batches(corpus, bench, seed), bench.steps)
    losses: list[float] = []
    sharpness: list[float] = []
    record = {"losses": losses, "sharpness": sharpness, "held_out_loss": math.nan}
    record["entropy"] = compute_token_entropy(corpus.training)
    for loss in train_steps(model, master_weights, batches, bench):
        losses.append(loss)
        if not math.isfinite(loss):
            return record
        if len(losses) % bench.eval_steps == 0 or len(losses) == bench.steps:
            with torch.no_grad():
                logits = model.eval()(input_ids=ids).logits[:, :-1].flatten(0, 1)
            sharpness.append(compute_sharpness(logits, ids[:, 1:].flatten()).item())
    record["held_out_loss"] = text_loss(model, corpus.held_out, bench)
    return record


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


def train_all(
    texts: Sequence[Path],
    bench: DecoderBench,
    variants: Sequence[str],
    lrs: Sequence[float],
    seeds: Sequence[int],
    out: Path,
) -> list[StabilityResult]:
    """Train all runs that are missing in a folder, and summarize all of them there.

    ValueError: there is no such variant or learning rate, the groups of its scales do not divide a
    layer's channels, there are too few steps, or the folder has runs of other settings.
    """
    if bench.steps < LAST_STEPS:
        raise ValueError(
            f"{bench.steps} steps: allowed: at least {LAST_STEPS}, whose losses are averaged"
        )
    for lr in lrs:
        if not 0 < lr < math.inf:
            raise ValueError(f"--lrs {lr}: must be above 0 and finite")
    ids = torch.zeros(1, bench.tokens, dtype=torch.int64, device=get_device())
    for variant in variants:  # raises before any training, also if groups do not divide a layer
        weight_gradients(build_variant(bench, variant)[0], ids)
    keys = list(product(dict.fromkeys(variants), sorted(set(lrs)), sorted(set(seeds))))
    settings = asdict(replace(bench, lr=0.0))
    settings["texts"] = [sha256(text.read_bytes()).hexdigest() for text in texts]
    corpus = read_corpus(texts, bench)
    names = {f"{variant}_lr{lr!r}_seed{seed}": (variant, lr, seed) for variant, lr, seed in keys}
    runs = {name: (corpus, bench, *key) for name, key in names.items()}
    records = sweep(out, settings, runs, train_run)
    results = [summarize_run(*names[name], record) for name, record in records.items()]
    table = out / "stability.csv"
    table.unlink(missing_ok=True)
    harness.append_results(table, results)
    return results


def summarize_run(variant: str, lr: float, seed: int, record: Record) -> StabilityResult:
    """Return the result of a run."""
    losses, sharpness = record["losses"], record["sharpness"] or [math.nan]
    outcome, final, lowest = find_outcome(losses, record["entropy"])
    return StabilityResult(
        *record["origin"],
        variant=variant,
        lr=lr,
        seed=seed,
        outcome=outcome,
        steps=len(losses),
        final_loss=final,
        lowest_loss=lowest,
        held_out_loss=record["held_out_loss"],
        sharpness=sharpness[-1],
        max_sharpness=max(sharpness),
    )


COLUMNS = {
    **{name: name for name in ("variant", "lr", "seed", "outcome")},
    **{"loss": "final_loss:3", "held-out loss": "held_out_loss:3", "sharpness": "sharpness:2"},
}
EXAMPLES = """\
  python scripts/bench/lab_stability.py --text wiki.txt --size tiny --steps 20 \\
      --variants bf16 e8m3 --out sweep                           # on a CPU
  python scripts/bench/lab_stability.py --text wiki.txt --variants bf16 coat e8m5 e8m3 e5m7 \\
      --lrs 1e-3 3e-3 1e-2 --seeds 0 1 2 --out runs/stability
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES, csv=False)
    add = parser.add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 texts")
    add(
        "--variants", nargs="+", default=["bf16", "coat"], metavar="VARIANT",
        help="default bf16 coat",
    )  # fmt: skip
    add("--lrs", type=float, nargs="+", default=[1e-3], help="peak learning rates; default 1e-3")
    add("--seeds", type=int, nargs="+", default=[0], help="default 0")
    add("--size", choices=SIZES, default="30m", help="of the decoder; default 30m")
    add("--steps", type=int, help="steps of a run; default: by size")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the sweep")
    return parser


def main(args: argparse.Namespace) -> None:
    """Train and print all runs."""
    bench = SIZES[args.size]
    bench = replace(bench, steps=args.steps or bench.steps)
    results = train_all(args.text, bench, args.variants, args.lrs, args.seeds, args.out)
    harness.say(f"{harness.format_results(results, COLUMNS)}\n\nruns: {args.out / 'stability.csv'}")


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
