"""Check what ruff does not: sizes, docstrings, words, and paths and links in documents.

python tests/check_style.py          # prints one line per problem; exit status 1 if there are any
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("coat_vlm/", "kernels/", "data/", "eval/", "scripts/", "examples/")
MAX_LINES = {
    **{"*.py": 700, "README.md": 150, "CONTRIBUTING.md": 120, "Makefile": 40},
    **{"docs/design.md": 150, "docs/results.md": 150},
    **{"docs/guides/*.md": 180, "docs/experiments/*.md": 80},
}
TEXTS = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".jinja", ""}
GENERATED = re.compile(
    r"docs/reference/(commands|recipe|models)\.md|benchmarks/results/|CHANGELOG\.md"
)

# Assembled from pieces so that this file does not contain what it looks for.
FORBIDDEN = re.compile(
    "|".join(
        [
            *("/" + "work/", "/" + "root/", "/" + "home/[a-z]", r"\.\./" + "shared"),
            *("FIX" + "ME", "XX" + "X", "TO" + r"DO(?!\()", "make_" + "block_ptr"),
            *(r"breakpoint" + r"\(", r"set_" + r"trace\(", "^<{7} |^>{7} "),
        ]
    )
)

WORDS = {
    "stochastic rounding": r"\bby chance\b|_chance\b(?<!f1_chance)|by_chance|V_CHANCE",
    "round to nearest": r"(?i)(?<!round )(?<!rounds )(?<!rounded )(?<!rounding )\bto nearest\b",
    "forward GEMM, grad-input GEMM, grad-weight GEMM": (
        r"(forward|gradients?'?) products?\b|products of (the )?(gradients|forward)"
    ),
    "quantized data, dequantized value": r"\bcodes\b(?<!status codes)(?<!byte codes)|code is worth",
    "saved for backward": r"FP8 cop(y|ies)|\bkept (activations|for (the |its )?backward|copies)",
    "high precision": r"\bunrounded\b",
    "grad_output, grad_input, grad_residual": r"def \w+\([^)]*\b(dy|da|dresidual|dh)\b\s*[:,)]",
    "master weights; low 16 bits": r"\bmasters\b|\b16-bit remainder|\bREMAINDER\b|\bremainders\b",
    "supervised token": r"\btrained[ _]tokens?\b|trained positions?\b",
    "bad-sample log": r"\bquarantine",
    "transient I/O error": r"\b[oO]utages?\b|\bOUTAGES\b",
    "non-retryable": r"\bin vain\b",
    "the subject first": r"(?<!\w )\bOf (?!course)",
    "next to, in addition to, compared with": r"\bbeside\b",
    "only, just, by itself": r"(?<!letter )(?<!number )(?<!\} )\balone\b",
    "also, as well": r", too(?=[.,;:)]| \(|$)",
    "the noun again, or a possessive": r"\b([Tt]hat|[Tt]hose) of\b",
    "except": r"\bbut for\b|keys of `model` but",
    "is not a": r"(?<=[^ ] )(?<!here )\b(is|are|was|were) no (?!longer|more|less|better)[a-z]",
    "image, video or audio": r"\b([Aa]|[Ee]ach|[Nn]o|[Oo]ne|[Ee]very|[Tt]he) medium\b",
    "means, represents; is in": r"\bstands? (for|in)\b",
    "reached, ran at": r"\bmade [\d,.]+k? tokens",
    "most frequent; majority": r"commonest",
    "of similar length": r"\bof like\b",
    "distributed to": r"\bdealt\b",
}
"""What the field says -> a pattern of what to avoid."""

PHRASES = """
FP8 after COAT / unless noted | / GPU in one process / CPU emulates it / are not cut / alone are cut
trains everything, from / starts, or continues / with a mask may be NaN / ten minutes there
have today's options / today's defaults / another arithmetic / loss stores no logits
are means since / line has apart / also of a crashed run / the steps of about / its ranks returned
process at a time uses / process that is dead / know neither tokenizer / results of tools
calls of tools / media by address / same numbers with less / once more in FP8 / at most a share
are older than two / behind its first row / TRL script the example / lengths of the rows
predictions with a score / uncertainty of the items / GPUs are sold / lost in gaps
fastest whose peak / costs no communication / plans that were not measured / clips of seconds
listen to other hosts / an error of a command / lost another / result gets no speed
optimizer alone knows / called `stacked`
"""
"""Parts of sentences that read as translated; say them as PyTorch's documentation would."""

