"""The persistent compile cache: a second run of the same program on the same layout starts without compiling it.

Programs in the folder are run as they are, so it is made readable for its owner alone. On a CPU nothing is kept:
compiled code depends on the machine's instruction set. Reference: https://docs.jax.dev/en/latest/persistent_compilation_cache.html
"""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jaxmeg.record.compiles import Compilation

MIN_SECONDS = 1.0  # programs that compile faster are not kept


def set_up_cache(folder: str | None, platform: str) -> str | None:
    """Keep compiled programs in `folder`; call before anything is compiled. Returns a line to print, if there is one:
    where the cache is, or a warning why there is none.

    platform: of the devices. A cache that the user has set up for jax (JAX_COMPILATION_CACHE_DIR) is left as it is.
    """
    own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if own:
        return f"compile cache {own} (JAX_COMPILATION_CACHE_DIR)"
    if folder is None or platform == "cpu":
        return None
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write")
    except OSError as error:
        return f"warning: no compile cache: record.compile_cache={folder}: {error.strerror}: give another folder, or null"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return f"compile cache {path}"


def outcome(compilation: Compilation) -> str:
    """How a program came to be: "compile cache: hit (0.4 s)", or what it took to compile."""
    return f"compile cache: {'hit' if compilation.from_cache else 'miss'} ({compilation.seconds:.1f} s)"
