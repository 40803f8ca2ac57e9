"""Objects in durable storage: read, write, list, create-if-absent and delete, over any fsspec URL."""
