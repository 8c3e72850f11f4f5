"""``coat-vlm bench``: compare losses, time and memory of precisions and baselines."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from coat_cli.command import PRECISIONS, Commands, add_recipe, at_least, command, read_recipe, say

if TYPE_CHECKING:
    from coat_bench.recipe import RecipeRow
    from coat_bench.rows import Row
    from coat_bench.step import StepRow
    from coat_lab.decoder import DecoderBench

SHAPES = "llama-2-7b, qwen2.5-7b, siglip-so400m; default llama-2-7b"
SIZES = ("tiny", "tiny-llm", "1b", "2b", "8b", "14b", "qwen2.5-7b", "llama-2-7b")
SIZES += ("qwen2.5-vl-7b", "qwen3-vl-8b")
COMPILED = ("compile", "torchao", "liger_compile", "liger_torchao", "liger_loss_torchao")
BASELINES = ("eager", "liger", *COMPILED, *(f"{name}_tower" for name in COMPILED))
OPTIMIZERS = ("none", "own")
# These choices repeat those of coat_bench, which takes longer to import than --help should.


def add(commands: Commands) -> None:
    """Add the jobs of ``bench`` to the parser."""
    parser = commands.add_parser("bench", help="compare precisions: losses, speed, memory")
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    for declare in (_decoder, _layer, _kernels, _gemm, _adamw, _step, _recipe, _long):
        declare(jobs)


# fmt: off
def _decoder(jobs: Commands) -> None:
    summary = "compare the losses of a small decoder trained on text"
    add = command(jobs, "decoder", _run_decoder, summary, """\
  coat-vlm bench decoder --text wiki.txt                # bf16 and coat, the smaller size
  coat-vlm bench decoder --text a.txt b.txt --seeds 0 1 2 --out runs/decoder
  coat-vlm bench decoder --text wiki.txt --size 100m --precisions bf16 coat coat_lean
  coat-vlm bench decoder --text wiki.txt --precisions bf16 coat coat,optimizer=adamw
  coat-vlm bench decoder --text wiki.txt --lr 5e-3 --beta2 0.999        # a less stable run

sizes:
  30m     27.3M parameters,  8 layers,  8,192 tokens per step, 200 steps
  100m    99.5M parameters, 12 layers, 16,384 tokens per step, 300 steps
""").add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE",
        help="UTF-8 texts, concatenated; the last tenth is held out")
    add("--size", choices=("30m", "100m"), default="30m",
        help="model and training length, see below; default 30m")
    add("--precisions", nargs="+", metavar="NAME", default=["bf16", "coat"],
        help=f"{', '.join(PRECISIONS)}; settings may follow an FP8 precision, as in the example. "
        "The others are compared with the first; default bf16 coat")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N",
        help="seeds of initial weights and batches, one run each per precision; default 0")
    add("--steps", type=at_least(1), metavar="N",
        help="optimizer steps; default: depends on --size")
    add("--lr", type=float, help="peak learning rate; default: depends on --size")
    add("--beta2", type=float, help="AdamW's beta2; default 0.95")
    add("--out", type=Path, metavar="DIR",
        help="folder for decoder.csv, .svg and .json; runs that it already contains are skipped")


def _layer(jobs: Commands) -> None:
    summary = "measure time, memory and error of one layer, for our precisions and the baselines"
    parser = command(jobs, "layer", _run_layer, summary, """\
  coat-vlm bench layer                                  # Llama-2-7B's layer
  coat-vlm bench layer --shape siglip-so400m --attention cudnn --csv layer.csv
  coat-vlm bench layer --shape qwen2.5-7b --batch 1 --length 8192
  coat-vlm bench layer --csv kernels/benchmarks/results/layer.csv --plot layers.svg

Memory is counted beyond the BF16 parameters. The time includes one quantization of the weights;
"cached weights" is the time of a further micro-batch, which reuses the quantized weights.

