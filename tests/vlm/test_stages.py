"""What a run that continues may change."""

from dataclasses import replace
from pathlib import Path

import pytest

from coat_vlm.config import SourceConfig
from coat_vlm.config.load import load_recipe, save_recipe
from coat_vlm.config.stage import PackingConfig
from coat_vlm.distributed import joined_world
from coat_vlm.train import stages
from coat_vlm.train.data import row_budget
from coat_vlm.train.sources import SourceRecord


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], ["fp8.weights=recompute"]),  # a run that ran out of memory under auto
        (["fp8.weights=cache", "fp8.skip_last=1"], ["fp8.skip_last=1", "num_workers=0"]),
        ([], ["zero_stage=3", "stages.sft.micro_batch_size=1"]),  # more GPUs
        ([], ["fp8.cuda_graphs=true"]),
        # What auto meant where the run began, the checkpoint's states say.
        ([], ["fp8.second_moment=nearest"]),
        # These are what auto takes with quickstart's betas.
        (["fp8.second_moment=nearest"], ["fp8.second_moment=auto"]),
    ],
)
def test_what_changes_no_gradient_may_change(before: list[str], after: list[str]) -> None:
    old, new = (load_recipe("quickstart", overrides) for overrides in (before, after))
    stages._check_same(old, new, Path("recipe.yaml"))  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("graphs", "align"), [(False, 128), (True, 1024)])
def test_packed_rows_for_graphs_have_one_length(graphs: bool, align: int) -> None:
    recipe = load_recipe("quickstart", [f"fp8.cuda_graphs={graphs}"])
    budget = row_budget(recipe, PackingConfig(images=3), 1000)
    assert (budget.tokens, budget.images, budget.align) == (1024, 3, align)


def test_another_rounding_of_moments_is_refused_before_the_recipe_is_saved(tmp_path: Path) -> None:
    """In the stage alone whose beta2 makes it another."""
    overrides = ["stages.sft.betas=[0.9,0.999]", f"output_dir={tmp_path}"]
    old = load_recipe("quickstart", [*overrides, "fp8.second_moment=nearest"])
    save_recipe(old, tmp_path / "recipe.yaml")
    before = (tmp_path / "recipe.yaml").read_bytes()
    words = r"second_moment.*dre_e4m3', 'sft': 'dre_e4m3'.*dre_e4m3', 'sft': 'dre_e4m3_chance'"
    with joined_world() as world, pytest.raises(ValueError, match=words):
        stages._claim(  # pyright: ignore[reportPrivateUsage]
            tmp_path, load_recipe("quickstart", overrides), world,
            resume=True, chained=False, overwrite=False,
        )  # fmt: skip
    assert (tmp_path / "recipe.yaml").read_bytes() == before


def test_other_keys_are_named() -> None:
    old, new = load_recipe("quickstart", []), load_recipe("quickstart", ["fp8.group_size=32"])
    with pytest.raises(ValueError, match=r"recipe differs from recipe.yaml.*group_size"):
        stages._check_same(old, new, Path("recipe.yaml"))  # pyright: ignore[reportPrivateUsage]


def test_an_edited_list_of_sources_is_noticed(tmp_path: Path) -> None:
    a, b = (SourceConfig(name=f"l/{name}", path=name, repeat=1.0) for name in "ab")
    SourceRecord(tmp_path, [a, b], [5, 7]).check()  # nothing was saved yet
    SourceRecord(tmp_path, [a, b], [5, 7]).save()
    SourceRecord(tmp_path, [a, b], [5, 7]).check()
    twice = replace(b, repeat=2.0)
    for sources, rows, words in [
        ([a, twice], [5, 7], "l/b has repeat 2.0, had 1.0"),
        ([a, b], [5, 8], "l/b has rows 8, had 7"),
        ([a], [5], "l/b is gone"),
        ([a, b, replace(a, name="l/c")], [5, 7, 1], "l/c is new"),
        ([b, a], [7, 5], "its order"),
    ]:
        with pytest.raises(ValueError, match=f"with which this run started: {words}; restore"):
            SourceRecord(tmp_path, sources, rows).check()
