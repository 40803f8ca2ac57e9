"""Stop requests, the watchdog, and what an error means."""
