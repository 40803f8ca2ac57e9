"""An exchange in memory, for hosts or ranks that are threads of one process."""

import threading


class Table:
    """What was left in it is in `rows`. Words are ASCII, all of them."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        value.decode("ascii")
        with self._changed:
            self.rows[key] = value
            self._changed.notify_all()

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.rows, timeout=max(0.0, limit_s))
            return self.rows.get(key)
