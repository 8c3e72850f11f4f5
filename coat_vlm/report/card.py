"""Writes the model card (README.md) of an exported model from the files of its run.

Its metadata are described in https://huggingface.co/docs/hub/model-cards#model-card-metadata
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from coat_vlm.config import STAGES
from coat_vlm.report.evaluation import build_evaluation_rows, format_interval, format_percent
from coat_vlm.report.run_folder import RunFolder, read_run_folder
from coat_vlm.report.tables import (
    build_data_rows,
    build_stage_columns,
    format_count,
    list_header_facts,
)
from coat_vlm.train.tracking import add_up

_PUBLISHED = "published"  # layout of a run of model.pretrained
_LIBRARIES = dict.fromkeys(("llava", "language", _PUBLISHED), "transformers") | {"vila": "vila"}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_DATA = re.compile(r"hf:(?://)?datasets/([\w.-]+/[\w.-]+)")
_AUTO_CLASSES = (
    "from transformers import AutoModelForImageTextToText, AutoProcessor\n\n"
    "model = AutoModelForImageTextToText.from_pretrained(FOLDER)\n"
    "processor = AutoProcessor.from_pretrained(FOLDER)"
)
_LOADING = {
    "coat": f"import coat_vlm\n{_AUTO_CLASSES}",
    _PUBLISHED: _AUTO_CLASSES,
    "llava": "from transformers import AutoProcessor, LlavaForConditionalGeneration\n\n"
    "model = LlavaForConditionalGeneration.from_pretrained(FOLDER)\n"
    "processor = AutoProcessor.from_pretrained(FOLDER)",
    "language": "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    "model = AutoModelForCausalLM.from_pretrained(FOLDER)\n"
    "tokenizer = AutoTokenizer.from_pretrained(FOLDER)",
}


def build_card(source: Path, layout: str, weights: str | None = None) -> str:
    """Build the text of a card, for the ``layout`` and ``weights`` of the exported folder.

    ``source`` is ``RUN/<stage>/model`` or ``RUN/<stage>/checkpoints/step-...``, else ValueError.
    """
    source = source.resolve()
    is_model = source.name == "model"
    stage = source.parents[0 if is_model else 1]
    if stage.name not in STAGES or not (stage.parent / "recipe.yaml").is_file():
        raise ValueError(
            f"--card describes the run of a model, and {source} is not in a run folder; give "
            "RUN/STAGE/model or RUN/STAGE/checkpoints/step-..., or remove --card"
        )
    run = read_run_folder(stage.parent)
    stages = [name for name in STAGES if name in (run.recipe.get("stages") or {})]
    if not stages:
        raise ValueError(f"--card: {stage.parent / 'recipe.yaml'} is damaged; restore the file")
    if (run.recipe.get("model") or {}).get("pretrained"):
        layout = _PUBLISHED
    final = is_model and stage.name == stages[-1]
    done = STAGES[: STAGES.index(stage.name) + 1]
    run.stages = [log for log in run.stages if log.name in done]
    data = [row[:6] for row in build_data_rows(run)]
    parts = [
        _describe(run, source, stage.name),
        "## Training\n",
        "".join(f"- {label}: {text}\n" for label, text in list_header_facts(run)),
        _stages(run),
        "## Data\n",
        _table(("stage", "source", "rows", "epochs", "% of samples", "tokens per sample"), data),
        "## Results\n",
        _results(run, final=final, weights=weights),
        "## License\n",
        "Not filled in. Add `license` (and for a license that the Hub does not know `license_name` "
        "and `license_link`) to the metadata at the top of this file. The licenses of the models "
        "that training started from, and of the data, still hold.\n",
    ]
    if layout in _LOADING:
        parts += ["## Use\n", f"```python\n{_LOADING[layout]}\n```\n"]
    parts += ["## Recipe\n", f"```yaml\n{run.recipe_text.strip()}\n```\n"]
    return f"---\n{_metadata(run.recipe, layout)}---\n\n" + "\n".join(parts)


def _metadata(recipe: Mapping[str, Any], layout: str) -> str:
    model, stages = recipe.get("model") or {}, recipe.get("stages") or {}
    pretrained = model.get("pretrained")
    text_only = pretrained is None and (layout == "language" or model.get("vision") is None)
    names = [recipe.get("init_from") or pretrained]
    if names[0] is None:
        parts = ["language"] if text_only else ["language", "vision"]
        names = [(model.get(part) or {}).get("name_or_path") for part in parts]
    bases = [n for n in names if n and _HUB_ID.fullmatch(n) and not Path(n).exists()]
    paths = [str(data.get("path")) for stage in stages.values() for data in stage.get("data") or []]
    ids = [match[1] for path in paths if (match := _HUB_DATA.match(path))]
    data = ModelCardData(
        library_name=_LIBRARIES.get(layout, "coat-vlm"),
        pipeline_tag="text-generation" if text_only else "image-text-to-text",
        base_model=bases or None,
        datasets=list(dict.fromkeys(ids)) or None,
        tags=["coat-vlm"],
    )
    return f"{data.to_yaml()}\n"


def _describe(run: RunFolder, source: Path, stage: str) -> str:
    total = run.stages[-1].start.get("total") or {}
    parts = ", ".join(f"{name} {format_count(number)}" for name, number in total.items())
    state = "the model at the end of" if source.name == "model" else f"checkpoint {source.name} of"
    size = f" of {format_count(sum(total.values()))} parameters ({parts})" if total else ""
    model = run.recipe.get("model") or {}
    start = run.recipe.get("init_from") or model.get("pretrained")
    return (
        f"# {run.recipe.get('name')}\n\nA model{size}: {state} stage `{stage}`"
        + (f", started from `{start}`" if start else "")
        + ". Written by `coat-vlm export --card` from the files of the run.\n"
    )


def _stages(run: RunFolder) -> str:
    rows = []
    for log, column in zip(run.stages, build_stage_columns(run), strict=True):
        trained = ", ".join(
            f"{name} {count} (lr {lr})" if lr else f"{name} {count}"
            for name, count, _, lr in column["modules"]
            if count != "frozen"
        )
        steps = dict(column["facts"]).get("steps", column["status"])
        batch = dict(column["facts"]).get("batch size", "-")
        tokens = format_count(add_up(log.steps, "tokens")) if log.steps else "-"
        rows.append((log.name, steps, batch, tokens, trained or "-"))
    return _table(("stage", "steps", "batch size", "tokens", "trained parameters"), rows)


def _results(run: RunFolder, *, final: bool, weights: str | None) -> str:
    if not final:
        return "Not measured: the run evaluated the model of its last stage.\n"
    sets = run.recipe.get("eval_sets") or {}
    rows = [
        (
            *(row.set_name, row.metric, format_percent(row.value), format_interval(row.interval)),
            *(format_percent(row.chance), "-" if row.n is None else str(row.n)),
        )
        for row in build_evaluation_rows(run.eval_json, sets, run.reports)
        if row.value is not None
    ]
    if not rows:
        return "Not measured: the run has no evaluation (`coat-vlm eval --model RUN`).\n"
    note = f" The weights in this folder were quantized afterwards ({weights})." if weights else ""
    precision = run.eval_json.get("precision")
    return (
        "Percent, with 95% intervals over the choice of questions"
        + (f", computed in `{precision}`" if precision else "")
        + f".{note}\n\n"
        + _table(("set", "metric", "value", "95% interval", "chance", "questions"), rows)
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
