"""The version, also for a package in a mere folder: one above a checkout of its name."""

__version__ = "0.1.0"
