"""Plans of published models: rows as their processors make them, memory as their passes take."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from family_folders import MAKERS, make_folders
from family_samples import conversation, picture

from coat_cli.main import main
from coat_data.load.encode import IGNORE_INDEX
from coat_vlm.config.load import load_recipe
from coat_vlm.model.build import create_meta_model
from coat_vlm.model.configuration import CoatVlmConfig
from coat_vlm.model.families import FAMILIES
from coat_vlm.model.family_model import load_family_model
from coat_vlm.model.folder import start_processor
from coat_vlm.plan import format_plan, plan_recipe
from coat_vlm.plan.fit import fit_recipe
from coat_vlm.plan.rows import compose_row
from coat_vlm.train.passes import copy_batch_to_device

MICRO = "stages.sft.micro_batch_size=2"


UNKNOWN = ("gemma4", "lfm2_vl", "mistral3")
"""Families whose towers read sizes of images on the device."""
UNPACKED = ("paligemma", "qwen3_5")
QUICK = ("llava_next", "qwen2_5_vl")
folder = make_folders(FAMILIES.keys() - UNKNOWN, quick=QUICK)


def write_recipe(folder: Path, path: Path, rows: list[Any], *changes: str) -> Any:
    """A recipe that trains all parts, on conversations with so many pictures."""
    path.mkdir(exist_ok=True)
    answer = {"from": "gpt", "value": "red"}
    written: list[Any] = []
    for number, sizes in enumerate(rows):
        names: list[str] = []
        for place, size in enumerate(sizes):
            names.append(f"{number}_{place}.png")
            (path / names[-1]).write_bytes(picture(number, *size).data or b"")
        asked = {"from": "human", "value": "<image>" * len(names) + "What is it?"}
        written.append({"conversations": [asked, answer], **({"image": names} if names else {})})
    (path / "rows.json").write_text(json.dumps(written))
    train = {"train": True, "lr": 1e-5}
    stage = {
        "data": [{"name": "rows", "path": str(path / "rows.json")}],
        "batch_size": 4, "max_steps": 1,
        "vision": train, "projector": train, "language": train,
    }  # fmt: skip
    model = {"pretrained": str(folder), "max_length": 512}
    if folder.name == "paligemma":  # Gemma 2's decoder has no other attention
        model["attn_implementation"] = "eager"
    recipe = {"name": "plan", "output_dir": str(path / "run"), "model": model, "precision": "bf16"}
    (path / "recipe.json").write_text(json.dumps({**recipe, "stages": {"sft": stage}}))
    return load_recipe(str(path / "recipe.json"), [MICRO, *changes])


def test_rows_are_as_those_of_the_data(folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(folder, tmp_path, [[(40, 24)], [(24, 40), (30, 50)], []])
    (plan,) = plan_recipe(recipe, ranks=1, gpu_bytes=80e9)
    assert "mean of the data's first rows, rounded up; 24 x 40 pixels" in format_plan([plan])
    encoder: Any = start_processor(recipe, None).encoder()
    shown = [[picture(1, 40, 24)], [picture(2, 24, 40), picture(3, 30, 50)], []]
    text = len(encoder(conversation(answers=("red",))).input_ids)
    media = [len(encoder(conversation(*one, answers=("red",))).input_ids) - text for one in shown]
    row: Any = plan.row
    planned = row.make(torch.Generator())
    assert len(planned.input_ids) == 512
    in_images = int((planned.labels == IGNORE_INDEX).sum())
    # At least the mean, and less than one image more; a template adds tokens around images.
    each = in_images / row.images
    assert sum(media) / 3 - 8 < in_images < sum(media) / 3 + each + 8
    # What training would do with such rows.
    model: Any = load_family_model("model.pretrained", str(folder), torch.float32).train()
    batch = row.collate([planned, row.make(torch.Generator().manual_seed(1))], None)
    loss = model(**copy_batch_to_device(batch, torch.device("cpu")), skip_logits=True).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert plan.activations.saved["vision"] > 0


def test_bad_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    MAKERS["qwen2_5_vl"](tmp_path / "qwen")
    recipe = write_recipe(tmp_path / "qwen", tmp_path, [[(40, 24)], [(40, 24)], [(40, 24)]])
    rows = json.loads((tmp_path / "rows.json").read_text())
    rows[0]["image"] = ["missing.png"]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (plan,) = plan_recipe(recipe, ranks=1, gpu_bytes=80e9)
    assert (
        "1 image(s) of 60 patches (mean of the data's first rows, rounded up, without 1 bad "
        in (format_plan([plan]))
    )


def test_numbers_of_images(folder: Path, tmp_path: Path) -> None:
    write_recipe(folder, tmp_path, [[]])

    def plan(images: int | None, *changes: str) -> Any:
        changed = load_recipe(str(tmp_path / "recipe.json"), [MICRO, *changes])
        return plan_recipe(changed, ranks=1, gpu_bytes=80e9, images=images)[0]

    texts = plan(None)
    assert "only text (mean of the data's first rows" in format_plan([texts])
    assert texts.activations.saved["vision"] > 0  # of the small image that training adds
    two, three = plan(2), plan(3)
    more = [three.activations.saved[part] / two.activations.saved[part] for part in ("vision",)]
    assert more == [pytest.approx(1.5, rel=0.1)]
    if folder.name not in UNPACKED:
        packed = plan(None, "stages.sft.packing={}")
        assert packed.row.images >= 3
        assert "as many as fit into a packed sequence" in format_plan([packed])
    with pytest.raises(ValueError, match=r"150 images of 640 x 480 pixels have .* raise model"):
        plan(150)


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("llava_onevision", "bf16"),
        ("qwen2_5_vl", "coat"),
        pytest.param("qwen3_vl", "bf16", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_tokens_divide_those_of_the_decoder(
    family: str, precision: str, tmp_path: Path
) -> None:
    """All images pass the tower of each rank. BF16 saves attention's output on both sides, too."""
    MAKERS[family](tmp_path / family)
    for micro in (1, 2):
        changes = f"precision={precision}", f"stages.sft.micro_batch_size={micro}"
        saved: list[dict[str, float]] = []
        for ranks in (1, 2):
            shared = f"stages.sft.sequence_parallel={ranks}"
            recipe = write_recipe(tmp_path / family, tmp_path, [[(40, 24)]], *changes, shared)
            (plan,) = plan_recipe(recipe, ranks=ranks, gpu_bytes=80e9)
            saved.append(plan.activations.saved)
        alone, shared = saved
        assert shared["vision"] == alone["vision"] > 0
        assert shared["language"] == pytest.approx(alone["language"] / 2, rel=0.08)


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_model_that_cannot_be_planned(family: str, tmp_path: Path) -> None:
    MAKERS[family](tmp_path / family)
    recipe = write_recipe(tmp_path / family, tmp_path, [[(40, 24)]])
    with pytest.raises(ValueError, match="cannot be planned, because its forward pass reads"):
        plan_recipe(recipe, ranks=1, gpu_bytes=80e9)


