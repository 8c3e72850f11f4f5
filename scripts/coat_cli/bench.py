"""``coat-vlm bench``: what precisions cost in losses, time and memory, beside baselines."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from coat_cli.command import PRECISIONS, Commands, command, say

if TYPE_CHECKING:
    from coat_bench.recipe import RecipeRow
    from coat_bench.rows import Row
    from coat_bench.step import StepRow
    from coat_lab.decoder import DecoderBench

ATTENTIONS = ("default", "cudnn", "flash")
SHAPES = "llama-2-7b, qwen2.5-7b, siglip-so400m; default llama-2-7b"
SIZES = ("tiny", "tiny-llm", "1b", "2b", "8b", "llama-2-7b")
PEERS = ("eager", "compile", "torchao", "liger", "liger_compile", "liger_torchao")
OPTIMIZERS = ("none", "adamw", "coat", "own")
# The choices above are those of coat_bench, which takes longer to import than --help should.


def add(commands: Commands) -> None:
    """Declare the jobs of ``bench``."""
    parser = commands.add_parser("bench", help="compare precisions: losses, speed, memory")
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    for declare in (_decoder, _rounding, _layer, _kernels, _gemm, _adamw, _step, _recipe):
        declare(jobs)


# An option is declared in a line or two.
# fmt: off
def _decoder(jobs: Commands) -> None:
    summary = "compare the losses of a small decoder trained on a text"
    add = command(jobs, "decoder", _run_decoder, summary, """\
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
""").add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE",
        help="UTF-8 texts, read as one; its last tenth is held out")
    add("--size", choices=("30m", "100m"), default="30m",
        help="the model and its training, see below; default 30m")
    add("--precisions", nargs="+", metavar="NAME", default=["bf16", "coat"],
        help=f"{', '.join(PRECISIONS)}; an FP8 one may be followed by settings, as in the example. "
        "The first is what the others are compared with; default bf16 coat")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N",
        help="one run of each precision per seed, of start and batches; default 0")
    add("--steps", type=int, help="optimizer steps; default: the size's")
    add("--lr", type=float, help="peak learning rate; default: the size's")
    add("--beta2", type=float,
        help="AdamW's; default: the size's, 0.95. Above 0.99 FP8 second moments are rounded by "
        "chance, as in recipes: compare coat,second_moment=nearest")
    add("--out", type=Path, metavar="DIR",
        help="folder for decoder.csv, .svg and .json; finished runs that it has are not repeated")
    add("--across", action="store_true",
        help="also take the losses of each trained model in the other precisions; with --out they "
        "are kept in across.csv, and a finished run that has none there is trained again")


def _rounding(jobs: Commands) -> None:
    summary = "compare what single roundings to FP8 cost the small decoder, from one BF16 run on"
    add = command(jobs, "rounding", _run_rounding, summary, """\
  coat-vlm bench rounding --text wiki.txt --variants xw dvga xw@@0-1
  coat-vlm bench rounding --text wiki.txt --variants xw@gate+up+down coat
  coat-vlm bench rounding --text wiki.txt --size tiny --at 10 --more 10

A variant is OPERANDS@PARTS@FIRST-LAST, several joined with /, or an FP8 precision of bench decoder:
  OPERANDS    letters: x, w (forward GEMM: input, weight), d, v (grad-input GEMM: gradient, weight),
              g, a (grad-weight GEMM: gradient, input)
  PARTS       q, k, v, o, gate, up, down, joined with +; without, all
  FIRST-LAST  blocks, counted from 0; without, all
