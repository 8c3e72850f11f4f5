"""Writes generated files, or checks them with ``--check``."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def write_pages(folder: Path, pages: Mapping[str, Callable[[], str]]) -> int:
    """Write the text of each file into ``folder``; ``--check`` returns 1 if a file is stale."""
    stale = []
    for name, make in pages.items():
        path, text = folder / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}; run python {sys.argv[0]}")
        return 1
    return 0
