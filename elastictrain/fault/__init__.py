"""Stop requests, notices of clouds, how processes end, and what an error means."""
