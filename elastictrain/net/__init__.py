"""Authenticated connections between hosts of a run, and limits on connections that are not authenticated yet."""
