"""Keeps the bytecode of what is imported where nobody does: without it each start compiles torch's 2,500 files anew."""

import os
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import cache_from_source

from elastictrain.errors import HostUnfitError
from elastictrain.storage.private import temporary_folder

_NEVER, _FOLDER = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def keep_bytecode(
    environment: MutableMapping[str, str] = os.environ, *, package: str = "torch", parent: Callable[[], str] = temporary_folder
) -> None:
    """Have this process, and those that it starts, keep bytecode in a folder of this user's, if `package` has none beside its
    files: an image that was built with PYTHONDONTWRITEBYTECODE, or files of another user. Before the imports that matter."""
    if sys.pycache_prefix is not None:
        return  # someone has chosen a folder, or a parent of this process has made this one
    found = PathFinder.find_spec(package)
    if found is None or found.origin is None or os.path.exists(cache_from_source(found.origin)):  # noqa: PTH110
        return
    with suppress(HostUnfitError, OSError):
        sys.pycache_prefix = environment[_FOLDER] = f"{parent()}/bytecode"
        sys.dont_write_bytecode = False
        environment.pop(_NEVER, None)
