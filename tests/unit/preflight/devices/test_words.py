import pytest

from elastictrain.preflight.devices.words import bus_id, decimal, integer, truth, word


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16x", 16),
        ("27 C", 27),
        ("26.562 GB/s", 26.562),
        (" 0 ", 0),
        ("-5 C", -5),
        ("N/A", None),
        ("[Unknown Error]", None),
        ("ERR!", None),
        ("", None),
        (None, None),
        ("1.2.3", None),
        ("535.54.03", None),
    ],
)
def test_numbers(text: str | None, number: float | None) -> None:
    assert decimal(text) == number


def test_a_fraction_is_no_whole_number() -> None:
    assert integer("1.5") is None
    assert integer("8x") == 8


@pytest.mark.parametrize(
    ("text", "value"),
    [("Yes", True), ("Not Active", False), ("Enabled", True), ("[N/A]", None), ("Unknown Error", None), (None, None)],
)
def test_truths(text: str | None, value: bool | None) -> None:
    assert truth(text) is value


@pytest.mark.parametrize(
    "text", ["N/A", "[N/A]", "ERR!", "None", "", "Requested functionality has been deprecated", "[Unknown Error]"]
)
def test_words_that_say_nothing(text: str) -> None:
    assert word(text) is None


@pytest.mark.parametrize(
    ("text", "bus"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00", "0000:3b:00.0"),
        ("GPU0000:CB:00.0: Unknown Error", "0000:cb:00.0"),
        ("GPU1", None),
        ("PCI:0000:9b:00", "0000:9b:00.0"),
        ("00000009:01:00.0", "0009:01:00.0"),
        ("GPU1: 0000:34:00.0: GPU is lost", "0000:34:00.0"),
        ("nothing", None),
    ],
)
def test_addresses(text: str, bus: str | None) -> None:
    assert bus_id(text) == bus
