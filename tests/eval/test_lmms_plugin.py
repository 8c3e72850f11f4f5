"""Models that lmms-eval evaluates, and its logs, scored here."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, Image
from official_files import WORDS
from PIL import Image as PilImage

from coat_data.sample import DataError, Media, Part, Sample, Turn
from coat_eval.benchmark import Settings
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
    # coat_vlm first: it makes torchvision importable next to a CPU build of torch.
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
    report = score_official(get_benchmark("pope"), [log], [data], settings=lmms)
    ours = report["metrics"]
    assert report["n"] == len(rows) == 6
    assert ours["popular.accuracy"] == pytest.approx(100 * theirs["pope_accuracy,none"])
    assert ours["popular.f1"] == pytest.approx(100 * theirs["pope_f1_score,none"])
    for row, item in zip(rows, report["items"], strict=True):
        prompt = f"{row['question']}\nAnswer the question using a single word or phrase."
        assert item["prediction"] == expect(speaking_model, prompt, Path(row["image"]), 1)
    assert {item["prediction"] for item in report["items"]} <= set(WORDS)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin next to what it needs of lmms-eval's interface."""
    names = ("api", "api.model", "models", "models.registry_v2")
    modules = {f"lmms_eval.{name}": ModuleType(f"lmms_eval.{name}") for name in names}
    modules["lmms_eval.api.model"].lmms = type("lmms", (), {})  # type: ignore[attr-defined]
    modules["lmms_eval.models.registry_v2"].ModelManifest = dict  # type: ignore[attr-defined]
    for name, module in {"lmms_eval": ModuleType("lmms_eval"), **modules}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "coat_eval.lmms_plugin", raising=False)
    yield importlib.import_module("coat_eval.lmms_plugin")
    sys.modules.pop("coat_eval.lmms_plugin", None)


def test_the_plugin_answers_messages_up_to_a_text_of_until(
    plugin: Any, speaking_model: Path, benchmarks: Path
) -> None:
    picture = min((benchmarks / "pope" / "val2014").iterdir())
    model = plugin.CoatVlmForLmmsEval(str(speaking_model), device="cpu", batch_size="2")
    with PilImage.open(picture) as opened:
        image = {"type": "image", "url": opened.copy()}
    rows: list[Any] = [image, {"type": "image", "url": str(picture)}, {"type": "audio", "url": "a"}]
    model.task_dict = {"own": {"test": rows}}

    def ask(row: int, **options: Any) -> SimpleNamespace:
        def make_messages(content: Any) -> list[dict[str, Any]]:
            text = {"type": "text", "text": QUESTION}
            return [{"role": "user", "content": [content, text]}]

        return SimpleNamespace(args=("", make_messages, options, row, "own", "test"))

    whole = expect(speaking_model, QUESTION, picture, 6)
    assert len(whole) > 3
    end = whole[2:4]
    asked = [ask(0, max_new_tokens=6), ask(1, max_new_tokens=6, until=end, temperature=0), ask(0)]
    found = model.generate_until(asked)
    assert found[:2] == [whole, whole[: whole.index(end)]]
    assert found[2].startswith(whole)  # 128 tokens
    with pytest.raises(DataError, match="task own, row 2: the content 'audio' of type str"):
        model.generate_until([ask(2)])
    for wrong in ({"temperature": 0.7}, {"do_sample": True}, {"num_beams": 3}):
        with pytest.raises(ValueError, match=r"task own asks for .* answers are greedy"):
            model.generate_until([ask(0, **wrong)])
    with pytest.raises(ValueError, match="batch_size is 'auto'; give a number"):
        plugin.CoatVlmForLmmsEval(str(speaking_model), batch_size="auto")
