"""The saver: one small process per host that writes snapshots to storage and outlives the workers. Free of torch."""
