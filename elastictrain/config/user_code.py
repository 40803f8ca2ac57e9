"""Names the user's methods in messages: Class.method, where it is written, and the frames in which it failed."""

import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from elastictrain.errors import ElasticTrainError, TaskError

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))  # noqa: PTH118
_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def name_method(owner: object, method: str) -> str:
    """Class.method, for the `method` of an object or a class."""
    return f"{(owner if isinstance(owner, type) else type(owner)).__qualname__}.{method}"


def locate_method(owner: object, method: str) -> str:
    """Class.method (file:line); without a place where Python does not know it."""
    name = name_method(owner, method)
    code = getattr(inspect.unwrap(getattr(owner, method, None) or (lambda: None)), "__code__", None)
    return f"{name} ({_short(code.co_filename)}:{code.co_firstlineno})" if hasattr(owner, method) and code else name


def describe_value(value: object, *, depth: int = 2) -> str:
    """A value's type; of a tensor or an array its dtype and shape too, of a collection its first parts."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    parts: list[str] = []
    if isinstance(value, Mapping):
        parts = [f"{key!r}: {describe_value(one, depth=depth - 1)}" for key, one in list(value.items())[:4]]
    elif isinstance(value, list | tuple):
        parts = [describe_value(one, depth=depth - 1) for one in value[:4]]
    shown = f" of {len(value)} ({', '.join(parts)})" if parts and depth else ""  # type: ignore[arg-type]
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return "None" if value is None else f"{type(value).__name__}{shown}"


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error in the user's own code; if there are none, all below ours."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [one for one in frames if not one.filename.startswith((_PACKAGE, "<frozen"))]
    own = [one for one in foreign if not one.filename.startswith(_LIBRARIES)]
    return own or foreign


@contextmanager
def calling(owner: object, method: str, *, at: str = "", position: int | None = None) -> Iterator[None]:
    """Around a call of a user's method before training. Raises: TaskError for what it raises, with the frames of the user's
    code; but errors of ours, and those that may be of this moment (a connection, a disk, memory), as they are."""
    try:
        yield
    except Exception as error:
        passing = isinstance(error, OSError) and not isinstance(error, _LASTING)
        if passing or isinstance(error, ElasticTrainError | MemoryError):
            raise
        frames = user_frames(error)
        where = f" at {_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        raised = f"raised {type(error).__name__}{where}{at}: {' '.join(str(error).split()) or 'no message'}"
        message, shown = f"{locate_method(owner, method)} must not fail, but {raised}", "".join(traceback.format_list(frames))
        raise TaskError(message, method=name_method(owner, method), position=position, frames=shown) from error


def refuse(owner: object, method: str, must: str, found: str, *, position: int | None = None) -> TaskError:
    """The error for a method that "must `must`, but `found`"."""
    where = "" if position is None else f" at position {position}"
    message = f"{locate_method(owner, method)} must {must}, but {found}{where}"
    return TaskError(message, method=name_method(owner, method), position=position)


def _short(file: str) -> str:
    """Relative to the current folder, where the file is below it."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (OSError, ValueError):
        return file
