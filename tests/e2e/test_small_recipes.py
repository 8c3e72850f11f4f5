"""The recipes for data that `data make` writes: made, trained for two steps, and evaluated."""

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from coat_cli.main import main
from coat_vlm.config.load import load_recipe

FAILED = 1
"""Exit status of ``eval`` if a metric is below the recipe's minimum."""


def encode(color: tuple[int, int, int], kind: str) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (64, 64), color).save(encoded, format=kind)
    return encoded.getvalue()


def make_easy_vqa() -> list[str]:
    images = Path("easy/train/images")
    images.mkdir(parents=True)
    asked = [
        ["what color is the shape?", "red"],
        ["what shape is present?", "circle"],
        ["is a circle present?", "yes"],
        ["is no circle present?", "no"],
    ]
    rows = [[*asked[number % 4], number] for number in range(404)]
    (images.parent / "questions.json").write_text(json.dumps(rows))
    for number in range(404):
        (images / f"{number}.png").write_bytes(encode((200, number % 256, 0), "PNG"))
    return ["easy_vqa", "--folder", "easy", "--out", "runs/easy_vqa-data"]


def make_tiny_imagenet() -> list[str]:
    names = ["goldfish", "king penguin", "acorn", "abacus", "wok"]
    with zipfile.ZipFile("tiny.zip", "w") as archive:
        listed = [{"folder": one.replace(" ", "_"), "name": one} for one in names]
        archive.writestr("classes.json", json.dumps(listed))
        for number, one in enumerate(listed):
            for path in ("train/{}/0", "train/{}/1", "val/{}/470"):
                photo = encode((50 * number, 0, 0), "JPEG")
                archive.writestr(f"{path.format(one['folder'])}.jpg", photo)
    return ["tiny_imagenet", "--zip", "tiny.zip", "--out", "photos/tiny_imagenet"]


def make_scenes() -> list[str]:
    sizes = ["--num-train", "8", "--num-val", "2", "--num-test", "8"]
    return ["scenes", *sizes, "--out", "runs/scenes-data"]


@pytest.mark.parametrize(
    ("name", "make", "sets", "required"),
    [
        ("easy_vqa", make_easy_vqa, ["test"], ("test", "97.00")),
        (
            "tiny_imagenet",
            make_tiny_imagenet,
            ["classification", "presence", "choice"],
            ("classification", "30.00"),
        ),
        (
            "scenes_binding",
            make_scenes,
            ["color", "presence", "count", "position", "binding"],
            ("binding", "90.00"),
        ),
    ],
)
def test_two_steps_of_a_small_model(
    name: str,
    make: Callable[[], list[str]],
    sets: list[str],
    required: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REAL_PHOTOS", "photos")
    assert main(["data", "make", *make()]) == 0
    recipe = load_recipe(name)
    small = [
        *("precision=fp32", "num_workers=0", "tracking.tensorboard=false"),
        *("model.vision.config.num_hidden_layers=1", "model.language.config.num_hidden_layers=1"),
    ]
    for stage, settings in recipe.stages.items():
        small += [f"stages.{stage}.{key}=4" for key in ("batch_size", "micro_batch_size")]
        small += [f"stages.{stage}.max_steps=2"]
        small += [f"stages.{stage}.epochs=null"] if settings.epochs is not None else []
    assert main(["train", name, *small]) == 0
    assert main(["eval", "--run", f"runs/{name}"]) == FAILED
    (missed,) = re.findall(
        r"missed: (\w+): accuracy is [\d.]+, required ([\d.]+)", capsys.readouterr().err
    )
    assert missed == required
    run = Path("runs", name)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(row["stage"], row["step"]) for row in steps if row["kind"] == "step"]
    assert found == [(stage, step) for stage in recipe.stages for step in (1, 2)]
    scores = json.loads((run / "eval.json").read_text())
    assert set(sets) < set(scores)
