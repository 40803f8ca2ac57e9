"""Speed test between two hosts over what training uses: NCCL between GPUs, gloo between CPUs. One side listens."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from elastictrain.distributed.bounded import call_until
from elastictrain.distributed.device import Backend, settle
from elastictrain.distributed.exchange import get_record, put_record
from elastictrain.distributed.group import make_group
from elastictrain.distributed.store import StoreExchange
from elastictrain.errors import HostUnfitError, TransportError
from elastictrain.identity import Identity
from elastictrain.net.interfaces import is_loopback
from elastictrain.preflight.group.collectives import MB, Collectives
from elastictrain.preflight.transport.infiniband import Rdma
from elastictrain.preflight.transport.plan import apply_plan, decide_transport, read_facts
from elastictrain.surroundings import Surroundings

_LISTEN_S = 7 * 86400.0  # one side waits for the other one, and for the test
LIMIT_S = 600.0  # one test takes no longer; 10G at 1 Gbit/s take 86 s each way
_ANSWER_S = 10.0
_CHUNK_BYTES = 256 * MB
_BACKENDS: dict[bool, Backend] = {True: "nccl", False: "gloo"}  # by whether both sides have a GPU
_ODD = 0x9E3779B97F4A7C1


@dataclass(frozen=True, slots=True)
class SpeedRequest:
    """What the connecting side asks for; the answer says what both can do."""

    size_bytes: int
    address: str  # of the connecting side
    gpu: bool  # it has one


@dataclass(slots=True)
class SpeedTest:
    """One side. `token` is the same on both; `device`: index of the GPU that is used if both sides have one."""

    address: str  # of the listening side
    port: int
    token: str
    device: int = 0
    peer: str = field(default="", init=False)  # the other side's address, once it is known

    def run(self, size_bytes: int | None, *, on_listening: Callable[[int], None]) -> tuple[int, list[float]]:
        """Bytes, and seconds of: sending them from the connecting side, receiving as many, and both at once. `size_bytes`: None
        on the listening side, which passes its port to `on_listening` and waits for days. Raises: HostUnfitError naming address
        and port; TransportError naming the address, also if bytes arrive changed."""
        self.peer, limit_s = ("the other host", _LISTEN_S) if size_bytes is None else (self.address, LIMIT_S)
        until = time.monotonic() + limit_s
        try:
            store = self._listen(on_listening) if size_bytes is None else None
            return call_until(partial(self._meet, store, size_bytes), left_s=lambda: until - time.monotonic())
        except (RuntimeError, OSError) as error:
            said = (str(error) or f"no answer within {limit_s:g} s").splitlines()[0][:300]
            needs = "start the listening side with the same token, and let all TCP ports between the two through"
            raise TransportError(f"no speed test with {self.peer}, port {self.port}: {said}; {needs}") from error

    def _listen(self, on_listening: Callable[[int], None]) -> dist.TCPStore:
        try:
            store = dist.TCPStore(self.address, self.port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            raise HostUnfitError(f"cannot listen on {self.address}, port {self.port}: {error}; choose a free port") from error
        on_listening(store.port)
        return store

    def _meet(self, store: dist.Store | None, size_bytes: int | None) -> tuple[int, list[float]]:
        """Agree on the test, and run it. `store`: None on the connecting side."""
        if store is None:
            socket.create_connection((self.address, self.port), timeout=_ANSWER_S).close()
            store = dist.TCPStore(self.address, self.port, timeout=timedelta(seconds=_ANSWER_S))
        own, gpu = StoreExchange(dist.PrefixStore(self.token, store)), torch.cuda.is_available()
        if size_bytes is not None:
            put_record(own, "request", SpeedRequest(size_bytes, self._prepare(), gpu))
        key, limit_s = ("request", _LISTEN_S) if size_bytes is None else ("answer", _ANSWER_S)
        agreed = get_record(own, key, SpeedRequest, limit_s=limit_s)
        if agreed is None:
            raise OSError(f"no answer to this token within {limit_s:g} s")
        if size_bytes is None:
            agreed = replace(agreed, gpu=agreed.gpu and gpu)
            put_record(own, "answer", agreed)
            self.peer = agreed.address
            self._prepare()
        rank = int(size_bytes is not None)
        identity = Identity(rank, 2, self.device, self.device + 1, socket.gethostname(), launched=True)
        shared, backend = dist.PrefixStore(f"group {self.token}", store), _BACKENDS[agreed.gpu]
        group = make_group(shared, identity, backend=backend, init_timeout_s=LIMIT_S, save_timeout_s=LIMIT_S)
        return agreed.size_bytes, measure(Collectives(rank, 2, group.device), size_bytes=agreed.size_bytes)

    def _prepare(self) -> str:
        """Set variables of NCCL and gloo, as for a run of the two hosts; returns the own address towards the peer."""
        facts = read_facts(Surroundings(), rendezvous=self.peer)
        local = facts.rendezvous.local if facts.rendezvous is not None and facts.rendezvous.local is not None else ""
        apply_plan(decide_transport(replace(facts, alone=is_loopback(local)), agreed=Rdma.UNKNOWN), os.environ)
        return local


def measure(collectives: Collectives, *, size_bytes: int) -> list[float]:
    """Seconds in which `size_bytes` arrive from rank 1, from rank 0, and both at once. Collective: yes, of two ranks. Raises:
    TransportError if bytes arrive changed."""
    device, rank = collectives.device, collectives.rank
    chunk = min(size_bytes, _CHUNK_BYTES)
    # Other bytes in each place, the same on all devices.
    words = torch.arange(-(-chunk // 8), device=device)
    messages = [((words + one) * _ODD).view(torch.uint8)[:chunk] for one in (1, len(words) + 1)]
    received, wrong = torch.empty_like(messages[0]), torch.zeros(2, device=device)

    def transfer(senders: tuple[int, ...], num_bytes: int) -> float:
        """Seconds until `num_bytes` from each of `senders` have arrived; bytes that arrive changed count in `wrong`.
        Collective: yes."""
        received.zero_()
        sends, receives = rank in senders, 1 - rank in senders
        # Both sides begin together, and end when all bytes are there: reading a sum waits for both and for the device.
        collectives.all_reduce(wrong)
        wrong.tolist()
        began = time.perf_counter()
        for start in range(0, num_bytes, chunk):
            part = slice(0, min(chunk, num_bytes - start))
            output, message = received[part] if receives else None, messages[rank][part] if sends else None
            collectives.send_recv(output, message, source=1 - rank, target=1 - rank)
        settle(device)
        collectives.all_reduce(wrong)
        wrong.tolist()
        seconds = time.perf_counter() - began
        if receives and not torch.equal(received, messages[1 - rank]):
            wrong[rank] += 1
        return seconds

    ways = ((1,), (0,), (0, 1))
    for way in ways:
        transfer(way, chunk)
    seconds = [transfer(way, size_bytes) for way in ways]
    collectives.all_reduce(wrong)
    for one, count in enumerate(wrong.tolist()):
        if count:
            ways_text = f"from {1 - one} to {one} (0 listens)"
            raise TransportError(f"bytes changed on the way {ways_text}: test memory, cards and cables of both hosts")
    return seconds
