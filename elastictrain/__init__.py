"""Fault-tolerant PyTorch training on preemptible machines."""

from elastictrain.version import __version__ as __version__
