import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.preflight.links.messages import (
    Adopt,
    Contact,
    Flow,
    GarbledError,
    LinkFindings,
    MakeContact,
    Measure,
    decode_findings,
    decode_introduction,
    decode_order,
    decode_roster,
    encode,
    encode_order,
    merged,
)
from tests.unit.examples import examples
from tests.unit.preflight.links.made import introduction, roster
from tests.unit.preflight.made import verdict

FINDINGS = LinkFindings(
    contacts=(Contact(source=0, target=1, blocked=((1, "refused"),), largest=None, intended=9000, latency_s=0.1),),
    flows=(Flow(source=1, target=0, gbps=2.5, both=True),),
)


def test_what_is_said_is_what_is_heard() -> None:
    assert decode_introduction(encode(introduction(1, mtu=None))) == introduction(1, mtu=None)
    assert decode_roster(encode(roster(3, absent=(3,)))) == roster(3, absent=(3,))
    assert decode_findings(encode(FINDINGS), num_hosts=2) == FINDINGS


@pytest.mark.parametrize(
    "order",
    [
        MakeContact(((0, 1), (1, 0))),
        Measure((((0, 1),), ((0, 2),)), ((0, 1),)),
        Adopt((verdict(), verdict("fail", measured=0.5))),
    ],
    ids=["contact", "measure", "adopt"],
)
def test_orders_are_heard_as_given(order: MakeContact | Measure | Adopt) -> None:
    assert decode_order(encode_order(order), num_hosts=3) == order


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"order": "sing"}',
        b'{"order": "contact"}',
        b'{"order": "contact", "links": [[0, 3]]}',
        b'{"order": "contact", "links": [[1, 1]]}',
        b'{"order": "contact", "links": [[0, "1"]]}',
        b'{"order": "contact", "links": [[0, 1, 2]]}',
        b'{"order": "measure", "rounds": 3, "met": []}',
        b'{"order": "adopt", "verdicts": [{"check": "mtu"}]}',
        b'{"order": "adopt", "verdicts": "[{\\"check\\": \\"mtu\\"}]"}',
    ],
)
def test_a_garbled_order_is_an_error(text: bytes) -> None:
    with pytest.raises(GarbledError):
        decode_order(text, num_hosts=3)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row.pop("mtu"),
        lambda row: row.update(mtu="large"),
        lambda row: row.update(tcp_ports=[]),
        lambda row: row.update(tcp_ports=5),
        lambda row: row.update(node_rank=True),
        lambda row: row.update(nonce="xyz"),
    ],
)
def test_a_garbled_introduction_is_an_error(spoil: Callable[[dict[str, Any]], Any]) -> None:
    row = json.loads(encode(introduction(0)))
    spoil(row)
    with pytest.raises(GarbledError):
        decode_introduction(json.dumps(row).encode())


def test_findings_of_hosts_that_are_not_there_are_an_error() -> None:
    with pytest.raises(GarbledError, match="there are 1"):
        decode_findings(encode(FINDINGS), num_hosts=1)


@settings(max_examples=examples(30))
@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_other_json_is_an_error(value: object) -> None:
    for decode in (decode_introduction, decode_roster, lambda data: decode_findings(data, num_hosts=3)):
        with pytest.raises(GarbledError):
            decode(json.dumps(value).encode())


def test_the_better_of_two_contacts_counts() -> None:
    first = Contact(
        source=0,
        target=1,
        blocked=((1, "no answer"), (2, "no answer")),
        largest=1500,
        intended=9000,
        latency_s=0.1,
        offset_s=5.0,
    )
    second = Contact(source=0, target=1, blocked=((2, "refused"), (3, "refused")), largest=None, latency_s=0.2, offset_s=4.0)
    assert merged([first, second])[0, 1] == Contact(
        source=0, target=1, blocked=((2, "refused"),), largest=1500, intended=9000, latency_s=0.1, offset_s=5.0
    )


def test_the_larger_frame_counts_whenever_it_passed() -> None:
    sizes = [Contact(source=0, target=1, largest=largest, intended=9000) for largest in (9000, 1500)]
    assert merged(sizes)[0, 1].largest == merged(reversed(sizes))[0, 1].largest == 9000


def test_names_that_are_not_unique_get_their_node_rank() -> None:
    twins = roster(3)
    object.__setattr__(twins, "hosts", (introduction(0), introduction(1, name="h1"), introduction(2)))
    assert twins.labels() == ("h1 (node rank 0)", "h1 (node rank 1)", "h3")
