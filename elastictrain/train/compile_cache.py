"""Compiled code that outlives its process: torch's cache in a folder of this host, and an archive of it in the run's folder.

All workers of a host share one private folder. A start reads the archive in a thread, beside the build; rank 0 stores what the
first step has added. Nothing here ends a run: what fails is logged, and torch compiles as without a cache.
docs/decisions/0027-compiled-code-in-the-run-folder.md says whose archives are loaded.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from elastictrain.bytecode import COMPILED_PREFIX
from elastictrain.checkpoint.lineage import number_of
from elastictrain.checkpoint.signing import SigningKey, signing_key
from elastictrain.config.composed import RunConfig
from elastictrain.errors import ElasticTrainError, ObjectExistsError, StorageError
from elastictrain.events import Compiled, Event
from elastictrain.storage.bounded_read import read_bounded
from elastictrain.storage.opening import create_secret, why_others_may_write, without_sync
from elastictrain.storage.private import make_private_folder, open_private_file, temporary_folder
from elastictrain.storage.store import Store
from elastictrain.torch_private import cache_attention_graphs
from elastictrain.train.compile_archive import (
    FOLDER,
    MOST_BYTES,
    ArchiveName,
    ArchiveRefusedError,
    content_of,
    files_in,
    newest,
    pack,
    parse_name,
    remove_torn_objects,
    seal,
    superfluous,
    unpack,
    unseal,
)
from elastictrain.train.compile_key import KEY_DIGITS, cache_key, facts_of
from elastictrain.train.context import TrainContext

logger = logging.getLogger(__name__)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
LONGEST_WAIT_S = 5.0  # for storage, after the build: compiling takes 10 s and more
_STALE_S = 7 * 86_400.0
_MOST_CONTENTS_BYTES = 1 << 16


def use_host_folder(config: RunConfig, *, task: object, device: torch.device) -> str | None:
    """Have torch keep compiled code in this host's folder for such code; returns the folder, whose name ends with the key.

    Before the first compilation of the process. None, and torch does as it would: nothing is compiled, the user has chosen a
    folder, or none can be made.
    """
    if not config.train.compile:
        return None
    try:
        parent = temporary_folder()
        if is_chosen(os.environ.get(VARIABLE, ""), temporary=tempfile.gettempdir(), parent=parent):
            logger.info("compiled code stays in %s, the folder that %s names", os.environ[VARIABLE], VARIABLE)
            return None
        folder = f"{parent}/{COMPILED_PREFIX}{cache_key(facts_of(config, task=task, device=device))}"
        make_private_folder(folder)
        os.utime(folder)
    except (OSError, ElasticTrainError) as error:
        logger.warning("compiled code is not kept: %s", error)
        return None
    os.environ[VARIABLE] = folder
    cache_attention_graphs()
    return folder


def is_chosen(value: str, *, temporary: str, parent: str) -> bool:
    """Whether a person has set the compiler's folder: torch sets the variable, too, to a folder of its own, and so does
    `use_host_folder`, below `parent`. Pure."""
    return bool(value) and not value.startswith((f"{temporary}/torchinductor_", f"{parent}/{COMPILED_PREFIX}"))


def begin_compile_cache(context: TrainContext) -> "CompileCache | None":
    """Begin to read the run's compiled code, in a thread. After the group has formed; None where nothing is kept."""
    config, identity = context.config, context.identity
    folder = use_host_folder(config, task=context.task, device=context.group.device)
    if folder is None:
        return None
    cache = CompileCache(
        folder,
        context.store,
        signing=signing_key(config.checkpoint.key_env),
        number=max(0, number_of(context.generation.name)),
        record=context.journal.record if identity.rank == 0 else None,
    )
    cache.begin()
    return cache


