"""Which roundings to FP8 cost training loss: one BF16 run, continued with each of them.

    python kernels/benchmarks/forward_rounding.py --text wiki.txt --variants xw dvga xw@@0-1
    python kernels/benchmarks/forward_rounding.py --text wiki.txt --variants xw@gate+up+down coat
    python kernels/benchmarks/forward_rounding.py --text wiki.txt --size tiny --at 10 --more 10

The decoder of "coat-vlm bench decoder" is trained in BF16 for --at steps. From there each variant
takes --more further steps, from the same weights, FP32 masters and states of torch's AdamW, on the
same batches. Two whole runs differ by some 0.4% in loss whatever their precision, because small
differences grow; runs that parted some 40 steps ago, by some 0.01%. Rows of one process can be
compared: another one arrives at other weights, as sums on a GPU have no fixed order.

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

An FP8 precision of "coat-vlm bench decoder --precisions" is a variant too, here with torch's AdamW:
coat, or coat_lean,bf16_forward_first=0. The variant that rounds nothing always comes first.

mean_loss is the mean training loss of the further steps, last_loss that of the last ten, text_loss
that of the resulting weights in BF16 on the first 64 sequences of the training text; the columns
in percent are differences to the variant that rounds nothing. On a CPU FP32 stands in for BF16.
"""

import argparse
import copy
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from coat_bench.rows import Row, append_rows, local_origin, origin, read_rows, table
from coat_kernels import dequantize_tensor, quantize_tensor
from coat_lab import decoder
from coat_lab.decoder import Corpus, DecoderBench, Masters
from coat_vlm.config import FP8_PRECISIONS
from coat_vlm.fp8.blocks import Fp8DecoderLayer
from coat_vlm.optim import lr_factor

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
        x_MK = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_MK, weight)
        ctx.operands, ctx.shape, ctx.biased = operands, x.shape, bias is not None
        y_MN = F.linear(_operand("x", x_MK, operands), _operand("w", weight, operands), bias)
        return y_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x_MK, weight = ctx.saved_tensors
        dy_MN = grad_outputs[0].reshape(-1, weight.shape[0])
        dx_MK = _operand("d", dy_MN, ctx.operands) @ _operand("v", weight, ctx.operands)
        dw_NK = _operand("g", dy_MN, ctx.operands).t() @ _operand("a", x_MK, ctx.operands)
        return dx_MK.view(ctx.shape), dw_NK, dy_MN.sum(0) if ctx.biased else None, None


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
    masters = Masters(start, lambda decayed, plain: _adamw(decayed, plain, bench))
    draw = torch.Generator().manual_seed(seed)
    batches = [_batch(corpus, bench, draw) for _ in range(at + more)]
    _train(start, masters, tqdm(batches[:at], "in BF16", disable=None), bench, 0)
    for variant in variants:
        model, its_masters = copy.deepcopy((start, masters))  # together: they share the weights
        apply_variant(model, variant)
        bar = tqdm(batches[at:], variant or "nothing rounded", disable=None)
        losses = _train(model, its_masters, bar, bench, at)
        plain = copy.deepcopy(start)
        plain.load_state_dict(model.state_dict())
        text = decoder.text_loss(plain, corpus.training[: TEXT_SEQUENCES * bench.tokens], bench)
        yield sum(losses) / more, sum(losses[-LAST:]) / LAST, text


def _adamw(
    decayed: list[nn.Parameter], plain: list[nn.Parameter], bench: DecoderBench
) -> torch.optim.Optimizer:
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=bench.betas, weight_decay=bench.weight_decay)


def _batch(corpus: Corpus, bench: DecoderBench, draw: torch.Generator) -> Tensor:
    """Token ids [batch size, tokens], drawn as :func:`decoder.train_decoder` draws them."""
    ids = corpus.training
    starts = torch.randint(0, len(ids) - bench.tokens, (bench.batch_size,), generator=draw)
    return torch.stack([ids[i : i + bench.tokens] for i in starts.tolist()])


def _train(
    model: Any, masters: Masters, batches: Iterable[Tensor], bench: DecoderBench, at: int
) -> list[float]:
    """Steps ``at`` and following of the schedule; their losses."""
    losses = []
    for step, batch in enumerate(batches, at):
        ids = batch.to(model.device)
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        masters.step(lr_factor(step, bench.steps, bench.steps // 10, "cosine", 0.1), bench)
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, add each row to the CSV file as soon as it is there, and print a table."""
    args = _arguments(argv)
    bench, path = SIZES[args.size], args.csv
    there = [] if path is None or not path.exists() else read_rows(path, ForkRow, "--csv")
    process = max((row.process for row in there), default=0) + 1
    where = origin() if torch.cuda.is_available() else local_origin()
    corpus = decoder.read_corpus(args.text, bench)
    variants = list(dict.fromkeys(["", *args.variants]))
    nothing, lines = None, []
    measured = bench_variants(corpus, bench, variants, args.seed, args.at, args.more)
    for variant, losses in zip(variants, measured, strict=True):
        nothing = nothing or losses
        percent = [100 * (loss / base - 1) for loss, base in zip(losses, nothing, strict=True)]
        settings = (process, args.size, args.seed, args.at, args.more, variant)
        if path is not None:
            append_rows(path, [ForkRow(*where, *settings, *losses, *percent)])
        cells = [f"{x:.4f}" for x in losses] + [f"{x:+.3f}%" for x in percent]
        lines.append([variant or "nothing rounded", *cells])
    print(table(["variant", "mean", "last", "text", "mean", "last", "text"], lines))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    first, rest = (__doc__ or "").split("\n", maxsplit=1)
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=first, epilog=rest, formatter_class=formatter)
    add = parser.add_argument
    add("--text", type=Path, nargs="+", required=True, help="UTF-8 text files to train on")
    add("--variants", nargs="+", default=["xw"], help="written as below; default xw")
    add("--size", choices=SIZES, default="100m", help="the model; default 100m")
    add("--at", type=int, default=250, help="steps in BF16; default 250")
    add("--more", type=int, default=40, help="further steps, 10 at least; default 40")
    add("--seed", type=int, default=0, help="of the start and of the batches; default 0")
    add("--csv", type=Path, help="file to add the rows to, as the next process of it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
