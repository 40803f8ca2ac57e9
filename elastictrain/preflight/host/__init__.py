"""What one host can tell about itself: names, ports, memory, disks, limits, CPUs, its way to storage, its code. No torch."""
