"""The command line: what it passes on, how it ends, what a user sees of a mistake."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coat_cli import data, train
from coat_cli.chat import prompt_sample
from coat_cli.main import PIPE_CLOSED, main, parse
from coat_data.sample import DataError


def failing_train(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def handler(_: Any) -> int:
        raise error

    monkeypatch.setattr(train, "_train", handler)


def test_overrides_may_stand_behind_options():
    args = parse(["train", "quickstart", "seed=1", "--stage", "sft", "a.b=2", "--overwrite"])
    assert args.recipe == "quickstart"
    assert args.overrides == ["seed=1", "a.b=2"]
    assert args.stage == "sft"
    assert args.overwrite


@pytest.mark.parametrize(
    "words",
    [
        ["train", "quickstart", "--overwite"],
        ["data"],
    ],
)
def test_wrong_arguments_end_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_info:
        parse(words)
    assert exit_info.value.code == 2
    assert "usage: coat-vlm" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--local_rank=3", "train", "quickstart"], ["train", "quickstart", "--local-rank", "3"]],
    ids=["deepspeed", "torch.distributed"],
)
def test_a_launchers_rank_is_accepted(words: list[str]):
    assert parse(words).recipe == "quickstart"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DataError("a.json:7", "no image", "add it"), "a.json:7: no image -> add it"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.yaml"), "x.yaml"),
        (torch.OutOfMemoryError("tried 9 GiB"), "lower micro_batch_size"),
        (RuntimeError("received 0 items of ancillary data"), "(ulimit -n)"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "(ulimit -n)"),
        (RuntimeError("unable to mmap 64 bytes from file </torch_1_2_3>"), "(--shm-size=8g)"),
        (RuntimeError("can't start new thread"), "(ulimit -u"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "run"), "(output_dir, --to)"),
        (FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), "run"), "a file is where"),
        (Exception("Validation error for field 'vocab_size'"), "correct the configuration"),
        (RuntimeError("Storage size calculation overflowed"), "correct the configuration"),
        (RecursionError("maximum depth while decoding a JSON array"), "correct the configuration"),
    ],
)
def test_a_users_mistake_is_one_message(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    failing_train(monkeypatch, error)
    assert main(["train", "quickstart"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert main(["train", "quickstart", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyError("a"), RuntimeError("of an engine"), Exception("plain")])
def test_a_fault_of_the_program_asks_for_a_report(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    failing_train(monkeypatch, error)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["train", "quickstart"]) == 1
    printed = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    assert f"please report it with {file}" in printed
    assert "Traceback" not in printed
    assert f"raise error\n{type(error).__name__}: {error}" in file.read_text()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    assert main(["train", "quickstart"]) == 1
    assert "raise error\n" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    failing_train(monkeypatch, KeyboardInterrupt())
    assert main(["train", "quickstart"]) == 130
    assert "interrupted" in capsys.readouterr().err


OWN_SET = ["--model", "m", "--tasks", "yes_no=d", "--to", "o"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model is missing"),
        (["--model", "m"], "m is not a run folder: name what to evaluate with --tasks or --text"),
        (["--model", "m", "--tasks", "yesno=d", "--to", "o"], "allowed: yes_no"),
        ([*OWN_SET, "--split", "test"], "--split has no effect: it is for benchmarks"),
        (["--model", "m", "--max-pixels", "9"], "here the run decides"),
        ([*OWN_SET[:-2], "yes_no=e/d", "--to", "o"], "two of them would write to d"),
    ],
)
def test_eval_says_what_is_missing(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err


def test_generate_shows_the_files_in_the_order_given():
    words = ["generate", "--model", "m", "--prompt", "p"]
    args = parse([*words, "--video", "a", "--image", "b", "d", "--video", "c"])
    sample = prompt_sample(args.prompt, args.media)
    assert [(one.kind, Path(one.path or "").name) for one in sample.media] == [
        ("video", "a"),
        ("image", "b"),
        ("image", "d"),
        ("video", "c"),
    ]
    assert sample.turns[0].text == "\n\n\n\np"


def test_scenes_are_made_once_and_anew_for_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "scenes"
    words = ["data", "scenes", "--to", str(out), "--num-train", "3", "--num-val", "2"]
    words += ["--num-test", "8"]
    assert main(words) == 0
    made = (out / data.MADE_FILE).stat().st_mtime_ns
    assert main(words) == 2, "without --reuse nothing of the user's is touched"
    assert main([*words, "--reuse"]) == 0
    assert (out / data.MADE_FILE).stat().st_mtime_ns == made
    assert "exists already" in capsys.readouterr().out
    assert main([*words, "--reuse", "--seed", "1"]) == 0
    assert (out / data.MADE_FILE).stat().st_mtime_ns > made


def test_reuse_never_deletes_a_folder_it_did_not_make(tmp_path: Path):
    kept = tmp_path / "thesis.txt"
    kept.write_text("mine")
    assert main(["data", "scenes", "--to", str(tmp_path), "--reuse"]) == 2
    assert kept.read_text() == "mine"


def test_the_installed_command_runs_and_survives_a_closed_pipe():
    command = str(Path(sys.executable).parent / "coat-vlm")
    shown = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("coat-vlm ")
    reading, writing = os.pipe()
    os.close(reading)
    closed = subprocess.run(
        [command, "recipes"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert closed.returncode == PIPE_CLOSED
    assert closed.stderr == ""
    without = subprocess.run(
        ["sh", "-c", f"{command} recipes >&-"], capture_output=True, check=False
    )
    assert (without.returncode, without.stderr) == (0, b"")
