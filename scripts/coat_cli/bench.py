"""``coat-vlm bench``: losses of a small decoder; speed of a step, one layer, kernels and GEMMs."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from coat_cli.bench_recipe import add_recipe
from coat_cli.bench_step import add_step
from coat_cli.command import PRECISIONS, Commands, command, say

if TYPE_CHECKING:
    from coat_bench.rows import Row
    from coat_lab.decoder import DecoderBench


def add(commands: Commands) -> None:
    """Declare the jobs of ``bench``."""
    parser = commands.add_parser("bench", help="compare precisions: losses, speed, memory")
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    _add_decoder(jobs)
    _add_layer(jobs)
    _add_kernels(jobs)
    _add_gemm(jobs)
    _add_adamw(jobs)
    add_step(jobs)
    add_recipe(jobs)


def _add_decoder(jobs: Commands) -> None:
    parser = command(
        jobs,
        "decoder",
        _decoder,
        "compare the losses of a small decoder trained on a text",
        """\
  coat-vlm bench decoder --text wiki.txt                # bf16 and coat, the smaller size
  coat-vlm bench decoder --text a.txt b.txt --seeds 0 1 2 --out runs/decoder
  coat-vlm bench decoder --text wiki.txt --size 100m --precisions bf16 coat coat_lean
  coat-vlm bench decoder --text wiki.txt --precisions bf16 coat coat,optimizer=adamw
  coat-vlm bench decoder --text wiki.txt --lr 5e-3 --beta2 0.999    # what does a harder run do?

--across tells what FP8 costs in the weights (BF16 passes of a model trained in FP8) from what it
costs in a pass (FP8 passes of a model trained in BF16).

sizes:
  30m     27.3M parameters,  8 layers,  8,192 tokens per step, 200 steps
  100m    99.5M parameters, 12 layers, 16,384 tokens per step, 300 steps
""",
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, metavar="FILE",
        help="UTF-8 texts, read as one; its last tenth is held out",
    )  # fmt: skip
    parser.add_argument(
        "--size", choices=("30m", "100m"), default="30m",
        help="the model and its training, see below; default 30m",
    )  # fmt: skip
    parser.add_argument(
        "--precisions", nargs="+", metavar="NAME", default=["bf16", "coat"],
        help=f"{', '.join(PRECISIONS)}; an FP8 one may be followed by settings, as in the example. "
        "The first is what the others are compared with; default bf16 coat",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], metavar="N",
        help="one run of each precision per seed, of start and batches; default 0",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, help="optimizer steps; default: the size's")
    parser.add_argument("--lr", type=float, help="peak learning rate; default: the size's")
    parser.add_argument(
        "--beta2", type=float,
        help="AdamW's; default: the size's, 0.95. Above 0.99 FP8 second moments are rounded by "
        "chance, as in recipes: compare coat,second_moment=nearest",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="folder for decoder.csv, .svg and .json; finished runs that it has are not repeated",
    )  # fmt: skip
    parser.add_argument(
        "--across", action="store_true",
        help="also take the losses of each trained model in the other precisions; with --out they "
        "are kept in across.csv, and a finished run that has none there is trained again",
    )  # fmt: skip


def _decoder(args: argparse.Namespace) -> int:
    from coat_lab.across import AcrossLosses, format_across
    from coat_lab.curves import draw_curves, format_curves
    from coat_lab.decoder import bench_decoder

    bench = _decoder_bench(args)
    across = None
    if args.across:
        path = None if args.out is None else args.out / "across.csv"
        across = AcrossLosses(args.precisions, bench, path)
    curves = []
    look, seen = (None, ()) if across is None else (across.look, across.seen)
    for curves in bench_decoder(
        args.text, args.precisions, args.seeds, bench, args.out, look, seen
    ):
        if args.out is not None:
            draw_curves(curves, args.out / "decoder.svg")
    say(format_curves(curves))
    if across is not None:
        say(f"\n{format_across(across.rows)}")
    if args.out is not None:
        say(f"\ncurves: {args.out / 'decoder.csv'}, {args.out / 'decoder.svg'}")
    return 0


def _decoder_bench(args: argparse.Namespace) -> "DecoderBench":
    """The size with what the options change of it."""
    from coat_lab.decoder import SIZES

    bench = SIZES[args.size]
    if args.steps is not None:
        bench = replace(bench, steps=args.steps)
    if args.lr is not None:
        if not 0 < args.lr < math.inf:
            raise ValueError(
                f"--lr {args.lr}: must be above 0 and finite; {args.size} takes {bench.lr}"
            )
        bench = replace(bench, lr=args.lr)
    if args.beta2 is not None:
        if not 0 <= args.beta2 < 1:
            raise ValueError(
                f"--beta2 {args.beta2}: must be at least 0 and below 1; {args.size} takes "
                f"{bench.betas[1]}"
            )
        bench = replace(bench, betas=(bench.betas[0], args.beta2))
    return bench


def _add_layer(jobs: Commands) -> None:
    parser = command(
        jobs,
        "layer",
        _layer,
        "measure time, memory and error of one layer in our precisions and the peers'",
        """\
  coat-vlm bench layer                                  # Llama-2-7B's layer, all that is installed
  coat-vlm bench layer --shape siglip-so400m --attention cudnn --csv layer.csv
  coat-vlm bench layer --shape qwen2.5-7b --batch 1 --length 8192
  coat-vlm bench layer --csv layer.csv --plot layer.svg # a picture of rows that are there

