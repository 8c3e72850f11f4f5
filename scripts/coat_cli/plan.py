"""``coat-vlm plan``."""

import argparse
import os

from coat_cli.command import Commands, add_recipe, at_least, command, read_recipe, say

DEFAULT_GPU_MEMORY_GB = 80.0


def add(commands: Commands) -> None:
    """Declare ``plan``."""
    parser = command(
        commands,
        "plan",
        _plan,
        "find out whether a recipe fits your GPUs, and what to change if not",
        """\
  coat-vlm plan quickstart
  coat-vlm plan my_recipe.yaml --gpus 8 --gpu-memory 141           # eight H200s
  coat-vlm plan my_recipe.yaml --gpus 8 precision=coat fp8.recompute_qkv=true
  coat-vlm plan my_recipe.yaml --gpus 4 --images 5 --stage sft --verbose
  coat-vlm plan my_recipe.yaml --stage sft --measure               # on a GPU
  torchrun --nproc-per-node 2 --no-python coat-vlm plan my_recipe.yaml --measure zero_stage=2
""",
        """\
The plan needs no GPU. It runs the model once on shapes only (for 8B parameters
in seconds to minutes), and assumes full sequences of model.max_length tokens,
all supervised except the image tokens.

--measure also trains a few steps with random weights and data on the GPUs of
this launch, and prints speed and peak memory next to the plan's. init_from must
be a folder (its weights are not read) or null. A step has at most two
micro-batches per GPU, the same in every step, and loads no data.
""",
    )
    add_recipe(parser)
    add = parser.add_argument
    add("--gpus", type=at_least(1), metavar="N", help="number of GPUs; default: torchrun's, else 1")
    add(
        "--gpu-memory",
        type=_positive_number,
        metavar="GB",
        help="nominal memory of each GPU; default: this machine's GPU, else "
        f"{DEFAULT_GPU_MEMORY_GB:.0f}",
    )
    add(
        "--images",
        type=at_least(0),
        metavar="N",
        help="image tiles and video frames per sequence; default: counted in the stage's data, "
        "else 1",
    )
    add("--verbose", action="store_true", help="also print a table of the ZeRO stages")
    add("--measure", action="store_true", help="also measure a few training steps")


def _plan(args: argparse.Namespace) -> int:
    recipe = read_recipe(args, unset_variables=True)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = args.gpus or processes
    if args.measure and ranks != processes:
        raise ValueError(
            f"--gpus {ranks} --measure: there are {processes} processes; start {ranks} with "
            "torchrun, or leave out --gpus"
        )
    from coat_vlm.plan import format_plan, plan_recipe

    plans = plan_recipe(
        recipe,
        ranks=ranks,
        gpu_bytes=1e9 * (args.gpu_memory or _local_gpu_gb()),
        images=args.images,
        only_stage=args.stage,
    )
    say(format_plan(plans, verbose=args.verbose))
    if args.measure:
        from coat_vlm.distributed import join_world
        from coat_vlm.plan.measure import measure_stage

        with join_world() as world:
            for plan in plans:
                say(f"\n{measure_stage(recipe, plan, world)}")
    return 0


def _local_gpu_gb() -> float:
    import torch

    from coat_vlm.plan.stage import SOLD

    if not torch.cuda.is_available():
        return DEFAULT_GPU_MEMORY_GB
    return SOLD * torch.cuda.get_device_properties(0).total_memory / 1e9


def _positive_number(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text}: more than 0 is needed")
    return number
