"""What tracing a step on tensors without content uses of torch without its promise that it stays. Importing this raises
HostUnfitError if the installed torch lacks some of it, so it is imported where a step is traced."""

from collections.abc import Callable
from typing import Any

from elastictrain.torch_private import PrivateName, require

TRACING = (
    PrivateName("torch._dynamo.backends.common", "aot_autograd"),
    PrivateName("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
    PrivateName("torch._inductor.decomposition", "select_decomp_table", ()),
    PrivateName("torch._ops", "OpOverload"),
    PrivateName("torch._subclasses.fake_tensor", "FakeTensorMode"),
    PrivateName("torch.utils._python_dispatch", "TorchDispatchMode"),
    PrivateName("torch.utils._pytree", "tree_leaves", ("tree",)),
)
require(TRACING)

from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch._ops import OpOverload as OpOverload  # noqa: E402, PLC0414
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # noqa: E402, PLC0414
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: E402, PLC0414
from torch.utils._pytree import tree_leaves as tree_leaves  # noqa: E402, PLC0414

Backend = Callable[..., Callable[..., Any]]


def backend_of(compiler: Callable[..., Callable[..., Any]]) -> Backend:
    """For torch.compile: graphs are cut and partitioned as Inductor has them, and `compiler` gets each one."""
    backend: Backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )
    return backend
