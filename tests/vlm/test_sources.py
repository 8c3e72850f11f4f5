"""Sources of a recipe: selection and exclusion; bad rows counted and limited; the recipe's keys."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import decoders

from coat_data.load.loader import BadSample, LoadedBatch
from coat_data.mixture.sampler import Mixture
from coat_data.sample import DataError
from coat_vlm.config import SourceConfig, StageConfig
from coat_vlm.config.load import load_recipe
from coat_vlm.distributed import ALONE
from coat_vlm.model.processor import build_processor
from coat_vlm.train.data import open_data
from coat_vlm.train.open_sources import iterate_texts, open_source, open_sources
from coat_vlm.train.step_log import BadSamples
from coat_vlm.train.tracking import rewind

TALK = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"id": row, "conversations": TALK} for row in range(20)]))
    return path


def stage_of(**changes: Any) -> StageConfig:
    sources = [SourceConfig(name=name, path=f"data/{name}.json") for name in ("a", "b")]
    trains: Any = {"train": True, "lr": 1e-3}
    settings: dict[str, Any] = {"max_steps": 1, "batch_size": 4, "micro_batch_size": 1, **changes}
    return StageConfig(data=sources, language=trains, **settings)


def log_of(folder: Path, name: str = "sft", total: int = 0, **limits: Any) -> BadSamples:
    stage = stage_of(**limits)
    return BadSamples(folder, name, stage, stage.data, total)


def bad(source: int, row: int) -> BadSample:
    return BadSample(where=f"x.json:{row}", problem="p", position=row, source=source, row=row)


def loaded(*samples: BadSample) -> list[LoadedBatch]:
    """Micro-batches in which these were left out."""
    batch: Any = {}
    return [LoadedBatch(batch=batch, bad=[sample], num_samples=1) for sample in samples]


def counts(a: int, b: int, transient: int = 0) -> dict[str, float]:
    return {"bad/a": a, "bad/b": b, "transient_errors": transient}


def test_a_runs_list_of_bad_rows_excludes_them_from_the_next(file: Path, tmp_path: Path) -> None:
    log = log_of(tmp_path, max_bad_samples=9)
    assert log.note(loaded(bad(0, 3), bad(1, 4), bad(0, 17)), step=1) == counts(2, 1)
    chosen: dict[str, Any] = {"name": "a", "path": str(file)}
    listed = str(tmp_path / "bad_samples.jsonl")
    rows = open_source(SourceConfig(**chosen, exclude=listed), seed=0)
    kept = [number for number in range(20) if number not in (3, 17)]
    assert [int(rows[index].id) for index in range(len(rows))] == kept
    # Selected first: excluding rows does not change which others take part.
    rows = open_source(SourceConfig(**chosen, exclude=listed, select="first 5"), seed=0)
    assert [int(rows[index].id) for index in range(len(rows))] == [0, 1, 2, 4]
    with pytest.raises(DataError, match=r"lists no row of source 'c' .*, only of 'a', 'b'"):
        open_source(SourceConfig(name="c", path=str(file), exclude=listed), seed=0)
    (tmp_path / "one.jsonl").write_text('{"source": "a", "file": "a.json", "row": 1}\n')
    nothing: dict[str, Any] = {"exclude": str(tmp_path / "one.jsonl"), "select": "first 1"}
    with pytest.raises(ValueError, match=r"a: .*one\.jsonl excludes all selected rows"):
        open_source(SourceConfig(**chosen, **nothing), seed=0)


def test_a_random_selection_has_the_recipes_seed(file: Path) -> None:
    def ids(recipe_seed: int) -> set[str]:
        source = SourceConfig(name="a", path=str(file), select="random 50%")
        rows = open_source(source, recipe_seed)
        return {rows[index].id for index in range(len(rows))}

    assert len(ids(0)) == 10
    assert ids(0) != ids(1)


def shares(*sources: SourceConfig) -> dict[str, int]:
    """Samples per epoch of each source, as the table before training has them."""
    configs, datasets = open_sources(sources, seed=0)
    mixture = Mixture(
        [len(rows) for rows in datasets],
        [config.repeat for config in configs],
        [config.weight for config in configs],
        seed=0,
        names=[config.name for config in configs],
    )
    return {share.name: share.samples for share in mixture.accounting()}


def test_a_list_in_a_recipe_becomes_its_sources_with_their_shares(
    file: Path, tmp_path: Path
) -> None:
    def listed(name: str, content: Any) -> str:
        (tmp_path / name).write_text(yaml.safe_dump(content))
        return str(tmp_path / name)

    a: dict[str, Any] = {"path": "a.json"}
    weighted = listed(
        "w.yaml",
        {"sources": [{**a, "weight": 3}, {**a, "name": "b", "select": "last 5", "weight": 1}]},
    )
    counted = listed(
        "c.yaml", {"sources": [{**a, "repeat": 0.5}, {**a, "name": "b", "select": "first 50%"}]}
    )
    # InternVL: part of a file, and repeats of one; LLaVA-NeXT: the last rows
    meta = tmp_path / "meta.json"
    meta.write_text(
        json.dumps(
            {
                "some": {"annotation": "a.json", "repeat_time": 0.1},
                "more": {"annotation": "a.json", "repeat_time": 2},
            }
        )
    )
    following = listed(
        "n.yaml", {"datasets": [{"json_path": "a.json", "sampling_strategy": "end:3"}]}
    )
    alone = SourceConfig(name="alone", path=str(file))
    # 25 rows in all, 3 : 1
    assert shares(SourceConfig(name="w", path=weighted)) == {"w/a": 19, "w/b": 6}
    # 45 rows; the list has half of them, and shares that half 3 : 1
    assert shares(
        SourceConfig(name="w", path=weighted, weight=2.0),
        SourceConfig(name="x", path=str(file), weight=2.0),
    ) == {"w/a": 17, "w/b": 6, "x": 22}
    # without weights of its own, by rows times repeat: 20 * 0.5 and 10 of 50 rows, half for each
    assert shares(
        SourceConfig(name="c", path=counted, weight=1.0),
        SourceConfig(name="x", path=str(file), weight=1.0),
    ) == {"c/a": 13, "c/b": 12, "x": 25}
    assert shares(alone, SourceConfig(name="c", path=counted, repeat=4.0)) == {
        "alone": 20,
        "c/a": 40,
        "c/b": 40,
    }
    assert shares(
        SourceConfig(name="m", path=str(meta)),
        SourceConfig(name="next", path=following),
    ) == {"m/some": 2, "m/more": 40, "next": 3}
    assert shares(SourceConfig(name="m", path=str(meta), select="last 30%")) == {"m": 13}
    mixed = listed("x.yaml", {"sources": [{**a, "weight": 3}, {**a, "name": "b"}]})
    for wrong, words in (
        (SourceConfig(name="m", path=mixed), "m: only 1 of the 2 sources"),
        (SourceConfig(name="w", path=weighted, repeat=2.0), "repeat=2.0 has no effect with the"),
        (SourceConfig(name="w", path=weighted, select="first 5"), "weight has no effect"),
    ):
        with pytest.raises(ValueError, match=words):
            open_sources([wrong], seed=0)
    with pytest.raises(ValueError, match="alone: no weight, but other sources have one"):
        shares(SourceConfig(name="w", path=weighted), alone)


def met(*counts: int) -> Any:
    return lambda: np.array(counts)


def test_bad_rows_are_counted_by_source(tmp_path: Path) -> None:
    log = log_of(tmp_path, max_bad_samples=9)
    assert log.entry(counts(0, 0), met()) == {"bad_by_source": {}}
    row = log.entry(counts(0, 2), met(30, 10))
    assert row == {"bad_by_source": {"b": {"rows": 2, "rate": 0.2}}}
    rates = log.entry(counts(1, 1), met(40, 20))["bad_by_source"]
    assert rates == {"a": {"rows": 1, "rate": 0.025}, "b": {"rows": 3, "rate": 0.15}}
    assert log.total == 4


def test_transient_errors_are_no_bad_rows(file: Path, tmp_path: Path) -> None:
    """They are counted by themselves, and not excluded from the next run."""
    log = log_of(tmp_path, max_bad_samples=3)
    away = [replace(bad(0, row), transient=True) for row in (1, 2)]
    assert log.note(loaded(*away, bad(0, 3)), step=1) == counts(1, 0, transient=2)
    row = log.entry(counts(2, 0, transient=2), met(10, 10))
    assert row == {"bad_by_source": {"a": {"rows": 2, "rate": 0.2}}, "transient_errors": 2}
    assert (log.total, log.transient) == (2, 2)
    listed = str(tmp_path / "bad_samples.jsonl")
    rows = open_source(SourceConfig(name="a", path=str(file), exclude=listed), seed=0)
    assert [int(rows[index].id) for index in range(3)] == [0, 1, 2]
    assert len(rows) == 19
    lines = Path(listed).read_text().splitlines()
    only = tmp_path / "only.jsonl"
    only.write_text(lines[0])
    assert json.loads(lines[0])["transient"]
    assert len(open_source(SourceConfig(name="a", path=str(file), exclude=str(only)), seed=0)) == 20
    with pytest.raises(ValueError, match=r"4 samples could not be reached, .* --resume auto when"):
        log.entry(counts(0, 0, transient=2), met(10, 10))
    again = log_of(tmp_path, total=2, max_bad_samples=3)  # continued when the host is up
    assert again.entry(counts(0, 0, transient=3), met(10, 10))["bad_by_source"]["a"]["rows"] == 1


def test_too_many_stop_the_run(tmp_path: Path) -> None:
    log = log_of(tmp_path, max_bad_samples=3)
    log.entry(counts(2, 0), met(5, 0))
    with pytest.raises(ValueError, match=r"4 bad samples \(a 4\) are more than max_bad_samples=3"):
        log.entry(counts(2, 0), met(30, 10))


def test_a_resumed_run_counts_what_was_listed_before_its_checkpoint(tmp_path: Path) -> None:
    first = log_of(tmp_path, max_bad_samples=9)
    for step, rows in ((1, [bad(0, 1)]), (2, [bad(1, 2)]), (3, [bad(1, 3), bad(0, 4)])):
        first.note(loaded(*rows), step)
    log_of(tmp_path, "pretrain", max_bad_samples=9).note(loaded(bad(0, 9)), 8)
    path = tmp_path / "bad_samples.jsonl"
    path.write_text(path.read_text() + '{"stage": "sft", "st')  # cut off
    rewind(path, "sft", 2)
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["stage"], row["row"]) for row in listed] == [
        ("sft", 2),
        ("sft", 3),
        ("pretrain", 10),
    ]
    again = log_of(tmp_path, max_bad_samples=9, total=2)
    assert again.entry(counts(0, 0), met(10, 10))["bad_by_source"] == {
        "a": {"rows": 1, "rate": 0.1},
        "b": {"rows": 1, "rate": 0.1},
    }


def test_bad_rows_are_left_out_when_a_tokenizer_is_trained(file: Path, tmp_path: Path) -> None:
    """They stopped the run, in spite of max_bad_samples."""
    rows = json.loads(file.read_text())
    texts = sum(len(row["conversations"]) for row in rows[1:])
    rows[0] = {"conversations": []}
    file.write_text(json.dumps(rows))
    source = {"name": "a", "path": str(file), "media_root": str(tmp_path)}
    recipe = load_recipe(str(recipe_with(tmp_path, {}, data=[source], max_bad_samples=1)))
    assert len([*iterate_texts(recipe)]) == texts
    recipe = load_recipe(str(recipe_with(tmp_path, {}, data=[source])))
    with pytest.raises(DataError, match=":1: there is no answer"):
        list(iterate_texts(recipe))


def recipe_with(tmp_path: Path, source: dict[str, Any], **stage: Any) -> Path:
    trains = {"train": True, "lr": 1e-3}
    recipe = {
        "name": "r",
        "output_dir": "out",
        "model": {
            "vision": {"name_or_path": "v"},
            "language": {"name_or_path": "l"},
            "max_length": 1000,
        },
        "stages": {
            "sft": {
                "data": [{"name": "a", "path": "a.json", **source}],
                "language": trains,
                "batch_size": 1,
                "micro_batch_size": 1,
                "max_steps": 1,
                **stage,
            }
        },
    }
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_a_line_names_each_source_that_the_template_does_not_suit(
    file: Path, tmp_path: Path, tiny: Any, tiny_tokenizer: Any
) -> None:
    web = tmp_path / "web.jsonl"
    web.write_text('{"text": "w5 w6"}\n' * 3)
    captions = tmp_path / "captions.json"
    said = [{"from": "human", "value": "<image>\nw7"}, {"from": "gpt", "value": "w8"}]
    captions.write_text(json.dumps([{"id": 0, "image": "a.jpg", "conversations": said}]))
    mixed = tmp_path / "mixed.jsonl"
    talk = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w8"}]
    rows = [{"messages": talk}, {"messages": talk[1:]}, {"messages": talk}]
    mixed.write_text("\n".join(map(json.dumps, rows)))
    paths = {"chat": file, "web": web, "captions": captions, "mixed": mixed}
    data = [{"name": name, "path": str(path)} for name, path in paths.items()]
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # no space in front of the end token
    processor = build_processor(tiny.recipe(), tokenizer, tiny.model().config)

    def told(template: str) -> list[str]:
        recipe = load_recipe(
            str(recipe_with(tmp_path, {}, data=data, val_data=data[:2], template=template))
        )
        return open_data(recipe, "sft", tmp_path / "run", processor, ALONE).warnings

    both = "mixed: 1 of 3 inspected rows are documents"
    dropped = "{}: template plain drops the users' turns, and {}:1 has no image or video"
    uncut = "{}: contains documents, which template vicuna_v1 trains as chat answers"
    expected = {
        "plain": [dropped.format("chat", file), both, dropped.format("mixed", mixed)],
        "vicuna_v1": [uncut.format("web"), both, uncut.format("mixed")],
    }
    for template, lines in expected.items():
        found = told(template)
        lines = [*lines, lines[0]]  # val_data
        assert [line[: len(start)] for line, start in zip(found, lines, strict=True)] == lines
