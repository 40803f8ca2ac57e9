"""The lease of a run's folder: one owner at a time, numbered by generations, and fenced where it commits."""
