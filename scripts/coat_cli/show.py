"""``coat-vlm recipes``, ``report``, ``status`` and ``doctor``: the commands that only print."""

import argparse
from importlib.resources import files
from pathlib import Path

from coat_cli.command import Commands, command, say


def add(commands: Commands) -> None:
    """Declare ``recipes``, ``report``, ``status`` and ``doctor``."""
    parser = command(
        commands,
        "recipes",
        _recipes,
        "get a recipe to start from",
        """\
  coat-vlm recipes                                     # list the built-in ones
  coat-vlm recipes qwen2_5_vl > my_finetuning.yaml
""",
    )
    parser.add_argument("name", nargs="?", help="print this recipe's YAML")
    parser = command(
        commands,
        "report",
        _report,
        "look at a run on one HTML page: curves, data, results, warnings",
        "  coat-vlm report runs/my_vlm\n",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="run folder")
    parser = command(
        commands,
        "status",
        _status,
        "see how far a run is, and what its processes do or did last",
        """\
  coat-vlm status runs/my_vlm
""",
        """\
exit status: 1 if a process of the run does not respond, else 0
""",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="run folder")
    command(
        commands,
        "doctor",
        _doctor,
        "see what runs on this machine, and how to enable the rest",
        "  coat-vlm doctor\n",
    )


def _recipes(args: argparse.Namespace) -> int:
    from coat_vlm.config.load import list_builtin_recipes

    names = list_builtin_recipes()
    if args.name is None:
        for name in names:
            say(f"{name:<16} {_read_text(name).splitlines()[0].lstrip('# ')}")
        return 0
    if args.name not in names:
        raise ValueError(f"no built-in recipe {args.name!r}; available: {', '.join(names)}")
    say(_read_text(args.name).rstrip())
    return 0


def _read_text(recipe: str) -> str:
    return (files("coat_vlm") / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")


def _report(args: argparse.Namespace) -> int:
    from coat_vlm.report import write_report

    say(f"report: {write_report(args.run, *_plan_memory(args.run)).resolve()}")
    return 0


def _plan_memory(folder: Path) -> tuple[dict[str, float], str]:
    """Plan the peak memory of the stages that ran on GPUs; return also why there is no plan."""
    from coat_vlm.report.run_folder import read_run_folder

    ranks = {stage.name: stage.ranks for stage in read_run_folder(folder).stages if stage.on_gpu}
    if not ranks:
        return {}, "not computed, as the run was not on a GPU"
    from coat_vlm.config.load import load_run_recipe
    from coat_vlm.plan import plan_recipe

    say("planning the memory of a GPU, to compare it with the measured one")
    planned: dict[str, float] = {}
    try:
        recipe = load_run_recipe(folder / "recipe.yaml", unset_variables=True)
        for name, number in ranks.items():
            (plan,) = plan_recipe(recipe, ranks=number, gpu_bytes=0.0, only_stage=name)
            planned[name] = plan.own_memory.peak
    except (ValueError, OSError) as error:
        return planned, f"not computed: {error}"
    return planned, ""


def _status(args: argparse.Namespace) -> int:
    from coat_vlm.report.run_folder import describe_run

    text, responding = describe_run(args.run)
    say(text)
    return 0 if responding else 1


def _doctor(_: argparse.Namespace) -> int:
    from coat_vlm.doctor import run_doctor

    return run_doctor()
