"""What a stranger does with a clone: the documented commands, the recipes, the test command."""

import argparse
import math
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from coat_cli.command import Parser
from coat_cli.main import build_parser, main, parse
from coat_vlm.config.load import list_builtin_recipes, load_recipe

ROOT = Path(__file__).resolve().parents[1]


def code_lines(page: Path) -> list[str]:
    """Lines of the page's shell blocks, with continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line]


def test_ci_runs_the_readmes_test_command():
    assert "./scripts/test" in code_lines(ROOT / "README.md")
    assert "./scripts/quickstart" in code_lines(ROOT / "README.md")
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "./scripts/test </dev/null"
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    assert workflow["jobs"]["test"]["steps"][-1] == {"run": "./scripts/test"}


def test_the_citation_has_the_version_and_license_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for key, own in {"title": "name", "version": "version", "license": "license"}.items():
        assert citation[key] == project[own]
    assert citation["authors"] == project["authors"]


DOCUMENTED = {
    words: None
    for page in [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
    for line in code_lines(page)
    if "coat-vlm " in line and not line.startswith(("conda ", "pip "))
    for words in [tuple(shlex.split(line[line.index("coat-vlm ") :], comments=True)[1:])]
}


def test_documented_commands_parse():
    """Also those that tests/e2e/test_documents.py cannot run."""
    for words in DOCUMENTED:
        command = words[: words.index(">")] if ">" in words else words
        assert callable(parse(command).handler), words


def parsers(parser: Parser) -> Iterator[Parser]:
    """Return the parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


@pytest.mark.parametrize("parser", parsers(build_parser()), ids=lambda parser: parser.prog)
def test_help_is_short_and_begins_with_the_purpose(parser: Parser, monkeypatch: pytest.MonkeyPatch):
    """At most 60 lines of a terminal with 80 columns, in which longer lines are wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
    purpose, blank, usage, *rest = parser.format_help().splitlines()
    assert (purpose, blank) == (parser.purpose, "")
    assert usage.startswith(f"usage: {parser.prog} [")
    assert 3 + sum(max(1, math.ceil(len(line) / 80)) for line in rest) <= 60


def test_the_command_alone_prints_five_commands(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    text = capsys.readouterr().out.replace("\\\n", " ")
    commands = re.findall(r"^  .*  (coat-vlm .*)$", text, flags=re.MULTILINE)
    assert [shlex.split(command)[1] for command in commands] == [
        "doctor", "data", "plan", "train", "eval",
    ]  # fmt: skip
    for command in commands:
        assert callable(parse(shlex.split(command)[1:]).handler)


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_builtin_recipes_load(name: str, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "coat_vlm" / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    for variable in re.findall(r"\$\{(\w+)\}", text):
        monkeypatch.setenv(variable, "data")
    assert load_recipe(name).name == name
    assert text.splitlines()[0].endswith("."), "coat-vlm recipes prints the first line"


def test_the_recipe_of_the_fine_tuning_guide_is_built_in():
    guide = (ROOT / "docs/guides/huggingface.md").read_text(encoding="utf-8")
    shown = guide.partition("```yaml\n# my_qwen.yaml\n")[2].partition("```")[0]
    text = (ROOT / "coat_vlm/recipes/qwen2_5_vl.yaml").read_text(encoding="utf-8")
    assert text.replace("qwen2_5_vl\n", "my_qwen\n").endswith(f"\n{shown}")
