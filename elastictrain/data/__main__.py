"""`python -m elastictrain.data`: prepare text for training, and inspect what was prepared."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from elastictrain.data.cache import read_shard
from elastictrain.data.index import TokenIndex, read_index, stored_type
from elastictrain.data.prepare import DEFAULT_SHARD_TOKENS, discover, plan_digest, prepare
from elastictrain.data.tokenizer import ByteTokenizer, Tokenizer, load_huggingface, tokenizer_of
from elastictrain.entry_point import run_command
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, UsageError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store

_SHOWN_CHARACTERS = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_command(
        _parser(), arguments, lambda parsed: int(parsed.act(parsed)), if_interrupted=lambda _: "; the same command continues"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m elastictrain.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser(
        "prepare",
        help="turn text files into token files",
        description="Turn text files into token files. Interrupted, the same command continues where it was.",
    )
    making.set_defaults(act=_prepare)
    making.add_argument("input", nargs="+", help="text file, folder, or quoted pattern such as 'books/**/*.txt'")
    making.add_argument("--out", required=True, metavar="URL", help="folder of the token files: a path or any fsspec URL")
    making.add_argument("--tokenizer", default="bytes", help="bytes, or the path of a Hugging Face tokenizer.json")
    making.add_argument("--separator", metavar="TOKEN", help="token of the tokenizer.json that ends a document")
    making.add_argument("--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS, metavar="N", help="tokens per file")
    making.add_argument("--pattern", action="append", metavar="GLOB", help="files to take from folders (*.txt); repeatable")
    showing = commands.add_parser("inspect", help="show token files", description="Show what a folder of token files holds.")
    showing.set_defaults(act=_inspect)
    showing.add_argument("url", help="folder of the token files: a path or any fsspec URL")
    showing.add_argument("--verify", action="store_true", help="read every byte and compare the digests")
    showing.add_argument("--sample", type=int, metavar="I", help="show the text of sample I")
    showing.add_argument("--seq-len", type=int, default=256, metavar="N", help="tokens per sample (256), for --sample")
    return parser


def _prepare(parsed: argparse.Namespace) -> int:
    if parsed.shard_tokens < 1:
        raise UsageError(f"--shard-tokens must be >= 1, but is {parsed.shard_tokens}")
    if parsed.separator is not None and parsed.tokenizer == "bytes":
        raise UsageError("--separator must go with --tokenizer PATH.json; the byte tokenizer has a separator of its own")
    tokenizer: Tokenizer = ByteTokenizer()
    if parsed.tokenizer != "bytes":
        tokenizer = load_huggingface(parsed.tokenizer, separator=parsed.separator)
    documents = discover(parsed.input, patterns=parsed.pattern or ["*.txt"])
    store = open_store(parsed.out)
    with _progress("preparing", sum(document.size_bytes for document in documents)) as on_bytes:
        index, complete = prepare(
            documents,
            plan=plan_digest(documents, tokenizer=tokenizer.description, shard_tokens=parsed.shard_tokens),
            store=store,
            tokenizer=tokenizer,
            shard_tokens=parsed.shard_tokens,
            on_bytes=on_bytes,
        )
    if complete:
        print(f"{store.url} is complete already; nothing was done", file=sys.stderr)  # noqa: T201
    print(_summary(index, url=store.url))  # noqa: T201
    print(f"train on it with: data.path={store.url}", file=sys.stderr)  # noqa: T201
    return EXIT_OK


def _inspect(parsed: argparse.Namespace) -> int:
    if parsed.seq_len < 1:
        raise UsageError(f"--seq-len must be >= 1, but is {parsed.seq_len}")
    store = open_store(parsed.url, follow_links=True)
    index = read_index(store)
    print(_summary(index, url=store.url))  # noqa: T201
    if parsed.sample is not None:
        text = _sample_text(store, index, sample=parsed.sample, seq_len=parsed.seq_len)
        print(f"  sample {parsed.sample} ({parsed.seq_len} tokens and the one after):\n{text}")  # noqa: T201
    if parsed.verify:
        with _progress("verifying", index.size_bytes) as on_bytes:
            found = [read_shard(store, shard, take=lambda piece: on_bytes(len(piece))) for shard in index.shards]
        problems = [problem for problem in found if problem]
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)  # noqa: T201
        if problems:
            return EXIT_STORAGE
        print("  verified   every shard has its digest")  # noqa: T201
    return EXIT_OK


def _summary(index: TokenIndex, *, url: str) -> str:
    tokenizer = index.tokenizer
    lines = [
        url,
        f"  tokens     {index.num_tokens:,} in {index.num_documents:,} documents ({index.dtype}, {index.size_bytes:,} bytes)",
        f"  tokenizer  {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, separator {tokenizer.separator}",
        f"  digest     {index.digest}",
        f"  shards     {len(index.shards)}",
        *(f"    {shard.file}  {shard.num_tokens:>14,} tokens  xxh3_128 {shard.xxh3_128}" for shard in index.shards),
    ]
    return "\n".join(lines)


def _sample_text(store: Store, index: TokenIndex, *, sample: int, seq_len: int) -> str:
    """One sample as training with this `seq_len` reads it, cut if it is long. Raises: UsageError if it does not exist."""
    tokenizer = tokenizer_of(store, index)
    num_samples = index.num_samples(seq_len)
    if not 0 <= sample < num_samples:
        raise UsageError(f"--sample must be in [0, {num_samples}) for --seq-len {seq_len}, but is {sample}")
    dtype = stored_type(index.dtype)
    start, end = sample * seq_len, sample * seq_len + seq_len + 1
    data = b""
    first = 0
    for shard in index.shards:
        low, high = max(start, first), min(end, first + shard.num_tokens)
        if low < high:
            data += store.read(shard.file, start=(low - first) * dtype.itemsize, end=(high - first) * dtype.itemsize)
        first += shard.num_tokens
    text = tokenizer.decode(np.frombuffer(data, dtype=dtype).tolist())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}\n[{len(text) - _SHOWN_CHARACTERS} more]"


@contextmanager
def _progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
