import pytest

from elastictrain.checkpoint.commands.output import age_text, plural, size_text, table


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (3_200_000_000, "3.2 GB"),
        (4.5e15, "4500.0 TB"),
    ],
)
def test_sizes(size_bytes: float, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"), (47.9 * 3600, "47 h"), (48 * 3600, "2 d")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_counts() -> None:
    assert [plural(count, "file") for count in (0, 1, 1234)] == ["0 files", "1 file", "1,234 files"]


def test_columns_are_aligned_and_nothing_trails() -> None:
    text = table(("name", "size", "state"), [("a", "1 B", "valid"), ("long", "1,000 B", "")], right=("size",))
    assert text.splitlines() == [
        "  name     size  state",
        "  a         1 B  valid",
        "  long  1,000 B",
    ]
