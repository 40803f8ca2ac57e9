"""Text to tokens and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from elastictrain.bounded_json import DOCUMENT, parse_json
from elastictrain.data.hub import hub_snapshot
from elastictrain.data.index import TokenIndex, TokenizerDescription
from elastictrain.errors import DataError, ObjectNotFoundError, ObjectTooLargeError, UsageError
from elastictrain.storage.bounded_read import read_bounded
from elastictrain.storage.store import Store

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceModel

TOKENIZER_FILE = "tokenizer.json"
_MOST_BYTES = 256 << 20
_SEPARATORS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_BAR = "\n\N{BOX DRAWINGS LIGHT HORIZONTAL}\n".encode()


class ByteTokenizer:
    """Every byte is a token, and 256 separates documents: any language, without training and without a file."""

    description = TokenizerDescription(kind="bytes", vocab_size=257, separator=256, digest="")
    file = None

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.uint32]]:
        """The tokens of each text (UTF-8) on its own, without separators."""
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with replacement characters for invalid text; a line with a bar stands for each separator."""
        return b"".join(bytes((token,)) if token < 256 else _BAR for token in tokens).decode(errors="replace")


class HuggingFaceTokenizer:
    def __init__(self, model: "HuggingFaceModel", *, file: bytes, description: TokenizerDescription) -> None:
        self._model = model
        self.file = file  # the content of the `tokenizer.json` beside the index
        self.description = description

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.uint32]]:
        """Token ids without special tokens; bytes that are not UTF-8 become replacement characters."""
        encodings = self._model.encode_batch([text.decode(errors="replace") for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._model.decode(list(tokens), skip_special_tokens=False)
        return text


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load_huggingface(path: str, *, separator: str | None = None) -> HuggingFaceTokenizer:
    """Load a `tokenizer.json`, or that of a model's folder or of a repository in the local Hugging Face cache.

    `separator` ends documents: by default what the folder's `tokenizer_config.json` calls `eos_token`, or else the first usual
    end-of-text token of the vocabulary.
    Raises: UsageError without the extra `hf` or without a separator; DataError if the file cannot be read or is no tokenizer.
    """
    folder = hub_snapshot(Path(path).expanduser())
    try:
        data = (folder / TOKENIZER_FILE if folder.is_dir() else folder).read_bytes()
    except OSError as error:
        raise DataError(f"--tokenizer {path} must be a readable tokenizer.json, but is not: {error.strerror}") from None
    model = _load_model(data, source=path)
    vocabulary = model.get_vocab(with_added_tokens=True)
    candidates = (separator,) if separator is not None else (*_end_of_text(folder), *_SEPARATORS)
    found = next((vocabulary[name] for name in candidates if name in vocabulary), None)
    if found is None:
        raise UsageError(
            f"--separator must name a token of {path}; it has none of: {', '.join(candidates)}. Pass the one that ends a text"
        )
    digest = xxhash.xxh3_128_hexdigest(data)
    description = TokenizerDescription("huggingface", max(vocabulary.values()) + 1, found, digest)
    return HuggingFaceTokenizer(model, file=data, description=description)


def _end_of_text(folder: Path) -> tuple[str, ...]:
    """The end-of-text token that the configuration in a model's folder names, if there is one."""
    try:
        named = parse_json((folder / "tokenizer_config.json").read_bytes(), limits=DOCUMENT).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ()
    named = named.get("content") if isinstance(named, dict) else named
    return (named,) if isinstance(named, str) else ()


def _load_model(data: bytes, *, source: str) -> "HuggingFaceModel":
    try:
        from tokenizers import Tokenizer as HuggingFaceModel
    except ImportError:
        raise UsageError(
            f"reading {source} needs the package tokenizers, which is not installed; run: pip install tokenizers"
        ) from None
    try:
        model = HuggingFaceModel.from_buffer(data)
    # The library raises bare `Exception` for every kind of damage.
    except Exception as error:  # noqa: BLE001
        raise DataError(
            f"{source} must be a tokenizer.json of the Hugging Face tokenizers library, but is not: {error}"
        ) from None
    model.no_truncation()
    model.no_padding()
    return model


def tokenizer_of(store: Store, index: TokenIndex) -> Tokenizer:
    """The tokenizer of a data set. Raises: DataError if its file is missing or differs; UsageError without the extra `hf`."""
    if index.tokenizer.kind == "bytes":
        return ByteTokenizer()
    url = f"{store.url}/{TOKENIZER_FILE}"
    try:
        data = read_bounded(store, TOKENIZER_FILE, max_bytes=_MOST_BYTES)
    except ObjectTooLargeError as error:
        raise DataError(f"{error}: it is no tokenizer; copy the right one there") from None
    except ObjectNotFoundError:
        raise DataError(f"{url} must be the tokenizer of these token files, but does not exist; copy it there") from None
    if xxhash.xxh3_128_hexdigest(data) != index.tokenizer.digest:
        raise DataError(f"{url} must be the tokenizer of these token files, but is another one; copy the right one there")
    return HuggingFaceTokenizer(_load_model(data, source=url), file=data, description=index.tokenizer)