WORDS["plain English"] = "(?i)" + "|".join(map(re.escape, re.split(" / |\n", PHRASES.strip())))

FILLERS = {
    *("a", "an", "the", "of", "to", "for", "from", "in", "on", "at", "by", "with", "and", "or"),
    *("as", "is", "are", "be", "it", "its", "this", "that", "which", "whose", "default", "none"),
    *("optional", "given", "value", "object", "instance", "only"),
}


def list_files() -> list[Path]:
    """Return what git has or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def check_docstrings(text: str, name: str = "module") -> Iterator[str]:
    """Yield public definitions without a docstring, and ``Args`` that repeat a name."""
    tree = ast.parse(text)
    if tree.body and ast.get_docstring(tree) is None:
        yield f"{name} has no docstring"
    yield from _check_definitions(tree, name)


def _check_definitions(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        is_private = node.name.startswith("_")
        if docstring is None and not is_private and not _is_documented(node):
            yield f"{name}.{node.name} has no docstring"
        for argument in find_repeated_arguments(docstring or "", node.name):
            yield f"{name}.{node.name}: the entry {argument!r} in Args repeats its name; remove it"
        if isinstance(node, ast.ClassDef) and not is_private:
            yield from _check_definitions(node, f"{name}.{node.name}")


def _is_documented(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a base class or the getter has the docstring."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    is_setter = any(decorator.endswith(".setter") for decorator in decorators)
    return is_setter or bool(decorators & {"override", "overload"})


def find_repeated_arguments(docstring: str, function: str) -> list[str]:
    """Return entries of ``Args`` with no word that is not in the names of argument and function."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if section is None:
        return []
    repeated = []
    for name, description in re.findall(r"^    (\w+): ((?:.|\n     )*)", section[1], re.MULTILINE):
        known = {word.rstrip("s") for word in f"{name}_{function}".lower().split("_")} | FILLERS
        words = re.findall(r"[\w.]+", description.lower().strip("."))
        if all(word in known or word.rstrip("s.") in known for word in words):
            repeated.append(f"{name}: {description.strip()}")
    return repeated


def check_lines(name: str, text: str) -> Iterator[str]:
    """Yield the lines of a file with characters or words to avoid."""
    is_exempt = name in ("LICENSE", ".pre-commit-config.yaml", "tests/check_style.py")
    has_words = not (is_exempt or name.startswith("tests/") or GENERATED.search(name))
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.isascii():
            yield f"{number}: only ASCII characters"
        if FORBIDDEN.search(line) and not is_exempt and name != "CONTRIBUTING.md":
            yield f"{number}: leave out: {line.strip()}"
        for word, pattern in WORDS.items() if has_words else ():
            if re.search(pattern, line):
                yield f"{number}: say {word!r}: {line.strip()}"


def check_links(document: Path, text: str) -> Iterator[str]:
    """Yield links of a page to files that do not exist."""
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target and not (document.parent / target).exists():
            yield f"links to {target}, which does not exist"


def check_paths_to_change() -> Iterator[str]:
    """Yield paths in CONTRIBUTING's table that do not exist."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("## Where to change what") : text.index("## Rules")]
    for path in re.findall(r"`((?:coat_vlm|kernels|data|eval|scripts|tests)/[\w/.]*)`", table):
        if not (ROOT / path).exists():
            yield f"CONTRIBUTING.md: {path} does not exist"


def check() -> Iterator[str]:
    """Yield all problems of the repository, each with its file."""
    for room in ("kernels", "data", "eval", "scripts", "tests"):
        if (ROOT / room / "__init__.py").exists():
            yield f"{room}/__init__.py: this folder is not a package; remove the file"
    for path in list_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in TEXTS and path.name != "Makefile":
            continue
        text = path.read_text(encoding="utf-8")
        problems = list(check_lines(name, text))
        limits = [most for pattern, most in MAX_LINES.items() if fnmatch(name, pattern)]
        if limits and len(text.splitlines()) > limits[-1]:
            problems.append(f"{len(text.splitlines())} lines; at most {limits[-1]}")
        if path.suffix == ".md":
            problems += check_links(path, text)
        if path.suffix == ".py" and name.startswith(PRODUCT):
            problems += check_docstrings(text, path.stem)
        yield from (f"{name}: {problem}" for problem in problems)
    yield from check_paths_to_change()


if __name__ == "__main__":
    found_problems = list(check())
    print(*found_problems, sep="\n", end="\n" if found_problems else "")
    sys.exit(bool(found_problems))
