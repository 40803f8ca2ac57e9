from tests.unit.conftest import hydra_compose

__all__ = ["hydra_compose"]
