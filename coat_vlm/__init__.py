"""coat-vlm: train vision-language models, and know from evaluation that nothing was lost."""

import subprocess
from pathlib import Path

from coat_data.moved import announce_moves
from coat_vlm.torchvision_ops import ensure_torchvision_later

# transformers, timm and open_clip import torchvision: this must come before any of them.
ensure_torchvision_later()
announce_moves("coat_vlm")  # of coat_kernels, too, which imports nothing of this project


def commit() -> str | None:
    """The commit of the checkout that this package lies in, with ``-dirty`` after changes.

    None for an installed copy, or without git.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
