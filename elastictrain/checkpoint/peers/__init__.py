"""Replicas of snapshots on other hosts, and reading snapshots of other hosts. Free of torch."""
