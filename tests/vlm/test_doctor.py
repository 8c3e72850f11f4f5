"""The doctor: every section runs here, and a broken part is found, named and counted."""

from importlib import metadata

import pytest
import torch

from coat_vlm import doctor
from coat_vlm.doctor import (
    run_doctor,
)


def test_nothing_is_broken_in_the_tested_environment(capsys: pytest.CaptureFixture[str]):
    status = run_doctor()
    printed = capsys.readouterr().out
    assert status == 0, printed
    for line in ("transformers", "deepspeed", "reading a video", "gloo", "BF16", "FP8"):
        assert line in printed
    assert f"torch                  {metadata.version('torch')}" in printed


def test_a_broken_part_is_counted_and_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken() -> str:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(doctor, "_import_deepspeed", broken)
    assert run_doctor() == 1
    printed = capsys.readouterr().out
    assert "BROKEN  DeepSpeed" in printed
    assert "RuntimeError: operator torchvision::nms does not exist" in printed
    assert printed.rstrip().endswith("1 broken")


def test_an_amd_gpu_is_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {finding.subject: finding for finding in doctor.check_features()}
    assert found["training on this GPU"].state == "BROKEN"
    assert "an AMD GPU" in found["training on this GPU"].detail
