"""The commands and Python blocks of README, guides and ``--help``, on small weights and files.

All are parsed in every test run; those that need neither minutes, GPUs nor downloads also run in
the long one.
"""

import argparse
import importlib
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from documented import (
    COMPOSED,
    PAGES,
    PUBLISHED,
    ROOT,
    Block,
    blocks,
    make_place,
    make_reader,
    run,
    run_page,
)
from family_folders import MAKERS
from shared_run import make_once
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from coat_cli.main import build_parser, parse

NOT_RUN = re.compile(r"torchrun|deepspeed|train quickstart|data download|--measure|Qwen/")
"""Examples of ``--help`` that need minutes, several GPUs or downloads."""


def leaves(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    """The commands without subcommands, with their examples."""
    nested = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    if not nested:
        yield name, parser.description or ""
    for action in nested:
        for word, child in action.choices.items():
            yield from leaves(child, f"{name} {word}")


def examples(text: str) -> list[str]:
    """The command lines below the heading, without comments."""
    block = text.removeprefix("examples:\n").replace("\\\n", " ")
    lines = [re.sub(r"\s+# .*", "", line) for line in block.splitlines()]
    return [" ".join(line.split()) for line in lines if line.strip()]


OTHERS = [page for page in PAGES[1:] if page != COMPOSED]
EXAMPLES = {name: examples(text) for name, text in leaves(build_parser(), "coat-vlm") if text}
DOCUMENTED = [
    (f"{block.page.name}:{block.line}", command)
    for page in PAGES
    for block in blocks(page)
    if block.language == "bash"
    for command in block.commands()
] + [(name, command) for name, commands in EXAMPLES.items() for command in commands]


def test_documented_commands_parse() -> None:
    """Options and choices are those of today."""
    parsed, refused = 0, []
    for where, command in DOCUMENTED:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        for control, group in itertools.groupby(lexer, lambda word: not set(word) - set("|;&<>")):
            words = list(group)
            if control or "coat-vlm" not in words[:-1]:
                continue
            parsed += 1
            try:
                parse(words[words.index("coat-vlm") + 1 :])
            except SystemExit as stopped:
                refused += [f"{where}: {command}"] if stopped.code else []
    assert refused == []
    assert parsed > 100


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a reader works; README's commands and COMPOSED's have been run in it."""
    return make_once(tmp_path_factory, "documents", make_reader) / "reader"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_page(page: Path, reader: Path) -> None:
    run_page(page, reader)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "gemma3"])
def test_the_first_recipe_with_other_families(family: str, tmp_path: Path) -> None:
    """Images are planned, trained in packed sequences, evaluated and asked, as in README."""
    make_place(tmp_path)
    shutil.rmtree(tmp_path / PUBLISHED)
    MAKERS[family](tmp_path / PUBLISHED)
    recipe = tmp_path / "my_qwen.yaml"
    if family != "qwen3_vl":  # others limit no number of pixels
        recipe.write_text(re.sub(r"  max_pixels: .*\n", "", recipe.read_text()))
    for block in blocks(PAGES[0]):
        if "my_qwen" in block.text and block.language == "bash" and block.not_run is None:
            for command in block.commands():
                run(command, tmp_path)
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "runs/my_qwen/sft/model")
    assert saved.config.model_type == family


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, reader: Path) -> None:
    """In the order of ``coat-vlm --help``: some examples use the output of earlier ones."""
    for command in EXAMPLES[name]:
        if not NOT_RUN.search(command):
            run(command, reader)


PYTHON = [
    block
    for page in PAGES
    for block in blocks(page)
    if block.language == "python" and block.not_run is None
]


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page.stem}-{block.line}")
def test_python(block: Block, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``model`` that the page takes for granted is a Llama."""
    monkeypatch.chdir(reader)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    names = {"model": LlamaForCausalLM(config)}
    exec(compile(block.text, str(block.page), "exec"), names)
    model = names["model"]
    ids = torch.arange(8, 24)[None]  # below are special tokens
    loss = model(input_ids=ids, labels=ids).loss
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    "pages", [["commands.md", "recipe.md"], pytest.param(["models.md"], marks=pytest.mark.slow)]
)
def test_the_reference_is_not_stale(pages: list[str]) -> None:
    """The generated pages of docs/reference are what docs/make_reference.py writes."""
    command = [sys.executable, str(ROOT / "docs/make_reference.py"), "--check", *pages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_charts_are_not_stale() -> None:
    """They are what docs/make_figures.py draws from the committed rows."""
    command = [sys.executable, str(ROOT / "docs/make_figures.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_planned_memory_is_not_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bars of ``memory_8b.svg`` are what coat-vlm plans today."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    figures = importlib.import_module("make_figures")
    figures.plan_memory(tmp_path / "plans.csv")
    assert (tmp_path / "plans.csv").read_text() == figures.PLANS.read_text()
