"""What can be trained out of the box; each folder is one task with a README."""
