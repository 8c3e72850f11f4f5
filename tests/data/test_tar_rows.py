"""A tar on this machine, read by the offsets of its members."""

import pickle
from pathlib import Path

import pytest
from encoders import Tar

from coat_data.load.dataset import SampleDataset
from coat_data.sample import DataError


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


def test_a_changed_file_is_scanned_again(tmp_path: Path) -> None:
    talk = '{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}'
    rows = tmp_path / "a.json"
    rows.write_text(f"[{talk}, {talk}]")
    assert len(SampleDataset(rows)) == 2
    rows.write_text(f"[{talk}, {talk}, {talk}")
    for _ in range(2):  # damage is remembered
        with pytest.raises(DataError, match="is not JSON"):
            SampleDataset(rows)
    rows.write_text(f"[{talk}]")
    assert len(SampleDataset(rows)) == 1
