"""Recipes: what loads, what is refused and how the message reads."""

import json
from pathlib import Path

import pytest

from coat_cli.main import main
from coat_vlm.config import MODULES, StageName
from coat_vlm.config.load import list_builtin_recipes, load_recipe, save_recipe

MINIMAL = """\
name: small
output_dir: runs/small
model:
  vision: {config: {model_type: siglip_vision_model}}
  language: {config: {model_type: qwen2}}
stages:
  sft:
    data: [{name: a, path: "${DATA}/a.json"}]
    projector: {train: true, lr: 1.0e-3}
    batch_size: 8
    micro_batch_size: 2
    max_steps: 5
"""


@pytest.fixture
def recipe_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DATA", "/my/data")
    path = tmp_path / "small.yaml"
    path.write_text(MINIMAL)
    return path


def test_overrides_and_variables(recipe_path: Path) -> None:
    recipe = load_recipe(
        str(recipe_path), ["seed=3", "stages.sft.projector.lr=0.5", "stages.sft.data.0.name=b"]
    )
    assert recipe.seed == 3
    assert recipe.stages["sft"].projector.lr == 0.5
    assert recipe.stages["sft"].data[0].name == "b"
    assert recipe.stages["sft"].data[0].path == "/my/data/a.json"
    assert recipe.stages["sft"].vision.train is False


