"""``coat-vlm lab fork``: the cost of roundings to FP8 in training loss and weight gradients.

The decoder of ``coat-vlm bench decoder`` is trained in BF16 for ``--at`` steps. From there each
variant trains ``--more`` further steps on the same batches, from the same weights, FP32 master
weights and AdamW states (torch's AdamW). Two separate runs differ by about 0.4% in loss in any
precision, because small differences grow; runs that share all but 40 steps differ by about 0.01%.
Compare rows of one process only: another process reaches other weights, because sums on a GPU have
no fixed order.

A variant rounds operands of linear layers of the decoder's blocks to E4M3, with one scale per
tensor, and multiplies the dequantized operands in BF16. A variant is OPERANDS@PARTS@FIRST-LAST,
several joined with /; a layer that several of them name gets the operands of all.

    OPERANDS    x, w    forward GEMM: the input, the weight
                d, v    grad-input GEMM: the output's gradient, the weight
                g, a    grad-weight GEMM: the output's gradient, the input
    PARTS       q, k, v, o (attention), gate, up, down (MLP), joined with +; all by default
    FIRST-LAST  blocks, counted from 0; all by default

    xw                              all forward GEMMs
    xw@gate+up+down@1-3/xw@@4-11    the MLP's in blocks 1 to 3, and all in blocks 4 to 11

An FP8 precision of ``bench decoder --precisions`` is a variant too, here with torch's AdamW: coat,
or coat_lean,bf16_forward_first=0. The variant without rounding is always the first.

mean_loss is the mean training loss of the further steps, last_loss the mean of the last ten, and
text_loss the loss of the resulting weights in BF16 on the first 64 sequences of the training text.
The columns in percent are differences to the variant without rounding. gradient_error is measured
at the fork: the relative RMS error of the gradients of the blocks' weight matrices, against FP32
(0.015 in BF16). It shows errors that random inputs and untrained models hide. A CPU uses FP32 for
BF16.
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from coat_bench.rows import Row, append_rows, format_number, format_table, get_origin, read_rows
from coat_kernels import dequantize_tensor, quantize_tensor
from coat_lab import decoder
from coat_lab.decoder import Corpus, DecoderBench, MasterWeights, train_steps, training_loss
from coat_vlm.config import FP8_PRECISIONS
from coat_vlm.fp8.blocks import Fp8DecoderLayer

OPERANDS = "xwdvga"
PARTS = {name.rpartition(".")[2].removesuffix("_proj"): name for name in Fp8DecoderLayer.LINEARS}
"""Name in a variant -> name in a block."""
Rounding = Callable[[str, Tensor], Tensor]
"""(letter of the operand, its values as a matrix) -> rounded values of the same dtype."""
LAST = 10
"""Number of steps that ``last_loss`` averages."""
TEXT_SEQUENCES = 64
_TINY = replace(decoder.SIZES["30m"], hidden_size=64, num_layers=2, intermediate_size=128)
SIZES = decoder.SIZES | {"tiny": replace(_TINY, vocab_size=300, tokens=32, batch_size=8, steps=30)}


@dataclass(slots=True)
class ForkRow(Row):
    """Losses of a variant after ``at`` BF16 steps and ``more`` of its own; columns of the CSV."""

    process: int
    """Number within the file; the first row of a process is the variant without rounding."""
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
    """None in rows of before it was measured."""


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
    """Parse a variant: (block, part) -> rounded operands.

    Raises:
        ValueError: the variant does not have the form in the module's docstring, or there is no
            such block.
    """
    found: dict[tuple[int, str], frozenset[str]] = {}
    for piece in variant.split("/") if variant else []:
        operands, _, rest = piece.partition("@")
        named, _, blocks = rest.partition("@")
        parts = named.split("+") if named else list(PARTS)
        ends = re.fullmatch(r"(\d+)-(\d+)", blocks or f"0-{num_blocks - 1}")
        first, last = map(int, ends.groups()) if ends else (1, 0)
        if not operands or set(operands) - set(OPERANDS):
            problem = f"operands {operands!r}: allowed are letters of {OPERANDS}, or as the whole "
            problem += f"variant a precision, one of {', '.join(FP8_PRECISIONS)}"
        elif set(parts) - set(PARTS):
            problem = f"parts {named!r}: allowed are {', '.join(PARTS)}, joined with +"
        elif not first <= last < num_blocks:
            problem = f"blocks {blocks!r}: allowed is FIRST-LAST within 0-{num_blocks - 1}"
        else:
            for key in itertools.product(range(first, last + 1), parts):
                found[key] = found.get(key, frozenset()) | frozenset(operands)
            continue
        raise ValueError(f"variant {variant!r}: {problem}")
    return found


def apply_variant(model: Any, variant: str, rounding: Rounding = round_to_e4m3) -> None:
    """Give the decoder a variant's arithmetic, in place; its parameters do not change.

    Args:
        model: the decoder.
        variant: see the module's docstring.
        rounding: rounds operands; not used for a precision.

    Raises:
        ValueError: there is no such variant.
    """
    if variant.partition(",")[0] in FP8_PRECISIONS:
        decoder.parse_arithmetic(variant).apply(model)
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

    Yields:
        Mean, last and text loss of each variant, and the error of its weight gradients.

    Raises:
        ValueError: the steps do not fit the schedule, or there is no such variant.
    """
    if at < 0 or more < LAST or at + more > bench.steps:
        raise ValueError(
            f"{at} steps and {more} more: allowed are {bench.steps} together, the length of the "
            f"size's schedule, and at least {LAST} more"
        )
    device = decoder.get_device()
    torch.manual_seed(seed)
    start = decoder.build_decoder(bench)
    for variant in variants:  # raises before any training
        apply_variant(copy.deepcopy(start), variant)
    start = start.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    start_weights = MasterWeights(start, bench)
    batches = list(itertools.islice(decoder.draw_batches(corpus, bench, seed), at + more))
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
        text = decoder.text_loss(plain, corpus.training[: TEXT_SEQUENCES * bench.tokens], bench)
        yield sum(losses) / more, sum(losses[-LAST:]) / LAST, text, error


