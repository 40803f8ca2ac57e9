"""What one host can tell about itself: names, memory, disks, CPUs, storage, code, GPUs and ports. No torch."""
