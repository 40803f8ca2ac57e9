"""Process groups, wrapping and agreement between ranks."""
