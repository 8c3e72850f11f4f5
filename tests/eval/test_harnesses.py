"""Models that lmms-eval and VLMEvalKit evaluate, and their logs, scored here."""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from datasets import Dataset, Image
from official_files import WORDS
from PIL import Image as PilImage

from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_eval.benchmark import Settings
from coat_eval.harness_model import HarnessModel, make_sample, read_generation
from coat_eval.scoring import score_official
from coat_eval.tasks import get_benchmark
from coat_vlm.generate import generate, load

ROOT = Path(__file__).parents[2]
QUESTION = "Is there a dog?"
TASK = """\
task: own_pope
dataset_path: parquet
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.pope_doc_to_visual
doc_to_text: !function utils.pope_doc_to_text
doc_to_target: answer
generation_kwargs: {max_new_tokens: 1, temperature: 0, do_sample: false}
process_results: !function utils.pope_process_results
metric_list:
- metric: pope_accuracy
  aggregation: !function utils.pope_aggregate_accuracy
  higher_is_better: true
- metric: pope_f1_score
  aggregation: !function utils.pope_aggregate_f1_score
  higher_is_better: true
lmms_eval_specific_kwargs:
  default: {pre_prompt: "", post_prompt: "\\nAnswer the question using a single word or phrase."}
"""


def expect(model: Path, text: str, path: Path, tokens: int) -> str:
    """The answer of the model itself to one image and a text, through ``generate``."""
    parts = (Part("image"), Part("text", "\n"), Part("text", text))
    media = (Media(kind="image", path=str(path)),)
    sample = Sample(id="x", turns=(Turn("user", parts),), media=media)
    return generate(*load(model, "cpu"), [sample], tokens)[0]


@pytest.fixture
def picture(benchmarks: Path) -> Path:
    return min((benchmarks / "pope" / "val2014").iterdir())


