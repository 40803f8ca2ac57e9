"""Show and verify token files, wherever they are, without bringing them here."""

import logging
from collections.abc import Callable

import numpy as np
import xxhash

from elastictrain.data.index import Shard, TokenIndex, token_bytes
from elastictrain.data.tokenizer import Tokenizer
from elastictrain.errors import ObjectNotFoundError, UsageError
from elastictrain.storage.store import Store

_PIECE_BYTES = 8 * 2**20
_SHOWN_CHARACTERS = 2000
logger = logging.getLogger(__name__)


def summarize(index: TokenIndex, *, url: str) -> str:
    """What a folder of token files holds, as a text for a terminal."""
    tokenizer = index.tokenizer
    lines = [
        f"{url}",
        f"  tokens     {index.num_tokens:,} in {index.num_documents:,} documents ({index.dtype}, {index.size_bytes:,} bytes)",
        f"  tokenizer  {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, separator {tokenizer.separator}",
        f"  digest     {index.digest}",
        f"  shards     {len(index.shards)}",
        *(f"    {shard.file}  {shard.num_tokens:>14,} tokens  xxh3_128 {shard.xxh3_128}" for shard in index.shards),
    ]
    return "\n".join(lines)


def verify(store: Store, index: TokenIndex, *, on_bytes: Callable[[int], None]) -> tuple[str, ...]:
    """Reads every byte; what is wrong, a sentence each."""
    return tuple(problem for shard in index.shards if (problem := _check(store, shard, on_bytes=on_bytes)))


def _check(store: Store, shard: Shard, *, on_bytes: Callable[[int], None]) -> str:
    url = f"{store.url}/{shard.file}"
    try:
        size_bytes = store.stat(shard.file).size_bytes
    except ObjectNotFoundError:
        return f"{url} is listed in the index, but does not exist"
    if size_bytes != shard.size_bytes:
        return f"{url} must have {shard.size_bytes} bytes, but has {size_bytes}"
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_PIECE_BYTES, size_bytes)))
    done = 0
    while done < size_bytes and (count := store.read_into(shard.file, buffer[: size_bytes - done], start=done)):
        digest.update(buffer[:count])
        done += count
        on_bytes(count)
    if digest.hexdigest() != shard.xxh3_128:
        return f"{url} is damaged: its digest must be {shard.xxh3_128}, but is {digest.hexdigest()}"
    return ""


def show_sample(store: Store, index: TokenIndex, *, tokenizer: Tokenizer, sample: int, seq_len: int) -> str:
    """The text of one sample, as training with `train.seq_len=seq_len` reads it; its head, if it is long.

    Raises: UsageError if there is no such sample.
    """
    num_samples = index.num_samples(seq_len)
    if not 0 <= sample < num_samples:
        raise UsageError(f"--sample must be in [0, {num_samples}) for --seq-len {seq_len}, but is {sample}")
    width = token_bytes(index.dtype)
    start, end = sample * seq_len, sample * seq_len + seq_len + 1
    data = b""
    first = 0
    for shard in index.shards:
        low, high = max(start, first), min(end, first + shard.num_tokens)
        if low < high:
            data += store.read(shard.file, start=(low - first) * width, end=(high - first) * width)
        first += shard.num_tokens
    tokens = np.frombuffer(data, dtype="<u2" if index.dtype == "uint16" else "<u4")
    text = tokenizer.decode(tokens.tolist())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}\n[{len(text) - _SHOWN_CHARACTERS} more]"
