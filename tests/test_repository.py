"""What a stranger does with a clone: the documented commands, the recipes, the test command."""

import re
import shlex
from pathlib import Path

import pytest

from coat_cli.main import build_parser, parse
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


def test_every_command_has_help_and_an_example(capsys: pytest.CaptureFixture[str]):
    for name in sorted({words[0] for words in DOCUMENTED}):
        with pytest.raises(SystemExit) as exit_info:
            build_parser().parse_args([name, "--help"])
        assert exit_info.value.code == 0
        assert f"usage: coat-vlm {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_builtin_recipes_load(name: str, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "coat_vlm" / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    for variable in re.findall(r"\$\{(\w+)\}", text):
        monkeypatch.setenv(variable, "data")
    assert load_recipe(name).name == name
