"""``coat-vlm bench recipe``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from coat_cli.command import Commands, command, say

if TYPE_CHECKING:
    from coat_bench.recipe_case import RecipeRow


def add_recipe(jobs: Commands) -> None:
    """Declare ``bench recipe``."""
    parser = command(
        jobs,
        "recipe",
        _recipe,
        "measure the training step of a recipe's stages, without its weights and data",
        """\
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
one sequence) with --images random images, tiles or frames each. All text is trained but a row's
first token, the costliest case; real rows are shorter, and in most of them the answers alone are
trained. A step is one micro-batch of micro_batch_size rows on each GPU, the same in every step:
training adds up more of them between two steps of the optimizer (--accumulation), which then
costs less. Rows are made once: reading, decoding and tokenizing data are no part of a step here
(in training, "wait" in the log line says how long a step waited for them).

The table: ms is the median of whole steps of the slowest GPU; tokens are all of the rows, and
vision tokens those of them that hold image features, as in training's log line; TFLOP/s are the
model's, as there; peak GB is the most that PyTorch allocated on one GPU in the measured steps,
beside what coat-vlm plan expects ("off": plan against peak).

A stage that does not fit is told as OOM, and the next one goes on; with several processes the run
ends there. The plan of an 8B model with long rows takes the CPU minutes: --no-plan leaves it out.
""",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or a built-in recipe's name")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="change a key of the recipe, dotted"
    )
    parser.add_argument("--stage", help="measure this stage only: align, pretrain or sft")
    parser.add_argument(
        "--images", type=int, metavar="N",
        help="tiles of images and frames of a row; default: counted in the stage's data, else 1",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=5, help="measured steps; default 5")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them; default 3")
    parser.add_argument(
        "--accumulation", type=int, default=1, metavar="N",
        help="micro-batches of a step on each GPU; default 1",
    )  # fmt: skip
    parser.add_argument(
        "--no-plan", action="store_true", help="leave out what coat-vlm plan expects"
    )
    parser.add_argument("--csv", type=Path, help="file to add the rows to, as they come")


def _recipe(args: argparse.Namespace) -> int:
    import coat_vlm.model  # noqa: F401 - before DeepSpeed, so that torchvision imports
    from coat_bench.recipe import bench_recipe
    from coat_bench.recipe_case import RecipeBench, format_row
    from coat_bench.rows import append_rows
    from coat_vlm.config.load import load_recipe
    from coat_vlm.distributed import joined_world

    def keep(row: "RecipeRow") -> None:
        say(f"\n{format_row(row)}")
        if args.csv is not None:
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
