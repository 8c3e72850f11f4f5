"""Measures what roundings to FP8 cost in training loss and weight gradients.

The decoder is trained in BF16 for --at steps. From there each variant trains --more further steps
on the same batches, from the same weights, FP32 master weights and AdamW states (torch's AdamW).
Two separate runs differ by about 0.4% in loss in any precision, because small differences grow;
runs that share all but 40 steps differ by about 0.01%. Compare lines of one process only: another
process reaches other weights, because sums on a GPU have no fixed order.

A variant rounds operands of linear layers of the decoder's blocks to E4M3, with one scale per
tensor, and multiplies the dequantized operands in BF16 (FP32 on a CPU). It is
OPERANDS@PARTS@FIRST-LAST, several joined with /; a layer that several of them name gets the
operands of all.

    OPERANDS    x, w    forward GEMM: the input, the weight
                d, v    grad-input GEMM: the output's gradient, the weight
                g, a    grad-weight GEMM: the output's gradient, the input
    PARTS       q, k, v, o (attention), gate, up, down (MLP), joined with +; all by default
    FIRST-LAST  blocks, counted from 0; all by default

An FP8 precision is also a variant, with torch's AdamW: coat, or coat,bf16_forward=[]. The
first variant is always without rounding; columns in percent are differences to it.

mean_loss is the mean training loss of the further steps, last_loss the mean of the last ten, and
text_loss the loss of the resulting weights in BF16 on the first 64 sequences of the training text.
gradient_error is measured at the fork: the relative RMS error of the gradients of the blocks'
weight matrices, against FP32 (0.015 in BF16).
"""

import argparse
import copy
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from csv import DictReader
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import harness
from coat_kernels import dequantize_tensor, quantize_tensor
from coat_vlm.fp8.blocks import Fp8DecoderLayer
from decoder import (
    SIZES,
    Corpus,
    DecoderBench,
    MasterWeights,
    build_decoder,
    draw_batches,
    get_device,
    parse_arithmetic,
    read_corpus,
    text_loss,
    train_steps,
    training_loss,
)
from harness import PRECISIONS, VersionedResult

OPERANDS = "xwdvga"
PARTS = {name.rpartition(".")[2].removesuffix("_proj"): name for name in Fp8DecoderLayer.LINEARS}
"""Name in a variant -> name in a block."""
Rounding = Callable[[str, Tensor], Tensor]
"""(letter of the operand, its values as a matrix) -> rounded values of the same dtype."""
LAST = 10
"""Number of steps that ``last_loss`` averages."""
TEXT_SEQUENCES = 64


@dataclass(slots=True)
class ForkResult(VersionedResult):
    """Losses of a variant after ``at`` BF16 steps and ``more`` of its own; columns of the CSV."""

    process: int
    """Number within the file; the first line of a process is the variant without rounding."""
    size: str
    seed: int
    at: int
    more: int
    variant: str
    mean_loss: float
    last_loss: float
    text_loss: float
    mean_percent: float
    last_percent: float
    text_percent: float
    gradient_error: float | None


class RoundedLinear(nn.Linear):
    """A linear layer that rounds the named ``operands`` of its three GEMMs with ``rounding``."""

    operands: frozenset[str] = frozenset()
    rounding: Rounding

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N], in the input's dtype."""
        return _RoundedProduct.apply(input, self.weight, self.bias, self._round)

    def _round(self, letter: str, x: Tensor) -> Tensor:
        return self.rounding(letter, x) if letter in self.operands else x