Memory counts from a state in which only the BF16 parameters are there. The time contains one
quantization of the weights; "weights kept" is the time of a micro-batch that finds them.

--plot measures nothing and needs no GPU: it draws the file's last run of each shape in that size
and with that attention.
""",
    )
    _add_shape(parser)
    parser.add_argument("--batch", type=int, help="sequences or images; default: the shape's")
    parser.add_argument("--length", type=int, help="tokens or patches of each, likewise")
    parser.add_argument(
        "--implementations", nargs="+", metavar="NAME",
        help="what to measure beside hf_eager; default: everything whose package is installed",
    )  # fmt: skip
    parser.add_argument(
        "--attention", default="default", help="default (SDPA's choice), cudnn or flash, for all"
    )
    _add_csv(parser)
    parser.add_argument(
        "--profile", action="store_true", help="also print the GPU time by kind and by kernel"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="SVG",
        help="draw the rows of --csv as bars of time and saved memory instead of measuring",
    )  # fmt: skip


def _layer(args: argparse.Namespace) -> int:
    from coat_bench.layer import LayerBench, available, bench_layer, format_rows
    from coat_bench.shapes import shape_called

    if args.plot is not None:
        return _plot(args)

    def profile(name: str, table: str) -> None:
        say(f"\n{name}: {table}")

    for name in args.shape:
        shape = shape_called(name, args.batch, args.length)
        implementations = args.implementations or available()
        on_profile = profile if args.profile else None
        rows = bench_layer(LayerBench(shape, implementations, args.attention, on_profile))
        size = f"{shape.batch} x {shape.length:,} tokens"
        _show(f"{shape.name}, {size}, attention: {args.attention}", format_rows(rows))
        _keep(args.csv, rows)
    return 0


def _plot(args: argparse.Namespace) -> int:
    from coat_bench.bars import draw_layers, last_run
    from coat_bench.layer import LayerRow
    from coat_bench.rows import read_rows
    from coat_bench.shapes import shape_called

    if args.csv is None:
        raise ValueError("--plot draws rows that are there; name their file with --csv")
    if args.implementations or args.profile:
        raise ValueError("--plot measures nothing; leave out --implementations and --profile")
    if args.plot.suffix != ".svg":
        raise ValueError(f"--plot {args.plot}: writes SVG; give a name that ends in .svg")
    rows = read_rows(args.csv, LayerRow, "coat-vlm bench layer --csv")
    shapes = [shape_called(name, args.batch, args.length) for name in args.shape]
    draw_layers([last_run(rows, shape, args.attention) for shape in shapes], args.plot)
    say(f"picture: {args.plot}")
    return 0


def _add_kernels(jobs: Commands) -> None:
    parser = command(
        jobs,
        "kernels",
        _kernels,
        "measure the bandwidth of every element-wise op beside that of a device copy",
        """\
  coat-vlm bench kernels                     # all ops, in the sizes of Llama-2-7B's block
  coat-vlm bench kernels --shape siglip-so400m --op norm_stats norm_bwd --csv kernels.csv
  coat-vlm bench kernels --sweep --op activation_bwd

