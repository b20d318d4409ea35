"""What the fuzz tests share: values of any kind, damage to files, and what may come of it.

Examples are the same in every run. `JAXMEG_FUZZ=10000 pytest -n 0 tests/test_fuzz_*.py` tries so many new ones of each kind.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONG = int(os.environ.get("JAXMEG_FUZZ", "0"))
HANG_SECONDS, MOST_BYTES = 120, 2**30


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Settings of a fuzz test."""
    return settings(max_examples=LONG or examples, derandomize=not LONG, database=None, deadline=None,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture])


@contextmanager
def bounded() -> Iterator[None]:
    """Fails where the block hangs or grows by a gigabyte."""
    def hang(*_: object) -> None:
        raise AssertionError(f"no answer within {HANG_SECONDS} s")

    before, old = peak_bytes(), signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert peak_bytes() - before < MOST_BYTES


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def listing(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_one_line(message: str) -> None:
    assert message and message.isprintable(), message
    assert len(message) < 2000, message


# ---------------------------------------------------------------- values
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["null", "true", "~", "~nobody/x", "1e3", "0x10", "1:20", "inf", ".nan", "2001-99-99", "2001-01-01", "²", "٣", "-1",
                     "", " ", "a" * 5000, "../x", "/", "{a: 1}", "[[[", "&a [*a]", "{<<: *x}", "!!python/name:os.system", "9" * 30,
                     "9" * 5000]))
SIZES = st.one_of(st.integers(1, 16), st.sampled_from([0, -1, 10**6, 2**24, 2**31 - 1, 2**31, 10**18, 2**63, 10**400, True]))
NUMBERS = st.one_of(SIZES, st.integers(), st.floats())
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.binary(max_size=4), st.dates())
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | NUMBERS, inner, max_size=3), max_leaves=8)
JSON = st.recursive(st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
                    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)), max_leaves=6)


def as_yaml(tree: Any) -> str:
    """YAML of plain values; what it can't write, as their repr."""
    try:
        return yaml.safe_dump(tree)
    except (yaml.YAMLError, ValueError):
        return repr(tree)


YAML_ODDITIES = st.sampled_from([
    "!!map foo", "!!int foo", "!!bool x", "!!timestamp x", "2001-99-99", "!!set {a, b}", "!!binary é", "? [a]\n: 1", "<<: 3",
    "&a {optim: *a}", "!!python/object/apply:os.system ['touch MARKER']", "!!python/object/new:os.system ['touch MARKER']",
    "!!python/name:os.system", "!!python/module:antigravity", "!!python/object/apply:builtins.exec ['open(\"MARKER\", \"w\")']",
    "[" * 3000, "{a: " * 3000, "- " * 3000,
    "%YAML 9.9\n---\n1", "a: 1\n---\nb: 2", "\t", "\x07", "*a", "@", "'", '"\\uD800"', '"\\0"', "0x" + "f" * 5000, "1" * 5000])


def bomb(leaf: str = "x", levels: int = 30) -> str:
    """A few lines of YAML that stand for more values than any memory holds."""
    lines = [f"l0: &l0 [{leaf}, {leaf}]"] + [f"l{n}: &l{n} [*l{n - 1}, *l{n - 1}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- files
@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file with some bytes flipped, cut out, put in, or its end gone."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "insert", "remove"])):
            case "flip" if data:
                data[at] ^= draw(st.integers(1, 255))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case _:
                del data[at : at + draw(st.integers(1, 9))]
    return bytes(data)