class CompileCache:
    """The compiled code of one start."""

    def __init__(
        self, folder: str, store: Store, *, signing: SigningKey | None, number: int, record: Callable[[Event], None] | None
    ) -> None:
        """`folder` is from `use_host_folder`; `number` is the generation's. `record` is rank 0's journal: only with it the
        archive in `store` is written."""
        self.folder = folder
        self.key = folder[-KEY_DIGITS:]
        self._store = store
        self._signing = signing
        self._number = number
        self._record = record
        self._loading = threading.Thread(target=self._load, name="compile-cache", daemon=True)
        self._keeping: threading.Thread | None = None
        self._loaded: ArchiveName | None = None
        self._found_files = 0
        self._seconds: dict[str, float] = {}

    def begin(self) -> None:
        self._loading.start()

    def wait(self, limit_s: float = LONGEST_WAIT_S) -> None:
        """Before the first compilation: wait until the archive is read, for `limit_s` at most."""
        began = time.monotonic()
        self._loading.join(limit_s)
        if self._loading.is_alive():
            logger.warning("the run's compiled code was not read within %.0f s: compiling", limit_s)
        self._seconds["wait"] = round(time.monotonic() - began, 4)
        self._found_files = len(files_in(self.folder))

    def first_step_done(self) -> None:
        """In a thread, as rank 0: store what was compiled, if it is new. All ranks have then compiled: rank 0 has their
        gradients."""
        if self._record is not None:
            self._keeping = threading.Thread(target=self._keep, args=(self._record,), name="compile-cache", daemon=True)
            self._keeping.start()

    def close(self, limit_s: float = LONGEST_WAIT_S) -> None:
        """At the end of a run that may have been short: wait until the compiled code is stored, for `limit_s` at most."""
        if self._keeping is not None:
            self._keeping.join(limit_s)

    def _load(self) -> None:
        began = time.monotonic()
        _sweep(os.path.dirname(self.folder), besides=self.folder)  # noqa: PTH120
        try:
            with self._alone():
                if torn := remove_torn_objects(self.folder):
                    logger.info("compiled anew, since a compiler was killed: %s", ", ".join(torn))
                self._load_newest()
        except (StorageError, OSError, ArchiveRefusedError) as error:
            logger.warning("the run's compiled code is not used, torch compiles: %s", error)
        self._seconds["load"] = round(time.monotonic() - began, 4)

    def _load_newest(self) -> None:
        """Raises: StorageError, OSError, ArchiveRefusedError."""
        name = newest(self._stored(), key=self.key)
        if name is None or name.content in self._known():
            return
        if self._signing is None and (why := why_others_may_write(self._store, str(name))):
            # Not before an archive is there: most folders of runs never hold one.
            raise ArchiveRefusedError("writable by others", f"{self._store.url}/{name} could run code of others here: {why}")
        try:
            body = unseal(name, read_bounded(self._store, str(name), max_bytes=MOST_BYTES), signing=self._signing)
            added = unpack(self.folder, body)
        except ArchiveRefusedError as error:
            raise ArchiveRefusedError(error.reason, f"{self._store.url}/{name} {error}") from error
        self._remember(name.content)
        self._loaded = name
        logger.info("compiled code: %d files from %s", added, name)

    def _keep(self, record: Callable[[Event], None]) -> None:
        began, stored, files = time.monotonic(), None, files_in(self.folder)
        try:
            stored = self._store_new(list(files), content_of(files))
        except (StorageError, OSError, ArchiveRefusedError) as error:
            logger.warning("compiled code is not stored: %s", error)
        self._seconds["store"] = round(time.monotonic() - began, 4)
        record(
            Compiled(
                key=self.key,
                loaded=str(self._loaded) if self._loaded is not None else None,
                found_files=self._found_files,
                new_files=len(files) - self._found_files,
                stored=str(stored) if stored is not None else None,
                seconds=self._seconds,
            )
        )

    def _store_new(self, files: list[str], content: str) -> ArchiveName | None:
        """Raises: StorageError, OSError, ArchiveRefusedError."""
        names = self._stored()
        last, name = newest(names, key=self.key), ArchiveName(self.key, self._number, content)
        if not files or (last is not None and last.content == content):
            return None
        if self._signing is None and (why := why_others_may_write(self._store, str(name))):
            logger.info("compiled code stays on this host, since checkpoint.key_env names no key and %s", why)
            return None
        data = seal(name, pack(self.folder, files), signing=self._signing)
        store = without_sync(self._store)
        with suppress(ObjectExistsError):
            create_secret(store, str(name), data)
        self._remember(content)
        for old in superfluous([*names, name]):
            store.delete(str(old))
        return name

    def _stored(self) -> list[ArchiveName]:
        return [name for info in self._store.list(FOLDER) if (name := parse_name(info.key)) is not None]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only process of this host that reads this code from storage. Raises: OSError."""
        descriptor = open_private_file(f"{self.folder}/.used.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # A process that was forked meanwhile has the descriptor, too: closing would not release it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _known(self) -> list[str]:
        """Contents of the archives that the folder has taken in, or was stored as."""
        descriptor = open_private_file(f"{self.folder}/.contents")
        with os.fdopen(descriptor, "rb") as file:
            return file.read(_MOST_CONTENTS_BYTES).decode(errors="replace").split()

    def _remember(self, content: str) -> None:
        descriptor = open_private_file(f"{self.folder}/.contents")
        with os.fdopen(descriptor, "ab") as file:
            file.write(f"{content}\n".encode())


def _sweep(parent: str, *, besides: str) -> None:
    """Remove the folders of code that no start has asked for in a week."""
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            stale = (
                entry.name.startswith(COMPILED_PREFIX) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_S
            )
            if stale and entry.path != besides:
                shutil.rmtree(entry.path, ignore_errors=True)
