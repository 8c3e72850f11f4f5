"""``coat-vlm doctor``: reports what is installed, what runs on this machine, and remedies.

The report tests the machine: it looks up codecs in the libraries, and writes an image and a video
and reads them with the functions that training uses. A line is ``ok``, ``note`` (works, with a
limitation) or ``BROKEN`` (needed for training or evaluation). All packages but torch are imported
inside the check that needs them, so that a broken library is reported as a line.
"""

import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

PACKAGES = (
    *("coat-vlm", "torch", "torchvision", "triton", "transformers", "deepspeed"),
    *("open_clip_torch", "datasets", "pillow", "av"),
)
OPTIONAL = {
    "peft": "only a stage with lora needs it: pip install -e '.[lora]'",
    "wandb": "only tracking.wandb_project needs it: pip install -e '.[wandb]'",
}
VIDEO_CODECS = ("h264", "hevc", "vp9", "av1")
IMAGE_FORMATS = {"jpg": "JPEG", "zlib": "PNG", "webp": "WebP"}
SMALL_SHARED_MEMORY = 1 << 30
FP8_CAPABILITY = (8, 9)
BF16_CAPABILITY = (8, 0)
_REINSTALL = "create the environment again, see section Install of the README"
# The image processors that come with these models import torchvision.
_MODELS = ("SiglipModel", "CLIPModel", "Qwen2ForCausalLM")


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


