"""``coat-vlm doctor``: what is installed, what will run here, what will not, and what to do.

Every line is found out by asking the machine: codecs are looked up in the libraries, an image and a
video are written and read back through the functions that training uses. A line is ``ok``, ``note``
(works, with a limit worth knowing) or ``BROKEN`` (something that training or evaluation needs).
Everything but torch is imported inside the check that needs it, so that a broken library is a line
of the report and not its end.
"""

import io
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

PACKAGES = (
    "coat-vlm",
    "torch",
    "torchvision",
    "triton",
    "transformers",
    "deepspeed",
    "open_clip_torch",
    "datasets",
    "pillow",
    "av",
)
OPTIONAL = (
    (
        "peft",
        "LoRA (peft)",
        "only a stage with lora needs it",
        "pip install -e '.[lora]' if a stage has lora",
    ),
    (
        "wandb",
        "Weights & Biases",
        "metrics.jsonl needs none",
        "pip install -e '.[wandb]' if you set tracking.wandb_project",
    ),
)
"""Packages of extras: what each is for, what goes without it, and how to get it."""
VIDEO_CODECS = ("h264", "hevc", "vp9", "av1")
IMAGE_FORMATS = {"jpg": "JPEG", "zlib": "PNG", "webp": "WebP"}
SMALL_SHARED_MEMORY = 1 << 30
FP8_CAPABILITY = (8, 9)
BF16_CAPABILITY = (8, 0)
_REINSTALL = "make the environment anew as the README's section Install says"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    state: Literal["ok", "note", "BROKEN"]
    subject: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        """The line as printed, the remedy below it."""
        line = f"  {self.state:<7} {self.subject:<22} {self.detail}"
        return f"{line}\n{'':33}-> {self.remedy}" if self.remedy else line


