"""Fine-tunes a pretrained language model in several precisions, on the same batches.

Every precision starts from the same weights, reads the same sequences in the order of the seed, and
has FP32 master weights and CoatAdamW, so that the runs differ in their GEMMs. A precision is

    bf16, coat, ...     as in training, also with keys of a recipe: coat,lm_head=bf16
    torchao             torchao's tensorwise FP8 in the decoder blocks, not compiled
    int8/group64, ...   BF16, but the operands of the blocks' forward GEMMs are rounded to a format
                        of lab_formats.py, with its scales: e4m3/tensor, int8/token

The trained weights are evaluated twice, in the precision of training and in BF16: the first loss
has the cost of training and of inference in FP8, the second one only of training, as for a
model that is served in BF16.

--lora trains adapters on all linear layers of the blocks instead of the weights. In coat, the
frozen weights are then stored in FP8 only.

--blocks trains nothing: it prints what each block costs if only its forward GEMMs are rounded, as
the Kullback-Leibler divergence of the next token from the model without rounding, in nats.

Documents are rows with a field text: JSON lines or Parquet, also compressed. The same command
continues with the runs that OUT does not contain, and inside a run after the last 500 steps.
"""

import argparse
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AutoModelForCausalLM, AutoTokenizer

import harness
from coat_cli.command import at_least
from coat_data.saved_files import replace_file
from coat_vlm.config import Fp8Config
from coat_vlm.fp8 import fp8_blocks, graph_blocks, store_frozen_weights
from decoder import (
    Corpus,
    DecoderBench,
    MasterWeights,
    Record,
    get_device,
    parse_arithmetic,
    sweep,
    text_loss,
    train_steps,
)
from harness import VersionedResult
from lab_formats import NumberFormat, Scaling, parse_format, parse_scaling, quantize
from lab_single_pass import count_steps, format_runs, read_documents, shuffled_batches
from layer import convert_to_torchao

HELD_OUT = 128
"""Held-out sequences, evenly spaced in the text."""
SAVE_STEPS = 500
SAMPLES = 16
"""Sequences that ``--blocks`` reads."""


@dataclass(slots=True)
class FinetuneResult(VersionedResult):
    """One run; the columns of the CSV file. Losses are of held-out text, in nats per token."""

    model: str
    precision: str
    seed: int
    steps: int
    lr: float
    lora: int | None
    """Rank of the adapters; None: all weights were trained."""
    before: float
    """In the precision, before training."""
    own: float
    """In the precision."""
    bf16: float
    """The same weights in BF16."""
    seconds: float


