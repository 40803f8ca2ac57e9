"""Network interface and RDMA of a host: facts, plan, verdicts, and the environment variables of the plan."""
