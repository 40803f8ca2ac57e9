"""Hangs: how long a silence may last, whose fault it is, and how a process is ended that cannot end itself."""