class _Rounded(torch.autograd.Function):
    """y = q(x) q(W)^T, with the rounded operands in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fmt: NumberFormat, scaling: Scaling) -> Tensor:
        x, weight = quantize(x, fmt, scaling), quantize(weight, fmt, scaling)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None, None


def load(llm: Path, precision: str, rank: int | None = None) -> Any:
    """Load the model in a precision, with adapters of a rank; ValueError: no such precision."""
    fmt, _, scales = precision.partition("/")
    plain = bool(scales) or precision == "torchao"
    arithmetic = parse_arithmetic("bf16" if plain else precision)
    model = cast(Any, AutoModelForCausalLM.from_pretrained(llm, dtype=arithmetic.dtype))
    model.to(get_device())
    model.config.use_cache = False
    layers = model.get_decoder().layers
    if rank is not None:
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=r".*\.layers\..*_proj"),
            model,
        )
    if precision == "torchao":
        convert_to_torchao(layers)
    elif scales:
        rounding = parse_format(fmt), parse_scaling(scales)
        for layer in layers.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = partial(_forward, layer, *rounding)
    else:
        arithmetic.apply(model)
        store_frozen_weights(model)
    return model


def _forward(layer: nn.Linear, fmt: NumberFormat, scaling: Scaling, input: Tensor) -> Tensor:
    return _Rounded.apply(input, layer.weight, fmt, scaling)


def read_corpus(llm: Path, text: Sequence[Path], held_out: Sequence[Path], out: Path) -> Corpus:
    """Tokenize documents with the model's tokenizer, or read the tokens that ``out`` has of them.

    DataError: a file cannot be read, or a row has no text.
    """
    known = [llm.resolve(), *((file.resolve(), file.stat().st_size) for file in (*text, *held_out))]
    cache = out / f"tokens-{zlib.crc32(str(known).encode()):08x}.pt"
    if not cache.is_file():
        tokenizer = AutoTokenizer.from_pretrained(llm)

        def encode(files: Sequence[Path]) -> Tensor:
            ids = tokenizer([*read_documents(files)], add_special_tokens=False)["input_ids"]
            return torch.tensor(
                [id for document in ids for id in (*document, tokenizer.eos_token_id)]
            )

        out.mkdir(parents=True, exist_ok=True)
        torch.save([encode(text), encode(held_out)], cache)
    return Corpus(*torch.load(cache))


def thin(ids: Tensor, bench: DecoderBench, sequences: int) -> Tensor:
    """Return at most this number of sequences of a text, evenly spaced, [tokens]."""
    rows = ids[: len(ids) // bench.tokens * bench.tokens].view(-1, bench.tokens)
    return rows[:: -(-len(rows) // sequences)].flatten()


def train_one(
    llm: Path,
    rank: int | None,
    bench: DecoderBench,
    corpus: Corpus,
    precision: str,
    seed: int,
    checkpoint: Path,
) -> Record:
    """Train and evaluate a run: ``training``, a loss per step, and ``measures``.

    It continues from ``checkpoint``, which is written every ``SAVE_STEPS`` and removed at the end.
    """
    torch.manual_seed(seed)  # of the adapters
    model, started = load(llm, precision, rank), time.perf_counter()
    held_out = thin(corpus.held_out, bench, HELD_OUT)
    before = text_loss(model, held_out, bench)
    graph_blocks(model, enabled=bool(fp8_blocks(model)) and get_device().type == "cuda")
    master_weights = MasterWeights(model, bench, Fp8Config().resolved("coat"))
    training: list[float] = []
    if checkpoint.is_file():
        saved = torch.load(checkpoint, map_location=get_device())
        training = saved.pop("training")
        master_weights.load_state_dict(saved)
    batches = islice(shuffled_batches(corpus.training, bench, seed), len(training), None)
    for loss in train_steps(model, master_weights, batches, bench, len(training)):
        training.append(loss)
        if len(training) % SAVE_STEPS == 0:
            with replace_file(checkpoint) as file:
                torch.save({"training": training, **master_weights.state_dict()}, file)
    own = text_loss(model, held_out, bench)
    plain = load(llm, "bf16", rank)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plain.load_state_dict(trained, strict=False)
    measures = {"before": before, "own": own, "bf16": text_loss(plain, held_out, bench)}
    checkpoint.unlink(missing_ok=True)
    return {"training": training, "measures": measures, "seconds": time.perf_counter() - started}


@torch.no_grad()
def rank_blocks(llm: Path, precision: str, corpus: Corpus, bench: DecoderBench) -> dict[str, float]:
    """Return the divergence of each block, in nats per token, and of all together."""
    model = load(llm, precision).eval()
    rows = thin(corpus.training, bench, SAMPLES).view(-1, bench.tokens).to(model.device)
    blocks = {name: [*block.modules()] for name, block in fp8_blocks(model)}
    if not blocks:
        raise ValueError(f"precision {precision} has no FP8 blocks; give coat")

    def keep_bf16(chosen: Iterator[str] | Sequence[str], enabled: bool) -> None:
        for layer in (layer for name in chosen for layer in blocks[name]):
            if isinstance(layer, nn.Linear):
                vars(layer)["fp8_bf16_forward"] = enabled

    def log_probabilities(row: Tensor) -> Tensor:
        return model(input_ids=row[None]).logits[0].float().log_softmax(-1)

    found: dict[str, float] = {}
    keep_bf16([*blocks], True)
    expected = [log_probabilities(row).bfloat16() for row in rows]
    for name, rounded in [*((name, [name]) for name in blocks), ("all", [*blocks])]:
        keep_bf16(rounded, False)
        found[name] = sum(
            F.kl_div(
                log_probabilities(row), p.float(), reduction="batchmean", log_target=True
            ).item()
            for row, p in zip(rows, expected, strict=True)
        ) / len(rows)
        keep_bf16(rounded, True)
    return found


EXAMPLES = """\
  python scripts/bench/lab_finetune.py --llm SmolLM2-135M-Instruct --text train.jsonl.xz \\
      --held-out validation.jsonl.xz --precisions bf16 coat --seeds 0 1 2 --out runs/finetune
  python scripts/bench/lab_finetune.py --llm SmolLM2-135M-Instruct --text train.jsonl.xz \\
      --held-out validation.jsonl.xz --precisions coat --blocks --out runs/finetune
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the script's parser."""
    parser = harness.make_parser(__doc__, EXAMPLES)
    add = parser.add_argument
    # fmt: off
    add("--llm", type=Path, required=True, metavar="DIR", help="pretrained model with tokenizer")
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="training documents")
    add("--held-out", type=Path, nargs="+", required=True, metavar="FILE", help="other documents")
    add("--precisions", nargs="+", default=["bf16", "coat"], metavar="NAME",
        help="the others are compared with the first one; default bf16 coat")
    add("--seeds", type=int, nargs="+", default=[0], help="default 0")
    add("--steps", type=at_least(1), default=200, help="default 200")
    add("--batch", type=at_least(1), default=16, help="sequences a step; default 16")
    add("--tokens", type=at_least(1), default=1024, help="tokens a sequence; default 1024")
    add("--lr", type=float, default=1e-4, help="peak learning rate; default 1e-4")
    add("--lora", type=at_least(1), metavar="RANK", help="train adapters; default: all weights")
    add("--blocks", action="store_true", help="compare blocks instead of training")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of runs")
    # fmt: on
    return parser


