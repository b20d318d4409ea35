"""jaxmeg: sharded LLM training on JAX, where the parallel layout is a flag.

`jaxmeg.initialize` and `jaxmeg.Config` are here for convenience and are imported when they are first asked for; everything else
is imported from the module that defines it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmeg.config import Config as Config
    from jaxmeg.engine import initialize as initialize

_HOME = {"initialize": "jaxmeg.engine", "Config": "jaxmeg.config"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module jaxmeg has no attribute {name}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
