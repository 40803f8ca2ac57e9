"""Seeded plans of faults, what they break, and what must hold all the same."""
