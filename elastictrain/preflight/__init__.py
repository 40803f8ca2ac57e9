"""Verdicts about a host, its links and the group, before the first step of every start."""
