from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.transport.apply import apply
from elastictrain.preflight.transport.plan import PlannedVariable, TransportPlan
from elastictrain.preflight.transport.rdma import Rdma
from elastictrain.preflight.transport.settings import OWN_VARIABLES, Setting, read_settings


def plan(**values: str) -> TransportPlan:
    variables = tuple(PlannedVariable(name, value, "why") for name, value in values.items())
    return TransportPlan("h1", variables, (), "eth0", Rdma.NONE, (), None)


def settings_of(root: Path, environment: dict[str, str]) -> dict[str, Setting]:
    return read_settings(Surroundings(root=root, environment=environment))


def test_what_is_not_set_is_set_and_the_rest_is_kept(tmp_path: Path) -> None:
    environment = {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "", "PATH": "/bin"}
    done = apply(plan(NCCL_DEBUG="INFO", GLOO_SOCKET_IFNAME="eth0", NCCL_IB_DISABLE="1"), environment)
    assert done == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert settings_of(tmp_path, environment) == {"NCCL_DEBUG": Setting("WARN")}


def test_the_next_plan_takes_back_what_the_last_one_set_but_nothing_of_a_person(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    apply(plan(NCCL_SOCKET_IFNAME="=lo", NCCL_IB_DISABLE="1"), environment)
    environment["NCCL_IB_DISABLE"] = "0"
    assert settings_of(tmp_path, environment) == {"NCCL_IB_DISABLE": Setting("0")}
    apply(plan(NCCL_SOCKET_IFNAME="=eth0"), environment)
    assert environment.pop(OWN_VARIABLES) == '{"NCCL_SOCKET_IFNAME": "=eth0"}'
    assert environment == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_DISABLE": "0"}


def test_files_of_nccl_count_as_set_by_a_person(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# ours\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==eth9\nPATH=/x\nnonsense\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    found = settings_of(tmp_path, {"HOME": "/home", "NCCL_IB_HCA": "mlx5"})
    assert found == {
        "NCCL_IB_HCA": Setting("mlx5"),
        "NCCL_DEBUG": Setting("INFO", "/home/.nccl.conf"),
        "NCCL_SOCKET_IFNAME": Setting("=eth9", "/etc/nccl.conf"),
    }
    assert found["NCCL_DEBUG"].undo("NCCL_DEBUG") == "remove NCCL_DEBUG from /home/.nccl.conf"
    assert found["NCCL_IB_HCA"].undo("NCCL_IB_HCA") == "unset NCCL_IB_HCA"
    (tmp_path / "mine").write_text("NCCL_DEBUG=TRACE")
    assert settings_of(tmp_path, {"HOME": "/home", "NCCL_CONF_FILE": "/mine"})["NCCL_DEBUG"].value == "TRACE"


def test_numbers_are_read_as_nccl_reads_them() -> None:
    texts = ("1", " 3x", "0x10", "-1", "", "yes", "0")
    assert [Setting(text).number for text in texts] == [1, 3, 16, -1, 0, 0, 0]


@settings(deadline=None)
@given(st.text())
def test_a_garbled_record_of_our_own_is_no_record(text: str) -> None:
    environment = {OWN_VARIABLES: text, "NCCL_DEBUG": "INFO"}
    apply(plan(NCCL_IB_DISABLE="1"), environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["NCCL_IB_DISABLE"] == "1"


def test_records_of_another_shape() -> None:
    for text in ("[1]", '{"NCCL_DEBUG": 3}', "null"):
        environment = {OWN_VARIABLES: text, "NCCL_DEBUG": "3"}
        apply(plan(), environment)
        assert environment == {"NCCL_DEBUG": "3", OWN_VARIABLES: "{}"}
