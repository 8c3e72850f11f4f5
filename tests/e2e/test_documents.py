"""Every command and every Python block of README and guides runs, on small weights and files."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from documented import PAGES, ROOT, Block, blocks, make_reader, run_page
from transformers import LlamaConfig, LlamaForCausalLM

OTHERS = PAGES[1:]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a reader works; README's commands have been run in it."""
    return make_reader(tmp_path_factory.mktemp("documents"))


@pytest.mark.timeout(900)
def test_readme(place: Path) -> None:
    assert (place / "runs/my_vlm/report.html").is_file()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_page(page: Path, place: Path) -> None:
    run_page(page, place)


PYTHON = [
    block
    for page in PAGES
    for block in blocks(page)
    if block.language == "python" and block.not_run is None
]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page.stem}-{block.line}")
def test_python(block: Block, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``model`` that the page takes for granted is a Llama."""
    monkeypatch.chdir(place)
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


def test_what_is_not_run() -> None:
    """The blocks that no test runs, by the reason that stands before them in the page's source."""
    reasons = {
        block.not_run: None for page in PAGES for block in blocks(page) if block.not_run is not None
    }
    assert list(reasons) == [
        "installs packages",
        "a test of its own, five to eight minutes",
        "needs eight GPUs",
        "the tests themselves",
        "installs packages; the quickstart has a test of its own",
        "downloads from the Hub, or needs the published archives",
        "downloads from the Hub, or needs eight GPUs",
        "needs lmms-eval, a checkout of VLMEvalKit and their downloads",
        "downloads a model; tests/e2e/test_families.py trains small ones",
        "needs a GPU",
        "tests/vlm/test_trl.py trains a small model with each",
        "needs two GPUs",
        "an 8B model at 65,536 tokens, two to four minutes",
        "needs a trained model and GPUs; a test runs it with a small one",
        "needs a trained model and Video-MME",
        "an 8B model, 20 s",
        "a server runs until it is stopped; tests/vlm/test_serve.py runs it",
        "needs vLLM and a GPU",
        "needs the server",
        "uploads to the Hub",
        "needs several GPUs, ssh or SLURM",
    ]


def test_the_reference_is_not_stale() -> None:
    """docs/reference/commands.md and recipe.md are what docs/make_reference.py writes."""
    command = [sys.executable, str(ROOT / "docs/make_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
