"""Checkpoints that do not fit: the error names the parameter, and says what to do."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from coat_vlm.checkpoint.atomic_folder import read_json
from coat_vlm.checkpoint.manifest import FolderFiles, write_manifest
from coat_vlm.checkpoint.metadata import Contents, SavedParameter
from coat_vlm.checkpoint.shards import Fragment, Shards, ShardWriter


def contents(**changes: object) -> Contents:
    parameters = {
        "tower.weight": SavedParameter(shape=(4, 3), dtype="bfloat16", group=None),
        "head.weight": SavedParameter(shape=(5, 4), dtype="bfloat16", group=0),
    }
    groups = [{"lr": 0.1, "states": "CoatAdamW fp32"}]
    whole = Contents(parameters=parameters, buffers={"scale": ()}, groups=groups)
    return dataclasses.replace(whole, **changes)


def with_head(**changes: object) -> Contents:
    parameters = contents().parameters
    head = dataclasses.replace(parameters["head.weight"], **changes)
    return contents(parameters={**parameters, "head.weight": head})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_head(shape=(6, 4)), r"head.weight has shape \(5, 4\), in this run \(6, 4\)"),
        (with_head(group=None), r"head.weight is in parameter group 0 .* and frozen in this run"),
        (contents(parameters={}), "only the checkpoint has a parameter head.weight"),
        (contents(groups=[]), "1 parameter groups were saved, this run has 0"),
        (
            contents(groups=[{"lr": 0.1, "states": "AdamW"}]),
            "states of head.weight .* CoatAdamW fp32, this run has AdamW",
        ),
    ],
)
def test_what_differs_is_named(model: Contents, message: str) -> None:
    contents().check(contents(), "step-1")
    with pytest.raises(ValueError, match=f"step-1: .*{message}.*resume with"):
        contents().check(model, "step-1")


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trainer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} is damaged: .*; restore the file"):
        read_json(path)


def write_shards(writer: ShardWriter, folder: Path) -> None:
    files = FolderFiles(folder)
    writer.write(files)
    write_manifest(folder, files.entries)
    for path in folder.glob("*.safetensors"):
        assert save(load_file(path)) == path.read_bytes()  # as the library writes it


def test_missing_elements_are_named(tmp_path: Path) -> None:
    writer = ShardWriter(0)
    writer.add((Fragment("w", 0, 6, 0),), torch.arange(6.0))
    write_shards(writer, tmp_path)
    assert Shards(tmp_path).read_parameter("w", (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="lacks 2 of 8 elements of w"):
        Shards(tmp_path).read_parameter("w", (8,))
