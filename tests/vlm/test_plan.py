"""``coat-vlm plan``: refusals, advice, and runs measured on an H200."""

import re
from pathlib import Path

import pytest

from coat_cli.main import main
from coat_vlm.config import Recipe
from coat_vlm.config.load import load_recipe
from coat_vlm.plan import plan_recipe
from coat_vlm.plan.stage import StagePlan
from coat_vlm.plan.table import advice, format_plan

TEXT = """\
name: planned
output_dir: unused
precision: bf16
model:
  vision: {config: {model_type: siglip_vision_model, hidden_size: 64, num_hidden_layers: 2,
    num_attention_heads: 4, intermediate_size: 128, image_size: 32, patch_size: 8},
    select_layer: -1}
  language: {config: {model_type: qwen2, hidden_size: 128, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 256, vocab_size: 512}}
  tokenizer: {train_vocab_size: 400}
  max_length: 128
stages:
  sft:
    data: [{name: none, path: missing.json}]
    language: {train: true, lr: 1.0e-3}
    projector: {train: true, lr: 1.0e-3}
    batch_size: 64
    micro_batch_size: 32
    max_steps: 1
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(TEXT)
    return tmp_path / "recipe.yaml"


def plan(recipe: Recipe, gpu_bytes: float, ranks: int = 1) -> StagePlan:
    (planned,) = plan_recipe(recipe, ranks=ranks, gpu_bytes=gpu_bytes, images=1)
    return planned


def test_parameters_masters_states_and_gradients_by_hand(path: Path) -> None:
    planned = plan(load_recipe(str(path)), 80e9, ranks=2)
    # Embeddings and output layer 512 x 128; blocks with biases of q, k, v; a last norm.
    attention = 128 * 128 + 128 + 2 * (64 * 128 + 64) + 128 * 128
    language = 2 * 512 * 128 + 2 * (attention + 3 * 128 * 256 + 2 * 128) + 128
    projector = 2 * 256 + 256 * 128 + 128 + 128 * 128 + 128
    trained = language + projector
    assert planned.sizes.trained == trained
    memory = planned.memory[2]
    assert memory.master_weights == 4 * trained / 2
    assert memory.states == 8 * trained / 2
    assert planned.memory[0].gradients == 0  # one micro-batch on each of two ranks
    assert planned.memory[3].weights == 2 * planned.sizes.parameters / 2
    coat = plan(load_recipe(str(path), ["precision=coat"]), 80e9)
    assert coat.memory[0].states == pytest.approx(2.125 * trained, rel=0.03)


@pytest.mark.parametrize(
    ("overrides", "gpu", "bytes_of_a_sum", "words"),
    [
        (["stages.sft.micro_batch_size=8"], 80e9, 2, "of 8 micro-batches are summed in BF16"),
        (["stages.sft.micro_batch_size=4"], 80e9, 4, "of 16 micro-batches are summed in FP32"),
        (["stages.sft.micro_batch_size=4", "precision=coat"], 80e9, 4, "are summed in FP32"),
        (["stages.sft.micro_batch_size=4", "precision=coat"], 7e6, 2, "BF16 with stochastic"),
        (["stages.sft.micro_batch_size=4", "precision=fp32"], 8e6, 4, "are summed in FP32"),
    ],
)
def test_sums_of_gradients_are_counted_and_named(
    path: Path, overrides: list[str], gpu: float, bytes_of_a_sum: int, words: str
) -> None:
    planned = plan(load_recipe(str(path), overrides), gpu)
    assert planned.own_memory.gradients == bytes_of_a_sum * planned.sizes.trained
    assert words in format_plan([planned])


def test_a_plan_of_several_scales_has_the_wide_projector(path: Path) -> None:
    changes = [
        "model.image.mode=dynamic_s2",
        "model.image.max_tiles=12",
        "stages.sft.language={train: false}",
        "stages.sft.micro_batch_size=1",
    ]
    (planned,) = plan_recipe(
        load_recipe(str(path), changes),
        ranks=1,
        gpu_bytes=80e9,
        images=1 + 4 + 12,
    )
    wide = 3 * 4 * 64  # three scales, blocks of 2 x 2 patches
    assert planned.sizes.trained == 2 * wide + (wide + 1) * 128 + 129 * 128


def test_the_largest_micro_batch_fits_and_the_next_does_not(path: Path) -> None:
    planned = plan(load_recipe(str(path)), 0.1e9)
    largest = planned.largest_micro_batch(0)
    assert 0 < largest < 64
    assert planned.estimate_memory(0, largest).peak <= planned.usable_bytes
    assert planned.estimate_memory(0, largest + 1).peak > planned.usable_bytes


def test_following_the_advice_makes_it_fit(path: Path) -> None:
    recipe = load_recipe(str(path))
    needed = plan(recipe, 80e9).memory[0].peak
    assert advice(plan(recipe, 80e9)).startswith("It fits as written")
    tight = plan(recipe, 0.6 * needed * 1.03)
    words = advice(tight)
    assert "does not fit" in words
    overrides = words.rpartition(" with: ")[2].split()
    changed = load_recipe(str(path), overrides)
    followed = plan(changed, 0.6 * needed * 1.03)
    assert followed.memory[changed.zero_stage].peak <= followed.usable_bytes
    hopeless = advice(plan(recipe, 1e6))
    assert "use more (--gpus) or larger GPUs" in hopeless


def test_the_command_prints_a_table_and_says_what_is_wrong(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(path), "--gpus", "2", "--gpu-memory", "16", "--images", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("stage sft: It fits as written")
    assert "2 GPU(s) of 16.0 GB" in out
    assert "GB per rank" not in out
    assert main([*words, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"GB per rank +ZeRO 0 .*\n  weights ", out)
    assert "activations by part, GB: vision 0." in out
    assert main(["plan", str(path), "--gpus", "5"]) == 2
    assert "not a multiple" in capsys.readouterr().err


def test_a_language_model_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TEXT.replace("    projector: {train: true, lr: 1.0e-3}\n", "")
    path.write_text(re.sub("vision: .*?select_layer: -1}", "vision: null", text, flags=re.DOTALL))
    assert main(["plan", str(path), "--gpu-memory", "16"]) == 0
    assert "only text (no vision tower)" in capsys.readouterr().out


def test_a_plan_needs_no_model_to_start_from(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(path), "--gpu-memory", "80", "--images", "2"]
    assert main(words) == 0
    expected = capsys.readouterr().out
    assert main([*words, "init_from=runs/earlier/align/model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assumed = [line for line in lines if "assumed" in line]
    assert assumed == [
        "  assumed: init_from=runs/earlier/align/model does not exist yet; its shapes and "
        "vocabulary are assumed to match the recipe's model section"
    ]
    assert [line for line in lines if line not in assumed] == expected.splitlines()
    path.with_name("empty").mkdir()
    assert main([*words, f"init_from={path.with_name('empty')}"]) == 2
    assert "it has no config.json" in capsys.readouterr().err
