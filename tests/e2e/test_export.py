"""A run that changes its ranks and its ZeRO stage twice, and what its checkpoints export."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from coat_cli.main import main
from coat_vlm.checkpoint.shards import Shards
from coat_vlm.generate import load

SEGMENTS = [(2, 2), (1, 3), (1, 0)]
"""Ranks and ZeRO stage: of two steps each."""


@pytest.fixture(scope="module")
def changing(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of six steps, each two of them with other ranks; the tower is frozen."""
    folder = tmp_path_factory.mktemp("changing")
    for number, (ranks, zero_stage) in enumerate(SEGMENTS):
        recipe = tiny_run.tiny_recipe(
            tiny_data, folder / "run", precision="coat", save_total_limit=9, zero_stage=zero_stage
        )
        recipe["model"]["language"]["config"]["tie_word_embeddings"] = True
        recipe["stages"]["sft"].update(save_steps=2, vision={"train": False})
        recipe["stages"]["sft"]["micro_batch_size"] = 2 if ranks == 1 else 4
        options = ["--resume", "auto"] if number else []
        done = tiny_run.train(tiny_run.no_dropout(recipe), folder, *options, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        if number:
            assert f"repartitioned for {ranks} at stage {zero_stage}" in done.stderr + done.stdout
        keep_until(folder / "run", 2 * (number + 1))
    return folder / "run"


def keep_until(run: Path, step: int) -> None:
    """As if the run had been stopped after ``step``, unless that is its last."""
    (run / f"after-{step}").mkdir()
    shutil.copy(run / "metrics.jsonl", run / f"after-{step}")
    if step < 6:
        (run / "sft" / "model" / "manifest.json").unlink()
        for path in (run / "sft" / "checkpoints").glob("step-*"):
            if path.name > f"step-{step:08d}":
                shutil.rmtree(path)


def checkpoint(run: Path, step: int) -> Path:
    return run / "sft" / "checkpoints" / f"step-{step:08d}"


def exported(source: Path, target: Path, *options: str) -> dict[str, torch.Tensor]:
    assert main(["export", "--model", str(source), "--to", str(target), *options]) == 0
    return load_file(target / "model.safetensors")


def test_the_losses_are_those_of_an_unchanged_run(changing: Path) -> None:
    """The first segment ran all six steps; the later ones repeat four of them."""
    changed, unchanged = (tiny_run.losses(run) for run in (changing, changing / "after-2"))
    assert changed[:2] == unchanged[:2]
    assert changed[2:] != unchanged[2:]
    assert changed == pytest.approx(unchanged, rel=0.01)  # FP8 scales are a micro-batch's


def final(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "sft" / "model" / "model.safetensors")


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_checkpoint_of_any_stage_exports_its_masters(
    changing: Path, tmp_path: Path, step: int
) -> None:
    source = checkpoint(changing, step)
    saved = json.loads((source / "trainer.json").read_text())
    assert (saved["world_size"], saved["zero_stage"]) == SEGMENTS[step // 2 - 1]
    weights = exported(source, tmp_path / "plain")
    contents = json.loads((source / "contents.json").read_text())["parameters"]
    assert weights.keys() == contents.keys()
    assert any(name.startswith("vision_tower") for name in weights)
    shards = Shards(source)
    for name, weight in weights.items():
        assert torch.equal(weight, shards.read_parameter(name, weight.shape)), name
    rounded = exported(source, tmp_path / "bf16", "--dtype", "bfloat16")
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in weights.items())
    ours, processor = load(tmp_path / "bf16")
    theirs: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    assert processor.tokenizer.vocab_size == 280
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b.float()), name
        assert torch.equal(a, rounded[name].float()), name


def test_the_last_checkpoint_exports_the_stages_model(changing: Path, tmp_path: Path) -> None:
    weights = exported(checkpoint(changing, 6), tmp_path / "exported")
    model = changing / "sft" / "model"
    assert all(torch.equal(weights[name], value) for name, value in final(changing).items())
    names = {path.name for path in model.iterdir()} - {"manifest.json"}
    assert {path.name for path in (tmp_path / "exported").iterdir()} == names
    for name in names - {"training.json"}:
        assert (model / name).read_bytes() == (tmp_path / "exported" / name).read_bytes(), name
    again = exported(model, tmp_path / "again")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_what_cannot_be_exported(
    changing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--model", str(changing / "sft"), "--to", str(tmp_path / "a")]) == 2
    assert "did you mean" in capsys.readouterr().err
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint(changing, 2), damaged)
    (path,) = damaged.glob("rank-00001-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert main(["export", "--model", str(damaged), "--to", str(tmp_path / "a")]) == 2
    assert "rank-00001-000.safetensors is damaged" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert (
        main(["export", "--model", str(changing / "sft" / "model"), "--to", str(tmp_path / "used")])
        == 2
    )
    assert "not empty" in capsys.readouterr().err
    inside = changing / "sft" / "model" / "exported"
    assert main(["export", "--model", str(inside.parent), "--to", str(inside)]) == 2
    assert f"{inside} is inside {inside.parent}" in capsys.readouterr().err
    assert not inside.exists()
