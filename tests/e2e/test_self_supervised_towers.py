"""Composed models with a tower of DINOv2, DINOv3 or ViT: planned, trained, exported and asked."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from coat_cli.main import main
from coat_vlm.config.load import load_recipe
from coat_vlm.generate import load
from coat_vlm.model.vision import CONTRASTIVE, VISION_MODELS
from coat_vlm.plan import plan_recipe

OTHER_TOWERS = [kind for kind in VISION_MODELS if kind not in CONTRASTIVE]


def save_tower(kind: str, folder: Path) -> None:
    """A checkpoint for images of 16 pixels, whose image processor makes 24."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"image_size": 16, "patch_size": 4}
    if not kind.startswith("dinov2"):
        sizes |= {"intermediate_size": 64}
    config = VISION_MODELS[kind].config_class(**sizes)
    torch.manual_seed(0)
    VISION_MODELS[kind](config).save_pretrained(folder)
    images = {"do_center_crop": True, "crop_size": {"height": 24, "width": 24}, "resample": 3}
    images |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))


@pytest.mark.parametrize(
    "kind",
    [k if k == "dinov2" else pytest.param(k, marks=pytest.mark.slow) for k in OTHER_TOWERS],
)
def test_a_run(
    kind: str, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tower(kind, tmp_path / "tower")

    fp8 = {"bf16_forward": []}
    recipe = tiny_run.tiny_recipe(tiny_data, tmp_path / "run", precision="coat", fp8=fp8)
    vision = {"name_or_path": str(tmp_path / "tower"), "select_layer": -1}
    recipe["model"] |= {"vision": vision, "projector": {"type": "mlp2x_gelu"}}
    recipe["stages"]["sft"] |= {"max_steps": 4, "save_steps": 4}
    done = tiny_run.train(tiny_run.no_dropout(recipe), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    blocks = {"dinov3_vit": "model.layer", "vit": "layers"}.get(kind, "encoder.layer")
    assert f"vision_tower.model.{blocks}.0-1: FP8 encoder block" in done.stdout
    losses = tiny_run.losses(tmp_path / "run")
    assert losses[-1] < losses[0]
    (planned,) = plan_recipe(
        load_recipe(str(tmp_path / "recipe.yaml")), ranks=1, gpu_bytes=80e9, images=1
    )
    model, processor = cast(Any, load(tmp_path / "run", "cpu"))
    assert planned.sizes.trained == sum(p.numel() for p in model.parameters())
    assert (processor.image_size, model.config.tokens_per_image) == (24, 36)

    (step,) = (tmp_path / "run" / "sft" / "checkpoints").glob("step-*")
    assert main(["export", "--model", str(step), "--to", str(tmp_path / "exported")]) == 0
    folders = (tmp_path / "exported", tmp_path / "run" / "sft" / "model")
    exported, saved = (load_file(folder / "model.safetensors") for folder in folders)
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    asked = ["--image", str(tiny_data / "1.png"), "--prompt", "What is it?"]
    capsys.readouterr()
    assert main(["generate", "--model", str(folders[0]), *asked, "--max-new-tokens", "4"]) == 0
    answer = capsys.readouterr().out
    assert (
        main(["generate", "--model", str(tmp_path / "run"), *asked, "--max-new-tokens", "4"]) == 0
    )
    assert capsys.readouterr().out == answer
    words = ["export", "--model", str(folders[0]), "--to", str(tmp_path / "llava")]
    assert main([*words, "--format", "llava"]) == 2
    assert (
        f"cannot hold a vision tower of type '{kind}'; allowed: siglip" in capsys.readouterr().err
    )
