"""Makes torchvision importable with a CPU build of torch.

torchvision's Linux wheels on PyPI are CUDA builds, whose C++ extension does not load with a CPU
build of torch. Then ``import torchvision``, also by transformers, timm and open_clip, fails with
"operator torchvision::nms does not exist". Declaring two operators is enough for everything that
this project uses; calling them, or decoding images with torchvision, still raises.
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

# torch drops the declarations when the Library object is freed.
_libraries: list[Any] = []


class _BeforeTorchvision(MetaPathFinder):
    """An import hook that declares the operators before the first import of torchvision."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:  # noqa: ARG002
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            ensure_torchvision()


def ensure_torchvision_later() -> None:
    """Call :func:`ensure_torchvision` at the first import of torchvision.

    It imports torch, which takes seconds and many commands do not need.
    """
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


def ensure_torchvision() -> None:
    """Declare the operators if torchvision's extension does not load; call before importing it."""
    import torch

    if torch.version.cuda is not None or _libraries:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).parent / "_C.so"))
    except OSError:  # the file or a CUDA library is missing
        pass
    else:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)
