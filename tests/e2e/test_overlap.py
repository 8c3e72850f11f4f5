"""Steps that overlap train as steps of which each waits for its results, also on a CPU."""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from coat_cli.main import main
from coat_vlm.train import stages
from coat_vlm.train.step import TrainStep

training = runpy.run_path(str(Path(__file__).with_name("test_training.py")))

TIMES = ("time", "step_s", "data_wait_s", "save_s", "val_s", "peak_memory_mb")
HEAD = "language_model.lm_head.weight"


def rows_of(run: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl without times."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = [row for row in rows if row["kind"] in ("step", "save", "val", "divergence", "rollback")]
    return [{k: v for k, v in row.items() if k not in TIMES and "per_s" not in k} for row in kept]


def trained(
    recipe: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> tuple[int, Path, list[list[int]]]:
    """Train in this process; also returns the steps that each call of the step has finished."""
    calls: list[list[int]] = []
    call = TrainStep.__call__

    def counted(self: TrainStep, *words: Any, **options: Any) -> Any:
        finished, stop = call(self, *words, **options)
        calls.append([one.row["step"] for one in finished])
        return finished, stop

    folder.mkdir()
    run = folder / "run"
    path = training["write_recipe"]({**recipe, "output_dir": str(run)}, folder / "recipe.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(stages, "steps_overlap", lambda *_: overlaps)
        patch.setattr(TrainStep, "__call__", counted)
        status = main(["train", str(path)])
    return status, run, calls


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "sft/model/model.safetensors")


def recipe_of(data: Path, **stage: Any) -> dict[str, Any]:
    recipe = training["tiny_recipe"](data, data, precision="coat")
    recipe["stages"]["sft"].update(stage)
    return recipe


@pytest.mark.parametrize("micro_batch_size", [2, 8])
@pytest.mark.parametrize("low_bits", [False, True])
def test_they_train_and_log_the_same(
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    micro_batch_size: int,
    low_bits: bool,
) -> None:
    """Also with checkpoints and validations between them, to the last bit."""
    schedule = {"max_steps": 9, "save_every_steps": 4, "eval_every_steps": 6}
    recipe = recipe_of(tiny_data, micro_batch_size=micro_batch_size, **schedule)
    if low_bits:
        recipe["master_weights"] = "low_bits"
    found = [
        trained(recipe, tmp_path / str(overlaps), monkeypatch, overlaps)
        for overlaps in (False, True)
    ]
    assert [status for status, *_ in found] == [0, 0]
    (_, plain, waiting), (_, run, overlapping) = found
    assert waiting == [[step] for step in range(1, 10)]
    # FP8 is measured in steps 1 and 9; the loop saves after 4 and 8, and validates after 6.
    assert overlapping == [[1], [], [2], [3, 4], [], [5, 6], [], [7, 8], [9]]
    assert rows_of(run) == rows_of(plain)
    assert len(rows_of(run)) > 9
    expected = weights(plain)
    for name, weight in weights(run).items():
        assert weight.equal(expected[name]), name


def test_a_rollback_leaves_no_trace_of_the_step_after(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is launched already; a threshold that noise exceeds stands for divergence."""
    recipe = recipe_of(
        tiny_data, val_data=[], max_steps=30, save_every_steps=3, schedule="constant"
    )
    for name in ("vision", "projector", "language"):
        recipe["stages"]["sft"][name] = {"train": True, "lr": 2e-2}  # noisy
    recipe["divergence"] = {
        "action": "rollback", "window": 16, "threshold": 1e-6, "patience": 1, "max_rollbacks": 100,
    }  # fmt: skip
    recipe["save_total_limit"] = 50
    found = [
        trained(recipe, tmp_path / str(overlaps), monkeypatch, overlaps)
        for overlaps in (False, True)
    ]
    assert [status for status, *_ in found] == [0, 0]
    (_, plain, _), (_, run, calls) = found
    jumps = json.loads((run / "sft/rollbacks.json").read_text())
    # Some are noticed when the next step is launched, which is then forgotten.
    assert any(
        len(finished) == 1 and finished[0] in {j["from"] for j in jumps} for finished in calls
    )
    assert jumps == json.loads((plain / "sft/rollbacks.json").read_text())
    assert rows_of(run) == rows_of(plain)
    expected = weights(plain)
    assert all(weight.equal(expected[name]) for name, weight in weights(run).items())


@pytest.mark.parametrize("allowed", [0, 1])
def test_bad_gradients_are_found_before_the_next_step_changes_weights(
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    allowed: int,
) -> None:
    """A step whose gradients are NaN changes nothing; one more than allowed stops the run."""
    recipe = recipe_of(
        tiny_data, max_steps=8, val_data=[], save_every_steps=0, max_skipped_steps=allowed
    )
    recipe["master_weights"] = "low_bits"
    update, history = TrainStep._update, []

    def spoiled(self: TrainStep, *words: Any) -> Any:
        head = self.model.get_parameter(HEAD)
        hook = head.register_hook(lambda grad: grad * math.nan if self.finished == 4 else grad)
        optimizer: Any = self.engine.optimizer
        with torch.no_grad():
            history.append(
                [head.clone(), optimizer.state[head].get("step", torch.zeros(())).clone()]
            )
        try:
            return update(self, *words)
        finally:
            hook.remove()
            with torch.no_grad():
                history[-1] += [head.clone(), optimizer.state[head]["step"].clone()]

    monkeypatch.setattr(TrainStep, "_update", spoiled)
    status, run, _ = trained(recipe, tmp_path / "overlapping", monkeypatch, overlaps=True)
    before, count, after, count_after = history[4]
    assert before.equal(after)  # step 5
    assert count == count_after == 4
    if allowed:
        assert status == 0
        assert [row["skipped_steps"] for row in training["steps"](run)] == [0] * 4 + [1] * 4
        assert [row["grad_norm"] is None for row in training["steps"](run)].index(True) == 4
        assert not history[5][0].equal(history[5][2])
        return
    assert status == 2
    assert "step 5: gradients are NaN or infinite" in capsys.readouterr().err
    assert history[5][2].equal(after)  # step 6 was launched, and did not change weights
    assert len(history) == 6
