"""The model card of an export, read by huggingface_hub, and uploads without a network."""

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard

from coat_cli.main import main

RECIPE = """\
name: my run
precision: coat
zero_stage: 2
seed: 3
init_from: {init_from}
model:
  vision: {{name_or_path: google/siglip-base-patch16-224}}
  language: {{name_or_path: {language}}}
stages:
  align:
    data: [{{name: captions, path: captions.json}}]
  sft:
    data:
      - {{name: chat | talk, path: "hf://datasets/someone/chat/train.parquet"}}
      - {{name: own, path: own.json}}
    batch_size: 8
    language: {{train: true, lr: 0.001}}
eval_sets:
  presence: {{task: yes_no, path: p, require: {{accuracy: 75}}}}
"""


def make_run(folder: Path, checkpoint: Path, init_from: str = "null", language: str = "Qwen/Q-1B"):
    """A run whose numbers are known; its model is the checkpoint."""
    for stage in ("align", "sft"):
        shutil.copytree(checkpoint, folder / stage / "model")
    (folder / "recipe.yaml").write_text(RECIPE.format(init_from=init_from, language=language))
    start = {"kind": "stage", "stage": "sft", "status": "start", "world_size": 2}
    start |= {"device": "NVIDIA H200", "precision": "coat", "versions": {"torch": "9.9.9"}}
    start["trainable"] = {"vision": 0, "projector": 0, "language": 1500}
    start["total"] = {"vision": 700, "projector": 20, "language": 1500}
    start["sources"] = [
        {"name": "chat | talk", "rows": 90, "samples": 30, "passes": 1.0, "tokens": 50.0},
        {"name": "own", "rows": 10, "samples": 10, "passes": 1.0, "tokens": 70.0},
    ]
    rows = [start]
    for number in (1, 2, 3):
        row = {"kind": "step", "stage": "sft", "step": number, "total_steps": 3, "loss": 1.0}
        rows.append(row | {"tokens": 2000, "samples": 8, "step_s": 2.0, "time": 1.7e9})
    rows.append({**start, "status": "end", "wall_s": 6.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = {"accuracy": 80.0, "chance": 50.0}
    (folder / "eval.json").write_text(json.dumps({"presence": metrics, "precision": "coat"}))
    (folder / "eval" / "presence").mkdir(parents=True)
    report = {"headline": "accuracy", "n": 100, "metrics": metrics}
    report["intervals"] = {"accuracy": [72.16, 87.84]}
    (folder / "eval" / "presence" / "report.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "run"
    make_run(folder, checkpoint)
    return folder


def export_card(source: Path, target: Path, *options: str) -> Any:
    assert main(["export", "--model", str(source), "--to", str(target), "--card", *options]) == 0
    return ModelCard.load(target / "README.md")


def tables(card: Any) -> list[list[str]]:
    """All rows of the card's tables."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in card.text.splitlines()
        if line.startswith("| ")
    ]


def test_a_card_repeats_the_numbers_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    card = export_card(run / "sft" / "model", tmp_path / "out")
    assert "its license is for you to fill in" in capsys.readouterr().out
    assert card.data.library_name == "coat-vlm"
    assert card.data.pipeline_tag == "image-text-to-text"
    assert card.data.base_model == ["Qwen/Q-1B", "google/siglip-base-patch16-224"]
    assert card.data.datasets == ["someone/chat"]
    assert card.data.license is None
    rows = tables(card)
    assert ["presence", "accuracy", "80.00", "72.2 to 87.8", "50.00", "100"] in rows
    assert ["sft", "3 of 3", "8", "6 K", "language 1.5 K (lr 0.001)"] in rows
    # Three steps of 8 samples, of 40 in an epoch.
    assert ["sft", "chat \\| talk", "90", "0.60", "75.0", "50"] in rows
    for text in ("- precision: coat\n", "- device: 2 x NVIDIA H200\n", "2.22 K parameters"):
        assert text in card.text
    assert "Not filled in. Add `license`" in card.text
    assert (run / "recipe.yaml").read_text().strip() in card.text


def test_results_are_those_of_the_exported_weights(run: Path, tmp_path: Path):
    earlier = export_card(run / "align" / "model", tmp_path / "align")
    assert "presence" not in earlier.text[: earlier.text.index("## Recipe")]
    assert "Not measured: the run evaluated the model of its last" in earlier.text
    options = ("--format", "language", "--weights", "int8")
    quantized = export_card(run / "sft" / "model", tmp_path / "int8", *options)
    assert "were quantized afterwards (int8)" in quantized.text
    assert quantized.data.library_name == "transformers"
    assert quantized.data.pipeline_tag == "text-generation"
    assert quantized.data.base_model == ["Qwen/Q-1B"]


def test_a_card_needs_a_run(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        main(["export", "--model", str(checkpoint), "--to", str(tmp_path / "out"), "--card"]) == 2
    )
    assert "--card describes the run of a model, and" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("offline", "name", "message"),
    [
        (True, "me/mine", "offline mode is enabled"),
        (False, "me/mine/of/mine", "give USER/MODEL"),
    ],
)
def test_an_upload_that_cannot_be_is_one_sentence_before_the_export(
    run: Path,
    tmp_path: Path,
    offline: bool,
    name: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    words = ["export", "--model", str(run / "sft" / "model"), "--to", str(tmp_path / "out")]
    assert main([*words, "--push-to-hub", name]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert f"--push-to-hub {name}: " in printed
    assert not (tmp_path / "out").exists()


def test_the_complete_folder_is_uploaded_to_a_private_repository(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls: list[Any] = []

    class Address(str):
        repo_id = "me/mine"

    def create_repo(_: HfApi, name: str, **options: Any) -> Address:
        calls.append((name, options))
        return Address("https://huggingface.co/me/mine")

    def upload_folder(_: HfApi, *, folder_path: Path, repo_id: str) -> None:
        calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr(HfApi, "whoami", lambda _: {})
    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    export_card(run / "sft" / "model", tmp_path / "out", "--push-to-hub", "mine")
    (name, options), (repository, files) = calls
    assert (name, options["private"], repository) == ("mine", True, "me/mine")
    assert {"README.md", "config.json", "model.safetensors"} <= {*files}
    assert "pushed: https://huggingface.co/me/mine" in capsys.readouterr().out
