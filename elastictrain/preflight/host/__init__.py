"""Checks of one host: names, memory, disks, CPUs, storage, code, GPUs and ports. No torch."""
