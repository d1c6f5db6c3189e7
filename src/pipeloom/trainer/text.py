"""The text that is trained on: any file, or one that every machine has."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

from pipeloom.errors import DataError

HELD_OUT = 10
"""One byte of so many is held out for evaluation: the last ones."""


def read_text(path: Path | None) -> bytes:
    """The bytes of the file `path`; of the sources of Python's standard library, in order of their names, if None.

    Raises:
        DataError: it is no file, or cannot be read.
    """
    if path is not None:
        try:
            if path.exists() and not path.is_file():
                raise DataError(
                    f"--data {path} is {'a directory' if path.is_dir() else 'no regular file'}; give a file"
                )
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"--data {path} cannot be read: {error.strerror}") from None
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests"}
    names = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.py"))
    return b"".join((root / name).read_bytes() for name in names if not others & set(name.split("/")))


def digest(text: bytes) -> str:
    """What tells a text from others."""
    return hashlib.sha256(text).hexdigest()
