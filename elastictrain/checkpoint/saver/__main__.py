"""The saver's process: `python -m elastictrain.checkpoint.saver FOLDER`; only workers start it."""

import fcntl
import logging
import os
import signal
import sys
import time
from contextlib import suppress

from elastictrain.checkpoint.saver.process import LOCK_NAME, clear_if_abandoned, load_config
from elastictrain.checkpoint.saver.service import SaverService
from elastictrain.checkpoint.signing import signing_key
from elastictrain.errors import EXIT_BUG, EXIT_OK, ElasticTrainError
from elastictrain.storage.opening import open_store
from elastictrain.storage.private import clear_folder, sweep_folders

logger = logging.getLogger(__name__)

_LOCK_WAIT_S = 30.0
_NICENESS = 5


def main(folder: str) -> int:
    """Run until no saver is needed; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    # It ends by itself when its run is over: a signal to the workers, or to the whole job, must not end it before that.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    lock = _take_lock(folder)
    if lock < 0:
        return EXIT_OK
    try:
        config = load_config(folder)
        sweep_folders(os.path.dirname(folder), clear=clear_if_abandoned)  # noqa: PTH120
        SaverService(folder, config, open_store(config.run_dir), signing=signing_key(config.key_env)).run()
    except ElasticTrainError as error:
        logger.error("%s", error)
        return error.exit_code
    except Exception:
        logger.exception("the saver ends because of a bug; what it kept stays for its successor")
        return EXIT_BUG
    clear_folder(folder, last=LOCK_NAME)
    os.close(lock)
    return EXIT_OK


def _take_lock(folder: str, *, wait_s: float = _LOCK_WAIT_S) -> int:
    """The descriptor of the lock, or -1 if another saver runs here or the folder was deleted."""
    deadline = time.monotonic() + wait_s
    path = f"{folder}/{LOCK_NAME}"
    while time.monotonic() < deadline:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return -1
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A saver that ended a moment ago deleted the file that is now locked here, and another saver may create it again.
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:  # noqa: PTH116
                return descriptor
        except BlockingIOError:
            pass
        except FileNotFoundError:
            os.close(descriptor)
            return -1
        os.close(descriptor)
        time.sleep(0.05)
    return -1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
