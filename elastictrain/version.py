"""The version, also where the package is a mere folder: one above a checkout of its name."""

__version__ = "0.1.0"
