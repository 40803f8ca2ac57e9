"""`elastictrain.load`: the tensors of a checkpoint, in one process, whatever the world that saved it."""

from torch import Tensor

from elastictrain.checkpoint.commands.export_formats import ExportSource
from elastictrain.checkpoint.commands.survey import find_checkpoint, locate
from elastictrain.checkpoint.folders import Reject
from elastictrain.checkpoint.verified_read import DamagedFileError


def load(url: str, *, step: int | None = None, prefix: str = "", key_env: str = "") -> dict[str, Tensor]:
    """The tensors of the newest valid checkpoint of the run at `url`, or of its checkpoint of `step`: whole, on the CPU, by
    their names without `prefix`; others are left out. `load(url, prefix="model.")` fits `model.load_state_dict`. Every byte is
    verified; nothing is unpickled. `key_env`: as `checkpoint.key_env`.

    Raises: NoValidCheckpointError, ObjectNotFoundError, UsageError, ConfigError, StorageError."""
    location = locate(url, key_env=key_env)
    rejected: list[Reject] = []
    while True:
        found = find_checkpoint(location, step=step, rejected=rejected)
        source = ExportSource(found, None, lambda _: None)
        names = [name for name in source.manifest.tensors if name.startswith(prefix)]
        try:
            return {name.removeprefix(prefix): source.read(name) for name in names}
        except DamagedFileError as error:
            rejected.append(Reject(found.name, error.file, str(error)))
