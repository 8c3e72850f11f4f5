"""``coat-vlm doctor``: reports what is installed, what runs on this machine, and remedies.

A line is ``ok``, ``note`` (works, with a limitation) or ``BROKEN`` (needed for training or
evaluation). All packages except torch are imported inside their checks, so a broken one is reported
in a line.
"""

import logging
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

_REINSTALL = "create the environment again, see section Install of the README"
PACKAGES = {
    "coat-vlm": "coat_vlm.train.run",
    "torchvision": "torchvision",
    "triton": "triton",
    "transformers": "transformers",
    "deepspeed": "deepspeed.accelerator",
    "open_clip_torch": "open_clip",
    "datasets": "datasets",
    "pillow": "PIL.Image",
    "av": "av",
}
"""Package -> module that is imported, to see whether it works here."""
OPTIONAL = {
    "peft": "only a stage with lora needs it: pip install -e '.[lora]'",
    "wandb": "only tracking.wandb_project needs it: pip install -e '.[wandb]'",
}
VIDEO_CODECS = ("h264", "hevc", "vp9", "av1")
SMALL_SHARED_MEMORY = 1 << 30
# The image processors that come with these models import torchvision.
_MODELS = ("SiglipModel", "CLIPModel", "Qwen2ForCausalLM")
_PRECISIONS = (
    ("BF16", (8, 0), "train with precision=fp32"),
    ("FP8", (8, 9), "train with precision=bf16"),
)
"""Precision, the compute capability of its units, and what to do without them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    state: Literal["ok", "note", "BROKEN"]
    subject: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        """Format the line, with the remedy below it."""
        line = f"  {self.state:<7} {self.subject:<22} {self.detail}"
        return f"{line}\n{'':33}-> {self.remedy}" if self.remedy else line


def run_doctor() -> int:
    """Print the report; return 1 if something that training or evaluation needs is broken."""
    # Without a GPU DeepSpeed logs a warning, which would interrupt the report.
    logging.disable(logging.WARNING)
    broken = notes = 0
    try:
        for findings in (check_packages(), check_gpu(), check_machine()):
            for finding in findings:
                broken += finding.state == "BROKEN"
                notes += finding.state == "note"
                print(finding)
    finally:
        logging.disable(logging.NOTSET)
    ending = f"; {notes} note{'s' if notes > 1 else ''} above" if notes else ""
    print(f"{broken} broken" if broken else f"Nothing that coat-vlm needs is broken{ending}.")
    return 1 if broken else 0


def check_packages() -> Iterator[Finding]:
    """Import each package, and report its version."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    build = f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else build
    yield Finding("ok", "torch", f"{version('torch')} for {build}")
    for name, module in PACKAGES.items():
        try:
            imported = import_module(module)
            for model in _MODELS if name == "transformers" else ():
                getattr(imported, model)
            yield Finding("ok", name, version(name))
        except Exception as error:  # any failure is reported as a line
            if name == "triton" and platform.system() != "Linux":
                yield Finding("note", name, "not installed")
            else:
                yield Finding("BROKEN", name, f"{type(error).__name__}: {error}", _REINSTALL)
    for name, remedy in OPTIONAL.items():
        try:
            yield Finding("ok", name, version(name))
        except ImportError:
            yield Finding("note", name, "not installed", remedy)
    try:
        import av
    except ImportError:
        return
    missing = [codec for codec in VIDEO_CODECS if codec not in av.codecs_available]
    if missing:
        remedy = "install PyAV from PyPI: pip install --force-reinstall av"
        yield Finding("note", "video", f"av cannot decode {', '.join(missing)}", remedy)


def check_gpu() -> Iterator[Finding]:
    """Report GPUs with compute capability and memory, and the precisions that they compute."""
    if not torch.cuda.is_available():
        detail, remedy = "none; everything runs on the CPU", ""
        if torch.version.cuda is not None:
            detail = f"none found by torch for CUDA {torch.version.cuda}"
            remedy = "if there is one, compare the driver's CUDA version in nvidia-smi with torch's"
        elif shutil.which("nvidia-smi"):
            detail = "not usable by this CPU build of torch"
            remedy = (
                "reinstall torch for CUDA: pip install --force-reinstall -c constraints.txt torch"
            )
        yield Finding("note", "GPU", detail, remedy)
        yield Finding(
            "note",
            "BF16 and FP8 training",
            "emulated on the CPU: FP32 storage, values rounded in the linear layers; slower than "
            "FP32, saves no memory",  # coat_vlm/fp8/convert.py
            "train with precision=fp32 here; FP8 needs an NVIDIA GPU of sm89 or newer",
        )
        return
    if torch.version.hip is not None:
        detail = "an AMD GPU: the Triton kernels of FP8 and of the loss contain NVIDIA's assembly"
        remedy = "train on an NVIDIA GPU, or on the CPU (HIP_VISIBLE_DEVICES=-1)"
        yield Finding("BROKEN", "training on this GPU", detail, remedy)
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        detail = f"{gpu.name}, sm{gpu.major}{gpu.minor}, {_format_gib(gpu.total_memory)}"
        yield Finding("ok", f"GPU {index}", detail)
    if not torch.distributed.is_nccl_available():
        yield Finding("BROKEN", "NCCL", "missing", "install torch's CUDA build for Linux")
    capability = torch.cuda.get_device_capability()
    for precision, needed, remedy in _PRECISIONS:
        if capability >= needed:
            yield Finding("ok", f"{precision} training", "native on this GPU")
        else:
            detail = f"this GPU has no {precision} units (sm{needed[0]}{needed[1]} or newer)"
            yield Finding("note", f"{precision} training", detail, remedy)


def check_machine() -> Iterator[Finding]:
    """Report cores, memory, disk and shared memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("ok", "CPU", f"{cores} cores, {_format_gib(memory)} of memory")
    yield Finding("ok", "disk", f"{_format_gib(shutil.disk_usage('.').free)} free in this folder")
    if not Path("/dev/shm").is_dir():
        return
    shared = shutil.disk_usage("/dev/shm").total
    if shared >= SMALL_SHARED_MEMORY:
        yield Finding("ok", "shared memory", _format_gib(shared))
        return
    yield Finding(
        "note",
        "shared memory",
        f"{_format_gib(shared)}: data loading processes may crash with a bus error",
        "start the container with --shm-size=8g, or train with num_workers=0",
    )


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
