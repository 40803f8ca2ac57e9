"""Handwritten digits: a small classifier on data that needs no download."""

from recipes.digits.task import DigitsTask, MlpConfig

__all__ = ["DigitsTask", "MlpConfig"]
