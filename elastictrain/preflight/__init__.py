"""Checks of hosts, their links and collectives, before a run starts."""
