"""The commands of `python -m elastictrain.checkpoint`: ls, verify, sign, prune, diff and export."""