The variant that rounds nothing always comes first; percentages are differences to it.
""").add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 texts")
    add("--variants", nargs="+", default=["xw"], help="written as above; default xw")
    add("--size", choices=("30m", "100m", "tiny"), default="100m", help="default 100m")
    add("--at", type=int, default=250, help="steps in BF16; default 250")
    add("--more", type=int, default=40, help="further steps, 10 at least; default 40")
    add("--seed", type=int, default=0, help="of the start and of the batches; default 0")
    add("--csv", type=Path, help="file to add the rows to, as the next process of it")


def _layer(jobs: Commands) -> None:
    summary = "measure time, memory and error of one layer in our precisions and the baselines'"
    parser = command(jobs, "layer", _run_layer, summary, """\
  coat-vlm bench layer                                  # Llama-2-7B's layer, all that is installed
  coat-vlm bench layer --shape siglip-so400m --attention cudnn --csv layer.csv
  coat-vlm bench layer --shape qwen2.5-7b --batch 1 --length 8192
  coat-vlm bench layer --csv layer.csv --plot layer.svg # a picture of rows that are there

Memory counts from a state in which only the BF16 parameters are there. The time contains one
quantization of the weights; "weights kept" is the time of a micro-batch that finds them.

--plot measures nothing and needs no GPU: it draws the file's last run of each shape in that size
and with that attention.
""")
    _add_shape(parser)
    add = parser.add_argument
    add("--batch", type=int, help="sequences or images; default: the shape's")
    add("--length", type=int, help="tokens or patches of each, likewise")
    add("--implementations", nargs="+", metavar="NAME",
        help="what to measure beside hf_eager; default: everything whose package is installed")
    add("--attention", default="default", help="default (SDPA's choice), cudnn or flash, for all")
    _add_csv(parser)
    add("--profile", action="store_true", help="also print the GPU time by kind and by kernel")
    add("--plot", type=Path, metavar="SVG",
        help="draw the rows of --csv as bars of time and saved memory instead of measuring")


def _kernels(jobs: Commands) -> None:
    summary = "measure the bandwidth of every element-wise op beside that of a device copy"
    parser = command(jobs, "kernels", _run_kernels, summary, """\
  coat-vlm bench kernels                     # all ops, in the sizes of Llama-2-7B's block
  coat-vlm bench kernels --shape siglip-so400m --op norm_stats norm_bwd --csv kernels.csv
  coat-vlm bench kernels --sweep --op activation_bwd

Each op is first compared with its reference on a smaller input; where they differ there is no
speed, and the note says why. Times are medians on the GPU without launch costs of the CPU (a CUDA
graph of the op is replayed), caches flushed. Bytes are counted once for every argument and result
of an op; 100% is a copy of 1 GiB in the same process. --sweep says how long the ops take with
other tiles, from which the constants of coat_kernels are chosen.
""")
    _add_shape(parser)
    parser.add_argument("--op", nargs="+", default=[], metavar="NAME",
        help="what to measure, such as norm_stats or adamw_step; default: all")
    what = parser.add_mutually_exclusive_group()
    _add_csv(what)
    what.add_argument("--sweep", action="store_true", help="try other tiles; print times only")


def _gemm(jobs: Commands) -> None:
    summary = "measure the GEMMs of one block in BF16 and FP8"
    parser = command(jobs, "gemm", _run_gemm, summary, """\
  coat-vlm bench gemm                                   # the twelve GEMMs of Llama-2-7B's block
  coat-vlm bench gemm --shape qwen2.5-7b siglip-so400m --csv gemm.csv

fp8_fast, with fewer bits of accumulation, is what the forward pass of training uses, fp8 what its
gradients use; fp8_rows has a scale per row, not per tensor. An error is that of the product
against FP32 on the BF16 operands; a product that differs from FP32 on its own operands gets no
speed. Times are medians on the GPU without launch costs of the CPU (a CUDA graph of the GEMM is
replayed), caches flushed. The last line is the whole block: all operations by the sum of the times.
""")
    _add_shape(parser)
    _add_csv(parser)


def _adamw(jobs: Commands) -> None:
    summary = "measure an optimizer step, or what 8 bits cost its moments"
    parser = command(jobs, "adamw", _run_adamw, summary, """\
  coat-vlm bench adamw --csv adamw.csv                  # speed, on a GPU: 0.94 B parameters
  coat-vlm bench adamw --states wiki.txt --csv adamw_error.csv
  coat-vlm bench adamw --states wiki.txt --steps 300    # a first look

