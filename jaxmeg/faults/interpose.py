"""A program run under observation: `python -m jaxmeg.faults.interpose FOLDER NUMBER PROGRAM ...` kills it right before its NUMBERth
change of a file below FOLDER, so that a crash can be aimed between any two of them. NUMBER 0 never does.

SIGUSR1 makes the main thread sleep for good while all other threads go on: a process that is alive, and stuck. Changes are seen
through Python's audit events; what C++ writes between them is not. Reference: https://peps.python.org/pep-0578/
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def killer(folder: Path, number: int) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook."""
    seen, root = 0, os.path.abspath(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == "open":
            paths = arguments[:1] if arguments[2] & _WRITES else ()
        else:
            paths = arguments if event in _CHANGES else ()
        names = [os.fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike)]
        if any(os.path.abspath(name).startswith(root) for name in names):
            seen += 1
            if seen == number:
                what = " -> ".join(os.path.relpath(name, root) for name in names)
                os.write(2, f"killed before change {number}: {event} {what}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def main() -> None:
    folder, number, program = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.argv[:] = sys.argv[3:]
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1e6))
    sys.addaudithook(killer(folder, number))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