def fork(
    texts: Sequence[Path],
    size: str,
    variants: Sequence[str],
    seed: int = 0,
    at: int = 250,
    more: int = 40,
    csv: Path | None = None,
) -> list[ForkRow]:
    """Measure variants; each row is appended to the file when it is measured.

    Args:
        texts: UTF-8 text files to train on.
        size: a key of :data:`SIZES`.
        variants: see the module's docstring; the variant without rounding is added in front.
        seed: seed of the initial weights and of the batches.
        at: steps in BF16.
        more: further steps.
        csv: file to append the rows to, as its next process.

    Raises:
        ValueError: see :func:`train_variants`; or the file has other columns.
    """
    there = [] if csv is None or not csv.exists() else read_rows(csv, ForkRow, "--csv")
    process = max((row.process for row in there), default=0) + 1
    where, bench = get_origin(), SIZES[size]
    variants = list(dict.fromkeys(["", *variants]))
    measured = train_variants(decoder.read_corpus(texts, bench), bench, variants, seed, at, more)
    nothing, rows = None, []
    for variant, (*losses, error) in zip(variants, measured, strict=True):
        nothing = nothing or losses
        percent = [100 * (loss / base - 1) for loss, base in zip(losses, nothing, strict=True)]
        rows.append(
            ForkRow(
                *where,
                process,
                size,
                seed,
                at,
                more,
                variant,
                *losses,
                *percent,
                gradient_error=error,
            )
        )
        append_rows(csv, rows[-1:])
    return rows


def format_rows(rows: Sequence[ForkRow]) -> str:
    """Format rows as a Markdown table with one line per variant."""
    return format_table(
        ["variant", "mean", "last", "text", "mean", "last", "text", "gradient error"],
        [
            [
                row.variant or "nothing rounded",
                *(f"{x:.4f}" for x in (row.mean_loss, row.last_loss, row.text_loss)),
                *(f"{x:+.3f}%" for x in (row.mean_percent, row.last_percent, row.text_percent)),
                format_number(row.gradient_error, 4),
            ]
            for row in rows
        ],
    )