--plot measures nothing and needs no GPU. It draws the last run in the file for each shape with the
given size and attention.
""")
    _add_shape(parser)
    add = parser.add_argument
    add("--batch", type=int, help="sequences or images; default: the shape's")
    add("--length", type=int, help="tokens or patches of each; default: the shape's")
    add("--implementations", nargs="+", metavar="NAME",
        help="implementations in addition to hf_eager; default: all whose packages are installed")
    add("--attention", default="default", help="default (chosen by SDPA), cudnn or flash")
    _add_csv(parser)
    add("--profile", action="store_true", help="also print the GPU time by kind and by kernel")
    add("--plot", type=Path, metavar="SVG",
        help="plot time and saved memory of the rows in --csv instead of measuring")


def _kernels(jobs: Commands) -> None:
    summary = "measure the bandwidth of every element-wise op, relative to a device copy"
    parser = command(jobs, "kernels", _run_kernels, summary, """\
  coat-vlm bench kernels                     # all ops, in the sizes of Llama-2-7B's block
  coat-vlm bench kernels --shape siglip-so400m --op norm_stats norm_bwd --csv kernels.csv

Each op is first compared with its reference on a smaller input. An op that differs is not timed,
and a note says why. Times are medians on the GPU without CPU launch overhead (a CUDA graph of the
op is replayed), with flushed caches. Bytes are counted once for every argument and result of an op;
100% is a copy of 1 GiB in the same process.
""")
    _add_shape(parser)
    parser.add_argument("--op", nargs="+", default=[], metavar="NAME",
        help="ops to measure, such as norm_stats or adamw_step; default all")
    _add_csv(parser)


def _gemm(jobs: Commands) -> None:
    summary = "measure the GEMMs of one block in BF16 and FP8"
    parser = command(jobs, "gemm", _run_gemm, summary, """\
  coat-vlm bench gemm                                   # the twelve GEMMs of Llama-2-7B's block
  coat-vlm bench gemm --shape qwen2.5-7b siglip-so400m --csv gemm.csv

Training uses fp8_fast, which accumulates with fewer bits, for all three GEMMs; fp8 is there for
comparison. The error is relative to an FP32 GEMM of the BF16 operands. A GEMM that differs from
FP32 on its own operands is not timed. Times are medians on the GPU without CPU launch overhead (a
CUDA graph of the GEMM is replayed), with flushed caches. The last line is the whole block: all
operations over the sum of the times.
""")
    _add_shape(parser)
    _add_csv(parser)


def _adamw(jobs: Commands) -> None:
    summary = "measure the optimizer step, or the error of its 8-bit moments"
    parser = command(jobs, "adamw", _run_adamw, summary, """\
  coat-vlm bench adamw --csv adamw.csv                  # speed, on a GPU: 0.94 B parameters
  coat-vlm bench adamw --states wiki.txt --csv adamw_error.csv
  coat-vlm bench adamw --states wiki.txt --steps 10     # a short run

Speed: a step of CoatAdamW, with second moments in round to nearest or stochastic rounding, torch's
fused AdamW and, if installed, torchao's 8-bit AdamW. CoatAdamW is first compared with the reference
on a sample. --states needs no GPU: it trains a small decoder on a text and stores the moments in
every codec and in FP32, for beta2 0.95 and 0.999; the error is that of m / sqrt(v). 3,000 steps
take about ten minutes.
""")
    parser.add_argument("--states", type=Path, metavar="TEXT",
        help="measure errors of moments from training on this text instead of speed")
    parser.add_argument("--steps", type=at_least(1), metavar="N",
        help="steps of --states; default 3000")
    _add_csv(parser)


def _step(jobs: Commands) -> None:
    summary = "measure the training step of a full model, on one GPU or several"
    add = command(jobs, "step", _run_step, summary, """\
  coat-vlm bench step --csv tiny.csv                     # a tiny model, on any machine
  coat-vlm bench step --size 8b --csv kernels/benchmarks/results/step.csv --plot step.svg
  coat-vlm bench step --size 8b --baselines eager liger liger_torchao --batch 1 2 4 8 --csv step.csv
  coat-vlm bench step --size qwen3-vl-8b --baselines liger_torchao --batch 1 2 4 --csv step.csv
  coat-vlm bench step --size 8b --precisions coat_lean --optimizer own --batch 4 --accumulation 4
  coat-vlm bench step --size 8b --precisions coat_lean --batch 4 --profile
  coat-vlm bench step --size 8b --precisions coat coat_lean --optimizer own --accumulation 8 \\
      --cap-gib 77                                       # an 8B model on a GPU of 80 GB
  coat-vlm bench step --size qwen2.5-7b --lora 64 --precisions coat_lean --optimizer own \\
      --batch 2                                          # adapters on frozen FP8 weights
  torchrun --nproc-per-node 2 --no-python coat-vlm bench step --size 1b --optimizer own \\
      --precisions bf16 coat_lean --zero 1 2 3 --batch 4 --csv step.csv
  torchrun --nproc-per-node 2 --no-python coat-vlm bench step --size llama-2-7b --optimizer own \\
      --precisions bf16 coat coat_lean --zero 1 2 3 --batch 1 2 4 --csv step.csv   # COAT's setup
  torchrun --nproc-per-node 2 --no-python coat-vlm bench step --size 2b --optimizer own \\
      --precisions coat --baselines liger_compile liger_torchao --zero 2 3 --batch 4 --csv step.csv

