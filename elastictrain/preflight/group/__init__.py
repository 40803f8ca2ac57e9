"""Checks of all ranks together, through the backend that will train. The only part of preflight that imports torch."""
