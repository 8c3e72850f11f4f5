"""Torn and foreign content in the small files of a run."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path

import pytest
import yaml

from coat_cli.main import main
from coat_data.folder_lock import hold_lock
from coat_data.saved_files import replace_file, write_text
from coat_vlm.config import Recipe
from coat_vlm.config.load import load_recipe, save_recipe
from coat_vlm.train.resume import find_changes, prepare_run_folder
from coat_vlm.train.step_log import BadSamples
from coat_vlm.train.tracking import METRICS, rewind


def test_a_replaced_file_has_its_earlier_content_or_all_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("earlier")

    def stop_in_the_middle() -> None:
        with replace_file(path) as file:
            file.write(b"ne")
            file.flush()
            assert path.read_text() == "earlier"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_in_the_middle()
    assert path.read_text() == "earlier"
    with replace_file(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def prepare(run_dir: Path) -> None:
    recipe = load_recipe("quickstart", [f"output_dir={run_dir}"])
    prepare_run_folder(run_dir, recipe, continues=True, overwrite=False)


@pytest.mark.parametrize("size", [0, 100, 400])
def test_a_torn_recipe_is_named_with_its_remedy(
    tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    saved = tmp_path / "recipe.yaml"
    whole = saved.read_bytes()
    saved.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"recipe\.yaml: (?s:.*)delete it and continue"):
        prepare(tmp_path)
    assert saved.read_bytes() == whole[:size]
    assert main(["eval", "--model", str(tmp_path)]) == 2
    assert (
        "delete it and continue with the same recipe and --resume auto" in capsys.readouterr().err
    )
    saved.unlink()
    prepare(tmp_path)
    assert saved.read_bytes() == whole


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, run_dir = tmp_path / "mine.yaml", tmp_path / "run"
    words = ["name=${TOKEN}", "eval_sets={a: {task: yes_no, path: '${HOST}/a'}}"]

    def load(path: Path, *more: str) -> Recipe:
        return load_recipe(str(path), more)

    def resume(recipe: Recipe, *, allow: bool = False) -> str:
        (run_dir / "sft/checkpoints/step-1").mkdir(parents=True, exist_ok=True)
        prepare_run_folder(
            run_dir, recipe, continues=True, overwrite=False, allow_changed_data=allow
        )
        files = (path for path in run_dir.rglob("*") if path.is_file())
        return "\n".join(path.read_text() for path in files)

    monkeypatch.setenv("TOKEN", "the token")
    monkeypatch.setenv("HOST", "https://me:word@host")
    save_recipe(load_recipe("quickstart", [f"output_dir={run_dir}", *words]), file)
    address = "https://me:pass@host/a?v=1&X-Amz-Signature=ab12&w=2"
    written = resume(load(file, f"init_from={address}"))
    assert "name: ${TOKEN}" in written
    assert "path: ${HOST}/a" in written
    assert "init_from: https://***@host/a?v=1&X-Amz-Signature=***&w=2" in written
    assert not {"the token", "word", "pass", "ab12"} & set(re.split(r"[\n :@=&/]", written))
    saved = run_dir / "recipe.yaml"
    digest = hashlib.sha256(b"the token").hexdigest()[:16]
    assert yaml.safe_load(saved.read_text())["environment"]["TOKEN"] == digest
    assert load(saved).name == "the token"
    described = find_changes(load(saved), load(file, f"init_from={address}", "name=${HOST}"))
    assert [*map(str, described)] == ["name: ${TOKEN} -> ${HOST}"]  # not the address
    monkeypatch.setenv("TOKEN", "another")
    for recipe in (load(file, f"init_from={address}"), load(saved)):
        with pytest.raises(ValueError, match=rf"(?s)environment.TOKEN: {digest} -> .*--allow"):
            resume(recipe)
    assert "another" not in resume(load(file, f"init_from={address}"), allow=True)
    monkeypatch.delenv("TOKEN")
    with pytest.raises(ValueError, match="needs the environment variable TOKEN"):
        load(saved)


def test_a_killed_overwrite_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("quickstart", [f"output_dir={tmp_path}"])
    save_recipe(recipe, tmp_path / "recipe.yaml")
    folders = [tmp_path / f"{number}" for number in range(20)]
    for folder in folders:
        folder.mkdir()
    with monkeypatch.context() as patch:

        def remove(folder: Path) -> None:
            folder.rmdir()
            if not any(one.is_dir() for one in folders):
                raise KeyboardInterrupt

        patch.setattr("coat_vlm.train.resume.shutil.rmtree", remove)
        with pytest.raises(KeyboardInterrupt):
            prepare_run_folder(tmp_path, recipe, continues=False, overwrite=True)
    with pytest.raises(ValueError, match="already contains a run"):
        prepare_run_folder(tmp_path, recipe, continues=False, overwrite=False)
    prepare_run_folder(tmp_path, recipe, continues=False, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_foreign_rows_do_not_stop_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / METRICS
    good = [
        {"kind": "step", "stage": "sft", "step": 1},
        {"kind": "val", "stage": "sft", "step": 1, "losses": {"a": 0.5}},
    ]
    foreign = ['{"step": 3}', '{"stage": "other"}', '{"stage": "sft", "step": "x"}', "7", '{"st']
    path.write_text("\n".join([*map(json.dumps, good), *foreign]))
    rewind(path, "sft", 1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == good
    assert "deleted 5 lines" in caplog.text
    (tmp_path / "bad_samples.jsonl").write_text('{"stage": "sft"}\n[]\n')
    recipe = load_recipe("quickstart")
    assert BadSamples(tmp_path, "sft", recipe.stages["sft"], []).total == 0


def test_a_read_only_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a temporary file in it, whose removal is also refused."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.raises(OSError, match=rf"cannot be locked: Read-only .*: '{tmp_path}'$"):
        hold_lock(tmp_path / ".lock", "train").__enter__()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match=rf"Read-only file system: '{tmp_path}/report\.html'$"):
        write_text(tmp_path / "report.html", "")