Speed: a step of CoatAdamW, its second moments rounded to nearest or by chance, beside torch's fused
AdamW and, where installed, torchao's 8-bit ones; ours is first compared with the reference on a
sample. --states needs no GPU: it trains a small decoder on a text and keeps its moments in every
codec beside FP32 ones, for beta2 0.95 and 0.999; the error is that of m / sqrt(v). 3,000 steps take
some ten minutes.
""")
    parser.add_argument("--states", type=Path, metavar="TEXT",
        help="measure errors on this text's moments instead of speed")
    parser.add_argument("--steps", type=int, default=3000, help="of --states; default 3000")
    _add_csv(parser)


def _step(jobs: Commands) -> None:
    summary = "measure the training step of a whole model, on one GPU or several"
    add = command(jobs, "step", _run_step, summary, """\
  coat-vlm bench step                                    # both passes of the tiny model, anywhere
  coat-vlm bench step --size 8b --peers eager liger liger_torchao --batch 1 2 4 8 --csv step.csv
  coat-vlm bench step --size 8b --precisions coat_lean --optimizer own --batch 4 --accumulation 4
  coat-vlm bench step --size 8b --csv step.csv --plot step.svg       # of rows that are there
  coat-vlm bench step --size 8b --precisions coat_lean --batch 4 --profile --trace step.json.gz
  torchrun --nproc_per_node 2 -m coat_cli.main bench step --size 1b --precisions bf16 coat_lean \\
      --optimizer own --zero 1 2 3 --batch 4 --check-plan --csv step.csv
  torchrun --nproc_per_node 2 -m coat_cli.main bench step --size llama-2-7b --optimizer own \\
      --precisions bf16 coat coat_lean --zero 1 2 3 --batch 1 2 4 --csv step.csv   # the paper's

sizes; the first three with SigLIP-so400m at 448 pixels and samples of 4,096 tokens with 4 images of
256, llama-2-7b with samples of 2,048 tokens of text:
  1b          0.90B parameters, a language model of Qwen2.5-0.5B's shape
  2b          1.95B, of Qwen2.5-1.5B's
  8b          8.04B parameters, of Qwen2.5-7B's
  llama-2-7b  6.74B parameters, no tower: what COAT's paper measures (BF16 with AdamW against coat;
              it reports 1.54x less memory and 1.43x the speed)
  tiny        0.2M parameters, 32 tokens: shows on a CPU that all of this works
  tiny-llm    the same without a tower

precisions are ours (bf16 included: its loss stores no logits); peers are transformers' own BF16
(eager), the same compiled (compile) or with torchao's tensorwise FP8, compiled (torchao), and all
three with Liger's kernels (liger, liger_compile, liger_torchao).

--optimizer none measures both passes in one process and frees the gradients between steps. Any
other goes through DeepSpeed as training does; own is the one that a recipe of the precision gets:
coat for coat and coat_lean, adamw for the rest.

Before a model gets a speed, its loss on a sample must be within 1% of BF16's and the norm of
its gradients within a factor of 1.5; with an optimizer the loss of the repeated batch must fall.
Times are medians of whole steps, peaks are what PyTorch allocated. A batch that does not fit is
reported as OOM, and no larger one is tried; with several processes the run ends there.

--profile runs one more step of each under torch's profiler and tells where its time goes: how long
the GPU worked and how long it waited for the CPU, the number of kernels, their time by kind, the
longest kernels, and what took the CPU longest. A GPU that waits needs fewer or larger launches (a
larger --batch, fewer micro-batches), not faster kernels. On a CPU only the last table is there.
--trace keeps all that the profiler saw, for ui.perfetto.dev: a large file, for no repository.

