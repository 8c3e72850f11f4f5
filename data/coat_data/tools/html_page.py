"""Self-contained HTML pages: renders templates, and encodes pictures as ``data:`` URLs."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from PIL import Image

from coat_data.saved_files import write_text


def write_page(path: Path, package: str, template: str, /, **values: Any) -> None:
    """Render a template to a file; texts are escaped, and the file is replaced atomically."""
    packages = (package, "coat_data.tools")
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, package_path="") for name in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    write_text(path, environment.get_template(template).render(values))


def data_address(picture: Image.Image, longest_side: int) -> str:
    """Encode the picture, scaled to at most ``longest_side`` pixels, as a ``data:`` URL."""
    picture = picture.copy()
    picture.thumbnail((longest_side, longest_side))
    buffer = io.BytesIO()
    # JPEG blurs small pictures (CIFAR has 32 x 32 pixels) and does not make them smaller.
    kind = "PNG" if max(picture.size) <= 96 else "JPEG"
    picture.convert("RGB").save(buffer, kind, **({} if kind == "PNG" else {"quality": 85}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def sample_evenly(indices: Sequence[int], number: int) -> list[int]:
    """Return at most ``number`` of the indices, evenly spaced, so the same ones each time."""
    number = min(number, len(indices))
    return [indices[position * len(indices) // number] for position in range(number)]
