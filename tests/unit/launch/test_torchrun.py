from elastictrain.launch.torchrun import agent_environment


def test_what_torchrun_needs_is_set_unless_somebody_has_set_it() -> None:
    ours = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    assert agent_environment({"A": "b"}) == {"A": "b", **ours}
    theirs = {"OMP_NUM_THREADS": "8", "TORCH_CPP_LOG_LEVEL": "INFO", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    assert agent_environment(theirs) == theirs


def test_defaults_of_an_operators_own_torchrun_are_not_for_ours() -> None:
    assert "PET_NNODES" not in agent_environment({"PET_NNODES": "4"})
