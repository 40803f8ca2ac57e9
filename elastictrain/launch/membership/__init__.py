"""Hosts find each other and agree on one generation after the other, without a head node.

Only `store.py` acts. All other modules are pure: no clock, network, process or randomness.
"""
