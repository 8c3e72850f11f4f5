"""The folders of a published model that one step without a learning rate trained equal its base's.

Also in an environment with transformers 4.57, which ``./scripts/test --all`` makes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import tiny_run
import torch
from family_folders import publish, settings_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from coat_cli.main import main
from coat_vlm.generate import load
from coat_vlm.model.families import FAMILIES

RECORDS = {"adapter", "manifest.json", "training.json"}
"""What the folder of a stage has in addition to the base's files."""
PYTHON_4 = Path(f"{sys.prefix}-transformers4") / "bin" / "python"


@pytest.fixture(
    scope="module",
    params=[
        name if name == "llava" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(FAMILIES)
    ],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / request.param
    publish(request.param, folder)
    return folder


def train(base: Path, data: Path, run: Path, *, precision: str = "fp32", **changes: Any) -> Path:
    """Train a step whose updates are 0 in FP32; return the stage's folder."""
    trains = {"train": True, "lr": 1e-300}
    rows = {"name": "tiny", "path": str(data / "data.json"), "select": "first 20"}
    stage = {
        "data": [rows], "batch_size": 2, "micro_batch_size": 1, "max_steps": 1, "save_steps": 1,
        "vision": trains, "projector": trains, "language": trains,
    }  # fmt: skip
    recipe = {
        "name": "same",
        "output_dir": str(run),
        "precision": precision,
        "num_workers": 0,
        "tracking": {"tensorboard": False},
        "model": settings_of(base),
        "stages": {"sft": stage | changes},
    }
    run.mkdir(parents=True)
    done = tiny_run.train(recipe, run.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return run / "sft"


@pytest.fixture(scope="module")
def folders(base: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models that must equal the base, and adapters last."""
    parent = tmp_path_factory.mktemp("trained")
    full = train(base, tiny_data, parent / "full" / "run")
    frozen = {"train": False}
    adapted = train(
        base, tiny_data, parent / "lora" / "run",
        lora={"rank": 2, "alpha": 2, "modules": ["language"]}, vision=frozen, projector=frozen,
    )  # fmt: skip
    targets = {"exported": full, "merged": adapted, "adapter": adapted}
    for name, stage in targets.items():
        (step,) = (stage / "checkpoints").glob("step-*")
        words = ["--format", "adapter"] if name == "adapter" else []
        assert main(["export", "--model", str(step), "--to", str(parent / name), *words]) == 0
    own = [full / "model", adapted / "model", parent / "exported", parent / "merged"]
    return [*own, adapted / "model" / "adapter", parent / "adapter"]


def tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}


def test_files_names_and_values_are_the_bases(base: Path, folders: list[Path]) -> None:
    expected = {file.name for file in base.iterdir()}
    before = load_file(base / "model.safetensors")
    for folder in folders[:4]:
        assert {file.name for file in folder.iterdir()} - RECORDS == expected
        assert tensors(folder) == tensors(base)
        after = load_file(folder / "model.safetensors")
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        for name in expected - {"model.safetensors"}:  # bytes, also of tokenizer and processor
            assert (folder / name).read_bytes() == (base / name).read_bytes(), name


def test_logits_are_the_bases(base: Path, folders: list[Path]) -> None:
    model, processor = load(base, "cpu")
    ids = torch.tensor([processor.tokenizer.encode("What color is the circle?")])
    # Without an input of its processor, PaliGemma is causal.
    types = {"token_type_ids": torch.zeros_like(ids)} if cast(Any, model).family.has_prefix else {}

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=ids, **types).logits

    expected = logits(model)
    for folder in folders:
        is_adapter = (folder / "adapter_config.json").is_file()
        source = base if is_adapter else folder
        stock: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
        if is_adapter:
            stock = peft.PeftModel.from_pretrained(stock, folder)
        # The same weights; kernels may sum in another order in memory of another alignment.
        torch.testing.assert_close(logits(stock), expected, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_and_an_adapter_are_models_as_well(base: Path, folders: list[Path]) -> None:
    expected = load(base, "cpu")[0].state_dict()
    steps = [*folders[0].parent.glob("checkpoints/*"), *folders[1].parent.glob("checkpoints/*")]
    assert len(steps) == 2
    for named in (*steps, *folders[4:]):
        found = load(named, "cpu")[0].state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), named


@pytest.mark.skipif(not PYTHON_4.is_file(), reason=f"no {PYTHON_4}: ./scripts/test --all makes it")
def test_transformers_4_reads_the_same_model(base: Path, folders: list[Path]) -> None:
    script = str(Path(__file__).with_name("in_transformers4.py"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON_4, script, base, *folders], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if isinstance(found, str):
        pytest.skip(f"transformers 4.57 does not know {found}")
    assert found.keys() == {str(folder) for folder in folders}
    assert max(found.values()) <= 1e-5, found


def test_a_trained_output_layer_is_kept(tiny_data: Path, tmp_path: Path) -> None:
    """config.json says that it is tied to the embeddings, and the file has another one."""
    base = tmp_path / "base"
    publish("qwen3_vl", base)
    weights = load_file(base / "model.safetensors")
    embeddings = weights["model.language_model.embed_tokens.weight"]
    weights["lm_head.weight"] = torch.randn(embeddings.shape)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    stage = train(base, tiny_data, tmp_path / "run")
    (step,) = (stage / "checkpoints").glob("step-*")
    assert main(["export", "--model", str(step), "--to", str(tmp_path / "exported")]) == 0
    for folder in (stage / "model", tmp_path / "exported"):
        found = load_file(folder / "model.safetensors")
        assert found.keys() == weights.keys()
        assert torch.equal(found["lm_head.weight"], weights["lm_head.weight"])
        # Otherwise transformers 4 ties them when it loads the folder.
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.slow
def test_experts_stay_frozen_under_lora_in_fp8(tiny_data: Path, tmp_path: Path) -> None:
    """Their weights keep their bits, and stock peft computes what the merged model does."""
    base = tmp_path / "base"
    publish("qwen3_vl_moe", base)
    stage = train(
        base, tiny_data, tmp_path / "run", precision="coat", lora={"rank": 4, "alpha": 8},
        language={"train": True, "lr": 0.01}, vision={"train": False}, projector={"train": False},
    )  # fmt: skip
    before, after = (load_file(f / "model.safetensors") for f in (base, stage / "model"))
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert sum(".experts." in name for name in before) == 4
    ids = torch.arange(20)[None]
    stock: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(stock, stage / "model" / "adapter").eval()
    merged: Any = AutoModelForImageTextToText.from_pretrained(stage / "model").eval()
    with torch.no_grad():
        logits, expected = adapted(input_ids=ids).logits, merged(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
