import pytest

from elastictrain.errors import UsageError
from elastictrain.preflight.links.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64M", 64 << 20),
        ("10G", 10 << 30),
        ("1k", 1024),
        ("1.5KiB", 1536),
        ("2 MB", 2 << 20),
        ("7", 7),
        ("7B", 7),
        ("1024T", 1 << 50),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "M", "-1M", "64X", "1e9", "64 M 3", "0", "0.1", "1025T", "٣M", "nan", "9" * 400])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a size must be"):
        parse_size(text)
