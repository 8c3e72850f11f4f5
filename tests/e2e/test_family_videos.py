"""Published models trained on texts, images and videos in one data set, and asked about videos."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from clips import write_clip
from family_folders import MAKERS, settings_of
from official_files import make_videomme
from PIL import Image
from safetensors.torch import load_file

from coat_cli.main import main
from coat_data.sample import Media, Part, Sample, Turn
from coat_vlm.generate import generate, load
from coat_vlm.model.families import FAMILIES
from coat_vlm.model.family_videos import EncodedVideo, FamilyMedia

FIRST = "qwen3_vl"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rows: texts, images, videos of several lengths, and both in one conversation."""
    folder = tmp_path_factory.mktemp("mixed")
    draw = np.random.default_rng(1)
    for number in range(3):
        values = draw.integers(0, 256, (24, 40 + 8 * number, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"{number}.png")
        frames = draw.integers(0, 256, (9 + 8 * number, 48, 64, 3), dtype=np.uint8)
        write_clip(folder / f"{number}.mp4", frames, rate=5)
    shown: list[dict[str, Any]] = [
        {"video": "0.mp4"}, {}, {"image": "0.png"}, {"video": "1.mp4"},
        {"image": "1.png", "video": "2.mp4"}, {"image": "2.png"}, {"video": "2.mp4"}, {},
    ]  # fmt: skip
    rows = []
    for number, media in enumerate(shown):
        marks = "".join(f"<{kind}>\n" for kind in media)
        question = {"from": "human", "value": f"{marks}Is there a square?"}
        answer = {"from": "gpt", "value": ("yes", "no", "red")[number % 3]}
        rows.append({"id": str(number), **media, "conversations": [question, answer]})
    (folder / "data.json").write_text(json.dumps(rows))
    return folder


def make_recipe(data: Path, source: Path, run: Path, **changes: Any) -> dict[str, Any]:
    trains = {"train": True, "lr": 1e-3}
    stage = {
        "data": [{"name": "mixed", "path": str(data / "data.json")}], "max_steps": 3,
        "batch_size": 4, "micro_batch_size": 1,
        "vision": trains, "projector": trains, "language": trains,
    }  # fmt: skip
    recipe = {
        "name": "videos",
        "output_dir": str(run),
        "precision": "fp32",
        "num_workers": 0,
        "tracking": {"tensorboard": False},
        "model": settings_of(source),
        "stages": {"sft": stage},
    }
    return recipe | changes


def train(recipe: dict[str, Any], folder: Path, ranks: int = 1) -> str:
    folder.mkdir(exist_ok=True)
    done = tiny_run.train(recipe, folder, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_with_mixed_rows(family: str, stage: int, mixed: Path, tmp_path: Path) -> None:
    """Each rank runs the tower once a pass, whichever kinds of media it has.

    At an epsilon far above the gradients, AdamW's steps are proportional to them.
    """
    MAKERS[family](tmp_path / family)
    before, changes, steps = read_weights(tmp_path / family), {}, {}
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        zero = {"zero_stage": stage} if ranks > 1 else {}
        recipe = make_recipe(mixed, tmp_path / family, run, **zero)
        parts = {part: {"train": True, "lr": 10.0} for part in ("vision", "projector", "language")}
        recipe["stages"]["sft"] |= {**parts, "eps": 100.0, "weight_decay": 0.0}
        train(recipe, tmp_path / str(ranks), ranks)
        after = read_weights(run / "sft" / "model")
        changes[ranks] = {name: after[name] - value for name, value in before.items()}
        steps[ranks] = [(step["loss"], step["grad_norm"]) for step in tiny_run.steps(run)]
    # The sums of FP32 gradients are in another order.
    assert np.array(steps[2]) == pytest.approx(np.array(steps[1]), rel=1e-4)
    whole = torch.cat([change.flatten() for change in changes[1].values()]).norm()
    assert whole > 0.01
    for name, change in changes[1].items():
        # Two FP32 values are rounded in each of three steps; gradients of some biases cancel.
        rounding = 6 * torch.finfo(torch.float32).eps * before[name].norm() + 1e-6 * whole
        assert (changes[2][name] - change).norm() <= 1e-4 * change.norm() + rounding, name


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return {name: value.float() for name, value in load_file(file).items()}


@pytest.fixture(scope="module", params=[FIRST, "gemma3"])
def run(
    request: pytest.FixtureRequest, mixed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param](folder / "model")
    train(make_recipe(mixed, folder / "model", folder / "run"), folder)
    return folder / "run"


def test_metrics_count_images_and_frames(run: Path) -> None:
    steps = tiny_run.steps(run)
    assert len({step["loss"] for step in steps}) == 3
    # Two steps are an epoch: three images, and 2 frames a second of 9, 17, 25 and 25 at 5 a second,
    # or 8 of each.
    frames = 4 + 6 + 10 + 10 if FIRST in str(run) else 4 * 8
    assert sum(step["tiles"] for step in steps[:2]) == 3 + frames
    assert sum(step["videos"]["video_pyav"] for step in steps[:2]) == 4


def test_questions_about_videos(
    run: Path, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands answer as :func:`generate`."""
    model, clip = run / "sft" / "model", mixed / "1.mp4"
    turns = (Turn("user", (Part("video"), Part("text", "Is there a square?"))),)
    asked = Sample(id="1", turns=turns, media=(Media(kind="video", path=str(clip)),))
    expected = generate(*load(model, "cpu"), [asked], 8)[0]
    words = ["--video", str(clip), "--prompt", "<video>Is there a square?", "--max-new-tokens", "8"]
    capsys.readouterr()
    assert main(["generate", "--model", str(run), *words]) == 0
    assert capsys.readouterr().out.strip() == expected
    data = tmp_path / "videomme"
    data.mkdir()
    make_videomme(data)
    options = ["--data", str(data), "--max-new-tokens", "4"]
    for task in ("videomme", "videomme_subtitles"):
        out = tmp_path / "out" / task
        assert main(["eval", "--model", str(run), "--tasks", task, "--to", str(out), *options]) == 0
        answers = (out / task / "predictions.jsonl").read_text().splitlines()
        assert len(answers) == 3
        problems = (out / task / "media_problems.jsonl").read_text().splitlines()
        assert len(problems) == 3  # the questions about a video that is missing
    prompts = [json.loads(row) for row in (out / task / "prompts.jsonl").read_text().splitlines()]
    # Four frames a second apart: of the words, those on screen at 0 and 3 seconds.
    assert "first words\nlast words\n" in prompts[0]["prompt"]
    assert "never shown" not in prompts[0]["prompt"]


def test_sampling_of_a_run_its_model_and_its_adapters(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answer as the merged model, from as many frames; the base has its own number."""
    seen: list[int] = []
    read = FamilyMedia.read_video

    def read_video(self: FamilyMedia, media: Media) -> EncodedVideo:
        seen.append((video := read(self, media)).frames)
        return video

    monkeypatch.setattr(FamilyMedia, "read_video", read_video)
    source, run = tmp_path / "model", tmp_path / "run"
    MAKERS[FIRST](source)
    recipe = make_recipe(mixed, source, run)
    recipe["model"]["video"] = {"num_frames": 6}
    stage = recipe["stages"]["sft"] | {"lora": {"rank": 4}, "max_steps": 1}
    recipe["stages"]["sft"] = {
        n: own for n, own in stage.items() if n not in ("vision", "projector")
    }
    train(recipe, tmp_path)
    questions = tmp_path / "questions"
    questions.mkdir()
    shutil.copy(mixed / "2.mp4", questions)
    row = {"question_id": "1", "video": "2.mp4", "text": "Is it red?", "answer": "yes"}
    (questions / "questions.jsonl").write_text(json.dumps(row))

    def ask(name: str, folder: Path, *more: str) -> tuple[str, set[int], int | None]:
        out = tmp_path / "out" / name
        words = ["--tasks", f"yes_no={questions}", "--to", str(out), "--max-new-tokens", "4"]
        seen.clear()
        assert main(["eval", "--model", str(folder), *words, *more]) == 0
        (report,) = out.rglob("report.json")
        prediction = (report.parent / "predictions.jsonl").read_text()
        return prediction, {*seen}, json.loads(report.read_text()).get("num_frames")

    model = run / "sft" / "model"
    expected = ask("run", run)
    assert expected[1:] == ({6}, None)
    assert ask("model", model) == expected
    assert ask("own", source, "--adapters", str(model / "adapter")) == expected
    assert ask("base", source)[1:] == ({10}, None)  # 2 a second of 25 at 5 a second
    assert ask("limited", source, "--num-frames", "6")[1:] == ({6}, 6)
