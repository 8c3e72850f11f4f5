"""LoRA as a user runs it: two ranks at ZeRO-2, resumed, exported merged and as peft's folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from coat_cli.main import main
from coat_vlm.generate import load
from coat_vlm.model.vlm import CoatVlm

RANK, ALPHA = 4, 12


def lora_recipe(data: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """Align trains the projector, sft adapters of tower and language model, and the projector."""
    recipe = tiny_run.tiny_recipe(data, run, save_total_limit=9, **changes)
    recipe["model"]["language"]["config"]["tie_word_embeddings"] = True
    sft = recipe["stages"]["sft"]
    sft.update(vision={"train": False}, max_steps=4, save_steps=2)
    align = {**sft, "language": {"train": False}, "max_steps": 1}
    sft["vision"] = {"train": True, "lr": 1e-3}
    lora = {"rank": RANK, "alpha": ALPHA, "rslora": True, "dropout": 0.05}
    sft["lora"] = lora | {"modules": ["vision", "language"]}
    recipe["stages"] = {"align": align, "sft": sft}
    return recipe


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    recipe = lora_recipe(tiny_data, folder / "run", zero_stage=2)
    done = tiny_run.train(recipe, folder, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rsLoRA rank 4, alpha 12, dropout 0.05 on 13 layers" in done.stderr + done.stdout
    return folder / "run"


def step(run: Path, number: int) -> Path:
    return run / "sft" / "checkpoints" / f"step-{number:08d}"


def stopped_after_two_steps(run: Path, copy: Path) -> None:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "sft" / "model")
    shutil.rmtree(step(copy, 4))
    recipe = copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(run), str(copy)))


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / name)


def exported(source: Path, target: Path, *options: str) -> Path:
    assert main(["export", "--model", str(source), "--to", str(target), *options]) == 0
    return target


def logits(model: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 200, (2, 30), generator=draw)
    ids[:, 1 : 1 + model.config.tokens_per_image] = model.config.image_token_id
    images = torch.randn(2, 3, 16, 16, generator=draw)
    with torch.no_grad():
        return model.eval()(input_ids=ids, pixel_values=images).logits


def test_a_resumed_run_ends_bit_for_bit_the_same(
    run: Path, tiny_data: Path, tmp_path: Path
) -> None:
    again = tmp_path / "run"
    stopped_after_two_steps(run, again)
    recipe = lora_recipe(tiny_data, again, zero_stage=2)
    done = tiny_run.train(recipe, tmp_path, "--resume", "auto", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tiny_run.losses(again) == tiny_run.losses(run)
    for folder, name in (("model", "model"), ("model/adapter", "adapter_model")):
        ours, theirs = (weights(at / "sft" / folder, f"{name}.safetensors") for at in (again, run))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_only_adapters_and_the_projector_moved(run: Path) -> None:
    """The model folder holds the aligned weights plus scale B A, and the adapters next to."""
    before, after = (weights(run / stage / "model") for stage in ("align", "sft"))
    adapters = weights(run / "sft/model/adapter", "adapter_model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    layers = {name.removesuffix(".lora_A.weight") for name in adapters if "lora_A" in name}
    assert len(layers) == 13
    for layer in layers:
        a, b = (adapters[f"{layer}.lora_{side}.weight"] for side in "AB")
        name = layer.removeprefix("base_model.model.") + ".weight"
        expected = before[name] + ALPHA / RANK**0.5 * (b @ a)
        assert torch.allclose(after[name], expected, atol=1e-7, rtol=0), name
        assert b.abs().max() > 1e-4
        changed.discard(name)
    assert changed
    assert all(name.startswith("projector.") for name in changed)


def test_checkpoints_export_merged(run: Path, tmp_path: Path) -> None:
    merged = weights(exported(step(run, 4), tmp_path / "merged"))
    model = weights(run / "sft" / "model")
    assert merged.keys() == model.keys()
    assert all(torch.equal(value, model[name]) for name, value in merged.items())
    assert not (tmp_path / "merged" / "adapter").exists()
    earlier = weights(exported(step(run, 2), tmp_path / "earlier"))
    assert any(not torch.equal(value, model[name]) for name, value in earlier.items())
    exported(run / "sft" / "model", tmp_path / "language", "--format", "language")
    q = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weights(tmp_path / "language")[q], model[f"language_model.{q}"])


def test_a_checkpoint_and_an_adapter_are_models_as_well(
    run: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """They answer as the stage's model, are exported, and other runs start from them."""
    model, adapter = run / "sft" / "model", run / "sft" / "model" / "adapter"
    expected, values = logits(load(model)[0]), weights(model)
    for number, named in enumerate((run, step(run, 4), adapter)):
        assert torch.equal(logits(load(named)[0]), expected), named
        exported_values = weights(exported(named, tmp_path / f"exported_{number}"))
        assert all(torch.equal(exported_values[name], value) for name, value in values.items())
        if named == run:  # the model folder, as other tests start from
            continue
        recipe = lora_recipe(tiny_data, tmp_path / f"run_{number}", init_from=str(named))
        del recipe["stages"]["align"], recipe["stages"]["sft"]["lora"]
        recipe["stages"]["sft"] |= {"language": {"train": False}, "vision": {"train": False}}
        done = tiny_run.train(recipe, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        trained = weights(tmp_path / f"run_{number}" / "sft" / "model")
        same = [name for name, value in values.items() if torch.equal(value, trained[name])]
        assert {name.split(".")[0] for name in values.keys() - same} == {"projector"}


def test_an_adapter_needs_its_base(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "sft" / "model" / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    for base in ("owner/model", str(tmp_path / "adapter"), None):
        config = json.loads(file.read_text()) | {"base_model_name_or_path": base}
        file.write_text(json.dumps(config))
        with pytest.raises(FileNotFoundError, match=f"is an adapter of {base!r}, which is not"):
            load(tmp_path / "adapter")


@pytest.mark.parametrize("source", ["model", "checkpoint", "checkpoint without its base"])
def test_stock_peft_loads_the_adapter(run: Path, tmp_path: Path, source: str) -> None:
    expected = logits(load(run / "sft" / "model")[0])
    base = run / "align" / "model"
    assert (logits(CoatVlm.from_pretrained(base)) - expected).abs().max() > 1e-3
    moved = tmp_path / "moved"
    if source.endswith("base"):
        base.rename(moved)
    try:
        origin = run / "sft" / "model" if source == "model" else step(run, 4)
        folder = exported(origin, tmp_path / "peft", "--format", "adapter")
        named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert Path(named) == (folder / "base" if source.endswith("base") else base)
        theirs: Any = peft.PeftModel.from_pretrained(CoatVlm.from_pretrained(named), folder)
    finally:
        if moved.exists():
            moved.rename(base)
    for model in (theirs, theirs.merge_and_unload()):
        assert (logits(model) - expected).abs().max() < 1e-5


def test_what_cannot_be_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main(["export", "--model", *arguments, "--to", str(tmp_path / "a")]) == 2
        assert not (tmp_path / "a").exists()
        return capsys.readouterr().err

    model = str(run / "sft" / "model")
    assert "--card has no effect" in refused(model, "--format", "adapter", "--card")
    assert "has no LoRA adapters" in refused(str(run / "align" / "model"), "--format", "adapter")
    copied = tmp_path / "copied"
    shutil.copytree(run / "sft" / "model", copied)
    (copied / "manifest.json").unlink()  # changed by its owner
    path = copied / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base_model_name_or_path": "gone"}))
    assert "not in a folder (gone)" in refused(str(copied), "--format", "adapter")


def test_a_run_in_coat_at_stage_3_from_its_own_parts(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FP8 states of adapters, no folder to begin from; then questions through the run folder."""
    recipe = lora_recipe(tiny_data, tmp_path / "run", precision="coat", zero_stage=3)
    del recipe["stages"]["align"]
    recipe["stages"]["sft"].update(max_steps=2, gradient_checkpointing=True)
    done = tiny_run.train(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "frozen linear layers in FP8, LoRA adapters in BF16" in done.stderr + done.stdout
    folder = exported(step(tmp_path / "run", 2), tmp_path / "peft", "--format", "adapter")
    theirs: Any = peft.PeftModel.from_pretrained(CoatVlm.from_pretrained(folder / "base"), folder)
    expected = logits(load(tmp_path / "run" / "sft" / "model")[0])
    assert (logits(theirs) - expected).abs().max() < 1e-5
    model = str(tmp_path / "run" / "sft" / "model")
    capsys.readouterr()
    question = ["--prompt", "Which color?", "--max-new-tokens", "2"]
    assert main(["generate", "--model", model, "--image", str(tiny_data / "1.png"), *question]) == 0
    refused = ["export", "--model", model, "--format", "adapter", "--to", str(tmp_path / "b")]
    assert main(refused) == 2
    assert "export a checkpoint of the stage" in capsys.readouterr().err


def test_dora_on_every_module_in_coat(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = lora_recipe(tiny_data, tmp_path / "run", precision="coat")
    del recipe["stages"]["align"]
    sft = recipe["stages"]["sft"]
    sft["lora"] |= {"dora": True, "modules": ["vision", "projector", "language"]}
    sft.update(max_steps=2)
    done = tiny_run.train(recipe, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rsDoRA rank 4, alpha 12, dropout 0.05 on 15 layers" in done.stderr + done.stdout
    folder = exported(step(tmp_path / "run", 2), tmp_path / "peft", "--format", "adapter")
    adapters = weights(folder, "adapter_model.safetensors")
    assert all(".lora_" in name for name in adapters)
    theirs: Any = peft.PeftModel.from_pretrained(CoatVlm.from_pretrained(folder / "base"), folder)
    expected = logits(load(tmp_path / "run" / "sft" / "model")[0])
    assert (logits(theirs) - expected).abs().max() < 1e-5
    assert (logits(CoatVlm.from_pretrained(folder / "base")) - expected).abs().max() > 1e-4
    recipe["zero_stage"] = 3
    recipe["output_dir"] = str(tmp_path / "other")
    path = tmp_path / "three.yaml"
    path.write_text(json.dumps(recipe))
    assert main(["train", str(path)]) == 2
    assert "set zero_stage to 0, 1 or 2, or remove dora" in capsys.readouterr().err
