"""Compilations are counted by function; the persistent cache keeps what is slow to compile, and says hit or miss."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmeg.record.cache import outcome, set_up_cache
from jaxmeg.record.compiles import Compilation, Watch

ROOT = Path(__file__).parent.parent


def fresh(name: str):
    """A jitted function of that name that has not been compiled."""
    def f(x):
        return x * 2
    f.__name__ = name
    return jax.jit(f)


def arrays(*sizes: int) -> list[jax.Array]:
    return [jax.device_put(np.ones(size, np.float32)) for size in sizes]


def names(watch: Watch) -> list[str]:
    return [compilation.name for compilation in watch.new()]


def test_two_shapes_are_two_compilations():
    step, (three, four) = fresh("step"), arrays(3, 4)
    with Watch() as watch:
        step(three), step(three), step(four), step(three)
        found = watch.new()
        assert [c.name for c in found] == ["step", "step"]
        assert all(c.seconds > 0 and not c.from_cache for c in found)
        assert watch.new() == []
        fresh("evaluate")(three)
        assert names(watch) == ["evaluate"]


def test_a_program_compiled_ahead_counts_once():
    step, (three,) = fresh("step"), arrays(3)
    with Watch() as watch:
        compiled = step.lower(three).compile()
        compiled(three), compiled(three)
        assert names(watch) == ["step"]


def test_watches_do_not_disturb_each_other():
    (three,) = arrays(3)
    with Watch() as outer:
        first = Watch().__enter__()
        fresh("a")(three)
        with Watch() as second:
            fresh("b")(three)
            first.__exit__(None, None, None)  # not in the order of opening
            fresh("c")(three)
        fresh("d")(three)
        assert (names(outer), names(first), names(second)) == (["a", "b", "c", "d"], ["a", "b"], ["b", "c"])
    fresh("e")(three)
    assert names(outer) == []


def test_a_watch_is_closed_by_an_error():
    (three,) = arrays(3)
    with pytest.raises(KeyError), Watch() as watch:
        raise KeyError
    fresh("f")(three)
    assert names(watch) == []


# ------------------------------------------------------------------ the persistent cache
CACHED = """
import json, sys
import jax, jax.numpy as jnp
from jaxmeg.record.cache import MIN_SECONDS, outcome, set_up_cache
from jaxmeg.record.compiles import Watch
line = set_up_cache(sys.argv[1], "gpu")
settings = [jax.config.jax_persistent_cache_min_compile_time_secs, jax.config.jax_persistent_cache_min_entry_size_bytes]
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # this test has no slow program
with Watch() as watch:
    jax.jit(lambda x: x * 2)(1.0)
    print(json.dumps([line, settings, MIN_SECONDS, [c.from_cache for c in watch.new()]]))
"""


def cached(folder: str, home: Path, **env: str):
    kept = {name: value for name, value in os.environ.items() if name != "JAX_ENABLE_COMPILATION_CACHE"}
    done = subprocess.run([sys.executable, "-c", CACHED, folder], cwd=ROOT, env=kept | {"HOME": str(home)} | env,
                          capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_second_process_finds_the_program(tmp_path):
    folder = tmp_path / "a" / "b"
    line, settings, least, first = cached("~/a/b", tmp_path)
    assert line == f"compile cache {folder}" and settings == [least, -1] and least <= 1
    assert first == [False] and list(folder.iterdir()) and folder.stat().st_mode & 0o777 == 0o700
    assert cached("~/a/b", tmp_path)[3] == [True]


def test_jaxs_own_setting_wins(tmp_path):
    line, *_ = cached("~/a", tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine"))
    assert line == f"compile cache {tmp_path / 'mine'} (JAX_COMPILATION_CACHE_DIR)"
    assert (tmp_path / "mine").exists() and not (tmp_path / "a").exists()


@pytest.fixture
def no_cache(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.jax_compilation_cache_dir
    yield
    assert jax.config.jax_compilation_cache_dir == before


def test_a_cpu_and_null_keep_nothing(no_cache, tmp_path):
    assert set_up_cache(str(tmp_path / "a"), "cpu") is None and set_up_cache(None, "gpu") is None
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_made_is_a_warning(no_cache, tmp_path):
    (tmp_path / "file").write_text("")
    line = set_up_cache(f"{tmp_path}/file/a", "gpu")
    assert line == (f"warning: no compile cache: record.compile_cache={tmp_path}/file/a: Not a directory: "
                    "give another folder, or null")


def test_a_folder_that_cannot_be_written_is_a_warning(no_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    line = set_up_cache(str(tmp_path), "gpu")
    assert line is not None and line.startswith("warning: no compile cache: ") and "no permission to write" in line


def test_hit_or_miss_in_words():
    assert outcome(Compilation("step", 0.44, True)) == "compile cache: hit (0.4 s)"
    assert outcome(Compilation("step", 61.0, False)) == "compile cache: miss (61.0 s)"
