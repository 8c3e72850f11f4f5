"""The page docs/reference/models.md: what the families of published models support.

Each feature is asked of the code that training uses, with a small random checkpoint per family.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import coat_vlm  # noqa: F401 - before transformers, which then takes any torchvision
from coat_vlm.config import Recipe
from coat_vlm.config.load import load_recipe
from coat_vlm.fp8 import arithmetic_of
from coat_vlm.fp8.blocks import Fp8ExpertsDecoderLayer, Fp8MlpLayer, find_layer
from coat_vlm.model.families import FAMILIES, Family
from coat_vlm.model.family_model import create_meta_family_model
from coat_vlm.plan import plan_recipe
from coat_vlm.train.model_setup import prepare_model

ROOT = Path(__file__).resolve().parents[1]
INTRO = """# Model families

`model.pretrained` [fine-tunes](../guides/huggingface.md) these families. All of them read text and
images, several per conversation; all train in full or with LoRA, in every precision, also on
preference pairs, and are saved in the published layout. Experts are frozen with LoRA.

- **videos**: `own`: the family's processor samples, sizes and times them; `frames`: as images
  ([details](../guides/long_video.md#published-models))
- **packing**: several samples per sequence; **shared**: several GPUs share a sequence
  ([details](../guides/long_context.md))
- **FP8**: `blocks`: attention projections and MLPs; `MLP`: only MLPs ([details](fp8_blocks.md))
- **plan**: `coat-vlm plan` and `memory` know the memory
- **pixels**: `model.max_pixels` limits the size of images
- **boxes**: the convention of the family's publishers
  ([details](../guides/conversations.md#boxes))

A dash means that a message refuses it; for FP8, that the blocks stay in BF16."""
COLUMNS = (
    *("family", "`model_type`", "videos", "packing", "shared", "FP8 tower"),
    *("FP8 language", "plan", "pixels", "boxes"),
)


def models_page() -> str:
    """Return the page: a table of features, and one of the modules in each part of a model."""
    sys.path.insert(0, str(ROOT / "tests/vlm"))
    from family_folders import MAKERS, settings_of

    lines = [INTRO, "", *_head(COLUMNS)]
    with tempfile.TemporaryDirectory() as folder:
        for kind, family in FAMILIES.items():
            path = Path(folder) / kind
            MAKERS[kind](path)
            cells = [family.name, f"`{kind}`", *_features(family, settings_of(path), path)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Parts",
        "",
        "What a stage trains as `vision`, `projector` and `language`.",
        "",
    ]
    lines += _head(("`model_type`", "`vision`", "`projector`", "`language`"))
    for kind, family in FAMILIES.items():
        parts = [
            ", ".join(f"`{name.removeprefix('model.')}`" for name in names)
            for names in family.parts.values()
        ]
        lines.append(f"| `{kind}` | {' | '.join(parts)} |")
    return "\n".join(lines) + "\n"


def _head(columns: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def _features(family: Family, settings: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield the cells of a family from ``videos`` on."""
    model = create_meta_family_model("model", str(folder), torch.bfloat16, "eager")
    layers = {
        part: {
            layer
            for name, module in model.named_modules()
            if name.startswith(names) and (layer := find_layer(module)) is not None
        }
        for part, names in family.parts.items()
    }
    yield "own" if family.videos.frames is None else "frames"
    yield _yes(_prepares(_recipe(folder, {"pretrained": str(folder)}, packing={})))
    shared = _recipe(folder, {"pretrained": str(folder)}, sequence_parallel=2)
    yield _yes(_prepares(shared))
    experts = any(issubclass(layer, Fp8ExpertsDecoderLayer) for layer in layers["language"])
    for part in ("vision", "language"):
        only_mlp = all(issubclass(layer, Fp8MlpLayer) for layer in layers[part])
        whole = "attention, frozen experts" if experts and part == "language" else "blocks"
        yield "-" if not layers[part] else "MLP" if only_mlp else whole
    yield _yes(_plans(_recipe(folder, settings)))
    yield _yes(family.limits_pixels)
    yield family.boxes


def _yes(value: bool) -> str:
    return "yes" if value else "-"


def _recipe(folder: Path, model: dict[str, Any], **changes: Any) -> Recipe:
    """Make a recipe that trains all parts on one sample of text."""
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "red"}]
    rows = folder / "rows.json"
    rows.write_text(json.dumps([{"conversations": turns}]), encoding="utf-8")
    train = {"train": True, "lr": 1e-5}
    stage = {"data": [{"name": "rows", "path": str(rows)}], "batch_size": 1}
    stage |= {"micro_batch_size": 1, "max_steps": 1}
    stage |= dict.fromkeys(("vision", "projector", "language"), train) | changes
    path = folder / "recipe.json"
    recipe = {"name": "families", "output_dir": str(folder / "run"), "precision": "bf16"}
    model = {**model, "max_length": 512}
    path.write_text(json.dumps({**recipe, "model": model, "stages": {"sft": stage}}))
    return load_recipe(str(path), [])


def _prepares(recipe: Recipe) -> bool:
    """Whether training accepts the stage."""
    meta = torch.device("meta")
    with contextlib.suppress(ValueError):
        model = create_meta_family_model(
            "model", str(recipe.model.pretrained), torch.bfloat16, recipe.model.attn_implementation
        )
        prepare_model(
            model, recipe.stages["sft"], arithmetic_of(recipe.precision, recipe.fp8, meta)
        )
        return True
    return False


def _plans(recipe: Recipe) -> bool:
    """Whether the memory of a sequence with an image can be planned."""
    try:
        plan_recipe(recipe, ranks=1, gpu_bytes=80e9, images=1)
    except ValueError as error:
        if "cannot be planned" not in str(error):
            raise
        return False
    return True
