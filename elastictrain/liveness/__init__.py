"""Hangs: how long a silence may last, which rank is at fault, and how a process that cannot end itself is ended."""
