"""Whether the other hosts of a generation live: a datagram a few times a second, and who is not heard any more."""
