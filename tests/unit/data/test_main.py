from pathlib import Path

import pytest

from elastictrain.data.__main__ import main

LINE = "The quick brown fox."


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(f"{LINE}\n" * 20)
    return tmp_path / "text"


def test_prepare_and_inspect(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["prepare", str(text), "--out", out, "--shard-tokens", "100"]) == 0
    captured = capsys.readouterr()
    assert "421" in captured.out
    assert f"data.path={out}" in captured.err
    assert main(["prepare", str(text), "--out", out, "--shard-tokens", "100"]) == 0
    assert "complete already" in capsys.readouterr().err
    # Sample 2 straddles two shards.
    assert main(["inspect", out, "--verify", "--sample", "2", "--seq-len", "42"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count(LINE) == 2
    assert "verified" in captured.out


def test_inspect_finds_damage(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["prepare", str(text), "--out", str(out), "--shard-tokens", "100"]) == 0
    data = bytearray((out / "tokens-00001.bin").read_bytes())
    data[3] ^= 1
    (out / "tokens-00001.bin").write_bytes(data)
    (out / "tokens-00002.bin").write_bytes(b"xx")
    (out / "tokens-00003.bin").unlink()
    assert main(["inspect", str(out)]) == 0
    assert main(["inspect", str(out), "--verify"]) == 74
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [token in error for token, error in zip(("00001.bin", "00002.bin", "00003.bin"), errors, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ([], 64, "command"),
        (["prepare", "text"], 64, "--out"),
        (["prepare", "missing", "--out", "out"], 78, "missing"),
        (["prepare", "text", "--pattern", "*.md", "--out", "out"], 78, "--pattern"),
        (["prepare", "text", "--out", "nonsense://x/y"], 78, "nonsense"),
        (["prepare", "text", "--out", "text/a.txt/below"], 74, "text/a.txt"),
        (["prepare", "text", "--out", "out", "--tokenizer", "missing.json"], 78, "missing.json"),
        (["prepare", "text", "--out", "out", "--separator", "x"], 64, "--separator"),
        (["prepare", "text", "--out", "out", "--shard-tokens", "0"], 64, "--shard-tokens"),
        (["prepare", "text", "--out", "out", "--field", "text"], 64, "--field"),
        (["prepare", "text", "--out", "out", "--format", "xml"], 64, "--format"),
        (["prepare", "text", "--out", "out", "--workers", "-1"], 64, "--workers"),
        (["prepare", "text", "--out", "out", "--format", "jsonl"], 78, "a.txt, line 1"),
        (["prepare", "text", "--out", "out", "--split", "train"], 78, "--split"),
        (["inspect", "missing"], 78, "missing"),
        (["inspect", "missing", "--seq-len", "0"], 64, "--seq-len"),
    ],
)
def test_bad_command_lines(
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    named: str,
) -> None:
    monkeypatch.chdir(text.parent)
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error


def test_a_sample_that_is_not_there(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    main(["prepare", str(text), "--out", out])
    assert main(["inspect", out, "--sample", "10", "--seq-len", "42"]) == 64
    assert "[0, 10)" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "prepare" in capsys.readouterr().out
