"""How full packed rows get on lengths like those of LLaVA-665k, and how long packing takes.

    python data/benchmarks/packing.py
    python data/benchmarks/packing.py --rows 665298 --tokens 8192

The lengths come from :func:`llava_like`; data/README.md has their quantiles. Beside the rows of the
order stand those of best fit decreasing with the whole epoch as its buffer, and the fill that no
packing can pass.
"""

import argparse
import time

import numpy as np

from coat_data.mixture.packing import Budget, Lengths, PackedOrder, best_fit_decreasing
from coat_data.mixture.sampler import Cursor, Mixture

# Rows of each part: LLaVA-1.5 (Liu et al. 2023, arXiv:2310.03744, table 7 of the appendix). The
# median of the text tokens and the standard deviation of their logarithm are assumptions of this
# file, after what a row of each part looks like, with its template: ShareGPT and the instructions
# are long, the question sets hold about ten questions a row.
PARTS = {
    # name: (rows, has an image, median text tokens, deviation of the logarithm)
    "instructions": (157_712, True, 260, 0.55),
    "sharegpt": (40_688, False, 1100, 0.70),
    "vqav2": (82_783, True, 200, 0.45),
    "gqa": (72_140, True, 210, 0.45),
    "okvqa": (8_998, True, 90, 0.25),
    "ocrvqa": (80_000, True, 150, 0.30),
    "a_okvqa": (66_160, True, 110, 0.25),
    "textcaps": (21_953, True, 80, 0.20),
    "refcoco": (48_447, True, 240, 0.60),
    "visual_genome": (86_417, True, 300, 0.40),
}
_SHORTEST, _LONGEST_TEXT = 40, 2048


def llava_like(rows: int, tokens_per_image: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token lengths and numbers of images, (rows,) int32 each, of a mix like LLaVA-665k."""
    rng = np.random.default_rng(seed)
    weights = np.array([part[0] for part in PARTS.values()], dtype=np.float64)
    part = rng.choice(len(PARTS), size=rows, p=weights / weights.sum())
    images = np.array([part[1] for part in PARTS.values()], dtype=np.int32)[part]
    medians = np.array([part[2] for part in PARTS.values()], dtype=np.float64)[part]
    deviations = np.array([part[3] for part in PARTS.values()], dtype=np.float64)[part]
    text = np.exp(np.log(medians) + deviations * rng.standard_normal(rows))
    text = np.clip(text, _SHORTEST, _LONGEST_TEXT).astype(np.int32)
    return text + images * np.int32(tokens_per_image), images


def fill_bound(lengths: np.ndarray, tokens: int) -> float:
    """The share of the rows' budget that no packing of these lengths can pass.

    The fewest rows are at least the samples' tokens over the budget, and at least their sum when a
    sample counts as its k-th part of a row in steps of 1 / k (the dual feasible functions u^(k) of
    Fekete and Schepers 2001, "New classes of fast lower bounds for bin packing problems",
    Mathematical Programming 91): of samples longer than a third of the budget, two fit a row.

    Args:
        lengths: (rows,) tokens of each sample, at most ``tokens``.
        tokens: budget of a row.
    """
    fewest = lengths.sum() / tokens
    for k in range(1, 7):
        steps, rest = np.divmod((k + 1) * lengths.astype(np.int64), tokens)
        parts = np.where(rest == 0, lengths / tokens, steps / k)
        fewest = max(fewest, parts.sum())
    return float(lengths.sum() / (tokens * np.ceil(fewest - 1e-9)))


def measure(rows: int, tokens_per_image: int, tokens: int, images: int | None, buffer: int) -> str:
    """A line of the table: how full an epoch's rows are, and how long its windows take."""
    lengths, shown = llava_like(rows, tokens_per_image, seed=0)
    keep = lengths <= tokens
    lengths, shown = lengths[keep], shown[keep]
    mixture = Mixture([len(lengths)], [None], [None], seed=0)
    budget = Budget(tokens=tokens, images=images, buffer=buffer)
    order = PackedOrder(mixture, Lengths([lengths], [shown]), budget, 1, seed=0)
    mixture.locate(0)  # draws the epoch
    bins, cursor = [], Cursor()
    started = time.process_time()
    while cursor.position < len(lengths):
        step, cursor = order.step(cursor)
        bins += step
    windows = -(-len(lengths) // buffer)
    window_ms = 1e3 * (time.process_time() - started) / windows
    used = sum(bin.tokens for bin in bins)
    aligned = sum(-(-bin.tokens // budget.align) * budget.align for bin in bins)
    alone = best_fit_decreasing(lengths.tolist(), shown.tolist(), budget)
    padded = sum(8 * int(batch.max()) for batch in lengths[: len(lengths) // 8 * 8].reshape(-1, 8))
    return (
        f"| {tokens_per_image} | {tokens} | {images or '-'} "
        f"| {len(lengths) / len(bins):.2f} | {used / (tokens * len(bins)):.1%} "
        f"| {used / (tokens * len(alone)):.1%} | {fill_bound(lengths, tokens):.1%} "
        f"| {used / aligned:.1%} | {int(lengths.sum()) / padded:.1%} | {window_ms:.0f} |"
    )


def main() -> None:
    """Print the quantiles of the lengths and a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--buffer", type=int, default=1000, help="samples looked at together")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 8192])
    args = parser.parse_args()
    for tokens_per_image in (256, 576):
        lengths, _ = llava_like(args.rows, tokens_per_image, seed=0)
        at = (0, 1, 5, 25, 50, 75, 95, 99, 100)
        values = ", ".join(f"{q}%: {np.percentile(lengths, q):.0f}" for q in at)
        print(f"{tokens_per_image} tokens per image: {values}; mean {lengths.mean():.0f}")
    print("\n| tokens per image | tokens | images | samples in a row | full |", end="")
    print(" all at once | at most | of aligned rows | padded batches of 8 |", end="")
    print(" CPU ms per window |\n|" + "---|" * 10)
    for tokens_per_image in (256, 576):
        for tokens in args.tokens:
            for images in (None, tokens // 512):
                print(measure(args.rows, tokens_per_image, tokens, images, args.buffer))


if __name__ == "__main__":
    main()
