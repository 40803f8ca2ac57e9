"""Sample order, assignment to ranks, token files and the loader."""
