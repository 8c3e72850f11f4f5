"""Lets torchvision import beside a CPU build of torch.

torchvision's Linux wheels on PyPI are CUDA builds. Beside a CPU torch their C++ extension cannot
load, and ``import torchvision`` fails with "operator torchvision::nms does not exist", because it
registers shape functions for two operators that only the extension declares. transformers, timm and
open_clip import torchvision and fail with it. Declaring the two operators is enough for everything
this project uses; calling them (or decoding images through torchvision) still raises.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# The declarations live as long as this list does.
_libraries: list[torch.library.Library] = []


def ensure_torchvision() -> None:
    """Declare torchvision's operators where its extension cannot load; call it before importing it.

    Does nothing on a CUDA build of torch, without torchvision, beside a working torchvision, or
    when called again. torchvision itself is not imported.
    """
    if torch.version.cuda is not None or _libraries:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _extension_loads(Path(spec.origin).parent / "_C.so"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def _extension_loads(path: Path) -> bool:
    try:
        torch.ops.load_library(str(path))
    except OSError:  # what a missing file or a missing CUDA library raises
        return False
    return True
