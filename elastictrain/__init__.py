"""A PyTorch training run that keeps going on machines that keep going away."""

from elastictrain.version import __version__ as __version__
