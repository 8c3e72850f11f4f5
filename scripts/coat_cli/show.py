"""``coat-vlm recipes``, ``report`` and ``doctor``: the commands that only look."""

import argparse
from importlib.resources import files
from pathlib import Path

from coat_cli.command import Commands, command, say


def add(commands: Commands) -> None:
    """Declare ``recipes``, ``report`` and ``doctor``."""
    parser = command(
        commands,
        "recipes",
        _recipes,
        "list the built-in recipes, or print one to start from",
        """\
  coat-vlm recipes
  coat-vlm recipes quickstart > my_recipe.yaml
""",
    )
    parser.add_argument("name", nargs="?", help="print this recipe's YAML")
    parser = command(
        commands,
        "report",
        _report,
        "write one self-contained HTML file about a run",
        "  coat-vlm report runs/quickstart\n",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="run folder")
    command(
        commands, "doctor", _doctor, "tell what runs on this machine, and what to do for the rest"
    )


def _recipes(args: argparse.Namespace) -> int:
    from coat_vlm.config.load import builtin_recipes

    names = builtin_recipes()
    if args.name is None:
        for name in names:
            say(f"{name:<16} {_text(name).splitlines()[0].lstrip('# ')}")
        return 0
    if args.name not in names:
        raise ValueError(f"no built-in recipe {args.name!r}; there are: {', '.join(names)}")
    say(_text(args.name).rstrip())
    return 0


def _text(recipe: str) -> str:
    return (files("coat_vlm") / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")


def _report(args: argparse.Namespace) -> int:
    from coat_vlm.report import write_report

    say(f"report: {write_report(args.run).resolve()}")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from coat_vlm.doctor import run_doctor

    return run_doctor()
