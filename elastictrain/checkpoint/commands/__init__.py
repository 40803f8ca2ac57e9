"""The commands of `python -m elastictrain.checkpoint`: looking at, checking, deleting, comparing and exporting checkpoints."""
