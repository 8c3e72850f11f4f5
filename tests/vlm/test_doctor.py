"""The doctor: every section runs here, and a broken part is found, named and counted."""

import io
from importlib import metadata

import av
import pytest

from coat_vlm import doctor
from coat_vlm.doctor import (
    Finding,
    bf16_on_gpu,
    encode_video,
    fp8,
    run_doctor,
    shared_memory,
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

    monkeypatch.setattr(doctor, "_import_transformers", broken)
    assert run_doctor() == 1
    printed = capsys.readouterr().out
    assert "BROKEN  transformers models" in printed
    assert "RuntimeError: operator torchvision::nms does not exist" in printed
    assert printed.rstrip().endswith("1 broken")


def test_a_missing_package_is_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("surely-not-installed",))
    states = {finding.subject: finding.state for finding in doctor.versions()}
    assert states["surely-not-installed"] == "BROKEN"


@pytest.mark.parametrize(
    ("capability", "state"), [((8, 0), "note"), ((8, 9), "ok"), ((9, 0), "ok")]
)
def test_fp8_needs_sm89(capability: tuple[int, int], state: str):
    assert fp8(capability).state == state


def test_an_old_gpu_has_two_remedies():
    assert "precision=bf16" in fp8((8, 0)).remedy
    assert "fp8.reference=true" in fp8((8, 0)).remedy


@pytest.mark.parametrize(
    ("capability", "state"), [((7, 5), "note"), ((8, 0), "ok"), ((9, 0), "ok")]
)
def test_bf16_needs_sm80(capability: tuple[int, int], state: str):
    assert bf16_on_gpu(capability).state == state


def test_small_shared_memory_is_noted():
    assert shared_memory(64 << 20).state == "note"
    assert "--shm-size" in shared_memory(64 << 20).remedy
    assert shared_memory(8 << 30).state == "ok"


def test_the_remedy_stands_below_its_line():
    lines = str(Finding("note", "GPU", "none", "buy one")).splitlines()
    assert lines[1].strip() == "-> buy one"


def test_the_video_is_real():
    with av.open(io.BytesIO(encode_video(num_frames=7)), mode="r") as container:
        frames = [frame.to_ndarray(format="gray8").mean() for frame in container.decode(video=0)]
    assert len(frames) == 7
    assert frames == sorted(frames), "each frame is brighter than the one before"
