"""Where a launcher is: decided from the environment that Slurm, Kubernetes, RunAI, Vast or a person gave it. Pure; no torch."""
