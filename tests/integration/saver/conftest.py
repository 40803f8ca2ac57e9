"""A saver as threads of this process: real sockets, shared memory and storage, and waits of seconds."""

from tests.unit.checkpoint.saver.conftest import memory, run

__all__ = ["memory", "run"]
