"""Folders of the local Hugging Face cache: `models--OWNER--NAME/snapshots/REVISION/...`."""

from pathlib import Path

from elastictrain.errors import DataError


def hub_snapshot(folder: Path) -> Path:
    """The files of a repository in the local Hugging Face cache; any other folder is returned as it is.

    Raises: DataError if the repository has several revisions and none of them is `main`.
    """
    found = sorted(path for path in folder.glob("snapshots/*") if path.is_dir()) if (folder / "refs").is_dir() else []
    if not found:
        return folder
    main = folder / "refs/main"
    revision = main.read_text(errors="replace").strip() if main.is_file() else ""
    chosen = [path for path in found if path.name == revision] or found
    if len(chosen) > 1:
        raise DataError(f"{folder} must have one revision, but has {len(chosen)}; name the folder of one, such as {chosen[0]}")
    return chosen[0]
