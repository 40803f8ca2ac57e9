import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.launch.watch.words import Word, seal, unseal

TOKEN = b"t" * 32
WORD = Word("host-0a1b2c3d", 7, ended=True)


@given(st.text(max_size=60), st.integers(0, 10**9), st.booleans())
def test_what_is_said_is_heard(host: str, generation: int, ended: bool) -> None:
    word = Word(host, generation, ended)
    assert unseal(seal(word, token=TOKEN), token=TOKEN) == word


def test_another_run_is_not_heard() -> None:
    assert unseal(seal(WORD, token=b"u" * 32), token=TOKEN) is None


def test_no_bit_can_be_changed() -> None:
    data = seal(WORD, token=TOKEN)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        assert unseal(bytes(changed), token=TOKEN) is None
    assert [unseal(data[:length], token=TOKEN) for length in range(len(data))] == [None] * len(data)
    assert unseal(data + b" ", token=TOKEN) is None


@given(st.binary(max_size=600))
def test_noise_is_not_heard(data: bytes) -> None:
    assert unseal(data, token=TOKEN) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"3",
        b"{}",
        b"[]",
        b'["a", 1]',
        b'["a", 1, true, 4]',
        b'["a", true, true]',
        b'["a", 1.0, true]',
        b'["a", 1, 1]',
        b'["a", 1, null]',
        b"[1, 1, true]",
        b'"abc"',
        b'{"a": 1, "b": 2, "c": 3}',
        b"\xff",
        b"[" * 490,
    ],
    ids=repr,
)
def test_what_another_release_may_sign_is_not_misread(body: bytes) -> None:
    signature = hmac.new(TOKEN, body, hashlib.sha256).digest()[:16]
    assert unseal(signature + b'["a", 1, true]', token=TOKEN) is None
    assert unseal(signature + body, token=TOKEN) is None


def test_a_word_fits_into_any_frame_and_a_larger_one_is_none() -> None:
    longest = Word("h" * 64 + "-0a1b2c3d", 999_999_999, ended=False)
    assert len(seal(longest, token=TOKEN)) < 200
    assert unseal(seal(Word("h" * 600, 1, ended=False), token=TOKEN), token=TOKEN) is None
