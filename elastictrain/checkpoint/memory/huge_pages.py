"""Huge pages for files in host memory, whatever its mount says: they are page-locked many times faster, and a process that is
killed gives them back sooner, for which the driver lets all others wait. Linux 6.1 and newer; elsewhere nothing changes."""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

PAGE_BYTES = 2 << 20
_AT_ONCE = 128  # pages: each call makes all processors of the host put their lists of pages in order
_COLLAPSE = 25  # MADV_COLLAPSE, madvise(2)
_NO_ACCESS, _FIXED = 0, 0x10  # PROT_NONE and MAP_FIXED, mmap(2)
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def make_huge_file(folder: str, size_bytes: int) -> int | None:
    """A file without a name, of which as much as possible is allocated in huge pages; the caller allocates the rest, and may
    `os.link` it. None where the kernel refuses some of the first ones. Raises: OSError where memory is short."""
    wanted = size_bytes // PAGE_BYTES * PAGE_BYTES
    if not wanted:
        return None
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None  # a file system without such files
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        os.ftruncate(descriptor, size_bytes)
        with _mapped(descriptor, wanted) as begin:
            for start in range(0, wanted, _AT_ONCE * PAGE_BYTES):
                end = min(wanted, start + _AT_ONCE * PAGE_BYTES)
                # The kernel fills a range that has a page; to touch one would be fatal where memory is short.
                for page in range(start, end, PAGE_BYTES):
                    os.posix_fallocate(descriptor, page, mmap.PAGESIZE)
                if _libc.madvise(begin + start, end - start, _COLLAPSE) and not start:
                    return None
        undo.pop_all()
    return descriptor


def map_aligned(descriptor: int, size_bytes: int) -> memoryview:
    """A whole file, mapped to write so that huge pages stay whole. It is unmapped when nothing refers to it any more. Raises:
    OSError."""
    begin = _map(descriptor, size_bytes)
    array = (ctypes.c_ubyte * size_bytes).from_address(begin)
    # Not at the end of the interpreter: other threads may still use it.
    weakref.finalize(array, _libc.munmap, begin, size_bytes).atexit = False
    return memoryview(array).cast("B")


@contextmanager
def _mapped(descriptor: int, size_bytes: int) -> Iterator[int]:
    begin = _map(descriptor, size_bytes)
    try:
        yield begin
    finally:
        _libc.munmap(begin, size_bytes)


def _map(descriptor: int, size_bytes: int) -> int:
    """Map a file at an address that is a multiple of a huge page. Raises: OSError."""
    # Room for one is reserved first, and what is not needed of it given back.
    total = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + PAGE_BYTES
    room = _libc.mmap(None, total, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    begin: int = -(-room // PAGE_BYTES) * PAGE_BYTES
    if _libc.mmap(begin, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, descriptor, 0) == _FAILED:
        code = ctypes.get_errno()
        _libc.munmap(room, total)
        raise OSError(code, os.strerror(code))
    end = begin + total - PAGE_BYTES
    for start, size in ((room, begin - room), (end, room + total - end)):
        if size:
            _libc.munmap(start, size)
    return begin
