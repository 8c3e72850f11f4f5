"""What a run that continues may change."""

from pathlib import Path

import pytest

from coat_vlm.recipe_file import load_recipe
from coat_vlm.train import stages


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], ["fp8.weights=recompute"]),  # a run that ran out of memory under auto
        (["fp8.weights=cache", "fp8.skip_last=1"], ["fp8.skip_last=1", "num_workers=0"]),
        ([], ["zero_stage=3", "stages.sft.micro_batch_size=1"]),  # more GPUs
    ],
)
def test_what_changes_no_gradient_may_change(before: list[str], after: list[str]) -> None:
    old, new = (load_recipe("quickstart", overrides) for overrides in (before, after))
    stages._check_same(old, new, Path("recipe.yaml"))  # pyright: ignore[reportPrivateUsage]


def test_other_keys_are_named() -> None:
    old, new = load_recipe("quickstart", []), load_recipe("quickstart", ["fp8.group_size=32"])
    with pytest.raises(ValueError, match=r"recipe differs from recipe.yaml.*group_size"):
        stages._check_same(old, new, Path("recipe.yaml"))  # pyright: ignore[reportPrivateUsage]
