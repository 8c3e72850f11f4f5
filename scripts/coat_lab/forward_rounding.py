"""``coat-vlm bench rounding``: which roundings to FP8 cost training loss.

One BF16 run is continued with each of them. The decoder of ``coat-vlm bench decoder`` is trained in
BF16 for ``--at`` steps. From there each variant takes ``--more`` further steps, from the same
weights, FP32 masters and states of torch's AdamW, on the same batches. Two whole runs differ by
some 0.4% in loss whatever their precision, because small differences grow; runs that parted some 40
steps ago, by some 0.01%. Rows of one process can be compared: another one arrives at other weights,
as sums on a GPU have no fixed order.

A variant rounds operands of linear layers of the decoder's blocks to E4M3, with one scale per
tensor, and multiplies what came out in BF16. It is written OPERANDS@PARTS@FIRST-LAST, several
joined with /; where they name the same layer, the operands of all are rounded.

    OPERANDS    x, w    output's product: the input, the weight
                d, v    input gradient's product: the output's gradient, the weight
                g, a    weight gradient's product: the output's gradient, the input
    PARTS       q, k, v, o (attention), gate, up, down (MLP), joined with +; without, all
    FIRST-LAST  blocks, counted from 0; without, all

    xw                              all forward products
    xw@gate+up+down@1-3/xw@@4-11    those of the MLP in blocks 1 to 3, and all in blocks 4 to 11

An FP8 precision of ``bench decoder --precisions`` is a variant too, here with torch's AdamW: coat,
or coat_lean,bf16_forward_first=0. The variant that rounds nothing always comes first.

mean_loss is the mean training loss of the further steps, last_loss that of the last ten, text_loss
that of the resulting weights in BF16 on the first 64 sequences of the training text; the columns
in percent are differences to the variant that rounds nothing. On a CPU FP32 stands in for BF16.
"""

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from coat_bench.rows import Row, append_rows, origin, read_rows, table
from coat_kernels import dequantize_tensor, quantize_tensor
from coat_lab import decoder
from coat_lab.decoder import Corpus, DecoderBench, Masters, train_steps
from coat_vlm.config import FP8_PRECISIONS
from coat_vlm.fp8.blocks import Fp8DecoderLayer

OPERANDS = "xwdvga"
PARTS = {name.rpartition(".")[2].removesuffix("_proj"): name for name in Fp8DecoderLayer.LINEARS}
"""As variants name them -> name in a block."""
LAST = 10
"""Steps of ``last_loss``."""
TEXT_SEQUENCES = 64
_TINY = replace(decoder.SIZES["30m"], hidden_size=64, num_layers=2, intermediate_size=128)
SIZES = decoder.SIZES | {"tiny": replace(_TINY, vocab_size=300, tokens=32, batch_size=8, steps=30)}


@dataclass(slots=True)
class ForkRow(Row):
    """A variant's losses after ``at`` steps in BF16 and ``more`` of its own; the CSV's columns."""

    process: int
    """Counted within the file; its first row is the variant that rounds nothing."""
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


class RoundedLinear(nn.Linear):
    """A linear layer that rounds the operands that ``operands`` names in its three products."""

    operands: frozenset[str] = frozenset()

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] to [..., N], in the input's dtype."""
        return _RoundedProduct.apply(input, self.weight, self.bias, self.operands)


