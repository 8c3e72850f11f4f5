"""``lab formats`` on a finished run: its tensors, and its model converted after training."""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from coat_bench.rows import read_rows
from coat_cli.main import main
from coat_lab.formats_study import FormatRow
from coat_lab.number_formats import parse_format, parse_scaling
from coat_lab.run_tensors import (
    capture,
    converted,
    linear_layers,
    list_tensors,
    measure_losses,
    open_run,
)

training = runpy.run_path(str(Path(__file__).with_name("test_training.py")))

DOWN = "language_model.model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    recipe = training["tiny_recipe"](tiny_data, folder / "run")
    done = training["train"](recipe, folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_rows_of_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, svg = tmp_path / "formats.csv", tmp_path / "formats.svg"
    command = ["lab", "formats", "--runs", str(run), "--data", "--batches", "100"]
    command += ["--formats", "int8", "int3", "--scales", "token", "tensor:static"]
    assert main([*command, "--csv", str(csv), "--plot", str(svg)]) == 0
    rows = read_rows(csv, FormatRow, "")
    values: dict[Any, float] = {
        (row.measure, row.layer, row.format, row.scales): row.value for row in rows
    }
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [row["losses"]["tiny"] for row in metrics if row["kind"] == "val"]
    own = values["held-out loss, tiny", "", "fp32", ""]
    assert own == pytest.approx(trained, abs=1e-4)  # a CSV file has four digits
    for scales in ("token", "tensor:static"):
        int8, int3 = (values["held-out loss, tiny", "", f, scales] for f in ("int8", "int3"))
        assert abs(int8 - own) < 0.05 * own
        assert abs(int8 - own) < abs(int3 - own)
    measures = {measure for measure, *_ in values}
    tensors = ("weights", "inputs", "gradients", "exp_avg", "exp_avg_sq")
    assert measures == {*(f"SQNR of {t}" for t in tensors), "training loss", "held-out loss, tiny"}

    # One weight with one scale per row, written out.
    weight = load_file(run / "sft" / "model" / "model.safetensors")[f"{DOWN}.weight"].double()
    scale = weight.abs().amax(1, keepdim=True) / 127
    noise = (weight / scale).round() * scale - weight
    expected = 10 * math.log10(weight.square().sum() / noise.square().sum())
    assert values["SQNR of weights", DOWN, "int8", "token"] == pytest.approx(expected, abs=0.02)
    assert "run: held-out loss, tiny" in capsys.readouterr().out
    assert svg.read_text().count("<svg") == 1


def test_a_stage_that_trains_on_pairs_is_refused(run: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    (stage,) = recipe["stages"].values()
    recipe["stages"]["dpo"] = {**stage, "packing": None, "dpo": {"beta": 0.1}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ValueError, match="last stage is dpo, and the lab does not know the loss"):
        open_run(tmp_path, 1)


def test_a_conversion_rounds_weights_and_inputs_and_is_undone(run: Path) -> None:
    opened = open_run(run, 2)
    before = {name: value.clone() for name, value in opened.model.state_dict().items()}
    losses = measure_losses(opened)
    fmt = parse_format("e3m2")
    calibration, gradients = capture(opened.model, opened.training[0])
    assert calibration.keys() == gradients.keys() == linear_layers(opened.model).keys()
    seen: list[torch.Tensor] = []
    layer = linear_layers(opened.model)[DOWN]
    for name in ("token", "tensor:static"):
        with converted(opened.model, fmt, parse_scaling(name), calibration):
            handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            assert measure_losses(opened) != losses
            handle.remove()
            for one in (layer.weight.detach(), seen[-1].reshape(-1, seen[-1].shape[-1])):
                assert max(len(row.abs().unique()) for row in one) <= 32  # of 5 bits
    # Static scales: larger inputs saturate at the largest one of the calibration.
    assert seen[-1].abs().max() <= calibration[DOWN].abs().max() * (1 + 1e-6)
    assert measure_losses(opened) == losses
    for name, value in opened.model.state_dict().items():
        assert torch.equal(value, before[name])
    with (
        pytest.raises(ValueError, match=r"layer .*: scales 'group5': rows have \d+ elements"),
        converted(opened.model, fmt, parse_scaling("group5"), {}),
    ):
        pass


def test_moments_are_those_of_the_checkpoint(run: Path) -> None:
    found = {(what, name): x for what, name, x in list_tensors(open_run(run, 1))}
    v = found["exp_avg_sq", DOWN]
    assert v.shape == found["weights", DOWN].shape
    assert (v >= 0).all()
    assert v.any()
    assert (found["exp_avg", DOWN] < 0).any()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--data"], "nothing to measure"),
        (["--batches", "2"], "--batches is a number of a run's micro-batches; give --runs"),
        (["--eval"], "--eval answers a run's evaluation sets; give --runs"),
        (["--formats", "e0m0"], "format 'e0m0' cannot exist"),
        (["--runs", "a/same", "b/same"], "two folders have the same name"),
        (["--data", "--runs", "missing"], "missing"),
    ],
)
def test_what_cannot_be_measured(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "formats", *options]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_without_questions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "formats", "--data", "--runs", str(run), "--eval"]) == 2
    assert "the recipe of run has no eval_sets" in capsys.readouterr().err