How long it takes on H200s, roughly (estimates, not measured apart): start-up less than a minute, a
model seconds (1b) or half a minute (8b); compiled peers another minute or so.
""").add_argument
    add("--size", choices=SIZES, default="tiny", help="the model; default tiny")
    ours = [name for name in PRECISIONS if name != "fp32"]
    add("--precisions", nargs="*", choices=ours, default=["bf16", "coat", "coat_lean"],
        metavar="NAME", help=f"{', '.join(ours)}; default bf16 coat coat_lean")
    add("--peers", nargs="*", choices=PEERS, default=[], metavar="NAME",
        help=f"{', '.join(PEERS)}; default none of them")
    add("--optimizer", nargs="+", choices=OPTIMIZERS, default=["none"], metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)}; each is measured with each model. Default none")
    add("--zero", nargs="+", type=int, choices=(0, 1, 2, 3), default=[1], metavar="STAGE",
        help="ZeRO stages, one after the other; default 1")
    add("--batch", nargs="+", type=int, default=[1], metavar="N",
        help="samples of a micro-batch on one GPU, ascending; default 1")
    add("--accumulation", type=int, default=1, metavar="N",
        help="micro-batches of a step; default 1")
    add("--graphs", action="store_true",
        help="measure coat and coat_lean a second time with FP8 blocks as CUDA graphs")
    add("--bf16-forward-first", type=_blocks, metavar="N",
        help="first blocks of coat and coat_lean with forward GEMMs in BF16; default a recipe's")
    add("--attention", choices=ATTENTIONS, default="default",
        help="default (SDPA's choice; training takes flash), cudnn or flash, for all")
    add("--steps", type=int, default=5, help="measured steps; default 5")
    add("--warmup", type=int, default=3, help="steps before them; default 3")
    add("--check-plan", action="store_true",
        help="beside our peaks, what coat-vlm plan expects and how far off that is")
    add("--profile", action="store_true", help="also tell where the time of one more step goes")
    add("--trace", type=Path, metavar="FILE",
        help="a new .json or .json.gz file for the trace of --profile; one model, one batch")
    add("--csv", type=Path, help="file to add the rows to, as they come")
    add("--plot", type=Path, metavar="SVG",
        help="draw the rows of --csv and --size, tokens/s against peak GB, instead of measuring")


def _recipe(jobs: Commands) -> None:
    summary = "measure the training step of a recipe's stages, without its weights and data"
    add = command(jobs, "recipe", _run_recipe, summary, """\
  coat-vlm bench recipe quickstart                       # three small stages, on any machine
  coat-vlm bench recipe vila_pretrain --images 13 init_from=null
  coat-vlm bench recipe llava_1_5 --stage sft --images 1 stages.sft.micro_batch_size=8
  torchrun --nproc_per_node 2 -m coat_cli.main bench recipe vila_sft --images 13 init_from=null \\
      --csv recipe.csv

The model of each stage has the recipe's shapes and random weights, and goes through training's own
steps: frozen modules, LoRA, precision, gradient checkpointing, optimizer, ZeRO stage. Nothing is
downloaded for the built-in recipes; of other published models config.json and tokenizer are read.
init_from has to be a folder (its weights are not read), or null.

Rows are those that coat-vlm plan calls full: model.max_length tokens (packed: a packed row's, as
one sequence) with --images random images, tiles or frames each. All text is supervised but a
row's first token, the costliest case; real rows are shorter, and in most of them only the answers
are supervised. A step is one micro-batch of micro_batch_size rows on each GPU, the same in every
step: training adds up more of them between two steps of the optimizer (--accumulation), which then
costs less. Rows are made once: reading, decoding and tokenizing data are no part of a step here
(in training, "wait" in the log line says how long a step waited for them).

The table: ms is the median of whole steps of the slowest GPU; tokens are all of the rows, and
vision tokens those of them that hold image features, as in training's log line; TFLOP/s are the
model's, as there; peak GB is the most that PyTorch allocated on one GPU in the measured steps,
beside what coat-vlm plan expects ("off": plan against peak).