class _RoundedProduct(torch.autograd.Function):
    """y = x w^T + b, dx = dy w and dw = dy^T x, each with roundings of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operands: frozenset[str]
    ) -> Tensor:
        """[..., K] by [N, K] to [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.operands, ctx.shape, ctx.biased = operands, x.shape, bias is not None
        y = F.linear(_operand("x", rows, operands), _operand("w", weight, operands), bias)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Gradients of x and weight, of the bias where there is one."""
        rows, weight = ctx.saved_tensors
        dy = grad_outputs[0].reshape(-1, weight.shape[0])
        dx = _operand("d", dy, ctx.operands) @ _operand("v", weight, ctx.operands)
        dw = _operand("g", dy, ctx.operands).t() @ _operand("a", rows, ctx.operands)
        return dx.view(ctx.shape), dw, dy.sum(0) if ctx.biased else None, None


def _operand(letter: str, x: Tensor, operands: frozenset[str]) -> Tensor:
    """A matrix, rounded if its letter is among the operands."""
    if letter not in operands:
        return x
    return dequantize_tensor(quantize_tensor(x.contiguous()), x.dtype)


def roundings(variant: str, num_blocks: int) -> dict[tuple[int, str], frozenset[str]]:
    """The operands that a variant rounds, by block and part.

    Raises:
        ValueError: the variant is not written as the module says, or there is no such block.
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


def apply_variant(model: Any, variant: str) -> None:
    """Give the decoder a variant's arithmetic, in place; its parameters stay.

    Raises:
        ValueError: there is no such variant.
    """
    if variant.partition(",")[0] in FP8_PRECISIONS:
        decoder.arithmetic_called(variant).apply(model)
        return
    for (block, part), operands in roundings(variant, len(model.model.layers)).items():
        layer = model.model.layers[block].get_submodule(PARTS[part])
        layer.__class__, layer.operands = RoundedLinear, operands


def bench_variants(
    corpus: Corpus, bench: DecoderBench, variants: Sequence[str], seed: int, at: int, more: int
) -> Iterator[tuple[float, float, float]]:
    """Train ``at`` steps in BF16, then from there ``more`` in every variant.

    Yields:
        After every variant: its mean, last and text loss.

    Raises:
        ValueError: the steps do not fit the schedule, or there is no such variant.
    """
    if at < 0 or more < LAST or at + more > bench.steps:
        raise ValueError(
            f"{at} steps and {more} more: allowed are {bench.steps} together, the length of the "
            f"size's schedule, and at least {LAST} more"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    start = decoder.build_decoder(bench)
    for variant in variants:  # refuse what is wrong before anything is trained
        apply_variant(copy.deepcopy(start), variant)
    start = start.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    masters = Masters(start, decoder.adamw(bench))
    batches = list(itertools.islice(decoder.drawn_batches(corpus, bench, seed), at + more))
    for _ in train_steps(start, masters, tqdm(batches[:at], "in BF16", disable=None), bench):
        pass
    for variant in variants:
        model, its_masters = copy.deepcopy((start, masters))  # together: they share the weights
        apply_variant(model, variant)
        bar = tqdm(batches[at:], variant or "nothing rounded", disable=None)
        losses = list(train_steps(model, its_masters, bar, bench, at))
        plain = copy.deepcopy(start)
        plain.load_state_dict(model.state_dict())
        text = decoder.text_loss(plain, corpus.training[: TEXT_SEQUENCES * bench.tokens], bench)
        yield sum(losses) / more, sum(losses[-LAST:]) / LAST, text


def bench_forks(
    texts: Sequence[Path],
    size: str,
    variants: Sequence[str],
    seed: int = 0,
    at: int = 250,
    more: int = 40,
    csv: Path | None = None,
) -> list[ForkRow]:
    """Measure variants; each row is in the file as soon as it is there.

    Args:
        texts: UTF-8 text files to train on.
        size: a key of :data:`SIZES`.
        variants: see the module's docstring; the one that rounds nothing is added in front.
        seed: of the start and of the batches.
        at: steps in BF16.
        more: further steps.
        csv: file to add the rows to, as the next process of it.

    Raises:
        ValueError: see :func:`bench_variants`; or the file is another one.
    """
    there = [] if csv is None or not csv.exists() else read_rows(csv, ForkRow, "--csv")
    process = max((row.process for row in there), default=0) + 1
    where, bench = origin(), SIZES[size]
    variants = list(dict.fromkeys(["", *variants]))
    measured = bench_variants(decoder.read_corpus(texts, bench), bench, variants, seed, at, more)
    nothing, rows = None, []
    for variant, losses in zip(variants, measured, strict=True):
        nothing = nothing or losses
        percent = [100 * (loss / base - 1) for loss, base in zip(losses, nothing, strict=True)]
        rows.append(ForkRow(*where, process, size, seed, at, more, variant, *losses, *percent))
        append_rows(csv, rows[-1:])
    return rows


def format_rows(rows: Sequence[ForkRow]) -> str:
    """Markdown: one line per variant."""
    return table(
        ["variant", "mean", "last", "text", "mean", "last", "text"],
        [
            [
                row.variant or "nothing rounded",
                *(f"{x:.4f}" for x in (row.mean_loss, row.last_loss, row.text_loss)),
                *(f"{x:+.3f}%" for x in (row.mean_percent, row.last_percent, row.text_percent)),
            ]
            for row in rows
        ],
    )