sizes; 1b, 2b, 8b and 14b have SigLIP-so400m at 448 pixels and samples of 4,096 tokens with 4 images
of 256 tokens, qwen2.5-7b has samples of 4,096 text tokens, llama-2-7b of 2,048. qwen2.5-vl-7b and
qwen3-vl-8b are published models (the recipe key model.pretrained) with samples of 4,096 tokens with
4 images of 448 pixels, of 256 and 196 tokens each:
  1b             0.90B parameters, language model like Qwen2.5-0.5B
  2b             1.95B parameters, language model like Qwen2.5-1.5B
  8b             8.04B parameters, language model like Qwen2.5-7B
  14b            15.2B parameters, language model like Qwen2.5-14B
  qwen2.5-7b     7.62B parameters, no vision tower
  llama-2-7b     6.74B parameters, no vision tower, as in COAT's paper (which compares BF16 and
                 AdamW with coat and reports 1.54x less memory and 1.43x the speed)
  qwen2.5-vl-7b  8.29B parameters
  qwen3-vl-8b    8.77B parameters
  tiny           0.2M parameters, 32 tokens, for a test on a CPU
  tiny-llm       the same without a vision tower

--precisions are ours (bf16 included; its loss does not store logits). --baselines are transformers'
BF16 model (eager), its decoder layers compiled (compile), compiled with torchao's tensorwise FP8
(torchao), each of them with Liger's kernels (liger, liger_compile, liger_torchao), torchao's with
Liger's loss alone (liger_loss_torchao), and the compiled ones with a compiled tower (..._tower).

--optimizer none measures the forward and backward pass in one process and frees the gradients
between steps. own runs DeepSpeed as training does, with the precision's default optimizer: coat for
coat and coat_lean, adamw for the others, and training's attention kernels (the recipe key
cudnn_attention has its default, auto). --lora freezes the tower and trains the projector and LoRA
adapters on all linear layers of the language model. For a recipe with other keys (fp8.cuda_graphs,
fp8.bf16_forward_first, cudnn_attention), use coat-vlm bench recipe.

A model is timed only if its loss on a sample is within 1% of BF16's and its gradient norm within a
factor of 1.5; with an optimizer, the loss of the repeated batch must also fall. Times are medians
of whole steps, peaks are the memory that PyTorch allocated; the note has the memory in use on the
GPU after the steps, by everything (torch.cuda.mem_get_info). A batch that does not fit is reported
as OOM, and no larger one is tried; with several processes the run ends there.

--profile runs one more step of each model under torch's profiler and prints the time in which the
GPU worked and waited for the CPU, the number of kernels, their time by kind, the longest kernels
and the longest CPU operations (on a CPU only the last). A GPU that waits needs fewer or larger
launches (a larger --batch, fewer micro-batches) rather than faster kernels.