def test_a_published_llava_takes_what_the_same_composed_model_takes(tmp_path: Path) -> None:
    MAKERS["llava"](tmp_path / "llava")
    path = tmp_path / "llava" / "config.json"  # where both compute all blocks of the tower
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_feature_layer": -1}))
    recipe = write_recipe(tmp_path / "llava", tmp_path, [[(40, 24)]])
    (plan,) = plan_recipe(recipe, ranks=1, gpu_bytes=80e9)
    parts = plan.model.config
    config = CoatVlmConfig(
        vision_config=parts.vision_config.to_dict(),
        text_config=parts.text_config.to_dict(),
        image_token_id=parts.image_token_index,
        select_layer=-1,
    )
    composed = create_meta_model(config, torch.bfloat16).train()
    expected = compose_row(composed, 512, 1).trace(composed, 2)
    assert plan.activations.total_saved == pytest.approx(expected.total_saved, rel=0.03)
    assert plan.activations.peak(2) == pytest.approx(expected.peak(2), rel=0.03)


def test_settings_are_chosen_and_a_step_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MAKERS["qwen2_5_vl"](tmp_path / "qwen")
    write_recipe(tmp_path / "qwen", tmp_path, [[(40, 24)], [(40, 24)]])
    path = str(tmp_path / "recipe.json")
    recipe = load_recipe(path, ["memory.gpu_gb=0.02"])
    fitted, sentence = fit_recipe(recipe, ranks=1)
    assert "micro_batch_size" in sentence
    assert fitted.stages["sft"].micro_batch_size in (1, 2, 4)
    words = ["stages.sft.packing={}", "precision=fp32", MICRO, "--measure"]
    assert main(["plan", path, *words]) == 0
    out = capsys.readouterr().out
    found = re.search(r"a step of ([\d,]+) tokens, ([\d,]+) of them supervised", out)
    assert found is not None, out
    assert found[1] == "2,048"  # two micro-batches of two rows of 512 tokens
    assert 0 < int(found[2].replace(",", "")) < 2048
