from collections.abc import Iterator

from elastictrain.storage.store import Store


def read_appended(store: Store, prefix: str) -> Iterator[bytes]:
    """Whole records (without newline) of all logs below a folder, in the order of their names."""
    for info in store.list(prefix):
        if info.key.endswith(".jsonl"):
            for line in store.read(info.key).splitlines(keepends=True):
                if line.endswith(b"\n") and line != b"\n":
                    yield line[:-1]
