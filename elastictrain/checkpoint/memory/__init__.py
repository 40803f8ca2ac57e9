"""Snapshots in host memory: their files, how readers detect torn ones, and how they are read. Free of torch."""
