"""Through which interface, and how, the hosts of a run speak to each other: read, decided, judged, then set."""
