"""`python -m elastictrain.data`: prepare text for training, and inspect what was prepared."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastictrain.data.index import read_index
from elastictrain.data.inspect import show_sample, summarize, verify
from elastictrain.data.plan import DEFAULT_SHARD_TOKENS, plan_digest
from elastictrain.data.prepare import discover, prepare
from elastictrain.data.tokenizer import ByteTokenizer, Tokenizer, load_huggingface, read_tokenizer_file, tokenizer_of
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, EXIT_USAGE, ElasticTrainError, UsageError
from elastictrain.storage.opening import open_store

_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        parsed = _parser().parse_args(arguments)
    except SystemExit as stop:
        # argparse ends with 2 for a wrong command line, and with 0 after --help.
        return EXIT_USAGE if stop.code else EXIT_OK
    try:
        if parsed.command == "prepare":
            return _prepare(parsed)
        return _inspect(parsed)
    except ElasticTrainError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)  # noqa: T201
        return _EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m elastictrain.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser(
        "prepare",
        help="turn text files into token files",
        description="Turn text files into token files. Interrupted, the same command continues where it was.",
    )
    making.add_argument("input", nargs="+", help="text file, folder, or quoted pattern such as 'books/**/*.txt'")
    making.add_argument("--out", required=True, metavar="URL", help="folder of the token files: a path or any fsspec URL")
    making.add_argument("--tokenizer", default="bytes", help="bytes, or the path of a Hugging Face tokenizer.json")
    making.add_argument("--separator", metavar="TOKEN", help="token of the tokenizer.json that ends a document")
    making.add_argument("--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS, metavar="N", help="tokens per file")
    making.add_argument("--pattern", action="append", metavar="GLOB", help="files to take from folders (*.txt); repeatable")
    showing = commands.add_parser("inspect", help="show token files", description="Show what a folder of token files holds.")
    showing.add_argument("url", help="folder of the token files: a path or any fsspec URL")
    showing.add_argument("--verify", action="store_true", help="read every byte and compare the digests")
    showing.add_argument("--sample", type=int, metavar="I", help="show the text of sample I")
    showing.add_argument("--seq-len", type=int, default=256, metavar="N", help="tokens per sample (256), for --sample")
    return parser


def _prepare(parsed: argparse.Namespace) -> int:
    if parsed.shard_tokens < 1:
        raise UsageError(f"--shard-tokens must be >= 1, but is {parsed.shard_tokens}")
    tokenizer: Tokenizer
    tokenizer_file: bytes | None = None
    if parsed.tokenizer == "bytes":
        if parsed.separator is not None:
            raise UsageError("--separator must go with --tokenizer PATH.json; the byte tokenizer has a separator of its own")
        tokenizer = ByteTokenizer()
    else:
        tokenizer_file = read_tokenizer_file(Path(parsed.tokenizer))
        tokenizer = load_huggingface(tokenizer_file, source=parsed.tokenizer, separator=parsed.separator)
    documents = discover(parsed.input, patterns=parsed.pattern or ["*.txt"])
    store = open_store(parsed.out)
    with _progress("preparing", sum(document.size_bytes for document in documents)) as on_bytes:
        prepared = prepare(
            documents,
            plan=plan_digest(documents, tokenizer=tokenizer.description, shard_tokens=parsed.shard_tokens),
            store=store,
            tokenizer=tokenizer,
            tokenizer_file=tokenizer_file,
            shard_tokens=parsed.shard_tokens,
            on_bytes=on_bytes,
        )
    if prepared.already_complete:
        print(f"{store.url} is complete already; nothing was done", file=sys.stderr)  # noqa: T201
    print(summarize(prepared.index, url=store.url))  # noqa: T201
    print(f"train on it with: data.path={store.url}", file=sys.stderr)  # noqa: T201
    return EXIT_OK


def _inspect(parsed: argparse.Namespace) -> int:
    if parsed.seq_len < 1:
        raise UsageError(f"--seq-len must be >= 1, but is {parsed.seq_len}")
    store = open_store(parsed.url, follow_links=True)
    index = read_index(store)
    print(summarize(index, url=store.url))  # noqa: T201
    if parsed.sample is not None:
        tokenizer = tokenizer_of(store, index)
        print(f"  sample {parsed.sample} ({parsed.seq_len} tokens and the one after):")  # noqa: T201
        print(show_sample(store, index, tokenizer=tokenizer, sample=parsed.sample, seq_len=parsed.seq_len))  # noqa: T201
    if parsed.verify:
        with _progress("verifying", index.size_bytes) as on_bytes:
            problems = verify(store, index, on_bytes=on_bytes)
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)  # noqa: T201
        if problems:
            return EXIT_STORAGE
        print("  verified   every shard has its digest")  # noqa: T201
    return EXIT_OK


@contextmanager
def _progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
