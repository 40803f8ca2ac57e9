"""What this host's GPUs, their links and its ports say about themselves: vendors' tools and the kernel's files."""
