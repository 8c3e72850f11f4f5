"""``coat-vlm train``."""

import argparse

from coat_cli.command import PRECISIONS, Commands, add_launcher_rank, command, say


def add(commands: Commands) -> None:
    """Declare ``train``."""
    parser = command(
        commands,
        "train",
        _train,
        "train the stages of a recipe",
        """\
  coat-vlm train quickstart
  coat-vlm train my_recipe.yaml seed=1 stages.sft.max_steps=100 stages.sft.language.lr=1e-5
  coat-vlm train my_recipe.yaml eval_every=500 eval_samples=64    # ask questions on the way
  coat-vlm train my_recipe.yaml log_every_steps=50 log_phases=true   # where a step's time goes
  coat-vlm train my_recipe.yaml --stage sft            # on the previous stage's model
  coat-vlm train my_recipe.yaml --resume auto          # continue where the run stopped
  torchrun --nproc-per-node 8 --no-python coat-vlm train my_recipe.yaml zero_stage=2
  deepspeed --num_gpus 8 "$(command -v coat-vlm)" train my_recipe.yaml zero_stage=2
  coat-vlm train my_recipe.yaml --resume auto zero_stage=0   # saved by 8 GPUs, continued by one
""",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or a built-in recipe's name")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="change a key of the recipe, dotted"
    )
    parser.add_argument("--stage", help="train this stage only: align, pretrain or sft")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        choices=["auto"],
        help="continue from the newest whole checkpoint, if any; the number of processes, "
        "zero_stage and micro_batch_size may have changed",
    )
    start.add_argument(
        "--overwrite", action="store_true", help="delete an earlier run in the output folder first"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="the same as precision=...: fp32, bf16, or FP8 as fp8_linear, coat, coat_lean",
    )
    add_launcher_rank(parser)


def _train(args: argparse.Namespace) -> int:
    from coat_vlm.config.load import load_recipe

    overrides = list(args.overrides)
    if args.precision:
        overrides.append(f"precision={args.precision}")
    recipe = load_recipe(args.recipe, overrides)
    subsets = []
    if recipe.eval_every:
        from coat_eval import eval_subsets

        subsets = eval_subsets(recipe)
    # DeepSpeed takes seconds to import: a mistake in the recipe is told before that.
    from coat_vlm.train.loop import Stopped
    from coat_vlm.train.stages import run_recipe

    try:
        model_dir = run_recipe(
            recipe,
            resume=args.resume == "auto",
            only_stage=args.stage,
            overwrite=args.overwrite,
            subsets=subsets,
        )
    except Stopped:
        say(f"stopped by a signal after saving a checkpoint in {recipe.output_dir}")
        say("continue with the same command and --resume auto (without --overwrite)")
        raise
    say(f"model: {model_dir}")
    return 0
