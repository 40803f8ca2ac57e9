"""Hosts made up of files: sysfs with network interfaces and InfiniBand devices, and a kernel that knows its routes."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from elastictrain.net.interfaces import Kind, NetworkInterface, find_route
from elastictrain.preflight.transport.plan import TransportFacts, read_facts
from elastictrain.preflight.transport.settings import Setting
from elastictrain.surroundings import Surroundings

MELLANOX, AWS, GOOGLE = "0x15b3", "0x1d0f", "0x1ae0"
LOOPBACK = ("127.0.0.1", "::1")


class MadeHost:
    """A host in a folder."""

    def __init__(self, root: Path, *, name: str = "h1", environment: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.name = name
        self.environment = dict(environment or {})
        self.addresses: dict[str, Sequence[str]] = {}
        self.routes: dict[str, tuple[str, str] | OSError] = {}
        self._next_index = 1
        self.interface("lo", LOOPBACK, type="772", operstate="unknown", mtu="65536", flags="0x9")

    def write(self, path: str, text: str | bytes) -> None:
        file = self.root / path.lstrip("/")
        if not file.parent.is_dir():
            file.parent.mkdir(parents=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())

    def interface(self, name: str, addresses: Sequence[str] = (), *, devtype: str = "", **files: str) -> None:
        """An Ethernet interface that is up; `files` are contents by name, double underscores standing for slashes."""
        contents = {"type": "1", "operstate": "up", "carrier": "1", "mtu": "1500", "flags": "0x1003", **files}
        contents.setdefault("ifindex", str(self._next_index))
        self._next_index += 1
        contents["uevent"] = (f"DEVTYPE={devtype}\n" if devtype else "") + f"INTERFACE={name}\n"
        for file, text in contents.items():
            self.write(f"/sys/class/net/{name}/{file.replace('__', '/')}", text + "\n")
        if addresses:
            self.addresses[name] = addresses

    def card(self, name: str, addresses: Sequence[str] = (), *, vendor: str = MELLANOX, speed: str = "25000") -> None:
        """An interface of a PCI card."""
        files = {"device__vendor": vendor, "device__uevent": "DRIVER=mlx5_core\nPCI_CLASS=20000", "speed": speed}
        self.interface(name, addresses, **files)

    def docker(self) -> None:
        self.interface("docker0", ("172.17.0.1",), devtype="bridge", bridge__stp_state="0", speed="10000")

    def device(
        self,
        name: str,
        *,
        link_layer: str = "InfiniBand",
        state: str = "4: ACTIVE",
        physical: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        gids: Sequence[tuple[str, str]] = (),
        port: int = 1,
        driver: str = "mlx5_core",
        node_type: str = "1: CA",
        opened: bool = True,
        netdev: str = "",
    ) -> None:
        """A port of a device; `gids` are pairs of address and type, at indices from 0."""
        folder = f"/sys/class/infiniband/{name}"
        ports = f"{folder}/ports/{port}"
        for file, text in (("state", state), ("phys_state", physical), ("link_layer", link_layer), ("rate", rate)):
            self.write(f"{ports}/{file}", f"{text}\n")
        listed = [*gids, *[("0000:0000:0000:0000:0000:0000:0000:0000", "")] * 3]
        for index, (address, kind) in enumerate(listed):
            self.write(f"{ports}/gids/{index}", f"{address}\n")
            if kind:
                self.write(f"{ports}/gid_attrs/types/{index}", f"{kind}\n")
                self.write(f"{ports}/gid_attrs/ndevs/{index}", f"{netdev or name}\n")
        self.write(f"{folder}/node_type", f"{node_type}\n")
        self.write(f"{folder}/device/uevent", f"DRIVER={driver}\nPCI_ID=15B3:101B\n")
        self.write(f"{folder}/device/infiniband_verbs/uverbs_{name}/abi_version", "1\n")
        if netdev:
            self.write(f"{folder}/device/net/{netdev}/mtu", "9000\n")
        if opened:
            self.write(f"/dev/infiniband/uverbs_{name}", "")

    def roce(self, name: str, address: str, *, at: int = 3, **more: str) -> None:
        """A RoCE port as mlx5 lists it: v1 and v2 of the link-local address, then v1 and v2 of IPv4, whose v2 is at `at`."""
        local = "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"
        gids = [(local, "IB/RoCE v1" if index % 2 == 0 else "RoCE v2") for index in range(at - 1)]
        gids += [(mapped(address), "IB/RoCE v1"), (mapped(address), "RoCE v2")]
        rate = more.pop("rate", "100 Gb/sec (4X EDR)")
        self.device(name, link_layer="Ethernet", rate=rate, gids=gids, **more)  # type: ignore[arg-type]

    def virtual_function(self, name: str, of: str) -> None:
        (self.root / f"sys/class/infiniband/{name}/device/physfn/infiniband/{of}").mkdir(parents=True)

    def surroundings(self) -> Surroundings:
        return Surroundings(
            host=self.name,
            root=self.root,
            environment=self.environment,
            addresses=lambda: self.addresses,
            probe=self.probe,
        )

    def probe(self, target: str) -> tuple[str, str]:
        answer = self.routes.get(target, OSError(101, "Network is unreachable"))
        if isinstance(answer, OSError):
            raise answer
        return answer

    def way(self, target: str, local: str, *, remote: str | None = None) -> None:
        """The kernel reaches `target` from its own address `local`."""
        self.routes[target] = (remote or target, local)

    def facts(
        self, *, rendezvous: str | None = None, peers: Mapping[str, str] | None = None, alone: bool = False
    ) -> TransportFacts:
        surroundings = self.surroundings()
        facts = read_facts(surroundings, rendezvous=rendezvous, alone=alone)
        find = partial(find_route, interfaces=facts.interfaces, surroundings=surroundings)
        return replace(facts, peers={name: find(address) for name, address in (peers or {}).items()})


def mapped(address: str) -> str:
    """An IPv4 address as the kernel writes a GID."""
    return "0000:0000:0000:0000:0000:ffff:" + ipaddress.IPv6Address(f"::ffff:{address}").exploded[-9:]


def ethernet(name: str, *addresses: str, kind: Kind = Kind.CARD) -> NetworkInterface:
    return NetworkInterface(name=name, kind=kind, running=True, addresses=addresses)


def set_by_hand(**values: str) -> dict[str, Setting]:
    return {name: Setting(value) for name, value in values.items()}
