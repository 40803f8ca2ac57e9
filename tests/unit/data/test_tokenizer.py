import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.data.index import Shard, TokenIndex
from elastictrain.data.tokenizer import TOKENIZER_FILE, ByteTokenizer, load_huggingface, tokenizer_of
from elastictrain.errors import DataError, UsageError


@given(text=st.text())
def test_bytes_come_back_as_the_same_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode([text.encode()])
    assert tokenizer.decode(tokens.tolist()) == text


def test_separators_and_broken_text_are_shown() -> None:
    assert ByteTokenizer().decode([97, 256, 98, 0xFF]).splitlines() == ["a", "\u2500", "b\ufffd"]
    assert ByteTokenizer().decode([300]).strip() == "\u2500"


@pytest.fixture(scope="module")
def tokenizer_json() -> bytes:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "hello": 1, "world": 2, "<|endoftext|>": 3, "[END]": 9}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.enable_truncation(max_length=1)
    model.post_processor = tokenizers.processors.TemplateProcessing(single="[END] $A", special_tokens=[("[END]", 9)])
    return bytes(model.to_str().encode())


@pytest.fixture
def path(tokenizer_json: bytes, tmp_path: Path) -> str:
    (tmp_path / "t.json").write_bytes(tokenizer_json)
    return str(tmp_path / "t.json")


def test_huggingface_file(path: str, tokenizer_json: bytes) -> None:
    tokenizer = load_huggingface(path)
    assert tokenizer.file == tokenizer_json
    # Neither truncated nor framed by special tokens: the file's settings for inference are not for training text.
    assert [tokens.tolist() for tokens in tokenizer.encode([b"hello world", b"\xff"])] == [[1, 2], [0]]
    assert tokenizer.decode([1, 2]) == "hello world"
    assert tokenizer.description.vocab_size == 10
    assert tokenizer.description.separator == 3
    assert load_huggingface(path, separator="[END]").description.separator == 9


@pytest.mark.parametrize(
    ("settings", "separator"),
    [('{"eos_token": "[END]"}', 9), ('{"eos_token": {"content": "[END]"}}', 9), ('{"eos_token": "?"}', 3), ("[", 3), ("[]", 3)],
)
def test_the_folder_of_a_model_names_its_end_of_text(
    tokenizer_json: bytes, tmp_path: Path, settings: str, separator: int
) -> None:
    model = tmp_path / "models--a--b/snapshots/1234"
    model.mkdir(parents=True)
    (tmp_path / "models--a--b/refs").mkdir()
    (model / TOKENIZER_FILE).write_bytes(tokenizer_json)
    (model / "tokenizer_config.json").write_text(settings)
    for folder in (model, tmp_path / "models--a--b"):
        assert load_huggingface(str(folder)).description.separator == separator


def test_huggingface_without_a_separator(path: str) -> None:
    with pytest.raises(UsageError, match=r"t\.json.*nothing"):
        load_huggingface(path, separator="nothing")


def test_not_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for content in (b"{}", None):
        (tmp_path / "t.json").write_bytes(content) if content else (tmp_path / "t.json").unlink()
        with pytest.raises(DataError, match=r"t\.json"):
            load_huggingface(str(tmp_path / "t.json"))


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "t.json").write_bytes(b"{}")
    with pytest.raises(UsageError, match="pip install tokenizers"):
        load_huggingface(str(tmp_path / "t.json"))


def test_the_tokenizer_beside_the_index(memory_store: Any, path: str, tokenizer_json: bytes) -> None:
    description = load_huggingface(path, separator="[END]").description
    index = TokenIndex("uint16", description, 1, (Shard("a", 1, 2, ""),))
    with pytest.raises(DataError, match=r"memory://tokens/tokenizer\.json"):
        tokenizer_of(memory_store, index)
    memory_store.write(TOKENIZER_FILE, tokenizer_json)
    assert tokenizer_of(memory_store, index).description == description
    memory_store.write(TOKENIZER_FILE, tokenizer_json + b" ")
    with pytest.raises(DataError, match=r"memory://tokens/tokenizer\.json"):
        tokenizer_of(memory_store, index)
