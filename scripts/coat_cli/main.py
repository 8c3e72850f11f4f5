"""The ``coat-vlm`` command.

Nothing imports this module, and every command imports what it needs when it runs. User errors (a
wrong key, a broken file, a full disk) end with one readable message and exit status 2; ``--debug``
adds the traceback. Exit status 1 means that a required metric was not reached, that ``lint`` found
bad rows or that ``doctor`` found a problem; 75 that a signal stopped the command, which the
same command (train: with ``--resume auto``) continues; 130 Ctrl-C.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

from coat_cli import chat, compare, data, evaluate, export, plan, show, train
from coat_cli.command import add_launcher_rank, complain
from coat_cli.removed import find_removed
from coat_data.sample import hide_secrets

USER_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, which the module docstring lists."""
    args = parse(argv)
    _configure_allocator()
    logging.getLogger("DeepSpeed").addFilter(_print_to_stderr)
    if "RANK" in os.environ:
        from coat_vlm.run.orphan_watch import die_with_launcher

        die_with_launcher()
    try:
        return args.handler(args)
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python's flush at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        if args.debug:
            sys.stderr.write(hide_secrets(traceback.format_exc()))
        complain(f"{_format_error(error)}\n(--debug shows the traceback)")
        return USER_ERROR


def _configure_allocator() -> None:
    """Let torch's allocator extend segments of GPU memory; call it before torch is imported.

    With segments of fixed sizes a step of 8B parameters, whose tensors take 124 GB, ran out of
    memory on a GPU of 150 GB (docs/experiments/step_8b.md).
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; the parsed namespace has ``handler`` and ``debug``."""
    parser = argparse.ArgumentParser(
        prog="coat-vlm",
        description="Train VILA-style vision-language models and evaluate them.",
        epilog="coat-vlm COMMAND --help explains a command with examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"coat-vlm {version('coat-vlm')}")
    # DeepSpeed's launcher puts its argument before the command.
    add_launcher_rank(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (train, plan, show, evaluate, compare, chat, export, data):
        module.add(commands)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; exit with status 2 and a message if one is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if replacement := find_removed(words):
        parser.exit(USER_ERROR, f"coat-vlm: {replacement}\n")
    args, rest = parser.parse_known_args(words)
    # argparse takes key=value arguments only before the first option; later ones are in ``rest``.
    if "overrides" in args and all("=" in word and not word.startswith("-") for word in rest):
        args.overrides = [*args.overrides, *rest]
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _print_to_stderr(record: logging.LogRecord) -> bool:
    """Print what DeepSpeed logs; its own handler writes to standard output, among the results."""
    sys.stderr.write(f"DeepSpeed: {record.levelname.lower()}: {record.getMessage()}\n")
    return False


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether torch ran out of memory, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _format_error(error: Exception) -> str:
    if _is_out_of_memory(error):
        return (
            f"out of memory: {error}\nLower micro_batch_size, set gradient_checkpointing: true, or "
            "raise zero_stage on several GPUs."
        )
    return str(error) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
