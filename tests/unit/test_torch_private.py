import ast
import importlib
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from elastictrain import torch_private
from elastictrain.errors import HostUnfitError
from elastictrain.torch_private import (
    COMPILATIONS,
    COMPILER,
    ENGINE,
    FLIGHT_RECORDER,
    HASHES,
    PLACEMENT,
    PrivateName,
    cache_attention_graphs,
    find_changes,
    follow_compilations,
    launch_without_lock,
    local_box,
    prepare_compiler,
    set_group_timeout,
    timeout_names,
)
from elastictrain.torch_private_groups import DDP, FAKE_GROUP, FSDP, REGISTRY
from tests.unit.sources import nodes

REPOSITORY = Path(__file__).parents[2]
HERE = tuple(f"elastictrain/torch_private{part}.py" for part in ("", "_groups", "_tracing"))
TENSORS = "torch.distributed.tensor._utils"


ALL = [*PLACEMENT, *COMPILATIONS, *HASHES, *FLIGHT_RECORDER, *ENGINE, *timeout_names(), *REGISTRY, *DDP, *FSDP, *FAKE_GROUP]


@pytest.mark.parametrize("name", ALL, ids=lambda name: name.name)
def test_the_installed_torch_has_what_is_used_of_it(name: PrivateName) -> None:
    assert find_changes([name]) == ()


@pytest.mark.parametrize(
    "name",
    [
        PrivateName("torch.distributed._gone", "anything"),
        PrivateName("torch.distributed", "_gone"),
        PrivateName("torch.distributed", "destroy_process_group._gone"),
        PrivateName("torch.distributed", "destroy_process_group", ("other",)),
    ],
)
def test_what_has_changed_is_named(name: PrivateName) -> None:
    (change,) = find_changes([name])
    assert torch.__version__ in change
    assert f"{name.module}.{name.name}" in change


def test_parameters_that_come_after_those_that_are_used_are_no_change() -> None:
    assert find_changes([PrivateName("torch.distributed", "barrier", ("group",))]) == ()