def make_popular(benchmarks: Path) -> list[dict[str, Any]]:
    """POPE's popular split as rows of the Hub; lmms-eval wants unique ids and images as bytes."""
    lines = (benchmarks / "pope" / "coco_pope_popular.json").read_text().splitlines()
    return [
        {
            "id": str(number),
            "question_id": str(row["question_id"]),
            "question": row["text"],
            "answer": row["label"],
            "image_source": row["image"].removesuffix(".jpg"),
            "image": str(benchmarks / "pope" / "val2014" / row["image"]),
            "category": "popular",
        }
        for number, row in enumerate(map(json.loads, lines))
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None, reason="needs lmms-eval (pip install lmms-eval)"
)
def test_lmms_eval_evaluates_a_model_and_its_log_scores_here(
    speaking_model: Path, benchmarks: Path, tmp_path: Path
) -> None:
    rows = make_popular(benchmarks)
    data = tmp_path / "pope.parquet"
    Dataset.from_list(rows).cast_column("image", Image()).to_parquet(data)
    task = tmp_path / "task"
    task.mkdir()
    (task / "own_pope.yaml").write_text(TASK.replace("DATA", str(data)))
    (task / "utils.py").write_text("from lmms_eval.tasks.pope.utils import *\n")
    # The entry point as pyproject.toml has it, however this package was installed.
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "site" / "entry-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 0\n")
    text = [f"{name} = {value}" for name, value in points["lmms_eval.models"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[lmms_eval.models]", *text]) + "\n")
    # coat_vlm first: it makes torchvision importable beside a CPU build of torch.
    start = "import coat_vlm, runpy; runpy.run_module('lmms_eval', run_name='__main__')"
    command = [
        *(sys.executable, "-c", start, "--model", "coat_vlm"),
        *("--model_args", f"pretrained={speaking_model}", "--device", "cpu", "--batch_size", "4"),
        *("--tasks", "own_pope", "--include_path", str(task), "--log_samples"),
        *("--output_path", str(tmp_path / "out")),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    env = {**os.environ, **offline, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "out").rglob("*_samples_own_pope.jsonl")
    (results,) = (tmp_path / "out").rglob("*_results.json")
    theirs = json.loads(results.read_text())["results"]["own_pope"]
    lmms = Settings(profile="lmms")
    report = score_official(get_benchmark("pope"), [log], [data], settings=lmms, with_items=True)
    ours = report["metrics"]
    assert report["n"] == len(rows) == 6
    assert ours["popular.accuracy"] == pytest.approx(100 * theirs["pope_accuracy,none"])
    assert ours["popular.f1"] == pytest.approx(100 * theirs["pope_f1_score,none"])
    for row, item in zip(rows, report["items"], strict=True):
        prompt = f"{row['question']}\nAnswer the question using a single word or phrase."
        assert item["prediction"] == expect(speaking_model, prompt, Path(row["image"]), 1)
    assert {item["prediction"] for item in report["items"]} <= set(WORDS)


class BaseModel:
    """What vlmeval/vlm/base.py @23757c4 states of its models, for messages that are lists."""

    INTERLEAVE = False
    allowed_types: Any = ("text", "image", "video")

    def __init__(self) -> None:
        self.dump_image_func = None

    def set_dump_image(self, function: Any) -> None:
        self.dump_image_func = function

    def use_custom_prompt(self, dataset: str) -> bool:
        return False

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        for item in message:
            assert item["type"] in self.allowed_types
        return self.generate_inner(message, dataset)

    def generate_inner(self, message: Any, dataset: str | None = None) -> str:
        raise NotImplementedError


@pytest.fixture
def vlmeval(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of VLMEvalKit that the adapter imports, with its dictionary of models."""
    names = ("vlmeval", "vlmeval.vlm", "vlmeval.vlm.base", "vlmeval.config")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["vlmeval.vlm.base"].BaseModel = BaseModel
    modules["vlmeval.config"].supported_VLM = {"taken": None}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "coat_eval.vlmeval_adapter", raising=False)
    yield modules["vlmeval.config"]
    sys.modules.pop("coat_eval.vlmeval_adapter", None)


def test_vlmevalkit_asks_a_registered_model(
    vlmeval: Any, speaking_model: Path, picture: Path
) -> None:
    from coat_eval.vlmeval_adapter import register

    register("my_vlm", str(speaking_model), max_new_tokens=3, device="cpu")
    with pytest.raises(ValueError, match="has a model named 'taken'"):
        register("taken", str(speaking_model))
    model = vlmeval.supported_VLM["my_vlm"]()  # as infer_data makes it
    assert not getattr(model, "is_api", False)
    model.set_dump_image(lambda line: line)
    assert not model.use_custom_prompt("POPE")
    asked = {"type": "text", "value": QUESTION}
    image = {"type": "image", "value": str(picture)}
    text = model.generate(message=[image, asked], dataset="POPE")
    assert text == expect(speaking_model, QUESTION, picture, 3)
    system = {"type": "text", "value": "Answer in one word.", "role": "system"}
    assert isinstance(model.generate(message=[system, image, asked], dataset="POPE"), str)
    with pytest.raises(DataError, match=r"none\.png"):
        model.generate(message=[{"type": "image", "value": "none.png"}, asked], dataset="POPE")


def test_an_answer_ends_at_a_text_of_until(speaking_model: Path, picture: Path) -> None:
    model = HarnessModel(str(speaking_model), device="cpu")
    with PilImage.open(picture) as opened:
        sample = make_sample([("user", [("image", opened), ("text", QUESTION)])], "row 1")
    whole = expect(speaking_model, QUESTION, picture, 6)
    assert model.answer([sample], 6) == [whole]
    assert len(whole) > 3
    assert model.answer([sample], 6, [whole[2:4]]) == [whole[: whole.index(whole[2:4])]]


def test_what_a_model_cannot_do_is_an_error(speaking_model: Path) -> None:
    assert read_generation({"max_new_tokens": 16, "until": "\n", "temperature": 0}, "x") == (
        16,
        ["\n"],
    )
    assert read_generation({"do_sample": False, "num_beams": 1}, "x") == (128, [])
    for wrong in ({"temperature": 0.7}, {"do_sample": True}, {"num_beams": 3}):
        with pytest.raises(ValueError, match=r"task x asks for .* answers are greedy"):
            read_generation(wrong, "task x")
    for kind, value in (("audio", "a.wav"), ("image", 7), ("text", None)):
        with pytest.raises(DataError, match=rf"row 7: the content '{kind}' of type"):
            make_sample([("user", [(kind, value)])], "row 7")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="batch_size is 'auto'; give a number"):
        HarnessModel(str(speaking_model), batch_size="auto")  # type: ignore[arg-type]
