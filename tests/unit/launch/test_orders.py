from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.launch.orders import Orders, decode, encode

text = st.text(max_size=20)
orders = st.builds(
    Orders, st.lists(text, max_size=5).map(tuple), st.dictionaries(text, text, max_size=5), text, st.integers(1, 64)
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
    orders = Orders(("run.dir=\udcff", "a\nb", "c=é"), {"X": "\udcfe"}, "/tmp/x.json", 8)
    assert decode(encode(orders)) == orders