def check_versions() -> Iterator[Finding]:
    """Report the versions of Python and of the libraries."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        try:
            yield Finding("ok", name, version(name))
        except PackageNotFoundError:
            if name == "triton" and platform.system() != "Linux":
                yield Finding("note", name, "not installed")
            else:
                yield Finding("BROKEN", name, "not installed", _REINSTALL)
    for name, remedy in OPTIONAL.items():
        try:
            yield Finding("ok", name, version(name))
        except PackageNotFoundError:
            yield Finding("note", name, "not installed", remedy)
    yield Finding("ok", "torch built for", _describe_build())


def check_hardware() -> Iterator[Finding]:
    """Report GPUs with compute capability, cores, memory and shared memory."""
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        detail = f"{gpu.name}, sm{gpu.major}{gpu.minor}, {_format_gib(gpu.total_memory)}"
        yield Finding("ok", f"GPU {index}", detail)
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("ok", "CPU", f"{cores} cores, {_format_gib(memory)} of memory")
    if Path("/dev/shm").is_dir():
        yield check_shared_memory(shutil.disk_usage("/dev/shm").total)


def check_shared_memory(size: int) -> Finding:
    """Report whether ``size`` bytes of /dev/shm are enough for data loading processes."""
    if size >= SMALL_SHARED_MEMORY:
        return Finding("ok", "shared memory", _format_gib(size))
    return Finding(
        "note",
        "shared memory",
        f"{_format_gib(size)}: data loading processes may crash with a bus error",
        "start the container with --shm-size=8g, or train with num_workers=0",
    )


def check_decoders() -> Iterator[Finding]:
    """Report image formats of Pillow and video codecs of PyAV, and decode one file of each kind."""
    try:
        import av
        from PIL import features
    except ImportError as error:
        yield Finding("BROKEN", "Pillow or PyAV", str(error), _REINSTALL)
        return
    for key, name in IMAGE_FORMATS.items():
        remedy = f"install a Pillow built with {name}, or convert such images"
        yield _report_available(f"{name} images", bool(features.check(key)), "note", remedy)
    for codec in VIDEO_CODECS:
        remedy = "install PyAV from PyPI: pip install --force-reinstall av"
        yield _report_available(f"{codec} video", codec in av.codecs_available, "note", remedy)
    with tempfile.TemporaryDirectory() as folder:
        yield _report_result("reading an image", lambda: _round_trip_image(Path(folder)))
        yield _report_result("reading a video", lambda: _round_trip_video(Path(folder)))


def check_distributed() -> Iterator[Finding]:
    """Report the communication backends of torch.distributed."""
    if not torch.distributed.is_available():
        yield Finding("BROKEN", "torch.distributed", "missing from this torch", "reinstall torch")
        return
    yield _report_available("gloo (CPU processes)", torch.distributed.is_gloo_available(), "BROKEN")
    if torch.version.cuda is not None:
        nccl, remedy = torch.distributed.is_nccl_available(), "install torch's CUDA build for Linux"
        yield _report_available("NCCL (GPUs)", nccl, "BROKEN", remedy)


def check_features() -> Iterator[Finding]:
    """Report which precisions and libraries work on this machine."""
    if torch.version.hip is not None and torch.cuda.is_available():
        detail = "an AMD GPU: the Triton kernels of FP8 and of the loss contain NVIDIA's assembly"
        remedy = "train on an NVIDIA GPU, or on the CPU (HIP_VISIBLE_DEVICES=-1)"
        yield Finding("BROKEN", "training on this GPU", detail, remedy)
    elif torch.cuda.is_available():
        yield from check_gpu_precisions(torch.cuda.get_device_capability())
    else:
        yield Finding("ok", "FP32 training", "on the CPU; small models only")
        yield Finding(
            "note",
            "BF16 and FP8 training",
            "emulated on the CPU: FP32 storage, values rounded in the linear layers; slower than "
            "FP32 and no smaller",  # coat_vlm/fp8/convert.py
            "train with precision=fp32 here; FP8 needs an NVIDIA GPU of sm89 or newer",
        )
    yield _report_import("transformers models", "transformers", *_MODELS)
    yield check_torchvision()
    yield _report_import("open_clip towers", "open_clip")
    yield _report_result("DeepSpeed", _import_deepspeed)
    yield _report_import("training's modules", "coat_vlm.train.run")


def check_torchvision() -> Finding:
    """Report whether torchvision's compiled operators load with this torch.

    coat_vlm works without them (:mod:`coat_vlm.torchvision_ops`); programs that import torchvision,
    or a transformers model with images, without coat_vlm do not.
    """
    try:
        import torchvision
    except Exception as error:  # any failure is reported as a line
        return Finding("BROKEN", "torchvision", f"{type(error).__name__}: {error}", _REINSTALL)
    try:
        torch.ops.torchvision.roi_pool  # noqa: B018 - the lookup is the test
    except AttributeError:
        return Finding(
            "note",
            "torchvision",
            f"its compiled operators (of {torchvision.__version__}) do not load with torch "
            f"{torch.__version__} for {_describe_build()}; in programs that do not import coat_vlm "
            "first, from transformers import SiglipModel fails (torchvision::nms does not exist)",
            "install both for the same device, here: pip install --force-reinstall torchvision "
            "--index-url https://download.pytorch.org/whl/cpu",
        )
    return Finding("ok", "torchvision", "its compiled operators load")


def check_gpu_precisions(capability: tuple[int, int]) -> Iterator[Finding]:
    """Report whether a GPU of this compute capability has BF16 and FP8 units."""
    name = "sm{}{}".format(*capability)
    for precision, least, remedy in (
        ("BF16", BF16_CAPABILITY, "train with precision=fp32"),
        ("FP8", FP8_CAPABILITY, "train with precision=bf16"),
    ):
        if capability >= least:
            yield Finding("ok", f"{precision} training", f"native on this GPU ({name})")
        else:
            detail = f"{name} has no {precision} units (sm{least[0]}{least[1]} or newer)"
            yield Finding("note", f"{precision} training", detail, remedy)


def run_doctor() -> int:
    """Print the report; return 1 if something that training or evaluation needs is broken."""
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "Versions": check_versions,
        "Hardware": check_hardware,
        "Decoders": check_decoders,
        "Processes": check_distributed,
        "Features": check_features,
    }
    broken = notes = 0
    for title, findings in sections.items():
        print(title)
        for finding in findings():
            broken += finding.state == "BROKEN"
            notes += finding.state == "note"
            print(finding)
    ending = f"; {notes} note{'s' if notes > 1 else ''} above" if notes else ""
    print(f"{broken} broken" if broken else f"Nothing that coat-vlm needs is broken{ending}.")
    return 1 if broken else 0


def _report_available(
    subject: str, found: bool, otherwise: Literal["note", "BROKEN"], remedy: str = ""
) -> Finding:
    return Finding("ok", subject, "yes") if found else Finding(otherwise, subject, "no", remedy)


def _report_import(subject: str, module: str, *names: str) -> Finding:
    def action() -> str:
        imported = import_module(module)
        return f"{', '.join(getattr(imported, name).__name__ for name in names) or module} import"

    return _report_result(subject, action)


def _report_result(subject: str, action: Callable[[], str]) -> Finding:
    try:
        return Finding("ok", subject, action())
    except Exception as error:  # any failure is reported as a line
        return Finding("BROKEN", subject, f"{type(error).__name__}: {error}", _REINSTALL)


def _round_trip_image(folder: Path) -> str:
    from PIL import Image

    from coat_data.media.image import open_image

    path = folder / "image.jpg"
    Image.new("RGB", (32, 24), "red").save(path)
    image = open_image(path)
    if image.size != (32, 24):
        raise ValueError(f"wrote an image of 32 x 24, read {image.size}")
    return "wrote and read a JPEG"


def _round_trip_video(folder: Path) -> str:
    import av
    import numpy as np
    from PIL import Image

    from coat_data.media.video import read_frames
    from coat_data.sample import Media

    path = folder / "video.mp4"
    with av.open(path, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(10):
            grey = Image.new("RGB", (64, 48), (25 * index,) * 3)
            container.mux(stream.encode(av.VideoFrame.from_image(grey)))
        container.mux(stream.encode())
    frames = read_frames(Media(kind="video", path=str(path)), 4)
    levels = [float(np.asarray(frame).mean()) for frame in frames]
    if len(frames) != 4 or frames[0].size != (64, 48) or levels != sorted(levels):
        raise ValueError(
            "wrote 10 frames of 64 x 48, each brighter than the one before, read "
            f"{[frame.size for frame in frames]} of brightness {levels}"
        )
    return "wrote an H.264 clip and read 4 frames"


def _describe_build() -> str:
    """Return the device that this torch was built for."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _import_deepspeed() -> str:
    # Without a GPU DeepSpeed logs a warning, which would interrupt the report.
    logging.disable(logging.WARNING)
    try:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
    finally:
        logging.disable(logging.NOTSET)
    return f"imports; accelerator: {accelerator.device_name() if accelerator else 'none'}"


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