Each op is first compared with its reference on a smaller input; where they differ there is no
speed, and the note says why. Times are medians on the GPU without launch costs of the CPU (a CUDA
graph of the op is replayed), caches flushed. Bytes are counted once for every argument and result
of an op; 100% is a copy of 1 GiB in the same process. --sweep says how long the ops take with
other tiles, from which the constants of coat_kernels are chosen.
""",
    )
    _add_shape(parser)
    parser.add_argument(
        "--op", nargs="+", default=[], metavar="NAME",
        help="what to measure, such as norm_stats or adamw_step; default: all",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    _add_csv(what)
    what.add_argument("--sweep", action="store_true", help="try other tiles; print times only")


def _kernels(args: argparse.Namespace) -> int:
    from coat_bench.kernels import bench_kernels, format_rows
    from coat_bench.shapes import shape_called
    from coat_bench.sweep import format_sweep, sweep

    for shape in [shape_called(name) for name in args.shape]:
        if args.sweep:
            found = format_sweep(sweep(shape, args.op))
            _show(f"{shape.name}, {shape.tokens:,} tokens, microseconds by tile", found)
            continue
        rows = bench_kernels(shape, args.op)
        copy = f"a copy: {rows[0].copy_gbps:,.0f} GB/s"
        _show(f"{shape.name}, {shape.tokens:,} tokens; {copy}", format_rows(rows))
        _keep(args.csv, rows)
    return 0


def _add_gemm(jobs: Commands) -> None:
    parser = command(
        jobs,
        "gemm",
        _gemm,
        "measure the GEMMs of one block in BF16 and FP8",
        """\
  coat-vlm bench gemm                                   # the twelve GEMMs of Llama-2-7B's block
  coat-vlm bench gemm --shape qwen2.5-7b siglip-so400m --csv gemm.csv

fp8_fast, with fewer bits of accumulation, is what the forward pass of training uses, fp8 what its
gradients use; fp8_rows has a scale per row, not per tensor. An error is that of the product
against FP32 on the BF16 operands; a product that differs from FP32 on its own operands gets no
speed. Times are medians on the GPU without launch costs of the CPU (a CUDA graph of the GEMM is
replayed), caches flushed. The last line is the whole block: all operations by the sum of the times.
""",
    )
    _add_shape(parser)
    _add_csv(parser)


def _gemm(args: argparse.Namespace) -> int:
    from coat_bench.gemm import bench_gemm, format_rows
    from coat_bench.shapes import shape_called

    for shape in [shape_called(name) for name in args.shape]:
        rows = bench_gemm(shape)
        _show(f"{shape.name}, {shape.tokens:,} tokens", format_rows(rows))
        _keep(args.csv, rows)
    return 0


def _add_adamw(jobs: Commands) -> None:
    parser = command(
        jobs,
        "adamw",
        _adamw,
        "measure an optimizer step, or what 8 bits cost its moments",
        """\
  coat-vlm bench adamw --csv adamw.csv                  # speed, on a GPU: 0.94 B parameters
  coat-vlm bench adamw --states wiki.txt --csv adamw_error.csv
  coat-vlm bench adamw --states wiki.txt --steps 300    # a first look

Speed: a step of CoatAdamW in every codec, beside torch's fused AdamW and, where installed,
torchao's 8-bit ones; ours is first compared with the reference on a sample. --states needs no GPU:
it trains a small decoder on a text and keeps its moments in every codec beside FP32 ones, for beta2
0.95 and 0.999; the error is that of m / sqrt(v). 3,000 steps take some ten minutes.
""",
    )
    parser.add_argument(
        "--states", type=Path, metavar="TEXT",
        help="measure errors on this text's moments instead of speed",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=3000, help="of --states; default 3000")
    _add_csv(parser)


def _adamw(args: argparse.Namespace) -> int:
    if args.states is not None:
        from coat_lab.moments import bench_moments, format_rows

        moments = bench_moments(args.states, args.steps, every=max(1, args.steps // 6))
        _show(f"{args.steps:,} steps", format_rows(moments))
        _keep(args.csv, moments)
        return 0
    from coat_bench.adamw import bench_adamw
    from coat_bench.adamw import format_rows as format_speeds

    rows = bench_adamw()
    _show(f"{rows[0].params:,} parameters", format_speeds(rows))
    _keep(args.csv, rows)
    return 0


def _show(title: str, table: str) -> None:
    say(f"\n{title}\n")
    say(table)


def _keep(path: Path | None, rows: Sequence["Row"]) -> None:
    """Add the rows to the file of ``--csv``, if there is one."""
    from coat_bench.rows import append_rows

    if path is not None:
        append_rows(path, rows)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", nargs="+", default=["llama-2-7b"], metavar="SHAPE",
        help="llama-2-7b, qwen2.5-7b, siglip-so400m; default llama-2-7b",
    )  # fmt: skip


def _add_csv(parser: "argparse.ArgumentParser | argparse._MutuallyExclusiveGroup") -> None:
    parser.add_argument("--csv", type=Path, help="file to add the rows to")
