"""The doctor: every check runs here, and a broken part is found, named and counted."""

from importlib import metadata
from pathlib import Path

import pytest
import torch

from coat_vlm import doctor


def test_nothing_is_broken_in_the_tested_environment(capsys: pytest.CaptureFixture[str]):
    status = doctor.run_doctor()
    printed = capsys.readouterr().out
    assert status == 0, printed
    for line in ("transformers", "deepspeed", "disk", "BF16", "FP8"):
        assert line in printed
    assert f"torch                  {metadata.version('torch')}" in printed


def test_a_broken_part_is_counted_and_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "broken.py").write_text("raise RuntimeError('torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(doctor.PACKAGES, "deepspeed", "broken")
    assert doctor.run_doctor() == 1
    printed = capsys.readouterr().out
    assert "BROKEN  deepspeed              RuntimeError: torchvision::nms" in printed
    assert printed.rstrip().endswith("1 broken")


def test_an_amd_gpu_is_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (finding,) = doctor.check_gpu()
    assert finding.state == "BROKEN"
    assert "an AMD GPU" in finding.detail
