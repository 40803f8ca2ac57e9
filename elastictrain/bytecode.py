"""Keeps bytecode in a private folder where the image has none and Python writes none: each start would compile torch's 2,500
files anew, which takes ten seconds."""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from importlib.util import cache_from_source

from elastictrain.errors import HostUnfitError
from elastictrain.storage.private import make_private_folder, temporary_folder

COMPILED_PREFIX = "compile-"  # so begin the names of folders that are removed when no start has used them for a week
_DIGITS = 12
_ROOM_BYTES = 500_000_000  # five times what is needed: Python keeps what a full disk has cut short, and fails to import it


@contextmanager
def bytecode_kept(package: str = "torch", *, room_bytes: int = _ROOM_BYTES) -> Iterator[None]:
    """What this process imports meanwhile leaves its bytecode there, if `package` has none. Only meanwhile, and not what other
    processes import: days later the folder may have been swept, and another user may have taken its name."""
    before = sys.pycache_prefix, sys.dont_write_bytecode
    folder = ""
    with suppress(HostUnfitError, OSError):
        folder = _folder(package, room_bytes)
    if folder:
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def _folder(package: str, room_bytes: int) -> str:
    """For this installation, made; "" where bytecode is kept anyway, or there is no room. Raises: HostUnfitError, OSError."""
    found = PathFinder.find_spec(package)
    if sys.pycache_prefix is not None or found is None or found.origin is None:
        return ""
    beside = os.path.dirname(found.origin)  # noqa: PTH120
    if os.path.exists(cache_from_source(found.origin)):  # noqa: PTH110
        return ""
    if not sys.dont_write_bytecode and os.access(beside, os.W_OK):
        return ""
    parent = temporary_folder()
    if shutil.disk_usage(parent).free < room_bytes:
        return ""
    # Images that share this folder may have other files with the same paths, sizes and times.
    site = os.path.dirname(beside)  # noqa: PTH120
    facts = "\n".join([sys.version, site, *sorted(os.listdir(site))])  # noqa: PTH208
    folder = f"{parent}/{COMPILED_PREFIX}python-{hashlib.sha256(facts.encode(errors='surrogateescape')).hexdigest()[:_DIGITS]}"
    make_private_folder(folder)
    os.utime(folder)
    return folder
