"""Every example of every ``--help`` runs, on small weights and files, after README's commands."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import make_reader, run

from coat_cli.main import build_parser

NOT_RUN = {
    "trains for five to eight minutes": ["coat-vlm train quickstart"],
    "needs several GPUs": [
        "torchrun --nproc-per-node 8 --no-python coat-vlm train my_recipe.yaml zero_stage=2",
        "deepspeed --num_gpus 8 ...",
        "torchrun --nproc-per-node 8 --no-python coat-vlm eval ...",
    ],
    "needs a GPU": [
        "coat-vlm plan my_recipe.yaml --stage sft --measure",
        "torchrun --nproc-per-node 2 --no-python coat-vlm plan ...",
    ],
    "downloads from the Hub": [
        "coat-vlm data download llava_558k --out data",
        "coat-vlm data download pope --out benchmarks",
    ],
}
"""Reason -> the examples that no test runs; ``...`` stands for the rest of a line."""


def leaves(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    """The commands without subcommands, with the text below their arguments."""
    nested = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    if not nested:
        yield name, parser.epilog or ""
    for action in nested:
        for word, child in action.choices.items():
            yield from leaves(child, f"{name} {word}")


def examples(text: str) -> list[str]:
    """The command lines between the heading and the first blank line, without comments."""
    block = text.removeprefix("examples:\n").split("\n\n")[0].replace("\\\n", " ")
    lines = [re.sub(r"\s+# .*", "", line) for line in block.splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip()]


COMMANDS = {name: examples(text) for name, text in leaves(build_parser(), "coat-vlm") if text}


def matches(entry: str, command: str) -> bool:
    """Whether an entry of NOT_RUN names a command."""
    return command.startswith(entry[:-3]) if entry.endswith("...") else command == entry


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a reader works; README's commands have been run in it."""
    return make_reader(tmp_path_factory.mktemp("help"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", COMMANDS)
def test_examples(name: str, place: Path) -> None:
    """In the order of ``coat-vlm --help``: some examples use the output of earlier ones."""
    for command in COMMANDS[name]:
        if not any(matches(entry, command) for own in NOT_RUN.values() for entry in own):
            run(command, place)


@pytest.mark.parametrize("entry", [entry for own in NOT_RUN.values() for entry in own])
def test_an_exception_names_one_example(entry: str) -> None:
    assert sum(matches(entry, command) for own in COMMANDS.values() for command in own) == 1
