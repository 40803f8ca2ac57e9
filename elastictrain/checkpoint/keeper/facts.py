"""What a keeper has to know of its run: a file in the run's folder in host memory, written by the worker that starts it."""

import json
from dataclasses import asdict, dataclass, fields

from elastictrain.bounded_json import parse_json
from elastictrain.checkpoint.keeper.messages import FACTS_NAME
from elastictrain.checkpoint.memory.records import read_file, write_file
from elastictrain.errors import InvalidCheckpointError


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The same for all incarnations that use one configuration."""

    run_dir: str
    run: str
    """Name of the run in host memory."""

    keep_last: int
    keep_every: int
    save_timeout_s: float
    flush_s: float
    grace_s: float
    versions: dict[str, str]

    key_env: str = ""
    """The environment variable with the key that signs checkpoints; empty for none."""


def store_facts(folder: str, facts: RunFacts) -> None:
    """Raises: OSError."""
    write_file(f"{folder}/{FACTS_NAME}", json.dumps(asdict(facts)).encode())


def load_facts(folder: str) -> RunFacts:
    """Raises: InvalidCheckpointError naming the file."""
    path = f"{folder}/{FACTS_NAME}"
    try:
        document = parse_json(read_file(path, most_bytes=1 << 20))
        if document.keys() != {field.name for field in fields(RunFacts)}:
            raise TypeError(f"its fields are {sorted(document)}")
        return RunFacts(**document)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidCheckpointError(f"{path} does not say what to keep ({type(error).__name__}: {error})") from error