class _RoundedProduct(torch.autograd.Function):
    """``y = x w^T + b``, ``grad_x = grad_y w`` and ``grad_w = grad_y^T x``, each with roundings."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rounding: Rounding
    ) -> Tensor:
        """[..., K] by [N, K] to [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.rounding, ctx.shape, ctx.biased = rounding, x.shape, bias is not None
        y = F.linear(rounding("x", rows), rounding("w", weight), bias)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias (None without a bias)."""
        rows, weight = ctx.saved_tensors
        grad_y = grad_outputs[0].reshape(-1, weight.shape[0])
        d, v, g, a = (
            ctx.rounding(letter, x)
            for letter, x in (("d", grad_y), ("v", weight), ("g", grad_y), ("a", rows))
        )
        return (d @ v).view(ctx.shape), g.t() @ a, grad_y.sum(0) if ctx.biased else None, None


def round_to_e4m3(_: str, x: Tensor) -> Tensor:
    """Round a matrix to E4M3 with one scale."""
    return dequantize_tensor(quantize_tensor(x.contiguous()), x.dtype)


def parse_variant(variant: str, num_blocks: int) -> dict[tuple[int, str], frozenset[str]]:
    """Parse a variant of the module's docstring: (block, part) -> rounded operands.

    ValueError: the variant does not have that form, or there is no such block.
    """
    found: dict[tuple[int, str], frozenset[str]] = {}
    for piece in variant.split("/") if variant else []:
        operands, _, rest = piece.partition("@")
        named, _, blocks = rest.partition("@")
        parts = named.split("+") if named else list(PARTS)
        ends = re.fullmatch(r"(\d+)-(\d+)", blocks or f"0-{num_blocks - 1}")
        first, last = map(int, ends.groups()) if ends else (1, 0)
        if not operands or set(operands) - set(OPERANDS):
            problem = f"operands {operands!r}: allowed: letters of {OPERANDS}, or as the whole "
            problem += f"variant a precision, one of {', '.join(PRECISIONS)}"
        elif set(parts) - set(PARTS):
            problem = f"parts {named!r}: allowed: {', '.join(PARTS)}, joined with +"
        elif not first <= last < num_blocks:
            problem = f"blocks {blocks!r}: allowed is FIRST-LAST within 0-{num_blocks - 1}"
        else:
            for key in itertools.product(range(first, last + 1), parts):
                found[key] = found.get(key, frozenset()) | frozenset(operands)
            continue
        raise ValueError(f"variant {variant!r}: {problem}")
    return found


def apply_variant(model: Any, variant: str, rounding: Rounding = round_to_e4m3) -> None:
    """Give the decoder a variant's arithmetic, in place; ``rounding`` is not for a precision."""
    if variant.partition(",")[0] in PRECISIONS:
        parse_arithmetic(variant).apply(model)
        return
    for (block, part), operands in parse_variant(variant, len(model.model.layers)).items():
        layer = model.model.layers[block].get_submodule(PARTS[part])
        layer.__class__, layer.operands, layer.rounding = RoundedLinear, operands, rounding


def weight_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Compute the gradients of the blocks' weight matrices, FP64, for token ids [B, T]."""
    model.zero_grad(set_to_none=True)
    training_loss(model, ids).backward()
    blocks = {n: p.grad for n, p in model.model.layers.named_parameters() if p.ndim == 2}
    found = {name: grad.double() for name, grad in blocks.items() if grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def relative_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Compute the RMS of all differences divided by the RMS of all exact values."""
    difference = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return (difference / sum(float(x.square().sum()) for x in exact.values())) ** 0.5


def train_variants(
    corpus: Corpus, bench: DecoderBench, variants: Sequence[str], seed: int, at: int, more: int
) -> Iterator[tuple[float, float, float, float]]:
    """Train ``at`` steps in BF16, then from this state ``more`` steps in every variant.

    Yields mean, last and text loss of each variant, and the error of its weight gradients. Raises
    ValueError if the steps do not fit the schedule, or there is no such variant.
    """
    if at < 0 or more < LAST or at + more > bench.steps:
        raise ValueError(
            f"{at} steps and {more} more: allowed: {bench.steps} together, the length of the "
            f"size's schedule, and at least {LAST} more"
        )
    device = get_device()
    torch.manual_seed(seed)
    start = build_decoder(bench)
    for variant in variants:  # raises before any training
        apply_variant(copy.deepcopy(start), variant)
    start = start.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    start_weights = MasterWeights(start, bench)
    batches = list(itertools.islice(draw_batches(corpus, bench, seed), at + more))
    for _ in train_steps(start, start_weights, tqdm(batches[:at], "in BF16", disable=None), bench):
        pass
    ids = batches[at].to(device)
    exact = weight_gradients(copy.deepcopy(start).float(), ids)
    for variant in variants:
        # One copy of both, because they share the weights.
        model, master_weights = copy.deepcopy((start, start_weights))
        apply_variant(model, variant)
        error = relative_error(weight_gradients(model, ids), exact)
        bar = tqdm(batches[at:], variant or "nothing rounded", disable=None)
        losses = list(train_steps(model, master_weights, bar, bench, at))
        plain = copy.deepcopy(start)
        plain.load_state_dict(model.state_dict())
        text = text_loss(plain, corpus.training[: TEXT_SEQUENCES * bench.tokens], bench)
        yield sum(losses) / more, sum(losses[-LAST:]) / LAST, text, error


def fork(
    texts: Sequence[Path],
    size: str,
    variants: Sequence[str],
    seed: int = 0,
    at: int = 250,
    more: int = 40,
    csv: Path | None = None,
) -> list[ForkResult]:
    """Measure variants; each result is appended to the file, as its next process.

    ValueError: see :func:`train_variants`; or the file has other columns.
    """
    process = 1
    if csv is not None and csv.exists():
        with csv.open(newline="") as file:
            process += sum(not line["variant"] for line in DictReader(file))
    origin, bench = harness.get_origin(), SIZES[size]
    variants = list(dict.fromkeys(["", *variants]))
    measured = train_variants(read_corpus(texts, bench), bench, variants, seed, at, more)
    base_losses, results = None, []
    for variant, (*losses, error) in zip(variants, measured, strict=True):
        base_losses = base_losses or losses
        percent = [100 * (loss / base - 1) for loss, base in zip(losses, base_losses, strict=True)]
        numbers = (process, size, seed, at, more, variant, *losses, *percent)
        results.append(ForkResult(*origin, *numbers, gradient_error=error))
        harness.append_results(csv, results[-1:])
    return results


COLUMNS = {
    "variant": lambda result: result.variant or "nothing rounded",
    **{name: f"{name}_loss:4" for name in ("mean", "last", "text")},
    **{f"{name}, %": f"{name}_percent:3" for name in ("mean", "last", "text")},
    "gradient error": "gradient_error:4",
}
EXAMPLES = """\
  python scripts/bench/lab_fork.py --text wiki.txt --size tiny --at 10 --more 10     # on a CPU
  python scripts/bench/lab_fork.py --text wiki.txt --variants xw dvga xw@@0-1
  python scripts/bench/lab_fork.py --text wiki.txt --variants xw@gate+up+down@1-3/xw@@4-11 coat
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 texts")
    add("--variants", nargs="+", default=["xw"], metavar="VARIANT", help="default xw")
    add("--size", choices=SIZES, default="100m", help="of the decoder; default 100m")
    add("--at", type=int, default=250, help="steps in BF16; default 250")
    add("--more", type=int, default=40, help="further steps, 10 at least; default 40")
    add("--seed", type=int, default=0, help="seed of initial weights and batches; default 0")
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure and print all variants."""
    settings = (args.text, args.size, args.variants, args.seed, args.at, args.more, args.csv)
    harness.say(harness.format_results(fork(*settings), COLUMNS))


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
