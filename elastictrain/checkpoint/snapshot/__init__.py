"""Copies the state of a rank to host memory while training goes on."""
