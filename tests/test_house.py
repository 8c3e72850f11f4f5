"""The house rules that no other tool checks: sizes, rooms, words, docstrings, and the documents."""

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from coat_cli.main import build_parser, parse
from coat_vlm.config.load import list_builtin_recipes, load_recipe

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "coat_vlm",
    "kernels/coat_kernels",
    "data/coat_data",
    "data/coat_datasets",
    "eval/coat_eval",
    "scripts/coat_bench",
    "scripts/coat_cli",
    "scripts/coat_lab",
)
ROOMS = ("kernels", "data", "eval", "scripts", "tests")
NOT_OURS = {".git", ".cache", ".venv", ".venv-lowest", "runs", "build", "dist"}


def our_files() -> list[Path]:
    """What git has or would add; without git, everything outside of NOT_OURS."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        paths = [p for p in ROOT.rglob("*") if not NOT_OURS & set(p.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


FILES = our_files()
SOURCES = [path for path in FILES if path.suffix == ".py"]


def test_the_files_were_found():
    assert ROOT / "coat_vlm" / "config" / "recipe.py" in SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_python_file_passes_700_lines(path: Path):
    """A file is as long as its subject; longer than this, it has two."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 700


def test_the_makefile_stays_short():
    assert len((ROOT / "Makefile").read_text().splitlines()) <= 40


@pytest.mark.parametrize("room", ROOMS)
def test_room_folders_are_not_packages(room: str):
    assert not (ROOT / room / "__init__.py").exists()


def test_only_ascii():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in FILES
        if path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".jinja", ""}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if not line.isascii()
    ]
    assert wrong == []


# Assembled from pieces so that this file does not contain what it looks for.
FORBIDDEN = re.compile(
    "|".join(
        [
            "/" + "work/",
            "/" + "root/",
            "/" + "home/[a-z]",
            r"\.\./" + "shared",
            "FIX" + "ME",
            "XX" + "X",
            "TO" + r"DO(?!\()",
            r"breakpoint" + r"\(",
            r"set_" + r"trace\(",
            "make_" + "block_ptr",
            "^<{7} |^>{7} ",  # of a merge
        ]
    )
)


def test_no_forbidden_words():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if path.name not in {"LICENSE", ".pre-commit-config.yaml", "CONTRIBUTING.md"}
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="ignore").splitlines(), start=1
        )
        if FORBIDDEN.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "path",
    ["see /" + "work/x", "TO" + "DO: later", "break" + "point()", "<" * 7 + " HEAD"],
    ids=["path", "todo", "stop", "merge"],
)
def test_the_forbidden_words_are_recognised(path: str):
    assert FORBIDDEN.search(path)


def undocumented(tree: ast.AST, name: str) -> list[str]:
    """Public definitions without a docstring, nested classes and methods included."""
    missing = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") or _documented_elsewhere(node):
                continue
            if ast.get_docstring(node) is None:
                missing.append(f"{name}.{node.name}")
            if isinstance(node, ast.ClassDef):
                missing += undocumented(node, f"{name}.{node.name}")
    return missing


def _documented_elsewhere(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    setter = any(decorator.endswith(".setter") for decorator in decorators)
    return setter or bool(decorators & {"override", "overload"})


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if str(path.relative_to(ROOT)).startswith(PACKAGES)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_public_names_have_docstrings(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.name != "__init__.py" or tree.body:
        assert ast.get_docstring(tree), f"{path} has no module docstring"
    assert undocumented(tree, path.stem) == []


def test_a_missing_docstring_is_found():
    assert undocumented(ast.parse("class A:\n    'doc'\n    def b(self): pass"), "m") == ["m.A.b"]


def code_lines(page: Path) -> list[str]:
    """Lines of the page's shell blocks, with continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line]


@pytest.mark.parametrize("script", ["scripts/quickstart", "scripts/test", ".ci/run"])
def test_commands_are_executable(script: str):
    assert os.access(ROOT / script, os.X_OK)
    assert (ROOT / script).read_text().startswith("#!/usr/bin/env bash\n")


def test_ci_runs_the_readmes_test_command():
    assert "./scripts/test" in code_lines(ROOT / "README.md")
    assert "./scripts/quickstart" in code_lines(ROOT / "README.md")
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "./scripts/test </dev/null"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
DOCUMENTED = {
    words: None
    for page in PAGES
    for line in code_lines(page)
    if "coat-vlm " in line and not line.startswith(("conda ", "pip "))
    for words in [tuple(shlex.split(line[line.index("coat-vlm ") :], comments=True)[1:])]
}


def test_readme_and_guides_show_every_command():
    shown = {words[0] for words in DOCUMENTED}
    running = {"train", "plan", "export", "bench", "recipes", "data", "doctor"}
    answering = {"eval", "eval-text", "score", "compare", "generate", "chat", "report"}
    assert shown == {*running, *answering}


@pytest.mark.parametrize("words", DOCUMENTED, ids=" ".join)
def test_documented_commands_parse(words: tuple[str, ...]):
    """Also those that tests/e2e/test_documents.py cannot run."""
    command = words[: words.index(">")] if ">" in words else words
    assert callable(parse(command).handler)


@pytest.mark.parametrize("words", sorted({words[:1] for words in DOCUMENTED}), ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        build_parser().parse_args([*words, "--help"])
    assert exit_info.value.code == 0
    assert "usage: coat-vlm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "most"),
    [
        *(("README.md", 150), ("CONTRIBUTING.md", 120)),
        *(("docs/design.md", 150), ("docs/results.md", 150)),
        *((f"docs/guides/{page.name}", 200) for page in PAGES[1:]),
    ],
)
def test_documents_keep_their_lengths(page: str, most: int):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_links_of_the_documents_lead_somewhere():
    for document in [path for path in FILES if path.suffix == ".md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_paths_of_the_table_of_changes_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("## Where to change what") : text.index("## Rules")]
    paths = re.findall(r"`((?:coat_vlm|kernels|data|eval|scripts|tests)/[\w/.]*)`", table)
    assert len(paths) > 20
    for path in paths:
        assert (ROOT / path).exists(), path


WALKS = re.findall(
    r"^\*\*(A batch|An activation|An answer)\*\*[^|]*?\n\n((?:\|[^\n]*\n)+)",
    (ROOT / "docs" / "design.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)


@pytest.mark.parametrize(("walk", "rows"), WALKS, ids=lambda text: text[:12])
def test_the_walks_name_files_and_functions_that_are_there(walk: str, rows: str):
    folders = {
        "A batch": ("data/coat_data", "coat_vlm"),
        "An activation": ("coat_vlm/fp8", ""),
        "An answer": ("eval/coat_eval",),
    }[walk]
    for row in rows.splitlines()[2:]:
        files, names = row.split("|")[1:3]
        found = [
            path.read_text(encoding="utf-8")
            for name in re.findall(r"`([\w/]+\.py)`", files)
            for path in [ROOT / folder / name for folder in folders]
            if path.is_file()
        ]
        wanted = [] if "<name>" in files or "kernels" in files else re.findall(r"`([\w.]+)`", names)
        assert "kernels" in files or "<name>" in files or found, row
        for name in wanted:
            last = name.rpartition(".")[2]
            assert any(re.search(rf"(def|class) {last}\b", text) for text in found), (row, name)


def test_there_are_three_walks():
    assert [walk for walk, _ in WALKS] == ["A batch", "An activation", "An answer"]


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_builtin_recipes_load(name: str, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "coat_vlm" / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    for variable in re.findall(r"\$\{(\w+)\}", text):
        monkeypatch.setenv(variable, "data")
    assert load_recipe(name).name == name
