"""Functions that all subcommands use to declare themselves and to print."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from coat_data.sample import hide_secrets

if TYPE_CHECKING:
    from coat_vlm.config import Recipe

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Handler = Callable[[argparse.Namespace], int]

PRECISIONS = ("fp32", "bf16", "fp8_linear", "coat")
"""Values of ``coat_vlm.config.Precision``, which takes longer to import than ``--help`` should."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Prints a usage line of the required arguments only; the options are listed below it."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:  # noqa: ARG002
        self._prog += " [options]"
        required = [one for one in actions if one.required or not one.option_strings]
        super().add_usage(usage, required, (), prefix)


class Parser(argparse.ArgumentParser):
    """A parser whose help begins with what the command is for."""

    def __init__(self, purpose: str, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, "allow_abbrev": False} | settings)
        self.purpose = purpose

    def format_help(self) -> str:
        """Return the purpose, usage, examples, options and notes."""
        return f"{self.purpose}\n\n{super().format_help()}"


def command(
    commands: Commands, name: str, handler: Handler, purpose: str, examples: str, notes: str = ""
) -> Parser:
    """Declare a subcommand and return its parser; ``handler`` returns the exit status.

    ``purpose`` is what a user wants to do: a clause without a period. ``examples`` are command
    lines; ``notes`` are the last lines of ``--help``.
    """
    parser = commands.add_parser(
        name,
        help=purpose,
        purpose=purpose[0].upper() + purpose[1:] + ".",
        description=f"examples:\n{examples}",
        epilog=notes,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(handler=handler)
    return parser


def stoppable(handler: Handler) -> Handler:
    """Return a handler that a signal stops at a point from which the same command continues."""

    def run(args: argparse.Namespace) -> int:
        from coat_vlm.run.signals import SIGNALS

        with SIGNALS.handle():
            return handler(args)

    return run


def at_least(least: int) -> Callable[[str], int]:
    """Return the ``type`` of an option that is a whole number and not below ``least``."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: at least {least} is needed")
        return int(text)

    return number


def check_effects(args: argparse.Namespace, without_effect: Mapping[str, str]) -> None:
    """Raise ValueError for an option that is given, with the reason why it has no effect."""
    for name, why in without_effect.items():
        if getattr(args, name) not in (None, False, []):
            raise ValueError(f"--{name.replace('_', '-')} has no effect: it {why}; remove it")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Declare the recipe and the overrides of its keys, for :func:`read_recipe`."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or a built-in recipe's name")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="change a key of the recipe, dotted"
    )
    parser.add_argument("--stage", help="run only this stage: align, pretrain, sft or dpo")


def read_recipe(args: argparse.Namespace, *, unset_variables: bool = False) -> "Recipe":
    """Load the recipe of :func:`add_recipe`; see :func:`coat_vlm.config.load.load_recipe`."""
    from coat_vlm.config.load import load_recipe

    return load_recipe(args.recipe, args.overrides, unset_variables=unset_variables)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Declare ``--precision`` and ``--max-pixels`` of a command that takes ``--model``."""
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        metavar="NAME",
        help="fp32, bf16, fp8_linear or coat; default: bf16 for a run (fp32 if trained so), else "
        "the weights' dtype",
    )
    parser.add_argument(
        "--max-pixels",
        type=at_least(1),
        metavar="N",
        help="shrink larger images (Qwen-VL, GLM-V) to N pixels",
    )


def add_launcher_rank(parser: argparse.ArgumentParser) -> None:
    """Accept DeepSpeed's ``--local_rank=N`` and ignore it: LOCAL_RANK has the same value."""
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)


def say(text: str) -> None:
    """Print from rank 0 only; a process without a launcher is rank 0."""
    if os.environ.get("RANK", "0") == "0":
        # In one write, also where output is not buffered.
        print(f"{hide_secrets(text)}\n", end="", flush=True)


def complain(text: str) -> None:
    """Print to stderr from every rank, because an error may occur on one rank only."""
    is_single = os.environ.get("WORLD_SIZE", "1") == "1"
    where = "" if is_single else f"[rank {os.environ.get('RANK')}] "
    # In one write: the thread that acknowledges signals prints, as well.
    sys.stderr.write(f"coat-vlm: {where}{hide_secrets(text)}\n")
