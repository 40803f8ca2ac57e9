"""The memory that compiled code needs, found without compiling it: torch's own tracing and partitioning decide what a graph
keeps for its backward pass, and a model of Inductor's fusion what it holds meanwhile."""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from elastictrain.torch_private_tracing import Backend, OpOverload, backend_of, tree_leaves

# Besides the operators that torch tags as elementwise, Inductor computes these where they are read.
_FUSED = frozenset(("_to_copy", "cat", "constant_pad_nd", "embedding", "full", "gather", "index", "iota", "slice_scatter"))
_REDUCTIONS = frozenset(("amax", "amin", "any", "argmax", "max", "mean", "min", "prod", "sum", "var", "var_mean"))


def sizing_backend(hold: Callable[[int], None]) -> Backend:
    """A backend for torch.compile that compiles and computes nothing: a graph returns tensors of the right sizes, for a process
    in which tensors have no content. `hold` is called with the bytes that exist beside them for a moment."""

    def compiler(module: fx.GraphModule, _: Sequence[object]) -> Callable[[list[Any]], Any]:
        """Returns what torch calls in place of a compiled graph, with one list of arguments."""
        graph, extra_bytes = module.graph, transient_bytes(module.graph)

        def run(arguments: list[Any]) -> Any:
            results = make_results(graph, arguments)
            hold(extra_bytes)
            return results

        run._boxed_call = True  # type: ignore[attr-defined]  # torch passes such a function one list
        return run

    return backend_of(compiler)


def make_results(graph: fx.Graph, arguments: Sequence[Any]) -> list[Any]:
    """What `graph` would return, without its content. A result that shares memory with an argument or another one does so."""
    bases: dict[int, Tensor] = {}
    found = dict[fx.Node, Any]()
    for node, argument in zip((one for one in graph.nodes if one.op == "placeholder"), arguments, strict=True):
        found[node] = argument
        for one in _storages(node):
            bases.setdefault(one, argument)
    (output,) = (one for one in graph.nodes if one.op == "output")
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        if node in found or not isinstance(value, Tensor):
            found.setdefault(node, value)
            continue
        ((key, num_bytes),) = _storages(node).items()
        # A view would be another kind of tensor to FSDP.
        whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        if key not in bases and whole.untyped_storage().nbytes() == num_bytes:
            found[node] = bases[key] = whole
            continue
        base = bases.setdefault(key, torch.empty(num_bytes // value.itemsize, dtype=value.dtype, device=value.device))
        found[node] = base.as_strided(value.shape, value.stride(), value.storage_offset())
    return [found[one] if isinstance(one, fx.Node) else one for one in output.args[0]]


def transient_bytes(graph: fx.Graph) -> int:
    """The most bytes that the compiled `graph` holds at once beside its inputs and results. An elementwise result is only held
    if something reads it that is neither elementwise nor a reduction: those are computed in one kernel."""
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    storages = {node: _storages(node) for node in nodes}
    outside = {one for node in nodes if node.op == "placeholder" for one in storages[node]}
    outside |= {one for node in nodes if node.op == "output" for used in node.all_input_nodes for one in storages[used]}
    held, last, sizes = dict[fx.Node, bool](), dict[fx.Node, int](), dict[int, tuple[int, int, int]]()
    for node in reversed(nodes):
        view = _is_view(node, storages)
        readers = [held[user] if _is_view(user, storages) else not _is_read_inside(user) for user in node.users]
        held[node] = any(readers) or not (view or _is_computed_inside(node))
        # What is computed inside a later kernel reads its own inputs there.
        ends = [place[user] if held[user] and not _is_view(user, storages) else last[user] for user in node.users]
        last[node] = max(ends, default=place[node])
        if node.op == "call_function" and held[node]:
            for one, size in storages[node].items():
                if one not in outside:
                    _, _, end = sizes.get(one, (0, 0, 0))
                    sizes[one] = size, place[node], max(end, last[node])
    changes: Counter[int] = Counter()
    for size, begin, end in sizes.values():
        changes[begin] += size
        changes[end + 1] -= size
    now = most = 0
    for index in sorted(changes):
        now += changes[index]
        most = max(most, now)
    return most


def _storages(node: fx.Node) -> dict[int, int]:
    """Bytes of the storages of what `node` computes, by an identifier."""
    found = [one.untyped_storage() for one in tree_leaves(node.meta.get("val")) if isinstance(one, Tensor)]
    return {one._cdata: int(one.nbytes()) for one in found}


def _is_view(node: fx.Node, storages: dict[fx.Node, dict[int, int]]) -> bool:
    if node.op != "call_function":
        return False
    shared = (one in storages[used] for used in node.all_input_nodes for one in storages[node])
    return node.target is operator.getitem or any(shared)


def _is_computed_inside(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or _name(target) in _FUSED)


def _is_read_inside(node: fx.Node) -> bool:
    target = node.target
    return _is_computed_inside(node) or (isinstance(target, OpOverload) and _name(target) in _REDUCTIONS)


def _name(target: OpOverload) -> str:
    return str(target._overloadpacket.__name__)
