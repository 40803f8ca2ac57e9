"""Simulates months of a run on thousands of hosts, with the decisions of the launchers themselves."""
