"""The bench of whole training runs: its files and recipes, and two steps of a small model."""

from typing import Any

import pytest
from PIL import Image

import lab_pipeline as bench
from coat_vlm.config.load import load_recipe


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Arguments of a run, with the data and small models that it reads."""
    out = tmp_path_factory.mktemp("pipeline")
    words = ["--tiny", "--samples", "12", "--batch", "1", "--steps", "2", "--warmup", "1"]
    args = bench.build_parser().parse_args([*words, "--runs", "qwen:coat", "--out", str(out)])
    bench.write_data(out, 12)
    bench.write_models(out, tiny=True)
    return args


def test_recipes_train_the_parts_that_the_runs_name(args: Any) -> None:
    sizes = {Image.open(file).size for file in (args.out / "images").iterdir()}
    assert len(sizes) > 6
    assert all(480 <= max(size) <= 1600 for size in sizes)
    trained = {"qwen": ["projector", "language"], "vila": ["vision", "projector", "language"]}
    for run in ("qwen:coat", "vila:coat"):
        name, *overrides = bench.train_arguments(args.out, run, args)
        recipe = load_recipe(name, overrides)
        stage = recipe.stages["sft"]
        parts = ("vision", "projector", "language")
        assert [part for part in parts if stage.module(part).train] == trained[run.split(":")[0]]
        assert recipe.optimizer == "coat"
        assert (stage.packing is not None) == run.startswith("qwen")


def test_results_leave_out_the_first_steps(args: Any) -> None:
    entry = {"tokens": 100, "step_s": 0.5, "data_wait_s": 0.01, "peak_memory_mb": None}
    first = {**entry, "step_s": 9.0, "peak_memory_mb": 2000.0}
    result = bench.summarize(
        "qwen:coat", [first, entry, {**entry, "tokens": 300, "step_s": 1.0}], args
    )
    assert (result.tok_s, result.step_tokens, result.steps) == (400 / 1.5, 200, 2)
    assert (result.step_s, result.wait, result.peak_gb) == (0.75, 0.02 / 1.5, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["qwen:coat", "vila:coat", "qwen:trl_liger"])
def test_a_small_run_is_measured(args: Any, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "apply_liger", lambda _: None)  # Liger's kernels need a GPU
    if run == "qwen:trl_liger":
        pytest.importorskip("trl")
    train = bench.train_trl if run == "qwen:trl_liger" else bench.train_ours
    entries = train(args.out, run, args)
    assert len(entries) == 2
    assert bench.summarize(run, entries, args).tok_s > 0
