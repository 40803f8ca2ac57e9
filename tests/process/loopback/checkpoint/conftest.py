from tests.unit.checkpoint.saver.conftest import memory, run

__all__ = ["memory", "run"]