A stage that does not fit is reported as OOM, and the next one goes on; with several processes the
run ends there. The plan of an 8B model with long rows takes the CPU minutes: --no-plan leaves it
out.
""").add_argument
    add("recipe", metavar="RECIPE", help="a YAML file, or a built-in recipe's name")
    add("overrides", metavar="key=value", nargs="*", help="change a key of the recipe, dotted")
    add("--stage", help="measure this stage only: align, pretrain or sft")
    add("--images", type=int, metavar="N",
        help="tiles of images and frames of a row; default: counted in the stage's data, else 1")
    add("--steps", type=int, default=5, help="measured steps; default 5")
    add("--warmup", type=int, default=3, help="steps before them; default 3")
    add("--accumulation", type=int, default=1, metavar="N",
        help="micro-batches of a step on each GPU; default 1")
    add("--no-plan", action="store_true", help="leave out what coat-vlm plan expects")
    add("--csv", type=Path, help="file to add the rows to, as they come")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", nargs="+", default=["llama-2-7b"], metavar="SHAPE", help=SHAPES)


def _add_csv(parser: "argparse.ArgumentParser | argparse._MutuallyExclusiveGroup") -> None:
    parser.add_argument("--csv", type=Path, help="file to add the rows to")


def _blocks(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of blocks; give 0 or more")
    return int(text)
# fmt: on


def _run_decoder(args: argparse.Namespace) -> int:
    from coat_lab.curves import draw_curves, format_curves
    from coat_lab.decoder import bench_decoder, format_across

    out, found = args.out, ([], [])
    settings = (args.text, args.precisions, args.seeds, _decoder_bench(args), out)
    for found in bench_decoder(*settings, across=args.across):
        if out is not None:
            draw_curves(found[0], out / "decoder.svg")
    curves, rows = found
    say(format_curves(curves))
    if args.across:
        say(f"\n{format_across(rows)}")
    if out is not None:
        say(f"\ncurves: {out / 'decoder.csv'}, {out / 'decoder.svg'}")
    return 0


def _decoder_bench(args: argparse.Namespace) -> "DecoderBench":
    """The size with what the options change of it."""
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


def _run_rounding(args: argparse.Namespace) -> int:
    from coat_lab.forward_rounding import bench_forks, format_rows

    settings = (args.text, args.size, args.variants, args.seed, args.at, args.more, args.csv)
    say(format_rows(bench_forks(*settings)))
    return 0


def _run_layer(args: argparse.Namespace) -> int:
    from coat_bench.layer import available, bench_layer, format_rows
    from coat_bench.shapes import shape_called

    if args.plot is not None:
        return _plot_layers(args)

    def profile(name: str, table: str) -> None:
        say(f"\n{name}: {table}")

    for name in args.shape:
        shape = shape_called(name, args.batch, args.length)
        implementations = args.implementations or available()
        on_profile = profile if args.profile else None
        rows = bench_layer(shape, implementations, args.attention, on_profile)
        size = f"{shape.batch} x {shape.length:,} tokens"
        title = f"{shape.name}, {size}, attention: {args.attention}"
        _show(title, format_rows(rows), rows, args.csv)
    return 0


def _plot_layers(args: argparse.Namespace) -> int:
    from coat_bench.layer import LayerRow
    from coat_bench.plots import draw_layers, last_run
    from coat_bench.rows import read_rows
    from coat_bench.shapes import shape_called

    _check_plot(args)
    if args.implementations or args.profile:
        raise ValueError("--plot measures nothing; leave out --implementations and --profile")
    rows = read_rows(args.csv, LayerRow, "coat-vlm bench layer --csv")
    shapes = [shape_called(name, args.batch, args.length) for name in args.shape]
    draw_layers([last_run(rows, shape, args.attention) for shape in shapes], args.plot)
    say(f"picture: {args.plot}")
    return 0


def _check_plot(args: argparse.Namespace) -> None:
    if args.csv is None:
        raise ValueError("--plot draws rows that are there; name their file with --csv")
    if args.plot.suffix != ".svg":
        raise ValueError(f"--plot {args.plot}: writes SVG; give a name that ends in .svg")


def _run_kernels(args: argparse.Namespace) -> int:
    from coat_bench.kernels import bench_kernels, format_rows, format_sweep, sweep
    from coat_bench.shapes import shape_called

    for shape in [shape_called(name) for name in args.shape]:
        size = f"{shape.name}, {shape.tokens:,} tokens"
        if args.sweep:
            _show(f"{size}, microseconds by tile", format_sweep(sweep(shape, args.op)))
            continue
        rows = bench_kernels(shape, args.op)
        copy = f"a copy: {rows[0].copy_gbps:,.0f} GB/s"
        _show(f"{size}; {copy}", format_rows(rows), rows, args.csv)
    return 0


def _run_gemm(args: argparse.Namespace) -> int:
    from coat_bench.gemm import bench_gemm, format_rows
    from coat_bench.shapes import shape_called

    for shape in [shape_called(name) for name in args.shape]:
        rows = bench_gemm(shape)
        _show(f"{shape.name}, {shape.tokens:,} tokens", format_rows(rows), rows, args.csv)
    return 0


def _run_adamw(args: argparse.Namespace) -> int:
    if args.states is not None:
        from coat_lab.moments import bench_moments, format_rows

        moments = bench_moments(args.states, args.steps, every=max(1, args.steps // 6))
        _show(f"{args.steps:,} steps", format_rows(moments), moments, args.csv)
        return 0
    from coat_bench.adamw import bench_adamw
    from coat_bench.adamw import format_rows as format_speeds

    rows = bench_adamw()
    _show(f"{rows[0].params:,} parameters", format_speeds(rows), rows, args.csv)
    return 0


def _run_step(args: argparse.Namespace) -> int:
    from coat_bench.rows import append_rows
    from coat_bench.step import StepBench, bench_step, format_rows
    from coat_vlm.distributed import joined_world

    if args.plot is not None:
        return _plot_steps(args)

    def keep(rows: "list[StepRow]") -> None:
        append_rows(args.csv, rows)
        for row in rows:
            if row.problem:
                say(f"{row.implementation}, {row.optimizer}, batch {row.batch}: {row.problem}")

    def profile(row: "StepRow", tables: str) -> None:
        at = "" if row.optimizer == "none" else f", ZeRO-{row.zero}"
        say(f"\n{row.implementation}, {row.optimizer}{at}, batch {row.batch}: {tables}\n")

    bench = StepBench(
        size=args.size,
        precisions=args.precisions,
        peers=args.peers,
        optimizers=args.optimizer,
        zero_stages=args.zero,
        batches=args.batch,
        graphs=args.graphs,
        bf16_forward_first=args.bf16_forward_first,
        accumulation=args.accumulation,
        steps=args.steps,
        warmup=args.warmup,
        attention=args.attention,
        check_plan=args.check_plan,
        on_profile=profile if args.profile else None,
        trace=args.trace,
    )
    with joined_world() as world:
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
    say(f"picture: {args.plot}")
    return 0


def _run_recipe(args: argparse.Namespace) -> int:
    from coat_bench.recipe import RecipeBench, bench_recipe, format_row
    from coat_bench.rows import append_rows
    from coat_vlm.config.load import load_recipe
    from coat_vlm.distributed import joined_world

    def keep(row: "RecipeRow") -> None:
        say(f"\n{format_row(row)}")
        append_rows(args.csv, [row])

    if args.images is not None and args.images < 0:
        raise ValueError(f"--images {args.images}: at least 0 is needed")
    bench = RecipeBench(
        recipe=load_recipe(args.recipe, args.overrides, unset_variables=True),
        changes=args.overrides,
        only_stage=args.stage,
        images=args.images,
        steps=args.steps,
        warmup=args.warmup,
        accumulation=args.accumulation,
        plan=not args.no_plan,
    )
    with joined_world() as world:
        bench_recipe(bench, world, keep)
    say("\nRandom weights, rows made once: loading data is not part of a step.")
    return 0


def _show(title: str, table: str, rows: "Sequence[Row]" = (), path: Path | None = None) -> None:
    """Print a table; add its rows to the file of ``--csv``, if there is one."""
    from coat_bench.rows import append_rows

    say(f"\n{title}\n")
    say(table)
    append_rows(path, rows)
