"""A PyTorch training run that keeps going on machines that keep going away."""

__version__ = "0.1.0"
