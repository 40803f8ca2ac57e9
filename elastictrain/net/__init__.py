"""Authenticated connections between hosts of a run, limits on connections that are not authenticated yet, and the interface and
address by which this host reaches the others."""