Duration on H200s (estimates): less than a minute for start-up, seconds (1b) to half a minute (8b)
for each model, about a minute more for each compiled baseline.
""").add_argument
    add("--size", choices=SIZES, default="tiny", help="the model; default tiny")
    ours = [name for name in PRECISIONS if name != "fp32"]
    add("--precisions", nargs="*", choices=ours, default=["bf16", "coat", "coat_lean"],
        metavar="NAME", help=f"{', '.join(ours)}; default bf16 coat coat_lean")
    add("--baselines", nargs="*", choices=BASELINES, default=[], metavar="NAME",
        help=f"{', '.join(BASELINES)}; default none")
    add("--optimizer", nargs="+", choices=OPTIMIZERS, default=["none"], metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)}; measured with every model; default none")
    add("--zero", nargs="+", type=int, choices=(0, 1, 2, 3), metavar="STAGE",
        help="ZeRO stages, one after the other; default 0, as in a recipe, also with several "
        "processes")
    add("--master-weights", choices=("auto", "fp32", "low_bits"), default="auto",
        help="with --optimizer own: storage of master weights, as in a recipe; default auto, "
        "by which ours have no FP32 copies at stage 0, and torch's AdamW has")
    add("--lora", type=int, metavar="RANK",
        help="train LoRA adapters of this rank; default: train all weights")
    add("--cap-gib", type=float, metavar="GIB",
        help="limit torch's allocator to this many GiB of each GPU")
    add("--batch", nargs="+", type=int, default=[1], metavar="N",
        help="samples per micro-batch on one GPU, ascending; default 1")
    add("--accumulation", type=int, default=1, metavar="N",
        help="micro-batches per step; default 1")
    add("--steps", type=int, default=5, help="measured steps; default 5")
    add("--warmup", type=int, default=3, help="steps before them; default 3")
    add("--profile", action="store_true", help="also profile one more step of each model")
    add("--csv", type=Path, help="append the rows to this file after each measurement")
    add("--plot", type=Path, metavar="SVG",
        help="plot tokens/s against peak GB of the rows in --csv with --size instead of measuring")


def _recipe(jobs: Commands) -> None:
    summary = "measure the training step of a recipe's stages with random weights and data"
    parser = command(jobs, "recipe", _run_recipe, summary, """\
  coat-vlm bench recipe quickstart                       # three small stages, on any machine
  coat-vlm bench recipe my_recipe.yaml --stage sft --images 1 stages.sft.micro_batch_size=2
  coat-vlm bench recipe vila_pretrain --images 13 init_from=null
  torchrun --nproc-per-node 2 --no-python coat-vlm bench recipe vila_sft --images 13 \\
      --csv recipe.csv init_from=null

The model of each stage has the recipe's shapes and random weights. The step is that of training:
frozen modules, LoRA, precision, gradient checkpointing, optimizer, ZeRO stage. The built-in recipes
download nothing; for other published models, config.json and the tokenizer are read. init_from must
be a folder (its weights are not read) or null.

