"""`python -m elastictrain.data`: prepare text for training, index tar files, and inspect what was prepared."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import numpy as np

from elastictrain.data.cache import read_shard
from elastictrain.data.encoding import Encoder
from elastictrain.data.index import TokenIndex, read_index, stored_type
from elastictrain.data.prepare import DEFAULT_SHARD_TOKENS, default_workers, plan_digest, prepare
from elastictrain.data.sources import FORMATS, discover, format_of
from elastictrain.data.tar_index import make_index
from elastictrain.data.tokenizer import ByteTokenizer, Tokenizer, load_huggingface, tokenizer_of
from elastictrain.entry_point import progress, run_command
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, UsageError
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store

_SHOWN_CHARACTERS = 2000
_MOST_WORKERS = 256


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
        help="turn texts into token files",
        description="Turn texts into token files. Interrupted, the same command continues where it was.",
    )
    making.set_defaults(act=_prepare)
    making.add_argument("input", nargs="+", help="file, folder or quoted pattern ('books/**/*.txt'): a path or any fsspec URL")
    making.add_argument("--out", required=True, metavar="URL", help="folder of the token files: a path or any fsspec URL")
    making.add_argument("--format", choices=("auto", *FORMATS), default="auto", help="of the inputs; auto: by their suffix")
    making.add_argument("--field", metavar="NAME", help="field or column that holds the text (text); not for plain text")
    making.add_argument("--split", metavar="NAME", help="split of a data set that has several, such as train")
    making.add_argument("--tokenizer", default="bytes", help="bytes, a tokenizer.json, or the folder of a Hugging Face model")
    making.add_argument("--separator", metavar="TOKEN", help="token of the tokenizer.json that ends a document")
    making.add_argument("--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS, metavar="N", help="tokens per file")
    making.add_argument("--pattern", action="append", metavar="GLOB", help="files to take from folders; repeatable")
    making.add_argument("--workers", type=int, metavar="N", help="processes; 0: this one; one per core if it is not given")
    indexing = commands.add_parser(
        "index",
        help="index the tar files of webdataset",
        description="Find the samples of tar files that webdataset has written, so that any of them can be read alone.",
    )
    indexing.set_defaults(act=_index)
    indexing.add_argument("input", nargs="+", help="tar file, folder or quoted pattern ('web/*.tar'): a path or any fsspec URL")
    indexing.add_argument("--out", required=True, metavar="URL", help="folder of the index: a path or any fsspec URL")
    indexing.add_argument("--workers", type=int, metavar="N", help="processes; 0: this one; one per core if it is not given")
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
    _check_workers(parsed.workers)
    tokenizer: Tokenizer = ByteTokenizer()
    if parsed.tokenizer != "bytes":
        tokenizer = load_huggingface(parsed.tokenizer, separator=parsed.separator)
    sources = discover(parsed.input, patterns=parsed.pattern or (), split=parsed.split)
    kind = format_of(sources, given=parsed.format)
    if kind == "text" and parsed.field is not None:
        raise UsageError(f"--field must go with jsonl, parquet or arrow files, but {sources[0].url} is plain text")
    encoder = Encoder(tokenizer, kind=kind, field="" if kind == "text" else parsed.field or "text")
    store = open_store(parsed.out)
    with progress("preparing", sum(source.size_bytes for source in sources), lines=True) as on_bytes:
        index, complete = prepare(
            sources,
            plan=plan_digest(sources, encoder=encoder, shard_tokens=parsed.shard_tokens),
            store=store,
            encoder=encoder,
            shard_tokens=parsed.shard_tokens,
            workers=default_workers(sources, tokenizer=tokenizer) if parsed.workers is None else parsed.workers,
            on_bytes=on_bytes,
        )
    if complete:
        print(f"{store.url} is complete already; nothing was done", file=sys.stderr)  # noqa: T201
    print(_summary(index, url=store.url))  # noqa: T201
    print(f"train on it with: data.path={store.url}", file=sys.stderr)  # noqa: T201
    return EXIT_OK


def _check_workers(given: int | None) -> None:
    if given is not None and not 0 <= given <= _MOST_WORKERS:
        raise UsageError(f"--workers must be in [0, {_MOST_WORKERS}], but is {given}")


def _index(parsed: argparse.Namespace) -> int:
    _check_workers(parsed.workers)
    sources = discover(parsed.input, patterns=("*.tar",))
    workers = min(os.cpu_count() or 1, len(sources)) if parsed.workers is None else parsed.workers
    store = open_store(parsed.out)
    with progress("indexing", sum(source.size_bytes for source in sources), lines=True) as on_bytes:
        index = make_index(sources, store, workers=0 if workers == 1 else workers, on_bytes=on_bytes)
    print(f"{store.url}: {index.num_samples:,} samples in {len(index.shards):,} tar files")  # noqa: T201
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
        with progress("verifying", sum(file.size_bytes for file in index.files), lines=True) as on_bytes:
            found = [read_shard(store, file, take=lambda piece: on_bytes(len(piece))) for file in index.files]
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


if __name__ == "__main__":
    sys.exit(main())
