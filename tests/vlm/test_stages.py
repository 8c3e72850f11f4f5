"""What a run that continues may change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coat_vlm.config import SourceConfig
from coat_vlm.config.load import load_recipe
from coat_vlm.train.data_record import build_source_record, check_source_record
from coat_vlm.train.resume import check_changes, find_changes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], ["fp8.weights=recompute"]),  # a run that ran out of memory under auto
        (["fp8.weights=cache"], ["fp8.recompute_qkv=true", "num_workers=0"]),
        ([], ["zero_stage=3", "stages.sft.micro_batch_size=1"]),  # more GPUs
        ([], ["fp8.cuda_graphs=true"]),
    ],
)
def test_what_changes_no_gradient_may_change(before: list[str], after: list[str]) -> None:
    old, new = (load_recipe("quickstart", overrides) for overrides in (before, after))
    changes = find_changes(old, new)
    check_changes(changes, {"sft": "started"}, Path("r.yaml"), allow_changed_data=False)


def test_an_edited_list_of_sources_is_noticed(tmp_path: Path) -> None:
    a, b = (SourceConfig(name=f"l/{name}", path=name, repeat=1.0) for name in "ab")

    def record(sources: list[SourceConfig], rows: list[int]) -> Any:
        return build_source_record(sources, rows, [{"files": {}, "samples": []} for _ in sources])

    path = tmp_path / "sources.json"
    path.write_text(json.dumps(record([a, b], [5, 7])))
    check_source_record(path, record([a, b], [5, 7]))
    for sources, rows, words in [
        ([a, replace(b, repeat=2.0)], [5, 7], "l/b has repeat 2.0, had 1.0"),
        ([a, b], [5, 8], "l/b has rows 8, had 7"),
        ([a], [5], "l/b is missing"),
        ([a, b, replace(a, name="l/c")], [5, 7, 1], "l/c is new"),
        ([b, a], [7, 5], "the order of the sources"),
    ]:
        with pytest.raises(ValueError, match=f"with which this run started: {words}; restore"):
            check_source_record(path, record(sources, rows))
