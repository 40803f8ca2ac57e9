"""On PYTHONPATH: a CPU may train with `train.precision=fp8`. torch has the products for it, which are slow."""

from elastictrain.distributed import float8

float8.check_float8 = lambda device: None
