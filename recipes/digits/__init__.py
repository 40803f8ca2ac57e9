"""Handwritten digits: a small classifier on data that needs no download."""

from .task import DigitsTask, MlpConfig

__all__ = ["DigitsTask", "MlpConfig"]
