"""The exception tree; each leaf has an exit code, and its message contains the remedy.

    ElasticTrainError                    70  a bug, or a crash loop without progress
    ├── UsageError                       64  the command line is wrong
    ├── ConfigError                      78  config is wrong on every host alike
    │   ├── DataError                    78  the training data is missing or not what the config says
    │   └── TaskError                    78  a method of the task, or of its data, does not do what it must
    ├── HostUnfitError                   69  this host cannot take part: replace it
    ├── StorageError                     74  the store failed
    │   ├── TransientStorageError        74  trying again may help (503, time-out, dropped connection)
    │   └── PermanentStorageError        74  trying again cannot help
    │       ├── ObjectNotFoundError      74
    │       ├── ObjectExistsError        74  lost a create-if-absent
    │       ├── IrregularFileError       74  a link, FIFO, socket or device where a file or folder must be
    │       ├── ObjectTooLargeError      74  it is not what was written under that name
    │       ├── AccessDeniedError        74
    │       └── StorageFullError         74  no space, or over quota
    ├── CheckpointError                  74
    │   ├── InvalidCheckpointError       74  one checkpoint is not what its manifest says
    │   │   └── UntrustedCheckpointError 74  one checkpoint is not signed with the key that was given
    │   ├── UnknownFormatError           74  one checkpoint has a format that this release does not read
    │   ├── NoValidCheckpointError       74  remnants exist and none is valid
    │   └── SavesFailingError            74  too many failed saves in a row
    ├── TransportError                   71  a peer is gone, or a collective failed or hung
    │   └── DetachedError                71  the launcher has ended the generation; the process may go on in the next one
    ├── PreflightError                   71  another host, a link or the group fails a check
    ├── NonFiniteError                   70  too many non-finite steps in a row
    ├── ReplicasDivergedError            70  replicas hold different state
    ├── RunHeldError                     75  another run trains in the folder: run me again when it has ended
    │   └── LeaseLostError               75  another run has taken over
    └── StopRequestedError                    75  stopped on request, state saved: run me again

Exit codes follow sysexits.h.
"""

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_OK = 0
EXIT_USAGE = 64
EXIT_UNFIT = 69
EXIT_BUG = 70
EXIT_TRANSPORT = 71
EXIT_STORAGE = 74
EXIT_STOPPED = 75
EXIT_CONFIG = 78


class ElasticTrainError(Exception):
    """An error that a person can act on: the message contains what is required, what was found, and the remedy."""

    exit_code = EXIT_BUG


class UsageError(ElasticTrainError):
    """The command line is wrong."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: `message` completes the sentence that begins with the dotted path `key`."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"`{self.key}` {self.message}"


class ConfigError(ElasticTrainError):
    """The configuration is wrong on every host alike; never retried."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        self.problems: tuple[Problem, ...] = () if isinstance(problems, str) else tuple(problems)
        if isinstance(problems, str):
            message = problems
        elif len(self.problems) == 1:
            message = str(self.problems[0])
        else:
            message = f"{len(self.problems)} problems in the configuration:\n" + "\n".join(
                f"  - {problem}" for problem in self.problems
            )
        super().__init__(message)


class DataError(ConfigError):
    """The training data is missing, damaged or not what the configuration says."""


class TaskError(ConfigError):
    """A method of the task, or of its data, raises or returns something else than it must."""

    def __init__(self, message: str, *, method: str = "", position: int | None = None, frames: str = "") -> None:
        """`method`: Class.method. `position`: of the sample that shows it. `frames`: of the user's code."""
        super().__init__(f"{message}\n{frames}".rstrip())
        self.method = method
        self.position = position


class HostUnfitError(ElasticTrainError):
    """This host cannot take part; another may."""

    exit_code = EXIT_UNFIT


class StorageError(ElasticTrainError):
    """A store failed; the message names the URL."""

    exit_code = EXIT_STORAGE
    file: str | None = None  # the file of a checkpoint that was being read, if known


class TransientStorageError(StorageError):
    """The store failed in a way that may pass: throttled, timed out, connection dropped."""


class PermanentStorageError(StorageError):
    """The store refused; a retry cannot help."""


class ObjectNotFoundError(PermanentStorageError):
    """No object of that name exists."""


class ObjectExistsError(PermanentStorageError):
    """A create-if-absent found the object."""


class IrregularFileError(PermanentStorageError):
    """A link, FIFO, socket or device has the name of an object, or of a folder above it."""


class ObjectTooLargeError(PermanentStorageError):
    """An object has more bytes than any that is written under its name."""


class AccessDeniedError(PermanentStorageError):
    """Credentials are missing, wrong, or do not permit the operation."""


class StorageFullError(PermanentStorageError):
    """No space or no inode is left, or a quota is reached."""


class CheckpointError(ElasticTrainError):
    """A checkpoint could not be written or read."""

    exit_code = EXIT_STORAGE


class InvalidCheckpointError(CheckpointError):
    """One checkpoint is not what its manifest says; the message names the file."""


class UntrustedCheckpointError(InvalidCheckpointError):
    """One checkpoint is not signed with the given key: it may be whole, but its origin is unproven."""


class UnknownFormatError(CheckpointError):
    """One checkpoint is whole, but of a format version that this release does not read."""


class NoValidCheckpointError(CheckpointError):
    """The run has had checkpoints, or remnants of them, and none is valid."""


class SavesFailingError(CheckpointError):
    """Too many saves failed in a row."""


class TransportError(ElasticTrainError):
    """A peer is gone, or a collective failed or hung."""

    exit_code = EXIT_TRANSPORT

    def __init__(self, message: str = "", *, missing: tuple[int, ...] = ()) -> None:
        """`missing`: ranks that did not join when the group was formed."""
        super().__init__(message)
        self.missing = missing


class DetachedError(TransportError):
    """The launcher has ended this generation: what a collective returns since then counts for nothing."""


class PreflightError(ElasticTrainError):
    """Before the first step another host, a link between hosts or the group as a whole failed a check."""

    exit_code = EXIT_TRANSPORT


class NonFiniteError(ElasticTrainError):
    """Too many steps in a row had a non-finite loss or gradient."""


class ReplicasDivergedError(ElasticTrainError):
    """Replicas of the model have different parameters or optimizer state; the message names the ranks and hosts."""


class StopRequestedError(ElasticTrainError):
    """The run was asked to stop; its state is saved."""

    exit_code = EXIT_STOPPED


class RunHeldError(ElasticTrainError):
    """Another run trains in this folder; the message names its owner and since when."""

    exit_code = EXIT_STOPPED


class LeaseLostError(RunHeldError):
    """This run was silent for so long that another one has taken over: nothing of it is saved any more."""
