"""Which keys are names of objects."""

from elastictrain.errors import PermanentStorageError

TEMPORARY_PREFIX = ".tmp-"
"""Names that start with it belong to unfinished files; no key has such a part."""


def check_key(key: str, *, url: str) -> None:
    """Raises: PermanentStorageError if `key` is not a relative, '/'-separated name that means the same on every backend."""
    for part in key.split("/"):
        if part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) or "\0" in part:
            raise PermanentStorageError(
                f"{url}: {key!r} cannot name an object: a key is relative, and its parts are neither empty nor '.' nor '..' "
                f"and do not start with {TEMPORARY_PREFIX!r}"
            )


def folder_of(prefix: str) -> str:
    """The prefix as a folder: '' or ending with '/'."""
    prefix = prefix.strip("/")
    return f"{prefix}/" if prefix else ""
