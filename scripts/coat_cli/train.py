"""``coat-vlm train``."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from coat_cli.command import Commands, add_launcher_rank, add_recipe, command, read_recipe, say

if TYPE_CHECKING:
    from coat_vlm.config import Recipe


def add(commands: Commands) -> None:
    """Declare ``train``."""
    parser = command(
        commands,
        "train",
        _train,
        "train or fine-tune a model",
        """\
  coat-vlm train quickstart
  coat-vlm train my_recipe.yaml --stage align output_dir=runs/seed1 seed=1
  coat-vlm train my_recipe.yaml --stage sft output_dir=runs/seed1 seed=1   # on align's model
  coat-vlm train my_recipe.yaml --overwrite eval_every=500 eval_samples=64
  coat-vlm train my_recipe.yaml --resume auto          # resume an interrupted run
  torchrun --nproc-per-node 8 --no-python coat-vlm train my_recipe.yaml zero_stage=2
  deepspeed --num_gpus 8 "$(command -v coat-vlm)" train my_recipe.yaml zero_stage=2
  coat-vlm train my_recipe.yaml --resume auto zero_stage=0   # on one GPU, saved on 8
""",
        """\
Before it loads a model, the command checks the recipe, the files and sixteen
rows of every source, and lists all problems with what to do (exit status 2).
eval_every=N answers questions of the evaluation sets every N steps.
""",
    )
    add_recipe(parser)
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        choices=["auto"],
        help="continue from the newest complete checkpoint, if there is one; the number of GPUs, "
        "learning rates and other recipe keys may change",
    )
    start.add_argument(
        "--overwrite", action="store_true", help="delete an earlier run in the output folder"
    )
    parser.add_argument(
        "--allow-changed-data",
        action="store_true",
        help="with --resume: continue with other data, or other recipe keys that change the "
        "samples or their order; the change is recorded",
    )
    parser.add_argument(
        "--status-file",
        type=Path,
        metavar="FILE",
        help="write the exit status to FILE when a signal stops training (75; 130 for Ctrl-C); "
        "torchrun always exits with 1",
    )
    add_launcher_rank(parser)


def _train(args: argparse.Namespace) -> int:
    from coat_vlm.run.signals import SIGNALS

    with SIGNALS.handle():
        try:
            return _run(args)
        except SystemExit as stopped:
            say("a signal stopped training; no finished step is lost")
            say("continue with the same command and --resume auto (without --overwrite)")
            if args.status_file is not None and os.environ.get("LOCAL_RANK", "0") == "0":
                args.status_file.write_text(f"{stopped.code}\n", encoding="ascii")
            raise


def _choose_settings(recipe: "Recipe", args: argparse.Namespace) -> "Recipe":
    """Choose settings that fit into memory, or take the settings of the resumed run."""
    from coat_vlm.config.load import load_run_recipe
    from coat_vlm.plan import adopt_choices, fit_recipe

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    saved = Path(recipe.output_dir) / "recipe.yaml"
    if saved.is_file() and not args.overwrite:
        adopted = adopt_choices(recipe, load_run_recipe(saved), ranks=ranks)
        if adopted is not None:
            lone = "" if adopted.zero_stage == recipe.zero_stage else ", and zero_stage=0"
            say(f"memory: the settings of {saved}{lone}")
            return adopted
    chosen, sentence = fit_recipe(recipe, ranks=ranks)
    say(sentence)
    return chosen


def _run(args: argparse.Namespace) -> int:
    recipe = read_recipe(args)
    # DeepSpeed takes seconds to import. Problems are reported before that, all of them.
    from coat_data.saved_files import check_outputs
    from coat_vlm.train.checks import check_recipe

    sources = [own for stage in recipe.stages.values() for own in (*stage.data, *stage.val_data)]
    check_outputs([args.status_file], [args.recipe, *(own.path for own in sources)])
    findings = check_recipe(
        recipe,
        only_stage=args.stage,
        resume=args.resume == "auto",
        overwrite=args.overwrite,
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
    )
    subsets = []
    if recipe.eval_every:
        from coat_eval.runner import make_eval_subsets

        with findings.collect("eval_sets"):
            subsets = make_eval_subsets(recipe)
    findings.raise_problems()
    for note in findings.notes:
        say(f"NOTE {note}")
    if recipe.memory is not None:
        recipe = _choose_settings(recipe, args)
    from coat_vlm.train.run import run_recipe

    model_dir = run_recipe(
        recipe,
        resume=args.resume == "auto",
        only_stage=args.stage,
        overwrite=args.overwrite,
        allow_changed_data=args.allow_changed_data,
        subsets=subsets,
    )
    say(f"model: {model_dir}")
    return 0
