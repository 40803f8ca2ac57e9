"""Snapshots of a run: written, committed, chosen, verified and restored."""
