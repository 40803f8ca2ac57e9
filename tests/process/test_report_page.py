"""The report's page in a browser, where there is one."""

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from elastictrain.report.page import page
from elastictrain.report.summary import summarize
from tests.unit.report.events import killed, lost_host

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def colors(png: bytes) -> set[bytes]:
    """The colors of the first pixels of each row, as the file has them; rows are filtered, so equal ones may count twice."""
    width, _, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (depth, kind) in ((8, 2), (8, 6))
    size, data, place = (3 if kind == 2 else 4), b"", 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        data += png[place + 8 : place + 8 + length] if png[place + 4 : place + 8] == b"IDAT" else b""
        place += length + 12
    pixels, row = zlib.decompress(data), 1 + width * size
    return {pixels[at : at + size] for begin in range(0, len(pixels), row) for at in range(begin + 1, begin + row, size)}


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_browser_shows_the_page_without_an_error(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(page([summarize(run.history(), url="run") for run in (killed(), lost_host())], price=2.0))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--screenshot={picture}"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,2000", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr
    assert len(colors(picture.read_bytes())) > 100
