"""Uploads an exported folder to the Hugging Face Hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

_FAILURES: Any = (*HfHubHTTPError.__bases__, OfflineModeIsEnabled)
"""OSError, of which LocalTokenNotFoundError is one, and the base of all errors of the HTTP client,
which is another package in other versions of huggingface_hub."""


def check_hub(name: str) -> None:
    """Check that this user may upload, before anything is written.

    Args:
        name: ``USER/MODEL``, or ``MODEL`` of the user.

    Raises:
        ValueError: the name is not allowed, the Hub does not answer, or nobody is logged in.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"--push-to-hub {name}: {error}; give USER/MODEL") from error
    try:
        HfApi().whoami()
    except _FAILURES as error:
        raise ValueError(
            f"--push-to-hub {name}: the Hugging Face Hub does not accept the upload: "
            f"{str(error).splitlines()[0]}; connect to the network and run hf auth login, or "
            "export without --push-to-hub"
        ) from error


def push(folder: Path, name: str) -> str:
    """Upload a folder; a repository that does not exist is created, private.

    Args:
        folder: a complete exported folder.
        name: as in :func:`check_hub`.

    Returns:
        The repository's address.

    Raises:
        ValueError: the upload failed; the folder is complete.
    """
    api = HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository.repo_id)
    except _FAILURES as error:
        raise ValueError(
            f"the upload to {name} failed: {str(error).splitlines()[0]}; {folder} is complete, "
            f"continue with: hf upload {name} {folder}"
        ) from error
    return str(repository)
