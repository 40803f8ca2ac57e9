"""Who trains together: hosts find each other, and agree on one generation after the other, without a head node.

Only `store.py` acts. All else is pure: no clock, network, process or randomness of its own.
"""
