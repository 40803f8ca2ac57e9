"""Hosts of their own on one machine: network namespaces on a switch, and what can be wrong with a network."""