def versions() -> Iterator[Finding]:
    """Python and the libraries that decide what runs."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        try:
            yield Finding("ok", name, version(name))
        except PackageNotFoundError:
            if name == "triton" and platform.system() != "Linux":
                yield Finding("note", name, "not installed")
            else:
                yield Finding("BROKEN", name, "not installed", _REINSTALL)
    cuda = torch.version.cuda
    yield Finding("ok", "torch built for", "CPU" if cuda is None else f"CUDA {cuda}")


def hardware() -> Iterator[Finding]:
    """GPUs with compute capability, cores, memory, shared memory."""
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        detail = f"{gpu.name}, sm{gpu.major}{gpu.minor}, {_gib(gpu.total_memory)}"
        yield Finding("ok", f"GPU {index}", detail)
    if not torch.cuda.is_available():
        yield _no_gpu()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("ok", "CPU", f"{cores} cores, {_gib(memory)} of memory")
    if Path("/dev/shm").is_dir():
        yield shared_memory(shutil.disk_usage("/dev/shm").total)


def shared_memory(size: int) -> Finding:
    """Whether ``size`` bytes of /dev/shm suffice for data loading processes."""
    if size >= SMALL_SHARED_MEMORY:
        return Finding("ok", "shared memory", _gib(size))
    return Finding(
        "note",
        "shared memory",
        f"{_gib(size)}: data loading processes may die with a bus error",
        "start the container with --shm-size=8g, or train with num_workers=0",
    )


def decoders() -> Iterator[Finding]:
    """Image formats of Pillow, video codecs of PyAV, and one file of each kind read back."""
    try:
        import av
        from PIL import features
    except ImportError as error:
        yield Finding("BROKEN", "Pillow or PyAV", str(error), _REINSTALL)
        return
    for key, name in IMAGE_FORMATS.items():
        remedy = f"install a Pillow built with {name}, or convert such images"
        yield _present(f"{name} images", bool(features.check(key)), "note", remedy)
    for codec in VIDEO_CODECS:
        remedy = "install PyAV from PyPI: pip install --force-reinstall av"
        yield _present(f"{codec} video", codec in av.codecs_available, "note", remedy)
    with tempfile.TemporaryDirectory() as folder:
        yield _attempt("reading an image", lambda: _read_image_back(Path(folder)))
        yield _attempt("reading a video", lambda: _read_video_back(Path(folder)))


def distributed() -> Iterator[Finding]:
    """Communication backends of torch.distributed."""
    if not torch.distributed.is_available():
        yield Finding("BROKEN", "torch.distributed", "missing from this torch", "install it anew")
        return
    yield _present("gloo (CPU processes)", torch.distributed.is_gloo_available(), "BROKEN")
    if torch.version.cuda is not None:
        nccl, remedy = torch.distributed.is_nccl_available(), "install torch's CUDA build for Linux"
        yield _present("NCCL (GPUs)", nccl, "BROKEN", remedy)


def abilities() -> Iterator[Finding]:
    """What will run on this machine and what will not."""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        yield bf16_on_gpu(capability)
        yield fp8(capability)
    else:
        yield Finding("ok", "FP32 training", "on the CPU; small models only")
        detail = "on the CPU with FP32 storage, rounded in the linear layers; slower than FP32"
        yield Finding("ok", "BF16 and FP8 training", detail)  # coat_vlm/fp8/convert.py
    yield _attempt("transformers models", _import_transformers)
    yield _attempt("open_clip towers", _import_open_clip)
    yield _attempt("DeepSpeed", _import_deepspeed)
    for package, subject, without, remedy in OPTIONAL:
        try:
            yield Finding("ok", subject, version(package))
        except PackageNotFoundError:
            yield Finding("note", subject, f"not installed; {without}", remedy)


def bf16_on_gpu(capability: tuple[int, int]) -> Finding:
    """Whether a GPU of this compute capability computes in BF16."""
    if capability >= BF16_CAPABILITY:
        return Finding("ok", "BF16 training", "native on this GPU")
    detail = f"sm{capability[0]}{capability[1]} has no BF16 units"
    return Finding("note", "BF16 training", detail, "train with precision=fp32")


def fp8(capability: tuple[int, int]) -> Finding:
    """Whether a GPU of this compute capability multiplies FP8 matrices."""
    name = f"sm{capability[0]}{capability[1]}"
    if capability >= FP8_CAPABILITY:
        return Finding("ok", "FP8 training", f"native on this GPU ({name})")
    remedy = "train with precision=bf16, or fp8.reference=true for the slow reference arithmetic"
    return Finding("note", "FP8 training", f"{name} has no FP8 units, sm89 has", remedy)


def run_doctor() -> int:
    """Print the report.

    Returns:
        0, or 1 when something that training or evaluation needs is broken.
    """
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "Versions": versions,
        "Hardware": hardware,
        "Decoders": decoders,
        "Processes": distributed,
        "What will run": abilities,
    }
    broken = 0
    for title, findings in sections.items():
        print(title)
        for finding in findings():
            broken += finding.state == "BROKEN"
            print(finding)
    print(f"{broken} broken" if broken else "Nothing is broken.")
    return 1 if broken else 0


def _no_gpu() -> Finding:
    detail, remedy = "none; everything runs on the CPU", ""
    if torch.version.cuda is not None:
        detail = f"none found by torch for CUDA {torch.version.cuda}"
        remedy = "if there is one, compare the driver's CUDA version in nvidia-smi with torch's"
    elif shutil.which("nvidia-smi"):
        detail = "this torch is a CPU build, it can use none"
        remedy = "reinstall torch for CUDA: pip install --force-reinstall -c constraints.txt torch"
    return Finding("note", "GPU", detail, remedy)


def _present(
    subject: str, found: bool, otherwise: Literal["note", "BROKEN"], remedy: str = ""
) -> Finding:
    return Finding("ok", subject, "yes") if found else Finding(otherwise, subject, "no", remedy)


def _attempt(subject: str, action: Callable[[], str], remedy: str = _REINSTALL) -> Finding:
    try:
        return Finding("ok", subject, action())
    except Exception as error:  # whatever fails is the finding
        detail = f"{type(error).__name__}: {error}"
        return Finding("BROKEN", subject, detail, remedy)


def _read_image_back(folder: Path) -> str:
    from PIL import Image

    from coat_data.media.image import open_image

    path = folder / "image.jpg"
    Image.new("RGB", (32, 24), "red").save(path)
    image = open_image(path)
    if image.size != (32, 24):
        raise ValueError(f"wrote an image of 32 x 24, read {image.size}")
    return "a JPEG written and read back"


def _read_video_back(folder: Path) -> str:
    from coat_data.media.video import read_frames
    from coat_data.sample import Media

    path = folder / "video.mp4"
    path.write_bytes(encode_video(num_frames=10))
    frames = read_frames(Media(kind="video", path=str(path)), 4)
    if len(frames) != 4 or frames[0].size != (64, 48):
        raise ValueError(f"wrote 10 frames of 64 x 48, read {[frame.size for frame in frames]}")
    return "an H.264 clip written, 4 frames read back"


def encode_video(num_frames: int) -> bytes:
    """An H.264 MP4 of grey frames of 64 x 48 that grow brighter, at 10 per second."""
    import av
    from PIL import Image

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(num_frames):
            level = 255 * index // num_frames
            frame = av.VideoFrame.from_image(Image.new("RGB", (64, 48), (level, level, level)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def _import_open_clip() -> str:
    import open_clip
    import torchvision

    name = f"open_clip {open_clip.__version__} with torchvision {torchvision.__version__}"
    try:
        torch.ops.torchvision.roi_pool  # noqa: B018 - the lookup is the test
    except AttributeError:
        # The wheel's compiled half needs CUDA; coat_vlm.torchvision_ops declares what is missing.
        return f"{name}, without its compiled ops (none is needed)"
    return name


def _import_transformers() -> str:
    from transformers import Qwen2ForCausalLM, SiglipVisionModel

    return f"{Qwen2ForCausalLM.__name__} and {SiglipVisionModel.__name__} import"


def _import_deepspeed() -> str:
    # On a machine without a GPU DeepSpeed warns of that, in the middle of this report.
    logging.disable(logging.WARNING)
    try:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
    finally:
        logging.disable(logging.NOTSET)
    return f"imports; it will use: {accelerator.device_name() if accelerator else 'nothing'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
