from elastictrain.launch.torchrun import agent_environment


def test_threads_are_set_unless_somebody_has_set_them() -> None:
    assert agent_environment({"A": "b"}) == {"A": "b", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert agent_environment({"OMP_NUM_THREADS": "8", "TORCH_CPP_LOG_LEVEL": "INFO"}) == {
        "OMP_NUM_THREADS": "8",
        "TORCH_CPP_LOG_LEVEL": "INFO",
    }


def test_defaults_of_an_operators_own_torchrun_are_not_for_ours() -> None:
    assert "PET_NNODES" not in agent_environment({"PET_NNODES": "4"})
