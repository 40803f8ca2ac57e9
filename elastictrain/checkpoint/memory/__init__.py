"""Snapshots in host memory: where they lie, how they are told whole from torn, and reading them. Free of torch."""
