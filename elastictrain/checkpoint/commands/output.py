"""Output of the commands: results on stdout, notes on stderr, figures and tables as text."""

import json
import sys
from collections.abc import Collection, Mapping, Sequence


def result(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def result_json(document: Mapping[str, object]) -> None:
    result(json.dumps(document, indent=2, allow_nan=False))


def note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def size_text(size_bytes: float) -> str:
    """`918 B`, `3.7 kB`, `11.0 MB`: powers of a thousand."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    scaled = float(size_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        scaled /= 1000
        # 999.95 would be rounded to 1000.0.
        if scaled < 999.95 or unit == "TB":
            break
    return f"{scaled:.1f} {unit}"


def age_text(seconds: float) -> str:
    """`42 s`, `17 min`, `5 h`, `3 d`; a time in the future, by a wrong clock, is `0 s`."""
    whole = max(0, int(seconds))
    for limit_s, unit_s, unit in ((60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h")):
        if whole < limit_s:
            return f"{whole // unit_s} {unit}"
    return f"{whole // 86400} d"


def plural(count: int, one: str) -> str:
    """`1 file`, `2 files`, `1,234 files`."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), indent: str = "  ") -> str:
    """Aligned columns, two spaces apart; those named in `right` are aligned to the right. An empty header leaves it out."""
    lines = [header, *rows] if header else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    signs = [">" if name in right else "<" for name in header] or ["<"] * len(widths)
    return "\n".join(
        indent + "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths, strict=True)).rstrip()
        for line in lines
    )
