"""Who trains together: hosts find each other, and agree on one generation after the other, without a head node."""