def main(args: argparse.Namespace) -> None:
    """Train and print all runs, or compare blocks."""
    bench = DecoderBench(tokens=args.tokens, batch_size=args.batch, steps=args.steps, lr=args.lr)
    corpus = read_corpus(args.llm, args.text, args.held_out, args.out)
    if args.blocks:
        for precision in args.precisions:
            found = rank_blocks(args.llm, precision, corpus, bench)
            lines = [[name, f"{value:.5f}"] for name, value in found.items()]
            harness.say(harness.format_table([f"{precision}: block", "divergence"], lines))
        return
    count_steps(corpus, bench)
    files = [(file.name, file.stat().st_size) for file in (*args.text, *args.held_out)]
    settings: Record = {"bench": asdict(bench), "llm": args.llm.name, "text": files}
    settings |= {"lora": args.lora} if args.lora else {}
    keys = [(p, s) for s in dict.fromkeys(args.seeds) for p in dict.fromkeys(args.precisions)]
    names = [f"{p.replace('/', ':')}, seed {s}" for p, s in keys]
    runs = {
        name: (args.llm, args.lora, bench, corpus, *key, args.out / f"{name}.pt")
        for name, key in zip(names, keys, strict=True)
    }
    records = [*sweep(args.out, settings, runs, train_one).values()]
    harness.append_results(args.csv, [
        FinetuneResult(
            *(
                *record["origin"], args.llm.name, *key, args.steps, args.lr, args.lora,
                *record["measures"].values(), record["seconds"],
            )
        )
        for key, record in zip(keys, records, strict=True)
    ])  # fmt: skip
    harness.say(format_runs({k: r["measures"] for k, r in zip(keys, records, strict=True)}))


if __name__ == "__main__":
    sys.exit(harness.run_script(build_parser(), main))
