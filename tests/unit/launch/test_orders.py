from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.fault.exits import Process
from elastictrain.launch.orders import AgentAnswer, Orders, decode, encode, read_answer, write_answer

text = st.text(max_size=20)
orders = st.builds(
    Orders,
    st.lists(text, max_size=5).map(tuple),
    st.dictionaries(text, text, max_size=5),
    text,
    st.integers(1, 64),
    st.lists(text, max_size=5).map(tuple),
    st.floats(0, 1e9),
)


@settings(max_examples=50)
@given(orders)
def test_orders_are_one_line_and_come_back(orders: Orders) -> None:
    line = encode(orders)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == orders


def test_arguments_that_are_no_text_come_back_as_they_are() -> None:
    """Python shows bytes of a command line that are not UTF-8 as lone surrogates, and torchrun has to get the same bytes."""
    orders = Orders(("run.dir=\udcff", "a\nb", "c=é"), {"X": "\udcfe"}, "/tmp/x.json", 8, ("a\udcff",), 900.0)
    assert decode(encode(orders)) == orders


@pytest.mark.parametrize(
    "answer",
    [
        AgentAnswer(),
        AgentAnswer({0: -9, 3: 71}, (Process(7, 100), Process(8, 101))),
        AgentAnswer(unforked="2 threads"),
        AgentAnswer(missing=(0, 2)),
    ],
)
def test_an_answer_is_read_as_it_was_written(answer: AgentAnswer, tmp_path: Path) -> None:
    write_answer(tmp_path / "answer", answer)
    assert read_answer(tmp_path / "answer") == answer


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "{", "[]", "[{}]", '{"codes": []}', '{"codes": {"a": 1}}', '{"codes": {"0": "1"}}'),
        *('{"leaving": 3}', '{"leaving": [[1]]}', '{"unforked": 1}', '{"missing": 3}', '{"missing": ["a"]}'),
    ],
)
def test_an_answer_that_cannot_be_read_says_nothing(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "answer").write_text(text)
    assert read_answer(tmp_path / "answer") == AgentAnswer()