class TestGroupTimeout:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object, object]]:
        """A torch that has neither of the two functions."""
        monkeypatch.delattr(dist, "set_timeout", raising=False)
        monkeypatch.delattr(distributed_c10d, "_set_pg_timeout", raising=False)
        return []

    @pytest.mark.parametrize(
        ("has", "uses"),
        [(["public"], "public"), (["private"], "private"), (["public", "private"], "public")],
    )
    def test_is_set_by_the_public_function_where_there_is_one(
        self, has: list[str], uses: str, calls: list[tuple[str, object, object]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def public(timeout: object, group: object = None) -> None:
            calls.append(("public", timeout, group))

        def private(timeout: object, group: object = None) -> None:
            calls.append(("private", timeout, group))

        if "public" in has:
            monkeypatch.setattr(dist, "set_timeout", public, raising=False)
        if "private" in has:
            monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", private, raising=False)
        set_group_timeout(None, timedelta(seconds=7))
        assert calls == [(uses, timedelta(seconds=7), None)]

    @pytest.mark.usefixtures("calls")
    def test_without_either_the_host_is_unfit(self) -> None:
        with pytest.raises(HostUnfitError, match="timeout"):
            set_group_timeout(None, timedelta(seconds=7))

    def test_is_set_without_a_warning(self, group_of_one: None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            set_group_timeout(None, timedelta(seconds=7))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sharded(group_of_one: None) -> DTensor:
    return distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])


def test_the_part_of_a_rank(sharded: DTensor) -> None:
    assert local_box(sharded) == ((4, 3), (0, 0))


@pytest.mark.parametrize("what", ["gone", "changed"])
def test_without_the_part_of_a_rank_the_host_is_unfit(what: str, sharded: DTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "gone":
        monkeypatch.setitem(sys.modules, TENSORS, None)
    else:
        monkeypatch.setattr(f"{TENSORS}.compute_local_shape_and_global_offset", lambda tensor: None)
    with pytest.raises(HostUnfitError, match="compute_local_shape_and_global_offset"):
        local_box(sharded)


def test_compilations_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.callback import callback_handler

    handler, told = type(callback_handler)(), []
    monkeypatch.setattr(f"{COMPILER}.callback.callback_handler", handler)
    assert follow_compilations(begins=lambda: told.append("begins"), ends=lambda: told.append("ends")) == ()
    for callback in (*handler.start_callbacks, *handler.end_callbacks):
        callback(None)  # type: ignore[arg-type]  # what it is told does not matter
    assert told == ["begins", "ends"]


def test_what_does_not_compile_does_not_import_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    monkeypatch.delitem(sys.modules, f"{COMPILER}.callback", raising=False)
    assert follow_compilations(begins=lambda: None, ends=lambda: None) == ()
    assert COMPILER not in sys.modules


def test_compilations_that_cannot_be_followed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.callback

    monkeypatch.delattr(torch._dynamo.callback, "callback_handler")
    changes = follow_compilations(begins=lambda: None, ends=lambda: None)
    assert [COMPILER in change for change in changes] == [True, True]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.expr) -> list[str]:
    """`a.b.c` as its names; empty for what is no such chain."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (front := dotted(node.value)):
        return [*front, node.attr]
    return []


def private_uses(tree: Sequence[ast.AST]) -> list[str]:
    """Imports from, and chains of attributes that begin at, torch and lead through a private name; and such names as text."""
    found, ours = [], set()
    for node in tree:
        if isinstance(node, ast.Import):
            names = [(one.name, one.asname) for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [(f"{node.module}.{one.name}", one.asname or one.name) for one in node.names]
        else:
            continue
        for name, known_as in names:
            if name.split(".")[0] == "torch":
                ours.add(known_as or "torch")
                found += [name] if any(map(is_private, name.split("."))) else []
    for node in tree:
        if isinstance(node, ast.Attribute):
            front, *rest = dotted(node) or [""]
            found += [".".join([front, *rest])] if front in ours and any(map(is_private, rest)) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
            found += [node.value] if any(map(is_private, node.value.split("."))) else []
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._dynamo import callback",
        "from torch.distributed.tensor import _utils as utils",
        "import torch.distributed as dist\ndist.distributed_c10d._set_pg_timeout",
        "import torch\ntorch._C._distributed_c10d",
        "'torch._dynamo'",
    ],
)
def test_private_names_are_seen(source: str) -> None:
    assert private_uses([*ast.walk(ast.parse(source))])


def test_public_names_are_not_taken_for_private() -> None:
    source = "import torch\nfrom torch import nn\ntorch.__version__\nself._x\nnn.Linear\nimport os\nos._exit"
    assert private_uses([*ast.walk(ast.parse(source))]) == []


def test_private_names_of_torch_stand_in_files_of_their_own() -> None:
    files = [file for package in ("elastictrain", "recipes") for file in (REPOSITORY / package).rglob("*.py")]
    uses = {str(file.relative_to(REPOSITORY)): private_uses(nodes(file)) for file in files}
    for file in HERE:
        assert uses.pop(file)
    assert {file: found for file, found in uses.items() if found} == {}


class TestLauncherOfKernels:
    @pytest.mark.parametrize("chosen", [True, False])
    def test_the_one_that_keeps_the_interpreters_lock_is_not_used_unless_a_person_wants_it(
        self, chosen: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = importlib.import_module("torch._inductor.config")
        if chosen:
            monkeypatch.setenv("TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER", "1")
        with config.patch(use_static_cuda_launcher=True):
            assert launch_without_lock() is not chosen
            assert config.use_static_cuda_launcher is chosen


class TestCompilerPreparedAhead:
    def test_what_torch_hashes_is_hashed_and_what_fails_or_has_changed_is_left_to_torch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called: list[str] = []

        def fails() -> None:
            called.append("fails")
            raise RuntimeError

        module = types.ModuleType("made_up_keys")
        vars(module).update(fails=fails, changed=lambda argument: None, hashes=partial(called.append, "hashes"))
        monkeypatch.setitem(sys.modules, "made_up_keys", module)
        names = [PrivateName("made_up_keys", name) for name in ("fails", "gone", "changed", "hashes")]
        monkeypatch.setattr(torch_private, "HASHES", names)
        monkeypatch.setattr(torch_private, "INDUCTOR", "made_up_compiler")
        prepare_compiler()
        assert called == ["fails", "hashes"]
        with monkeypatch.context() as imports:
            imports.setattr(importlib, "import_module", called.append)
            prepare_compiler()
        assert called[2] == "made_up_compiler"


class TestCacheOfAttention:
    def test_the_installed_torch_keeps_graphs_with_a_choice_of_attention(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = importlib.import_module("torch._inductor.config")
        before = dict(config.unsafe_marked_cacheable_functions)
        monkeypatch.setattr(config, "unsafe_marked_cacheable_functions", before | {"own": "1"})
        assert cache_attention_graphs()
        allowed = config.unsafe_marked_cacheable_functions
        assert allowed["own"] == "1"
        assert {name.rpartition(".")[2] for name in allowed} > {"_backend_from_string", "_sdpa_kernel"}

    def test_a_torch_without_it_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("torch.nn.attention._sdpa_kernel")
        assert not cache_attention_graphs()
