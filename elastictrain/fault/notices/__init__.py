"""Word that this host is about to be taken away, or that time is nearly up: clouds, limits, and a thread that asks them."""
