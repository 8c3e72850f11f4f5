"""Which commit runs."""

import subprocess
from pathlib import Path


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