Rows are full, as for coat-vlm plan: model.max_length tokens (for packing: one sequence of a packed
row's length) with --images random images, tiles or frames each. All text but the first token is
supervised, which is the most expensive case; real rows are shorter, and in most of them only the
answers are supervised. A step is one micro-batch of micro_batch_size rows on each GPU, the same one
in every step. Training accumulates more micro-batches per optimizer step (--accumulation), which
lowers the cost of the optimizer. Reading, decoding and tokenizing data are not part of the step (in
training, "wait" in the log line is the time that the GPU waited for data).

The table: ms is the median of whole steps of the slowest GPU; tokens are all tokens of the rows,
vision tokens those with image features, TFLOP/s the model's, all as in the log line of training;
peak GB is the maximum that PyTorch allocated on one GPU in the measured steps, followed by the
estimate of coat-vlm plan ("off": plan relative to peak).

A stage that does not fit is reported as OOM and the next one starts; with several processes the run
ends there. The plan of an 8B model with long rows takes minutes on the CPU; --no-plan skips it.
""")
    add_recipe(parser)
    add = parser.add_argument
    add("--stage", help="measure this stage only: align, pretrain, sft or dpo")
    add("--images", type=int, metavar="N",
        help="image tiles and video frames per row; default: counted in the stage's data, else 1")
    add("--steps", type=int, default=5, help="measured steps; default 5")
    add("--warmup", type=int, default=3, help="steps before the measured ones; default 3")
    add("--accumulation", type=int, default=1, metavar="N",
        help="micro-batches per step on each GPU; default 1")
    add("--no-plan", action="store_true", help="skip the estimate of coat-vlm plan")
    add("--csv", type=Path, help="append the rows to this file after each measurement")


def _long(jobs: Commands) -> None:
    summary = "measure long rows, the longest row that fits, and samples of many lengths"
    parser = command(jobs, "long", _run_long, summary, """\
  torchrun --nproc-per-node 2 --no-python coat-vlm bench long vila_long_video --images 512 \\
      --csv long.csv init_from=null model.max_length=131072 stages.sft.sequence_parallel=2
  coat-vlm bench long my_recipe.yaml --stage sft --longest 2048 --images 1 --csv long.csv
  torchrun --nproc-per-node 2 --no-python coat-vlm bench long my_recipe.yaml --stage sft \\
      --layouts packed:32768 bucketed:8 padded:16 --csv long.csv
  coat-vlm bench long quickstart --stage sft --steps 1 --warmup 1 --csv long.csv \\
      --layouts packed:1024 padded:2 --samples 8 model.max_length=1024
  coat-vlm bench long quickstart --csv long.csv --plot long.svg

Weights and data are random, and the step is that of training, as in coat-vlm bench recipe. Without
--longest and --layouts rows are full; with sequence_parallel ranks share their tokens.

--longest runs forward and backward passes without an optimizer on one GPU, on rows of --images
images and text. Two short rows tell how memory grows; longer ones are tried until a multiple of N
tokens fits and the next one does not. Each try is one row of --csv, of one pass.

--layouts measures the same samples in several layouts: packed:TOKENS (rows of so many tokens),
padded:SAMPLES (micro-batches in random order) and bucketed:SAMPLES (sorted by length). The lengths
are made up: 20% text alone, 70% images of 1 to 13 tiles, 10% videos of 8 to 64 frames, at most
model.max_length tokens. Tokens per second are those of samples, without padding.
""")
    add_recipe(parser)
    add = parser.add_argument
    add("--stage", help="align, pretrain or sft; default: the only stage of the recipe")
    add("--images", type=int, metavar="N",
        help="image tiles and video frames per full row; default: counted in the data, else 1")
    add("--longest", type=int, metavar="N",
        help="find the longest row on one GPU, in multiples of N tokens")
    add("--layouts", nargs="+", default=[], metavar="KIND:SIZE",
        help="measure samples of many lengths: packed:TOKENS, padded:SAMPLES, bucketed:SAMPLES")
    add("--samples", type=int, metavar="N",
        help="with --layouts: samples of a step on all GPUs; default 128")
    add("--steps", type=int, default=2, help="measured steps; default 2")
    add("--warmup", type=int, default=3, help="steps before the measured ones; default 3")
    add("--csv", type=Path, help="append the rows to this file after each measurement")
    add("--plot", type=Path, metavar="SVG",
        help="plot the rows in --csv instead of measuring; the recipe is then not read")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="+", default=["llama-2-7b"], metavar="SHAPE", help=SHAPES)


def _add_csv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=Path, help="append the rows to this file")

# fmt: on


def _run_decoder(args: argparse.Namespace) -> int:
    from coat_lab.curves import draw_curves, format_curves
    from coat_lab.decoder import bench_decoder

    out, curves = args.out, []
    for curves in bench_decoder(args.text, args.precisions, args.seeds, _decoder_bench(args), out):
        if out is not None:
            draw_curves(curves, out / "decoder.svg")
    say(format_curves(curves))
    if out is not None:
        say(f"\ncurves: {out / 'decoder.csv'}, {out / 'decoder.svg'}")
    return 0


def _decoder_bench(args: argparse.Namespace) -> "DecoderBench":
    """Return the settings of ``--size`` with the values of the options."""
    from coat_lab.decoder import SIZES

    bench = SIZES[args.size]
    given = {"steps": args.steps, "lr": args.lr}
    if args.lr is not None and not 0 < args.lr < math.inf:
        raise ValueError(
            f"--lr {args.lr}: must be above 0 and finite; {args.size} takes {bench.lr}"
        )
    if args.beta2 is not None:
        if not 0 <= args.beta2 < 1:
            raise ValueError(
                f"--beta2 {args.beta2}: must be at least 0 and below 1; {args.size} takes "
                f"{bench.betas[1]}"
            )
        given["betas"] = (bench.betas[0], args.beta2)
    return replace(bench, **{name: value for name, value in given.items() if value is not None})


def _run_layer(args: argparse.Namespace) -> int:
    from coat_bench.layer import bench_layer, format_rows, list_available
    from coat_bench.shapes import find_shape

    if args.plot is not None:
        return _plot_layers(args)

    def profile(name: str, table: str) -> None:
        say(f"\n{name}: {table}")

    for name in args.shape:
        shape = find_shape(name, args.batch, args.length)
        implementations = args.implementations or list_available()
        on_profile = profile if args.profile else None
        rows = bench_layer(shape, implementations, args.attention, on_profile)
        size = f"{shape.batch} x {shape.length:,} tokens"
        title = f"{shape.name}, {size}, attention: {args.attention}"
        _show(title, format_rows(rows), rows, args.csv)
    return 0


def _plot_layers(args: argparse.Namespace) -> int:
    from coat_bench.layer import LayerRow
    from coat_bench.plots import draw_layers, find_last_run
    from coat_bench.rows import read_rows
    from coat_bench.shapes import find_shape

    _check_plot(args)
    if args.implementations or args.profile:
        raise ValueError("--plot measures nothing; leave out --implementations and --profile")
    rows = read_rows(args.csv, LayerRow, "coat-vlm bench layer --csv")
    shapes = [find_shape(name, args.batch, args.length) for name in args.shape]
    draw_layers([find_last_run(rows, shape, args.attention) for shape in shapes], args.plot)
    say(f"plot: {args.plot}")
    return 0


def _check_plot(args: argparse.Namespace) -> None:
    if args.csv is None:
        raise ValueError("--plot needs the rows of an earlier run; give their file with --csv")
    if args.plot.suffix != ".svg":
        raise ValueError(f"--plot {args.plot}: the format is SVG; give a name that ends in .svg")


def _run_kernels(args: argparse.Namespace) -> int:
    from coat_bench.kernels import bench_kernels, format_rows
    from coat_bench.shapes import find_shape

    for shape in [find_shape(name) for name in args.shape]:
        rows = bench_kernels(shape, args.op)
        title = f"{shape.name}, {shape.tokens:,} tokens; a copy: {rows[0].copy_gbps:,.0f} GB/s"
        _show(title, format_rows(rows), rows, args.csv)
    return 0


def _run_gemm(args: argparse.Namespace) -> int:
    from coat_bench.gemm import bench_gemm, format_rows
    from coat_bench.shapes import find_shape

    for shape in [find_shape(name) for name in args.shape]:
        rows = bench_gemm(shape)
        _show(f"{shape.name}, {shape.tokens:,} tokens", format_rows(rows), rows, args.csv)
    return 0


def _run_adamw(args: argparse.Namespace) -> int:
    if args.states is not None:
        from coat_lab.moments import bench_moments, format_rows

        steps = args.steps or 3000
        moments = bench_moments(args.states, steps, every=max(1, steps // 6))
        _show(f"{steps:,} steps", format_rows(moments), moments, args.csv)
        return 0
    if args.steps is not None:
        raise ValueError("--steps are those of --states TEXT; give it, or leave --steps out")
    from coat_bench.adamw import bench_adamw
    from coat_bench.adamw import format_rows as format_speeds

    rows = bench_adamw()
    _show(f"{rows[0].params:,} parameters", format_speeds(rows), rows, args.csv)
    return 0


def _run_step(args: argparse.Namespace) -> int:
    from coat_bench.memory import limit_memory
    from coat_bench.rows import append_rows
    from coat_bench.step import StepBench, bench_step, format_rows
    from coat_vlm.distributed import join_world

    if args.plot is not None:
        return _plot_steps(args)

    def keep(row: "StepRow") -> None:
        append_rows(args.csv, [row])
        if row.problem:
            say(f"{row.implementation}, {row.optimizer}, batch {row.batch}: {row.problem}")

    def profile(row: "StepRow", tables: str) -> None:
        at = "" if row.optimizer == "none" else f", ZeRO-{row.zero}"
        say(f"\n{row.implementation}, {row.optimizer}{at}, batch {row.batch}: {tables}\n")

    if args.zero and set(args.optimizer) == {"none"}:
        raise ValueError("--zero has no effect without an optimizer: name one with --optimizer")
    bench = StepBench(
        size=args.size,
        precisions=args.precisions,
        baselines=args.baselines,
        optimizers=args.optimizer,
        zero_stages=args.zero or (0,),
        batches=args.batch,
        accumulation=args.accumulation,
        master_weights=args.master_weights,
        lora=args.lora,
        steps=args.steps,
        warmup=args.warmup,
        on_profile=profile if args.profile else None,
    )
    with join_world() as world:
        if args.cap_gib is not None:
            limit_memory(world.device, args.cap_gib)
        rows = bench_step(bench, world, keep)
        _show(f"{rows[0].model}, {world.size} x {rows[0].gpu}", format_rows(rows))
    return 0


def _plot_steps(args: argparse.Namespace) -> int:
    from coat_bench.models import SIZES
    from coat_bench.plots import draw_steps
    from coat_bench.rows import read_rows
    from coat_bench.step import StepRow

    _check_plot(args)
    rows = read_rows(args.csv, StepRow, "coat-vlm bench step --csv")
    draw_steps(rows, SIZES[args.size].name, args.plot)
    say(f"plot: {args.plot}")
    return 0


def _run_recipe(args: argparse.Namespace) -> int:
    from coat_bench.recipe import RecipeBench, bench_recipe, format_row
    from coat_bench.rows import append_rows
    from coat_vlm.distributed import join_world

    def keep(row: "RecipeRow") -> None:
        say(f"\n{format_row(row)}")
        append_rows(args.csv, [row])

    if args.images is not None and args.images < 0:
        raise ValueError(f"--images {args.images}: at least 0 is needed")
    bench = RecipeBench(
        recipe=read_recipe(args, unset_variables=True),
        changes=args.overrides,
        only_stage=args.stage,
        images=args.images,
        steps=args.steps,
        warmup=args.warmup,
        accumulation=args.accumulation,
        plan=not args.no_plan,
    )
    with join_world() as world:
        bench_recipe(bench, world, keep)
    say("\nRandom weights and data; loading data is not part of the step.")
    return 0


def _run_long(args: argparse.Namespace) -> int:
    from coat_bench.lengths import Layout
    from coat_bench.long import LongRow, bench_longest, bench_steps, format_rows
    from coat_bench.recipe import RecipeBench
    from coat_bench.rows import append_rows
    from coat_vlm.distributed import join_world

    if args.plot is not None:
        return _plot_long(args)

    def keep(row: LongRow) -> None:
        append_rows(args.csv, [row])
        say(f"{row.implementation}: {row.tokens:,} tokens, {row.note}")

    layouts = [Layout.parse(text) for text in args.layouts]
    if args.longest is not None and layouts:
        raise ValueError("--longest and --layouts are two measurements; leave one of them out")
    if args.samples is not None and not layouts:
        raise ValueError("--samples has no effect without --layouts; remove it")
    if args.images is not None and (args.images < 0 or layouts):
        raise ValueError("--images is 0 or more, and not for --layouts, which draw their own")
    for name, value in (("--longest", args.longest), ("--samples", args.samples)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value}: at least 1 is needed")
    recipe = read_recipe(args, unset_variables=True)
    if args.stage is None and len(recipe.stages) > 1:
        raise ValueError(f"give one of the stages: --stage {' or '.join(recipe.stages)}")
    bench = RecipeBench(
        recipe=recipe,
        only_stage=args.stage,
        images=args.images,
        steps=args.steps,
        warmup=args.warmup,
        plan=False,
    )
    with join_world() as world:
        if args.longest is not None:
            rows = bench_longest(bench, args.longest, world, keep)
        else:
            rows = bench_steps(bench, layouts, args.samples or 128, world, keep)
        _show(f"{rows[0].model}, {world.size} x {rows[0].gpu}", format_rows(rows))
    return 0


def _plot_long(args: argparse.Namespace) -> int:
    from coat_bench.long import LongRow
    from coat_bench.plots import draw_long
    from coat_bench.rows import read_rows

    _check_plot(args)
    draw_long(read_rows(args.csv, LongRow, "coat-vlm bench long --csv"), args.plot)
    say(f"plot: {args.plot}")
    return 0


def _show(title: str, table: str, rows: "Sequence[Row]" = (), path: Path | None = None) -> None:
    """Print a table, and append its rows to the file of ``--csv``."""
    from coat_bench.rows import append_rows

    say(f"\n{title}\n")
    say(table)
    append_rows(path, rows)
