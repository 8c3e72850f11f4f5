"""``coat-vlm lab``: studies of precision, apart from training."""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from coat_cli.command import Commands, at_least, command, say


def add(commands: Commands) -> None:
    """Add the jobs of ``lab`` to the parser."""
    parser = commands.add_parser("lab", help="study what roundings cost in training")
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    for job in (_fork, _single_pass, _formats, _stability, _states):
        job(jobs)


# fmt: off
def _fork(jobs: Commands) -> None:
    summary = "measure what roundings cost: from one BF16 state, the same next steps under each"
    add = command(jobs, "fork", _run_fork, summary, """\
  coat-vlm lab fork --text wiki.txt --size tiny --at 10 --more 10     # on a CPU
  coat-vlm lab fork --text wiki.txt --variants xw dvga xw@@0-1
  coat-vlm lab fork --text wiki.txt --variants xw@gate+up+down coat coat_lean

A variant is OPERANDS@PARTS@FIRST-LAST (several are joined with /) or a precision of bench decoder:
  OPERANDS    letters: x, w (forward GEMM: input, weight), d, v (grad-input GEMM: gradient, weight),
              g, a (grad-weight GEMM: gradient, input)
  PARTS       q, k, v, o, gate, up, down, joined with +; default all
  FIRST-LAST  blocks, counted from 0; default all
The first row is always a variant without rounding; percentages are differences from it. The last
column is the relative error of the blocks' weight gradients, against FP32, at the fork.
""").add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 texts")
    add("--variants", nargs="+", default=["xw"], help="see below; default xw")
    add("--size", choices=("30m", "100m", "tiny"), default="100m", help="default 100m")
    add("--at", type=int, default=250, help="steps in BF16; default 250")
    add("--more", type=int, default=40, help="further steps, 10 at least; default 40")
    add("--seed", type=int, default=0, help="seed of initial weights and batches; default 0")
    add("--csv", type=Path, help="append the rows to this file, as the next process of it")


def _single_pass(jobs: Commands) -> None:
    summary = "compare precisions on a decoder that reads every text once"
    add = command(jobs, "single-pass", _run_single_pass, summary, """\
  coat-vlm lab single-pass --text train.jsonl.xz --held-out validation.jsonl.xz --out runs/once
  coat-vlm lab single-pass --text train.jsonl.xz --held-out validation.jsonl.xz --size 100m \\
      --precisions bf16 coat coat_lean --seeds 0 1 2 --jobs 3 --questions copa.jsonl piqa.jsonl \\
      --out runs/once

sizes (a step reads 8,192 tokens, from 100m on 16,384):
  30m      27.3M parameters,  8 layers
  100m     99.5M parameters, 12 layers
  350m    348.2M parameters, 24 layers

Texts are rows with a field text, and a field source for losses by source: JSON lines or Parquet,
also compressed. A tokenizer of 4,096 tokens (from 100m on 8,192) is trained on them. Questions have
llm-foundry's layouts: query, choices, gold; context_options, continuation, gold; or context and
continuation. The same command continues with the runs that DIR does not contain.
""").add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="training documents")
    add("--held-out", type=Path, nargs="+", required=True, metavar="FILE", help="other documents")
    add("--questions", type=Path, nargs="*", default=[], metavar="FILE",
        help="questions whose accuracy is reported, one name per file")
    add("--size", choices=("30m", "100m", "350m"), default="30m", help="default 30m")
    add("--precisions", nargs="+", metavar="NAME", default=["bf16", "coat"],
        help="as for bench decoder; the others are compared with the first; default bf16 coat")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N",
        help="seeds of initial weights and of the order of the rows; default 0")
    add("--steps", type=int, default=0, help="fewer steps than the whole text")
    add("--lr", type=float, help="peak learning rate; default: depends on --size")
    add("--jobs", type=int, default=1, help="runs at the same time, on all GPUs in turn; default 1")
    add("--out", type=Path, required=True, metavar="DIR",
        help="folder for the tokens, single_pass.csv (losses) and single_pass_results.csv")


def _formats(jobs: Commands) -> None:
    summary = "measure quantization noise of number formats, and models converted to them"
    add = command(jobs, "formats", _run_formats, summary, """\
  coat-vlm lab formats --formats int8 e4m3 e3m4 e5m2 --scales tensor group128 group128:mse
  coat-vlm lab formats --runs runs/my_vlm --formats int8 e4m3 --scales token tensor:static
  coat-vlm lab formats --runs runs/my_vlm runs/other --data --formats int8 --scales channel --eval

Formats: eXmY floats (e4m3 and the formats below 8 bits by OCP's rules, others with IEEE's
infinities; a suffix fn or ieee chooses) and intN. Scales: none, tensor, channel (per output channel
of a weight; one for an input), token (also one per row of an input) or groupN (along a row), then
:mse for the range with the smallest error and :static for input scales of another batch. Data:
normal, tN (Student's t with N degrees of freedom), outliers (0.1% of normal values times 30).

Of a run's last stage the table has the SQNR of all linear layers' weights, inputs and gradients of
the outputs, and of moments that its newest checkpoint has in FP32 (means over layers, in dB); and
the losses of the model with weights and inputs of all linear layers but the output layer converted.
Two runs, one trained in BF16 and one in FP8, show which of them loses less in INT8.
""").add_argument
    add("--formats", nargs="+", default=["int8", "e3m4", "e4m3", "e5m2"], metavar="FORMAT",
        help="default int8 e3m4 e4m3 e5m2")
    add("--scales", nargs="+", default=["tensor"], metavar="SCALES", help="default tensor")
    add("--data", nargs="*", default=["normal", "t4"], metavar="DATA",
        help="distributions; default normal t4")
    add("--runs", type=Path, nargs="+", default=[], metavar="RUN", help="finished run folders")
    add("--batches", type=at_least(1), metavar="N",
        help="micro-batches of each loss of a run; default 8")
    add("--eval", action="store_true", help="also answer eval_samples of each of a run's eval_sets")
    add("--csv", type=Path, help="append the rows to this file")
    add("--plot", type=Path, metavar="SVG", help="draw the values")


