import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.saver.messages import LONGEST_BYTES, MalformedError, MessageLines, count, encode, text
from tests.unit.examples import examples


@settings(max_examples=examples(100))
@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5)), max_size=5),
    st.integers(1, 50),
)
def test_whatever_the_pieces_the_messages_come_whole(contents: list[dict[str, object]], size: int) -> None:
    sent = [{**content, "op": "x"} for content in contents]
    data = b"".join(encode(message) for message in sent)  # type: ignore[arg-type]
    lines = MessageLines()
    heard = [message for at in range(0, len(data), size) for message in lines.feed(data[at : at + size])]
    assert heard == sent


@settings(max_examples=examples(500))
@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_is_raised(data: bytes) -> None:
    lines = MessageLines()
    try:
        for message in lines.feed(data + b"\n"):
            assert isinstance(message["op"], str)
    except MalformedError:
        return


@pytest.mark.parametrize(
    "data", [b"[" * 5000 + b"\n", b"7\n", b"{}\n", b'{"op": 3}\n', b"x" * (LONGEST_BYTES + 1), b"\xff\n", b"1" * 9999 + b"\n"]
)
def test_no_messages(data: bytes) -> None:
    with pytest.raises(MalformedError):
        list(MessageLines().feed(data))


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, 1 << 63, 10**400])
def test_no_count(value: object) -> None:
    with pytest.raises(MalformedError, match="`n` of 'x' must be a count"):
        count({"op": "x", "n": value}, "n")  # type: ignore[dict-item]


def test_fields() -> None:
    assert count({"op": "x", "n": (1 << 63) - 1}, "n") == (1 << 63) - 1
    assert text({"op": "x", "t": "a"}, "t") == "a"
    with pytest.raises(MalformedError, match="`t` of 'x' must be a text"):
        text({"op": "x", "t": 1}, "t")
