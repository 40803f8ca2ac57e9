from tests.unit.distributed.conftest import group_of_one

__all__ = ["group_of_one"]
