"""No file uses a word that this project once had for a thing that has a name in the field.

One pattern per word; each spares the word's ordinary meaning. A line that keeps an old name
readable, as an alias, says so: it contains "deprecated".
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCANNED = ("coat_vlm", "kernels", "data", "eval", "scripts", "examples", "docs", "mkdocs.yml")
NOT_SCANNED = re.compile(
    r"docs/lab/|docs/reference/(commands|recipe)\.md|benchmarks/results/|moved\.txt|\.(svg|csv|json)$"
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
    "fused weight": r"\b[jJ]oint(ly)?\b(?! distribution)",
    "a verb": r"def (normed|sent|told|walked|said|met|deal|dealt|asked)\(",
    "persistent kernel": r"\bwalk(s|ed|ing)? (over|through|along)\b",
    "master weights; low 16 bits": r"\bmasters\b|\b16-bit remainder|\bREMAINDER\b|\bremainders\b",
    "supervised token": r"\btrained[ _]tokens?\b|trained positions?\b",
    "sampler state": r"\b[cC]ursors?\b(?!: pointer)",
    "bad-sample log": r"\bquarantine",
    "transient I/O error": r"\b[oO]utages?\b|\bOUTAGES\b",
    "non-retryable": r"\bin vain\b",
    "implementation, baseline": r"\bcontenders?\b|\b[pP]eers?\b",
    "reported, fixed, memorized": r"\bmended\b|\bby heart\b|\btold as\b",
    "FP8-saved attention": r"\blean attention\b|\blean\.py\b",
    "sampled frames; length-bucketed": r"\bframes (are )?shown\b|\b(of )?like length\b",
    "eagerly; permanently; say it again": (
        r"\bas ever\b|\bfor good\b|\b[lL]ikewise\b|\bof the like\b"
    ),
    "BF16 fallback": r"\b(sends?|sent)\b.{0,20}\bback to BF16",
    "foreach optimizer step": r"\btake_whole_steps?\b|\bwhole_step",
    "repository, package, allowed import": (
        r"\bhouse\b|\b(the|data|kernels) rooms?\b|\bROOMS?\b|\bdoors?\b"
    ),
    "classification accuracy": r"\bnaming (accuracy|question|set)|[/\"]naming\b|\bnames \d",
    "a sentence with a verb": r'"""Of (?!course)',
}
"""What the field says -> a pattern of what this project said."""


def scanned() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SCANNED, "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    names = [name for name in listed if not NOT_SCANNED.search(name) and name != "CHANGELOG.md"]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


LINES = [
    (path.relative_to(ROOT), number, line)
    for path in scanned()
    for number, line in enumerate(
        path.read_text(encoding="utf-8", errors="ignore").splitlines(), start=1
    )
    if "deprecated" not in line
]


@pytest.mark.parametrize("word", WORDS)
def test_the_fields_words(word: str) -> None:
    pattern = re.compile(WORDS[word])
    found = [f"{path}:{n}: {line.strip()}" for path, n, line in LINES if pattern.search(line)]
    assert not found, f"say {word!r}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("stochastic rounding", "codes of v are rounded by chance"),
        ("supervised token", "the loss of a trained token"),
        ("implementation, baseline", "ours and its peers"),
        ("a verb", "def normed(x):"),
        ("classification accuracy", "FP8 names 76.6%"),
    ],
)
def test_the_words_are_recognised(word: str, line: str) -> None:
    assert re.search(WORDS[word], line)


@pytest.mark.parametrize(
    "line", ["f1_chance", "an accuracy above chance", "exit status codes", "cursor: pointer;"]
)
def test_ordinary_meanings_are_spared(line: str) -> None:
    assert not any(re.search(pattern, line) for pattern in WORDS.values())
