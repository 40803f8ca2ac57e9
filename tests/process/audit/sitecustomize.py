"""Python loads this in every process of an audited run: it writes down each path in AUDITED that is opened or changed by name.

What is opened relative to the handle of a folder has no such path. AUDIT_FILE gets a line for each.
"""

import os
import sys

AUDITED = os.environ.get("AUDITED", "")
EVENTS = {"open", *(f"os.{name}" for name in ("listdir", "scandir", "mkdir", "rmdir", "remove", "rename", "link", "truncate"))}


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event in EVENTS:
        paths = [os.fsdecode(one) for one in arguments if isinstance(one, str | bytes)]
        found = [path for path in paths if path == AUDITED or path.startswith(f"{AUDITED}/")]
        if found:
            os.write(file, "".join(f"{path}\n" for path in found).encode())


if AUDITED:
    file = os.open(os.environ["AUDIT_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.addaudithook(note)
