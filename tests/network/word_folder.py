"""Words that hosts leave for each other as files in a folder that all of them see."""

import os
import signal
import time
from pathlib import Path


class WordFolder:
    """An exchange of files. Somebody who is to fall silent does so when he asks for the word `stop_at`, or reads it in one."""

    def __init__(self, path: Path, *, stop_at: str = "") -> None:
        self._path = path
        self._stop_at = stop_at

    def put(self, key: str, value: bytes) -> None:
        path = self._path / key.replace("/", "-")
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_bytes(value)
        part.rename(path)

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        if self._stop_at and key.endswith(self._stop_at):
            os.kill(os.getpid(), signal.SIGSTOP)
        path, deadline = self._path / key.replace("/", "-"), time.monotonic() + limit_s
        while True:
            if path.exists():
                word = path.read_bytes()
                if self._stop_at and self._stop_at.encode() in word:
                    os.kill(os.getpid(), signal.SIGSTOP)
                return word
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.002)
