import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elastictrain.config.composed import DataGroup, SourceGroup
from elastictrain.data.__main__ import main
from elastictrain.data.index import TokenIndex, TokenizerDescription, encode_index, read_index
from elastictrain.data.opening import open_datasets
from elastictrain.errors import EXIT_CONFIG, DataError, IrregularFileError
from elastictrain.storage.opening import open_store

TEXT = bytes(range(100)) * 3


@pytest.fixture
def folder(tmp_path: Path, prepare_bytes: Callable[..., TokenIndex]) -> Path:
    prepare_bytes(open_store(str(tmp_path / "tokens")), TEXT)
    return tmp_path / "tokens"


def test_training_and_held_out_samples_share_no_token_as_input(folder: Path) -> None:
    opened = open_datasets(DataGroup(path=str(folder), holdout_samples=4), seq_len=10, environment={})
    assert opened.holdout is not None
    assert (len(opened.train), len(opened.holdout)) == (26, 4)
    assert opened.train[25]["tokens"].tolist() == list(TEXT[250:261])
    assert opened.holdout[0]["tokens"].tolist() == list(TEXT[260:271])
    assert opened.index.num_tokens == 301
    assert opened.index.tokenizer.vocab_size == 257


def test_without_holdout(folder: Path) -> None:
    opened = open_datasets(DataGroup(path=f"file://{folder}"), seq_len=10, environment={})
    assert opened.holdout is None
    assert len(opened.train) == 30


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_local_files_that_are_not_what_the_index_says(folder: Path, damage: str) -> None:
    victim = folder / "tokens-00001.bin"
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"tokens-00001\.bin must"):
        open_datasets(DataGroup(path=str(folder)), seq_len=10, environment={})


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["link to a fifo", "link to a device", "dangling link", "fifo", "folder"])
def test_a_shard_is_a_regular_file(folder: Path, tmp_path: Path, kind: str, late: bool) -> None:
    shard = folder / "tokens-00000.bin"
    opened = open_datasets(DataGroup(path=str(folder)), seq_len=10, environment={}) if late else None
    shard.rename(tmp_path / "moved")
    if kind == "link to a fifo":
        os.mkfifo(tmp_path / "fifo")
        shard.symlink_to(tmp_path / "fifo")
    elif kind == "link to a device":
        shard.symlink_to("/dev/zero")
    elif kind == "dangling link":
        shard.symlink_to(tmp_path / "nothing")
    elif kind == "fifo":
        os.mkfifo(shard)
    else:
        shard.mkdir()
    if opened is not None:
        with pytest.raises((IrregularFileError, FileNotFoundError), match=shard.name):
            opened.train[0]
    else:
        with pytest.raises(DataError, match=shard.name):
            open_datasets(DataGroup(path=str(folder)), seq_len=10, environment={})


def test_files_of_a_folder_may_be_links(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in list(folder.iterdir()):
        file.rename(elsewhere / file.name)
        file.symlink_to(f"../elsewhere/{file.name}")
    options = DataGroup(path=str(folder), holdout_samples=4)
    opened = open_datasets(options, seq_len=10, environment={})
    assert opened.train[25]["tokens"].tolist() == list(TEXT[250:261])
    assert main(["inspect", str(folder), "--verify"]) == 0


def test_an_index_that_leads_to_a_fifo_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    (folder / "index.json").unlink()
    os.mkfifo(tmp_path / "fifo")
    (folder / "index.json").symlink_to(tmp_path / "fifo")
    with pytest.raises(IrregularFileError, match=r"index\.json"):
        open_datasets(DataGroup(path=str(folder)), seq_len=10, environment={})


@pytest.mark.parametrize("below", ["", "/tokens"])
def test_a_file_is_no_folder_of_tokens(tmp_path: Path, below: str) -> None:
    (tmp_path / "text.txt").write_text("not yet prepared")
    options = DataGroup(path=f"{tmp_path}/text.txt{below}")
    with pytest.raises(DataError) as caught:
        open_datasets(options, seq_len=10, environment={})
    assert caught.value.exit_code == EXIT_CONFIG
    assert f"{tmp_path}/text.txt" in str(caught.value)


def problem_keys(options: DataGroup, *, seq_len: int, cache: Path) -> list[str]:
    with pytest.raises(DataError) as caught:
        open_datasets(options, seq_len=seq_len, environment={"XDG_CACHE_HOME": str(cache)})
    return [problem.key for problem in caught.value.problems]


def test_problems_have_their_keys(folder: Path, tmp_path: Path, prepare_bytes: Callable[..., TokenIndex]) -> None:
    assert problem_keys(DataGroup(path=str(folder)), seq_len=301, cache=tmp_path) == ["train.seq_len"]
    assert problem_keys(DataGroup(path=str(folder), holdout_samples=30), seq_len=10, cache=tmp_path) == ["data.holdout_samples"]
    url = "memory://check-data/tokens"
    prepare_bytes(open_store(url), TEXT)
    assert problem_keys(DataGroup(path=url, cache_gb=1e-7), seq_len=10, cache=tmp_path) == ["data.cache_gb"]


def test_remote_data_is_read_from_the_cache(tmp_path: Path, prepare_bytes: Callable[..., TokenIndex]) -> None:
    url = "memory://open-remote/tokens"
    prepare_bytes(open_store(url), TEXT)
    opened = open_datasets(DataGroup(path=url), seq_len=10, environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert [opened.train[i]["tokens"][0].item() for i in range(3)] == [0, 10, 20]
    assert list((tmp_path / "elastictrain").glob("tokens-*/tokens-00002.bin"))


def test_several_sources(tmp_path: Path, prepare_bytes: Callable[..., TokenIndex]) -> None:
    sources = []
    for number, text in enumerate((b"a" * 99, b"b" * 49)):
        sources.append(SourceGroup(str(tmp_path / f"source-{number}"), float(3 - 2 * number)))
        prepare_bytes(open_store(sources[-1].path), text)
    options = DataGroup(sources=tuple(sources), holdout_samples=1)
    opened = open_datasets(options, seq_len=10, environment={})
    assert opened.mixture is not None
    assert opened.mixture.sizes == (8, 3)
    order = [opened.mixture.sample_at(position, seed=0, shuffle=True) for position in range(8)]
    assert "".join(chr(int(opened.train[sample]["tokens"][0])) for sample in order) == "aaabaaab"
    assert opened.holdout is not None
    assert [chr(int(opened.holdout[i]["tokens"][0])) for i in range(2)] == ["a", "b"]
    turned = replace(options, sources=options.sources[::-1] if options.sources else None)
    assert open_datasets(turned, seq_len=10, environment={}).digest != opened.digest


def test_sources_that_do_not_fit(folder: Path, tmp_path: Path, prepare_bytes: Callable[..., TokenIndex]) -> None:
    small = str(tmp_path / "small")
    prepare_bytes(open_store(small), b"abc")
    sources = (SourceGroup(str(folder)), SourceGroup(small))
    assert problem_keys(DataGroup(sources=sources, holdout_samples=1), seq_len=3, cache=tmp_path) == ["data.holdout_samples"]
    index = Path(small) / "index.json"
    other = replace(read_index(open_store(small)), tokenizer=TokenizerDescription("bytes", 300, 256, ""))
    index.write_bytes(encode_index(other))
    assert problem_keys(DataGroup(sources=sources), seq_len=3, cache=tmp_path) == ["data.sources[1].path"]
