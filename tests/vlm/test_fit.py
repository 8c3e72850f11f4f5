"""``memory: {gpu_gb: ...}``: what is chosen, against all settings by hand; what is kept."""

from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from coat_cli.train import _choose_settings
from coat_vlm.config.load import load_recipe, save_recipe
from coat_vlm.plan import adopt_choices, fit_recipe, plan_recipe
from coat_vlm.train.run import run_recipe

TEXT = """\
name: fitted
output_dir: unused
precision: coat
memory: {gpu_gb: 80}
model:
  vision: null
  language: {config: {model_type: llama, hidden_size: 128, num_hidden_layers: 4,
    num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 256, vocab_size: 512}}
  tokenizer: {train_vocab_size: 400}
  max_length: 512
stages:
  sft:
    data: [{name: none, path: missing.json}]
    language: {train: true, lr: 1.0e-3}
    batch_size: 2
    max_steps: 1
"""
MICRO, RECOMPUTE = "stages.sft.micro_batch_size", "stages.sft.gradient_checkpointing"
QKV = "fp8.recompute_qkv"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit") / "recipe.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def peaks(path: Path) -> dict[tuple[bool, bool, int], float]:
    """Bytes of all settings on one GPU with low bits of master weights, fastest first."""
    found = {}
    cases = ((False, False), (False, True), (True, False))
    for (recompute, qkv), size in product(cases, (2, 1)):
        words = [f"{MICRO}={size}", f"{RECOMPUTE}={recompute}", f"{QKV}={qkv}"]
        words.append("master_weights=low_bits")
        (plan,) = plan_recipe(load_recipe(str(path), words), ranks=1, gpu_bytes=0)
        found[recompute, qkv, size] = plan.memory[0].peak
    return found


def chosen(path: Path, *words: str, ranks: int = 1) -> tuple[tuple[Any, ...], str]:
    recipe, sentence = fit_recipe(load_recipe(str(path), words), ranks=ranks)
    assert recipe.memory is not None
    assert recipe.memory.choose == []
    stage = recipe.stages["sft"]
    assert recipe.zero_stage == 0 or ranks > 1 or recipe.optimizer == "adamw"
    qkv = recipe.fp8 is not None and recipe.fp8.recompute_qkv is True
    return (stage.gradient_checkpointing, qkv, stage.micro_batch_size), sentence


def test_the_fastest_that_fits(path: Path, peaks: dict[Any, float]) -> None:
    assert load_recipe(str(path)).memory.choose == [MICRO, RECOMPUTE]  # pyright: ignore[reportOptionalMemberAccess]
    sizes = sorted(peaks.values())
    results = set()
    for peak in (sizes[0], sizes[len(sizes) // 3], sizes[2 * len(sizes) // 3], sizes[-1]):
        gigabytes = 1.03 * peak * 1.0001 / 1e9
        expected = next(key for key, needed in peaks.items() if needed <= 1.0001 * peak)
        found, sentence = chosen(path, f"memory.gpu_gb={gigabytes}")
        assert found == expected
        assert f"GB: {MICRO}={expected[2]}, {RECOMPUTE}={str(expected[0]).lower()}" in sentence
        assert (f"{QKV}=true" in sentence) == expected[1]
        assert f"peak is {peaks[expected] / 1e9:.1f} GB" in sentence
        results.add(found)
    assert len(results) == 4


def test_a_run_goes_on_with_its_choices(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(str(path), ["memory.gpu_gb=1"])
    with pytest.raises(ValueError, match=rf"memory leaves {MICRO}, {RECOMPUTE} to be chosen"):
        run_recipe(recipe, resume=False)
    first, _ = fit_recipe(recipe, ranks=1)
    save_recipe(first, tmp_path / "recipe.yaml")
    saved = load_recipe(str(tmp_path / "recipe.yaml"))
    assert saved == first
    other = load_recipe(str(path), [f"{RECOMPUTE}=true", "zero_stage=0"])
    adopted = adopt_choices(other, saved, ranks=1)
    assert adopted is not None
    stage = adopted.stages["sft"]
    assert (stage.micro_batch_size, stage.gradient_checkpointing) == (2, True)
    for zero_stage, end in ((0, ""), (2, ", and zero_stage=0")):
        words = ["memory.gpu_gb=1", f"zero_stage={zero_stage}", f"output_dir={tmp_path}"]
        continued = _choose_settings(load_recipe(str(path), words), Namespace(overwrite=False))
        assert continued.zero_stage == 0
        said = f"memory: the settings of {tmp_path / 'recipe.yaml'}{end}\n"
        assert capsys.readouterr().out.endswith(said)
    assert adopt_choices(other, saved, ranks=2) is None  # batches of 2 do not divide
