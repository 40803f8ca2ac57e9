import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.bounded_json import MalformedJsonError, encode_record, parse_record
from elastictrain.preflight.links.messages import (
    Contact,
    Flow,
    HostIntroduction,
    LinkFindings,
    Order,
    Roster,
    merged,
)
from elastictrain.preflight.transport.infiniband import Rdma
from tests.unit.examples import examples
from tests.unit.preflight.links.made import introduction, roster

FINDINGS = LinkFindings(
    contacts=(Contact(link=(0, 1), blocked=((1, "refused"),), largest=None, intended=9000, latency_s=0.1),),
    flows=(Flow(link=(1, 0), gbps=2.5, both=True),),
)
RECORDS = [
    introduction(1, mtu=None, kinds=frozenset({Rdma.ROCE}), trouble="in use"),
    roster(3, absent=(3,)),
    FINDINGS,
    Order(((0, 1), (1, 0))),
    Order(((0, 1),), measure=True),
    Order(()),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_are_received_as_they_were_sent(record: object) -> None:
    assert parse_record(encode_record(record), type(record)) == record


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"links": [[0, 1]], "measure": "yes"}',
        b'{"links": [[0, -1]]}',
        b'{"links": [[0, "1"]]}',
        b'{"links": [[0, 1, 2]]}',
        b'{"links": 3, "measure": true}',
    ],
)
def test_a_garbled_order_is_an_error(text: bytes) -> None:
    with pytest.raises(MalformedJsonError):
        parse_record(text, Order)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row.pop("mtu"),
        lambda row: row.update(mtu="large"),
        lambda row: row.update(tcp_ports=[]),
        lambda row: row.update(tcp_ports=5),
        lambda row: row.update(node_rank=True),
        lambda row: row.update(nonce="xyz"),
        lambda row: row.update(kinds=["fast"]),
    ],
)
def test_a_garbled_introduction_is_an_error(spoil: Callable[[dict[str, Any]], Any]) -> None:
    row = json.loads(encode_record(introduction(0)))
    spoil(row)
    with pytest.raises(MalformedJsonError):
        parse_record(json.dumps(row), HostIntroduction)


@settings(max_examples=examples(30))
@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_other_json_is_an_error(value: object) -> None:
    for kind in (HostIntroduction, Roster, LinkFindings, Order):
        with pytest.raises(MalformedJsonError):
            parse_record(json.dumps(value), kind)


def test_of_a_measurement_both_hosts_report() -> None:
    links = ((0, 1),)
    assert [Order(links).concerns(place) for place in range(3)] == [True, False, False]
    assert [Order(links, measure=True).concerns(place) for place in range(3)] == [True, True, False]


def test_the_better_of_two_contacts_counts() -> None:
    first = Contact(
        link=(0, 1),
        blocked=((1, "no answer"), (2, "no answer")),
        largest=1500,
        intended=9000,
        latency_s=0.1,
        offset_s=5.0,
    )
    second = Contact(link=(0, 1), blocked=((2, "refused"), (3, "refused")), largest=None, latency_s=0.2, offset_s=4.0)
    assert merged([first, second])[0, 1] == Contact(
        link=(0, 1), blocked=((2, "refused"),), largest=1500, intended=9000, latency_s=0.1, offset_s=5.0
    )


def test_the_larger_frame_counts_whenever_it_passed() -> None:
    sizes = [Contact(link=(0, 1), largest=largest, intended=9000) for largest in (9000, 1500)]
    assert merged(sizes)[0, 1].largest == merged(reversed(sizes))[0, 1].largest == 9000
