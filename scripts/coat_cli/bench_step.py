"""``coat-vlm bench step``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from coat_cli.command import PRECISIONS, Commands, command, say

if TYPE_CHECKING:
    from coat_bench.step_case import StepRow

SIZES = ("tiny", "tiny-llm", "1b", "2b", "8b", "llama-2-7b")
PEERS = ("eager", "liger", "liger_compile", "liger_torchao")
ATTENTIONS = ("default", "cudnn", "flash")
OPTIMIZERS = ("none", "adamw", "coat", "torchao_fp8", "torchao_8bit", "own")


def add_step(jobs: Commands) -> None:
    """Declare ``bench step``."""
    parser = command(
        jobs,
        "step",
        _step,
        "measure the training step of a whole model, on one GPU or several",
        """\
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
(eager), Liger's kernels, these compiled, and these with torchao's tensorwise FP8, compiled.

--optimizer none measures both passes in one process and frees the gradients between steps. Any
other goes through DeepSpeed as training does; own is the one that a recipe of the precision gets:
coat for coat and coat_lean, adamw for the rest.

Before a contender gets a speed, its loss on a sample must be within 1% of BF16's and the norm of
its gradients within a factor of 1.5; with an optimizer the loss of the repeated batch must fall.
Times are medians of whole steps, peaks are what PyTorch allocated. A batch that does not fit is
told as OOM, and no larger one is tried; with several processes the run ends there.

--profile runs one more step of each under torch's profiler and tells where its time goes: how long
the GPU worked and how long it waited for the CPU, the number of kernels, their time by kind, the
longest kernels, and what took the CPU longest. A GPU that waits needs fewer or larger launches (a
larger --batch, fewer micro-batches), not faster kernels. On a CPU only the last table is there.
--trace keeps all that the profiler saw, for ui.perfetto.dev: a large file, for no repository.

How long it takes on H200s, roughly (estimates, not measured apart): start-up less than a minute, a
contender seconds (1b) or half a minute (8b); compiled peers another minute or so.
""",
    )
    parser.add_argument("--size", choices=SIZES, default="tiny", help="the model; default tiny")
    ours = [name for name in PRECISIONS if name != "fp32"]
    parser.add_argument(
        "--precisions", nargs="*", choices=ours, default=["bf16", "coat", "coat_lean"],
        metavar="NAME", help=f"{', '.join(ours)}; default bf16 coat coat_lean",
    )  # fmt: skip
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=[], metavar="NAME",
        help=f"{', '.join(PEERS)}; default none of them",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer", nargs="+", choices=OPTIMIZERS, default=["none"], metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)}; each is measured with each model. Default none",
    )  # fmt: skip
    parser.add_argument(
        "--zero", nargs="+", type=int, choices=(0, 1, 2, 3), default=[1], metavar="STAGE",
        help="ZeRO stages, one after the other; default 1",
    )  # fmt: skip
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1], metavar="N",
        help="samples of a micro-batch on one GPU, ascending; default 1",
    )  # fmt: skip
    parser.add_argument(
        "--accumulation",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches of a step; default 1",
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute activations in the backward pass"
    )
    parser.add_argument(
        "--graphs", action="store_true",
        help="measure coat and coat_lean a second time with FP8 blocks as CUDA graphs",
    )  # fmt: skip
    parser.add_argument(
        "--bf16-forward-first", type=_blocks, metavar="N",
        help="first blocks of coat and coat_lean with forward products in BF16; default a recipe's",
    )  # fmt: skip
    parser.add_argument(
        "--attention", choices=ATTENTIONS, default="default",
        help="default (SDPA's choice; training takes flash), cudnn or flash, for all",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=5, help="measured steps; default 5")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them; default 3")
    parser.add_argument(
        "--check-plan", action="store_true",
        help="beside our peaks, what coat-vlm plan expects and how far off that is",
    )  # fmt: skip
    parser.add_argument(
        "--profile", action="store_true", help="also tell where the time of one more step goes"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="a new .json or .json.gz file for the trace of --profile; one contender, one batch",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, help="file to add the rows to, as they come")
    parser.add_argument(
        "--plot", type=Path, metavar="SVG",
        help="draw the rows of --csv and --size, tokens/s against peak GB, instead of measuring",
    )  # fmt: skip


def _blocks(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of blocks; give 0 or more")
    return int(text)


def _step(args: argparse.Namespace) -> int:
    if args.plot is not None:
        return _plot(args)
    import coat_vlm.model  # noqa: F401 - before DeepSpeed, so that torchvision imports
    from coat_bench.rows import append_rows
    from coat_bench.step import bench_step
    from coat_bench.step_case import StepBench
    from coat_bench.step_table import format_rows
    from coat_vlm.distributed import joined_world

    def keep(rows: "list[StepRow]") -> None:
        if args.csv is not None:
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
        checkpointing=args.checkpointing,
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
        say(f"\n{rows[0].model}, {world.size} x {rows[0].gpu}\n")
        say(format_rows(rows))
    return 0


def _plot(args: argparse.Namespace) -> int:
    from coat_bench.rows import read_rows
    from coat_bench.step_case import StepRow
    from coat_bench.step_plot import draw_steps
    from coat_bench.vlm_shapes import SIZES as SHAPES

    if args.csv is None:
        raise ValueError("--plot draws rows that are there; name their file with --csv")
    if args.plot.suffix != ".svg":
        raise ValueError(f"--plot {args.plot}: writes SVG; give a name that ends in .svg")
    rows = read_rows(args.csv, StepRow, "coat-vlm bench step --csv")
    draw_steps(rows, SHAPES[args.size].name, args.plot)
    say(f"picture: {args.plot}")
    return 0
