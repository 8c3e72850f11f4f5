"""What all subcommands share: how one is declared, and how it prints."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Handler = Callable[[argparse.Namespace], int]

PRECISIONS = ("fp32", "bf16", "fp8_linear", "coat", "coat_lean")
"""Those of ``coat_vlm.config.Precision``, which takes longer to import than ``--help`` should."""


def command(
    commands: Commands, name: str, handler: Handler, summary: str, examples: str = ""
) -> argparse.ArgumentParser:
    """Declare a subcommand.

    Args:
        commands: the parser's subcommands.
        name: its name.
        handler: called with the parsed arguments, returns the exit status.
        summary: one clause for the list of commands, without a period.
        examples: lines shown below ``--help``.

    Returns:
        The subcommand's parser, for its own arguments.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(handler=handler)
    return parser


def add_launcher_rank(parser: argparse.ArgumentParser) -> None:
    """Accept DeepSpeed's ``--local_rank=N`` and ignore it: LOCAL_RANK says the same."""
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)


def say(text: str) -> None:
    """Print from rank 0 only; a process without a launcher is rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def complain(text: str) -> None:
    """Print to stderr from every rank: an unreadable file may be seen by one rank only."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    where = "" if alone else f"[rank {os.environ.get('RANK')}] "
    print(f"coat-vlm: {where}{text}", file=sys.stderr, flush=True)
