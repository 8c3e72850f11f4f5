"""``coat-vlm data download`` of a benchmark, with a stand-in for the Hub."""

import hashlib
import io
import zipfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from coat_cli.main import main
from coat_datasets import download
from coat_datasets.download import BENCHMARKS
from coat_eval.tasks import get_benchmark

FILES = {
    "lmms-lab/POPE": ["Full/random-0.parquet", "data/test-0.parquet"],
    "lmms-lab/Video-MME": ["videomme/test-0.parquet", "videos_chunked_01.zip", "subtitle.zip"],
}


def offline(*_: Any, **__: Any) -> None:
    raise OfflineModeIsEnabled("no network")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asks the real Hub."""
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)


def stand_in(repo: str, *, repo_type: str, local_dir: Path, allow_patterns: list[str]) -> None:
    assert repo_type == "dataset"
    for name in FILES[repo]:
        if any(fnmatch(name, pattern) for pattern in allow_patterns):
            path = local_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".zip":
                inside = "subtitle/a.srt" if "subtitle" in name else "data/a.mp4"
                with zipfile.ZipFile(path, "w") as archive:
                    archive.writestr(inside, "content")
            else:
                path.touch()


def test_files_of_the_benchmark_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
    for name in ("pope", "videomme"):
        assert main(["data", "download", name, "--to", str(tmp_path)]) == 0
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert "pope/Full/random-0.parquet" in found
    assert "pope/data/test-0.parquet" not in found
    assert {"videomme/data/a.mp4", "videomme/subtitle/a.srt"} <= found
    said = capsys.readouterr().out
    assert "license: MIT" in said
    assert "coat-vlm eval --tasks videomme" in said


def test_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert main(["data", "download", "gqa", "--to", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "hf download lmms-lab/GQA --repo-type dataset --include" in said
    assert f"--local-dir {tmp_path / 'gqa'}" in said


def test_every_benchmark_has_a_source_in_a_layout_that_is_read():
    for name, repository in BENCHMARKS.items():
        usual = next(iter(get_benchmark(name).layouts.values()))
        ends = {pattern.rpartition("/")[2] for layout in usual for pattern in layout}
        assert {file.rpartition("/")[2] for file in repository.files if "parquet" in file} <= ends


class Answer(io.BytesIO):
    status = 200
    length = 0


def test_a_table_with_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked, md5 = [], hashlib.md5(b"index\tanswer\n").hexdigest()

    def serve(url: str, *_: Any) -> Answer:
        asked.append(url)
        return Answer(b"index\tanswer\n")

    monkeypatch.setattr(download, "open_http", serve)
    words = ["data", "download", "mmstar", "--to", str(tmp_path)]
    assert main(words) == 2
    assert f"has the MD5 {md5}, not e1ecd21408" in capsys.readouterr().err
    assert not (tmp_path / "mmstar" / "MMStar.tsv").exists()
    known = replace(BENCHMARKS["mmstar"], md5=md5)
    monkeypatch.setattr(download, "BENCHMARKS", {"mmstar": known})
    for _ in range(2):  # the second time, the file is there
        assert main(words) == 0
    assert (tmp_path / "mmstar" / "MMStar.tsv").read_bytes() == b"index\tanswer\n"
    assert asked == [known.repo] * 2
    assert "coat-vlm eval --tasks mmstar" in capsys.readouterr().out