def test_a_saved_recipe_loads_equal(recipe_path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(str(recipe_path))
    save_recipe(recipe, tmp_path / "saved.yaml")
    assert load_recipe(str(tmp_path / "saved.yaml")) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.sft.projector.lrr=1", "stages.sft.projector.lr?"),
        (
            "precision=fp8",
            "precision: input should be 'fp32', 'bf16', 'fp8_linear' or 'coat', got 'fp8'",
        ),
        ("stages.sft.vision={train: false, lr: 1}", "has no effect because train is false"),
        ("stages.sft.max_steps=null", "exactly one of epochs or max_steps"),
        ("stages.sft.eval_steps=2", "no effect without val_data"),
        ("stages.sft.batch_size=-8", "stages.sft.batch_size: input should be greater than 0"),
        ("seed", "expected key=value"),
        ("stages.sft.vision={train: false, train: true}", "the key 'train' is repeated"),
    ],
)
def test_a_wrong_key_is_named(recipe_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        load_recipe(str(recipe_path), [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../../x", "/tmp/x", "..", "", "a\\b", "a\nb", ".lock", "x" * 300]
)
def test_names_of_evaluation_sets_stay_in_the_run(recipe_path: Path, name: str) -> None:
    override = f"eval_sets={{{json.dumps(name)}: {{task: yes_no, path: p}}}}"
    with pytest.raises(ValueError, match=r"(?s)  eval_sets\..*is not the name of a folder"):
        load_recipe(str(recipe_path), [override])
    load_recipe(str(recipe_path), ["eval_sets={POPE (r-1): {task: yes_no, path: p}}"])


def test_wrong_files(recipe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="did you mean quickstart"):
        load_recipe("quickstrat")
    recipe_path.write_text(MINIMAL + "name: again\n")
    with pytest.raises(ValueError, match="'name' is repeated"):
        load_recipe(str(recipe_path))
    recipe_path.write_text(MINIMAL + "format_version: 2\n")
    with pytest.raises(ValueError, match="has format version 2"):
        load_recipe(str(recipe_path))
    recipe_path.write_text("- a\n")
    with pytest.raises(ValueError, match="a recipe is a mapping"):
        load_recipe(str(recipe_path))
    recipe_path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=f"^{recipe_path}: a recipe is YAML in UTF-8"):
        load_recipe(str(recipe_path))
    recipe_path.write_text(MINIMAL)
    monkeypatch.delenv("DATA")
    with pytest.raises(ValueError, match="environment variable DATA"):
        load_recipe(str(recipe_path))


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VILA_DATA", "LLAVA_DATA", "TEXT_DATA", "REAL_PARTS"):
        monkeypatch.setenv(name, "/data")


@pytest.mark.usefixtures("folders")
def test_the_built_in_recipes_load_and_resolve(tmp_path: Path) -> None:
    published = {
        "llava_1_5",
        "llm_pretrain",
        "vila_align",
        "vila_pretrain",
        "vila_sft",
        "vila_video_sft",
        "vila_long_video",
    }
    own = {"quickstart", "qwen2_5_vl", "vila_sft_lora", "real_parts"}
    assert own | published == set(list_builtin_recipes())
    for name in list_builtin_recipes():
        recipe = load_recipe(name)
        assert recipe.name == name
        save_recipe(recipe, tmp_path / f"{name}.yaml")
        assert load_recipe(str(tmp_path / f"{name}.yaml")) == recipe


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("name", "stage", "rates", "batch", "length", "mode", "projector"),
    [
        # Tower, projector and language model: NVlabs/VILA, scripts/NVILA-Lite and scripts/NVILA.
        ("vila_align", "align", (None, 1e-3, None), 2048, 4096, "dynamic", "3x3"),
        ("vila_pretrain", "pretrain", (None, 5e-5, 5e-5), 1024, 4096, "dynamic", "3x3"),
        ("vila_sft", "sft", (2e-5, 2e-5, 2e-5), 2048, 4096, "dynamic", "3x3"),
        ("vila_video_sft", "sft", (2e-5, 2e-5, 2e-5), 2048, 16384, "resize", "3x3"),
        # NVlabs/VILA, longvila/train/5_long_sft_256frames.sh; batch and length are ours.
        ("vila_long_video", "sft", (2e-5, 2e-5, 2e-5), 128, 65536, "resize", "3x3"),
        # Tiles and length as above; rates and batch: haotian-liu/LLaVA, finetune_lora.sh.
        ("vila_sft_lora", "sft", (None, 2e-5, 2e-4), 128, 4096, "dynamic", "3x3"),
        # haotian-liu/LLaVA, scripts/v1_5.
        ("llava_1_5", "align", (None, 1e-3, None), 256, 2048, "pad", "mlp2x_gelu"),
        ("llava_1_5", "sft", (None, 2e-5, 2e-5), 128, 2048, "pad", "mlp2x_gelu"),
    ],
)
def test_published_settings(
    name: str,
    stage: StageName,
    rates: tuple[float | None, ...],
    batch: int,
    length: int,
    mode: str,
    projector: str,
) -> None:
    recipe = load_recipe(name)
    training = recipe.stages[stage]
    assert tuple(training.module(module).lr for module in MODULES) == rates
    assert (training.batch_size, recipe.model.max_length) == (batch, length)
    assert (training.epochs, training.lr_scheduler_type, training.warmup_ratio) == (
        1,
        "cosine",
        0.03,
    )
    assert (training.weight_decay, training.betas, training.max_grad_norm) == (0, (0.9, 0.999), 1)
    assert recipe.model.image.mode == mode
    assert projector in recipe.model.projector.type
    assert recipe.model.vision is not None
    assert recipe.model.vision.select_layer == -2
    assert training.batch_size % (8 * training.micro_batch_size) == 0


@pytest.mark.usefixtures("folders")
def test_a_recipe_whose_start_is_missing_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = f"init_from={tmp_path / 'nowhere'}"
    assert main(["train", "vila_sft", missing]) == 2
    assert "first train the recipe that writes it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        (
            "stages.sft.lr=1",
            "stages.sft.language.lr or stages.sft.projector.lr or stages.sft.vision.lr",
        ),
        ("stages.sft.num_train_epochs=1", "stages.sft.epochs"),
        ("learning_rate=1", "stages.NAME.language.lr"),
        ("stages.sft.max_length=1", "model.max_length"),
        ("stages.sft.data.0.image_folder=x", "stages.sft.data.0.media_root"),
    ],
)
def test_a_key_of_another_place_or_program_is_found(
    recipe_path: Path, override: str, suggested: str
) -> None:
    with pytest.raises(ValueError, match="unknown key") as caught:
        load_recipe(str(recipe_path), [override])
    assert f"did you mean {suggested}" in str(caught.value)
