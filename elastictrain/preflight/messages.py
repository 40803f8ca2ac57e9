"""What one host tells the first one of itself, so that all can be judged together. Pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elastictrain.preflight.host import alike
from elastictrain.preflight.host.alike import Likeness
from elastictrain.preflight.table import from_json, to_json
from elastictrain.preflight.transport.infiniband import Rdma
from elastictrain.preflight.transport.judge_infiniband import judge_alike
from elastictrain.preflight.verdict import Scope, Status, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """`kinds`: what RDMA this host could do; `hcas`: the ports that it plans to use."""

    verdicts: tuple[Verdict, ...]
    likeness: Likeness
    kinds: frozenset[Rdma]
    hcas: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """As ASCII."""
        row = {
            "verdicts": to_json(self.verdicts),
            "likeness": alike.encode(self.likeness).decode(),
            "kinds": sorted(self.kinds),
            "hcas": self.hcas,
        }
        return json.dumps(row).encode()


def host_report_from_bytes(data: bytes) -> HostReport | None:
    """The inverse of `to_bytes`; None for what another release says."""
    try:
        row = json.loads(data)
        likeness = alike.decode(str(row["likeness"]).encode())
        if likeness is None:
            return None
        return HostReport(
            verdicts=tuple(from_json(row["verdicts"])),
            likeness=likeness,
            kinds=frozenset(Rdma(kind) for kind in row["kinds"]),
            hcas=tuple(map(str, row["hcas"])),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def judge_host_reports(words: Mapping[str, HostReport | None], *, agreed: Rdma, waited_s: float) -> list[Verdict]:
    """What hosts found of themselves, and what they have unlike each other. A host whose word is None said nothing, or nothing
    that is understood."""
    verdicts = [verdict for word in words.values() if word is not None for verdict in word.verdicts]
    verdicts += [_silent(host, waited_s) for host, word in words.items() if word is None]
    known = {host: word for host, word in words.items() if word is not None}
    if len(words) > 1:
        verdicts += alike.compare({host: word.likeness for host, word in known.items()})
        hcas = {host: word.hcas for host, word in known.items()}
        verdicts += judge_alike(hcas, {host: word.kinds for host, word in known.items()}, agreed=agreed)
    return verdicts


def relabel(verdicts: Iterable[Verdict], *, name: str, label: str) -> list[Verdict]:
    """A host that calls itself `name` is called `label` in the group, where several may have that name."""
    if name == label:
        return list(verdicts)
    relabelled = []
    for verdict in verdicts:
        subject = verdict.subject
        if subject == name or subject.endswith(f" on {name}"):
            subject = subject.removesuffix(name) + label
        elif subject.startswith(f"{name} -> "):
            subject = label + subject.removeprefix(name)
        relabelled.append(replace(verdict, subject=subject))
    return relabelled


def _silent(host: str, waited_s: float) -> Verdict:
    return Verdict(
        check="roster",
        scope=Scope.HOST,
        subject=host,
        status=Status.FAIL,
        measured="said nothing of its own checks",
        expected=f"its word within {waited_s:.3g} s",
        remedy=f"python -m elastictrain.preflight  # on {host}: it tells which check does not end; see the log of its ranks",
    )
