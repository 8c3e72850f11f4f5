"""Lets torchvision import beside a CPU build of torch.

torchvision's Linux wheels on PyPI are CUDA builds. Beside a CPU torch their C++ extension cannot
load, and ``import torchvision`` fails with "operator torchvision::nms does not exist", because it
registers shape functions for two operators that only the extension declares. transformers, timm and
open_clip import torchvision and fail with it. Declaring the two operators is enough for everything
this project uses; calling them (or decoding images through torchvision) still raises.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# The declarations live as long as this list does.
_libraries: list[Any] = []


class _BeforeTorchvision(MetaPathFinder):
    """Declares the operators when torchvision is about to be imported, and finds nothing itself."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:  # noqa: ARG002
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            ensure_torchvision()


def ensure_torchvision_later() -> None:
    """Call :func:`ensure_torchvision` at the first import of torchvision, whoever imports it.

    Importing torch takes seconds, and half of the commands do without it.
    """
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


def ensure_torchvision() -> None:
    """Declare torchvision's operators where its extension cannot load; call it before importing it.

    Does nothing on a CUDA build of torch, without torchvision, beside a working torchvision, or
    when called again. torchvision itself is not imported.
    """
    import torch

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
    import torch

    try:
        torch.ops.load_library(str(path))
    except OSError:  # what a missing file or a missing CUDA library raises
        return False
    return True
