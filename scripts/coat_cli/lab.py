"""``coat-vlm lab``: studies of precision, apart from training."""

import argparse
from pathlib import Path

from coat_cli.command import Commands, command, say


def add(commands: Commands) -> None:
    """Add the jobs of ``lab`` to the parser."""
    parser = commands.add_parser("lab", help="study what roundings cost in training")
    jobs = parser.add_subparsers(title="jobs", metavar="JOB", required=True)
    _fork(jobs)


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

# fmt: on


def _run_fork(args: argparse.Namespace) -> int:
    from coat_lab.fork import fork, format_rows

    settings = (args.text, args.size, args.variants, args.seed, args.at, args.more, args.csv)
    say(format_rows(fork(*settings)))
    return 0
