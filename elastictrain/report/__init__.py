"""What a run has spent its time on, from its events alone: the ledger, the figures and the pages that show them."""
