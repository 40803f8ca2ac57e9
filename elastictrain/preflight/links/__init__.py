"""Checks of the links between hosts: who takes part, which links work, frame sizes, latency, clocks, bandwidth, culprits."""
