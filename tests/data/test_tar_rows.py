"""A tar on this machine, read by the offsets of its members."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from coat_data.containers import json_file
from coat_data.containers import tar as tar_module
from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError

Tar = Callable[[Path, dict[str, bytes]], Path]


def test_a_tar_that_is_replaced_is_noticed(tar: Tar, tmp_path: Path) -> None:
    """Its members are elsewhere now; the offsets of before would give parts of others."""
    path = tar(
        tmp_path / "a.tar", {f"{n}.{kind}": b"x" * 600 for n in "ab" for kind in ("jpg", "txt")}
    )
    opened = SampleDataset(path)
    assert opened[1].id == "b"
    copied = pickle.loads(pickle.dumps(opened))  # as a worker gets it
    path.write_bytes(tar(tmp_path / "b.tar", {"c.txt": b"x", "c.jpg": b"y" * 2000}).read_bytes())
    for dataset in (opened, copied):
        with pytest.raises(DataError, match=r"a\.tar: the file has changed since it was opened"):
            _ = dataset[1]
    assert SampleDataset(path)[0].id == "c"


def test_a_file_is_scanned_once_in_a_process(
    tar: Tar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks before training and every stage open it; a changed file is scanned again."""
    talk = '{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}'
    rows = tmp_path / "a.json"
    rows.write_text(f"[{talk}, {talk}]")
    paths = [rows, tar(tmp_path / "a.tar", {"a.txt": b"x", "a.jpg": b"y"})]
    scans = []
    for module, name in ((json_file, "_row_spans"), (tar_module, "_sample_spans")):
        scan = getattr(module, name)

        def count(*given, scan=scan):
            scans.append(given[1])
            return scan(*given)

        monkeypatch.setattr(module, name, count)
    for path in paths:
        first, second = SampleDataset(path), SampleDataset(path)
        assert [one.turns for one in first] == [one.turns for one in second]
    assert scans == list(map(str, paths))
    rows.write_text(f"[{talk}, {talk}, {talk}")
    for _ in range(2):  # damage is remembered, too
        with pytest.raises(DataError, match="is not JSON"):
            SampleDataset(rows)
    rows.write_text(f"[{talk}]")
    assert len(SampleDataset(rows)) == 1
