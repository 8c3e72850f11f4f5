"""What a run that continues may change."""

import json
from pathlib import Path
from typing import Any

import pytest

from coat_vlm.config.load import load_recipe
from coat_vlm.train.data_record import find_source_changes
from coat_vlm.train.resume import check_changes, find_changes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], ["fp8.weights=recompute"]),  # a run that ran out of memory under auto
        (["fp8.weights=recompute"], ["fp8.recompute_qkv=true", "num_workers=0"]),
        ([], ["zero_stage=3", "stages.sft.micro_batch_size=1"]),  # more GPUs
        ([], ["fp8.cuda_graphs=true"]),
    ],
)
def test_what_changes_no_gradient_may_change(before: list[str], after: list[str]) -> None:
    old, new = (load_recipe("quickstart", overrides) for overrides in (before, after))
    changes = find_changes(old, new)
    check_changes(changes, {"sft": "started"}, Path("r.yaml"), allow_changed_data=False)


def test_an_edited_list_of_sources_is_noticed(tmp_path: Path) -> None:
    def entry(name: str, rows: int, repeat: float = 1.0) -> dict[str, Any]:
        fields = {"name": f"l/{name}", "select": None, "repeat": repeat, "weight": None}
        return {**fields, "rows": rows, "files": {}, "samples": []}

    a, b = entry("a", 5), entry("b", 7)
    path = tmp_path / "sources.json"
    path.write_text(json.dumps([a, b]))
    assert find_source_changes(path, [a, b]) == []
    for record, change in [
        ([a, entry("b", 7, repeat=2.0)], "l/b has repeat 2.0, had 1.0"),
        ([a, entry("b", 8)], "l/b has rows 8, had 7"),
        ([a], "l/b is missing"),
        ([a, b, entry("c", 1)], "l/c is new"),
        ([b, a], "the order of the sources"),
    ]:
        assert find_source_changes(path, record) == [change]
