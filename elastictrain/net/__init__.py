"""What the servers of a run have in common: who is let in, and how many that have not proven themselves are waited for."""