def _stability(jobs: Commands) -> None:
    summary = "measure which runs of a small decoder diverge in reduced precision"
    add = command(jobs, "stability", _run_stability, summary, """\
  coat-vlm lab stability --text wiki.txt --size tiny --steps 20 --variants bf16 e8m3 --out sweep
  coat-vlm lab stability --text wiki.txt --variants bf16 coat coat_lean e8m5 e8m3 e5m7 \\
      --lrs 1e-3 3e-3 1e-2 --seeds 0 1 2 --jobs 4 --out runs/stability
  coat-vlm lab stability --text wiki.txt --variants e4m3,tensor:xw e8m3:xw@@0-1 --out sweep

A variant is a precision of bench decoder, or FORMAT[,SCALES][:OPERANDS@PARTS@FIRST-LAST]: formats
and scales (by default none) as in lab formats, the rest as in lab fork (by default all operands of
all linear layers of the blocks). The optimizer has FP32 states but in coat and coat_lean.

A run counts as diverged if a loss is not finite, if the last 20 losses are 0.25 nats above an
earlier 20, or not below the entropy of the token frequencies. Sharpness: the relative increase, in
percent, of the loss when every logit z moves by up to 0.001 (|z| + 1) (Keskar et al.).

OUT has one file per run, stability.csv and stability.svg. The same command continues a sweep, and
more variants, learning rates or seeds may be added.
""").add_argument
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 texts")
    add("--variants", nargs="+", default=["bf16", "coat"], metavar="VARIANT",
        help="default bf16 coat")
    add("--lrs", type=float, nargs="+", default=[1e-3], metavar="LR",
        help="peak learning rates; default 1e-3")
    add("--seeds", type=int, nargs="+", default=[0], help="default 0")
    add("--size", choices=("30m", "100m", "tiny"), default="30m", help="default 30m")
    add("--steps", type=int, help="steps of a run; default: those of the size")
    add("--jobs", type=int, default=1, help="runs at the same time, on all GPUs in turn; default 1")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the sweep")


def _states(jobs: Commands) -> None:
    summary = "compare 8-bit rules for AdamW's moments on generated gradients and a small task"
    add = command(jobs, "states", _run_states, summary, """\
  coat-vlm lab states --csv states.csv

On a CPU, minutes. Errors are the RMS of differences of m / sqrt(v) from FP32 moments. For gradients
of a real training run: coat-vlm bench adamw --states TEXT.
""").add_argument
    add("--steps", type=int, default=1000, help="steps of generated gradients; default 1000")
    add("--csv", type=Path, help="append the rows to this file")

# fmt: on


def _run_fork(args: argparse.Namespace) -> int:
    from coat_lab.fork import fork, format_rows

    settings = (args.text, args.size, args.variants, args.seed, args.at, args.more, args.csv)
    say(format_rows(fork(*settings)))
    return 0


def _run_single_pass(args: argparse.Namespace) -> int:
    from coat_lab.single_pass import SIZES, SinglePass, train_all

    bench = replace(SIZES[args.size], steps=args.steps)
    if args.lr is not None:
        bench = replace(bench, lr=args.lr)
    for name, value in {"--steps": args.steps + 1, "--jobs": args.jobs, "--lr": bench.lr}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: must be positive and finite")
    paths = tuple(args.text), tuple(args.held_out), tuple(args.questions)
    setup = SinglePass(training=paths[0], held_out=paths[1], questions=paths[2], bench=bench)
    for line in train_all(setup, args.precisions, args.seeds, args.jobs, args.out):
        say(line)
    return 0


def _run_formats(args: argparse.Namespace) -> int:
    from coat_bench.rows import append_rows
    from coat_lab.formats_study import draw_rows, format_rows, study_formats

    if not (args.data or args.runs):
        raise ValueError("nothing to measure: give --data normal t4, --runs RUN, or both")
    if args.runs == [] and args.eval:
        raise ValueError("--eval answers a run's evaluation sets; give --runs RUN")
    if args.runs == [] and args.batches is not None:
        raise ValueError("--batches is a number of a run's micro-batches; give --runs RUN")
    study = study_formats(
        args.formats,
        args.scales,
        args.data,
        args.runs,
        num_batches=args.batches or 8,
        evaluate=args.eval,
    )
    rows = list(study)
    append_rows(args.csv, rows)
    say(format_rows(rows))
    if args.plot is not None:
        draw_rows(rows, args.plot)
        say(f"plot: {args.plot}")
    return 0


def _run_stability(args: argparse.Namespace) -> int:
    from coat_lab.fork import SIZES
    from coat_lab.stability import format_rows, sweep

    bench = SIZES[args.size]
    bench = replace(bench, steps=bench.steps if args.steps is None else args.steps)
    settings = (args.text, bench, args.variants, args.lrs, args.seeds, args.out, args.jobs)
    say(format_rows(sweep(*settings)))
    say(f"\nruns: {args.out / 'stability.csv'}, {args.out / 'stability.svg'}")
    return 0


def _run_states(args: argparse.Namespace) -> int:
    from coat_bench.rows import append_rows
    from coat_lab.states import format_rows, study_states

    rows = study_states(args.steps)
    append_rows(args.csv, rows)
    say(format_rows(rows))
    return 0
