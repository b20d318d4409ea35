"""Files of pipeline schedules of any content: a table that is replayed and does every operation once, or problems of one line each."""

import os
from pathlib import Path

import pytest
from fuzz import assert_one_line, bounded, damaged, fuzz, listing
from hypothesis import given
from hypothesis import strategies as st
from orders import GOOD, ODD, as_lists, megatron_1f1b, megatron_interleaved, one_a_slot
from test_schedules import direct, interpret

from jaxmeg.pipeline.notation import ScheduleFileError
from jaxmeg.pipeline.user import MOST_BYTES, read_schedule, schedule_problems, user_table

FILES = [GOOD, ODD, as_lists(megatron_1f1b(3, 4), 1), as_lists(megatron_interleaved(2, 2, 4), 2), one_a_slot(megatron_1f1b(2, 3), 1)]
WORDS = st.one_of(
    st.builds("{}{}".format, st.sampled_from("FBfWb"), st.integers(-1, 5)),
    st.builds("{}{}.{}".format, st.sampled_from("FB"), st.integers(0, 3), st.integers(0, 3)),
    st.sampled_from(["F" + "9" * 5000, "B0.999999999", "F²", "rank", "rank 9999999999:", "stage 0", '"', "#", "\0", ";", "F0B0", "\u2028"]),
    st.text(max_size=3))
TEXTS = st.one_of(
    st.lists(st.lists(WORDS, max_size=4).map(" ".join), max_size=4).map(",".join),
    st.lists(st.lists(st.lists(WORDS, max_size=2).map(" ".join), min_size=1, max_size=3).map(",".join), max_size=8).map("\n".join),
    st.lists(st.builds("rank {}: {}".format, st.integers(0, 3) | st.integers(0, 10**12), st.lists(WORDS, max_size=6).map(" ".join)),
             max_size=4).map("\n".join))


def check(path: Path) -> None:
    with bounded():
        try:
            schedule = read_schedule(path)
            table = user_table(schedule)[0]
        except ScheduleFileError as error:
            assert error.problems == schedule_problems(path)
            for line in error.problems:
                assert_one_line(line)
            return
    virtual_stages = range(schedule.num_stages * schedule.num_chunks)
    wanted = {(kind, m, v) for kind in "FB" for m in range(schedule.num_microbatches) for v in virtual_stages}
    done = [op for stage in schedule.orders for op in stage]
    assert len(done) == len(wanted) and {(op.kind, op.m, op.v) for op in done} == wanted
    assert interpret(table) == direct(table)


@fuzz(100)
@given(TEXTS)
def test_any_schedule(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8", errors="surrogatepass")
    before = listing(tmp_path)
    check(tmp_path / "a.csv")
    assert listing(tmp_path) == before


@fuzz(150)
@given(st.sampled_from(FILES).flatmap(lambda text: damaged(text.encode())))
def test_a_damaged_schedule(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    check(tmp_path / "a.csv")


# ---------------------------------------------------------------- what was found
@pytest.mark.parametrize(("text", "line"), [
    ("F" + "9" * 5000, "line 1, stage 0: F" + "9" * 199 + "... is no operation"),
    ("F²\nB²\n", "line 1, stage 0: F² is no operation"),
    ("rank 999999999: F0 B0\n", "rank 0 has no line, but rank 999999999 has: number ranks 0, 1, ..."),
    ("rank " + "9" * 5000 + ": F0\n", "line 1, stage 0: rank is no operation"),
    ("F0.999999999\nB0.999999999\n", "line 1, stage 0: F0.999999999 is out of range: the chunks of most stages are 0 to 0"),
    ("F0 " * 1000, "line 1, stage 0: F0 and F0 and F0 in one cell"),
    ("F0" + " " * MOST_BYTES, f"cannot be read (More than {MOST_BYTES:,} bytes)"),
    ('"' + "F" * 150_000 + '\nB0', "line 1, stage 0: " + "F" * 200 + "... is no operation"),
])
def test_files_that_hung_or_crashed(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with bounded():
        found = schedule_problems(tmp_path / "a.csv")
    assert found[0].startswith(line), found[0]
    for problem in found:
        assert_one_line(problem)


def test_cells_in_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"F0",""\n"","F0 B0"\n"B0",""\n')
    assert schedule_problems(tmp_path / "a.csv") == []


@pytest.mark.parametrize("path", ["\0.csv", "a" * 5000 + ".csv", "~nobody/a.csv"])
def test_names_that_no_file_has(path: str) -> None:
    [line] = schedule_problems(path)
    assert line.startswith("cannot be read (")


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    with bounded():
        assert schedule_problems(tmp_path / "a.csv") == ["cannot be read (Not a regular file): give an existing file"]
