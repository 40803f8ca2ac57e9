"""One process per host that forms groups of hosts, starts workers for each, and decides what follows its end. No torch."""
