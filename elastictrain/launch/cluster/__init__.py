"""Where a launcher runs, decided from the environment that Slurm, Kubernetes, RunAI, Vast or a person set. Pure; no torch."""
