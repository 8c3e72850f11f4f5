"""The ``coat-vlm`` command.

Nothing imports this module, and every command imports what it needs when it runs. User errors (a
wrong key, a broken file, a full disk) end with one readable message and exit status 2; ``--debug``
adds the traceback. Exit status 1 means that a required metric was not reached, that ``lint`` found
bad rows, that ``doctor`` found a problem, or an internal error, whose traceback is in a file
that the message names; 75 that a signal stopped the command, which the same command (train: with
``--resume auto``) continues; 130 Ctrl-C.
"""

import argparse
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from coat_cli import chat, compare, data, evaluate, export, plan, show, train
from coat_cli.command import Parser, add_launcher_rank, complain, say
from coat_data.sample import hide_secrets

PURPOSE = "Fine-tune and train vision-language models in FP8 or BF16, and evaluate them."
START = """\
Start with:
  see what runs here           coat-vlm doctor
  find problems in your data   coat-vlm data lint chat.json --media-root images
  see whether it fits a GPU    coat-vlm plan my_recipe.yaml
  train, or resume             coat-vlm train my_recipe.yaml --resume auto
  measure the trained model    coat-vlm eval --model runs/my_recipe --tasks pope \\
                                 --data benchmarks --to out/my_recipe

my_recipe.yaml names the model, the data and the training stages. Begin with
"coat-vlm recipes qwen2_5_vl > my_recipe.yaml"; "coat-vlm recipes" lists others.
"""

FAULT = 1
USER_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

_REMEDIES = {
    "^OutOfMemoryError": "lower micro_batch_size, set gradient_checkpointing: true, or raise "
    "zero_stage on several GPUs",
    "Too many open files|items of ancillary data": "raise the limit of open files (ulimit -n), or "
    "use fewer workers (num_workers)",
    "</torch_|shared memory segment": "give the container more shared memory (--shm-size=8g), or "
    "set num_workers=0",
    "start new thread|Resource temporarily unavailable": "raise the limit of processes (ulimit -u, "
    "--pids-limit), or use fewer workers (num_workers)",
    "Read-only file system|Permission denied": "change the permissions, or use another folder "
    "(output_dir, --to)",
    r"\[Errno (17|20)\]": "a file is where a folder is needed; use another one (output_dir, --to)",
    "alidation error for|Storage size calculation|decoding a JSON": "correct the configuration of "
    "the model (its config.json, or model in the recipe)",
}
"""Words of the operating system, torch and NCCL in ``CLASS: MESSAGE`` of an error -> remedy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, which the module docstring lists."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (>&-)
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    args = parse(argv)
    _configure_allocator()
    logging.getLogger("DeepSpeed").addFilter(_print_to_stderr)
    if "RANK" in os.environ:
        from coat_vlm.run.orphan_watch import die_with_launcher

        die_with_launcher()
    try:
        return args.handler(args)
    except (KeyboardInterrupt, SystemExit) as stopped:
        if argv is None:  # a second Ctrl-C must not interrupt the end of the process
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if isinstance(stopped, SystemExit):
            raise
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python's flush at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        if args.debug:
            sys.stderr.write(hide_secrets(traceback.format_exc()))
        message = _format_error(error)
        complain(f"{message}\n(--debug shows the traceback)" if message else _save_fault(error))
        return USER_ERROR if message else FAULT


def _configure_allocator() -> None:
    """Let torch's allocator extend segments of GPU memory; call it before torch is imported.

    With segments of fixed sizes a step of 8B parameters, whose tensors take 124 GB, ran out of
    memory on a GPU of 150 GB (docs/experiments/step_8b.md).
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def build_parser() -> Parser:
    """Build the parser of all commands; the parsed namespace has ``handler`` and ``debug``."""
    parser = Parser(
        PURPOSE,
        prog="coat-vlm",
        description=START,
        epilog="coat-vlm COMMAND --help explains a command with examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=_start, debug=False)
    parser.add_argument("--version", action="version", version=f"coat-vlm {version('coat-vlm')}")
    # DeepSpeed's launcher puts its argument before the command.
    add_launcher_rank(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="coat-vlm")
    for module in (train, plan, show, evaluate, compare, chat, export, data):
        module.add(commands)
    return parser


def _start(_: argparse.Namespace) -> int:
    say(f'{PURPOSE}\n\n{START}\n"coat-vlm --help" lists all commands.')
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; exit with status 2 and a message if one is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
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


def _format_error(error: Exception) -> str:
    """Return the message to the user; empty for an internal error."""
    text = str(error) or type(error).__name__
    whole = f"{type(error).__name__}: {text}"
    remedies = (f" -> {remedy}" for words, remedy in _REMEDIES.items() if re.search(words, whole))
    remedy = next(remedies, "")
    return text + remedy if remedy or isinstance(error, ValueError | OSError | MemoryError) else ""


def _save_fault(error: Exception) -> str:
    """Write the traceback to a file, and return the message that names it."""
    trace = hide_secrets("".join(traceback.format_exception(error)))
    try:
        descriptor, path = tempfile.mkstemp(".txt", "coat-vlm-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"coat-vlm {version('coat-vlm')}\n{trace}")
        where = f"with {path}, which holds the traceback"
    except OSError:
        where = f"with this traceback:\n{trace}"
    return f"internal error: {type(error).__name__}: {error}; please report it {where}"


if __name__ == "__main__":
    sys.exit(main())
