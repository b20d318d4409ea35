"""Files of schedules: what is wrong with them is named in one line, the script draws and writes them, the documentation is true."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from orders import GOOD, ODD, as_lists, megatron_1f1b, megatron_interleaved
from test_schedules import direct, interpret

from jaxmeg.pipeline.notation import ScheduleFileError
from jaxmeg.pipeline.user import read_schedule, schedule_problems, user_table

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "schedule.py"


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "my.csv") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path
    return write


WRONG = [
    ("F0,\nW0,F0\nB0,B0\n", "line 2, stage 0: W0 is no operation: write F<microbatch>.<chunk> or B<microbatch>.<chunk>, such as F2.0"),
    ("tick,stage 0\n0,F0\n", "line 1, stage 0: tick is no operation"),
    ("F0;\n;F0\n", "line 1, stage 0: F0; is no operation"),
    (GOOD.replace("F1 B0", "F7 B0"), "line 1, stage 0: F7 is out of range: the microbatches of most stages are 0 to 1"),
    (GOOD.replace("F1 B0", "F7 B0"), "line 1, stage 0: the stage ends without F1: add it"),
    (GOOD.replace("F1 B0", "F1.4 B0"), "line 1, stage 0: F1.4 is out of range: the chunks of most stages are 0 to 0"),
    (ODD.replace("F3.1 B0.1", "F3 B0.1"), "line 10, stage 0: F3 names no chunk of 2: write F3.0 to F3.1"),
    (GOOD.replace("F1 B0", "F1 F1 B0"), "line 1, stage 0: F1 a second time, after line 1: leave one out"),
    ("F0,\nF1,F0 B0\nB0,F1 B1\n", "line 3, stage 0: the stage ends without B1: add it"),
    ("F0,\nF1,F0\nB0,F1 B0\nB1,\n", "line 4, stage 1: the stage ends without B1: add it"),
    (GOOD.replace("F0 B0", "B0 F0"), "line 2, stage 1: F0 after its backward in line 2: a forward comes first"),
    ("F0,\nF1 F2,F0\n", "line 2, stage 0: F1 and F2 in one cell: a tick has one forward of a stage at most"),
    ("F0,\nF0,F0,F0\n", "line 2: 3 cells after rows of 2: write one cell a stage, also if it is empty"),
    ("stage 1,stage 0\nF0,\n", "line 1: the header stage 1,stage 0 is out of order: columns are stage 0, stage 1, ..."),
    (GOOD + "F0 B0\n", "line 3: does not start with a rank: write for example rank 2: F0 F1 B0 B1"),
    (GOOD + "rank 1: F0\n", "line 3, stage 1: rank 1 is listed twice: write all its operations in one line"),
    (GOOD.replace("rank 1", "rank 2"), "rank 1 has no line, but rank 2 has: number ranks 0, 1, ..."),
    ("# nothing\n\n", "holds no operation"),
    ("stage 0,stage 1\n,\n", "holds no operation"),
    (
        "rank 0: F0 B0 F1 B1\nrank 1: F1 F0 B0 B1\n",
        "line 1, stage 0: B0 can never run: stage 0's B0 (line 1) waits for stage 1's B0 (line 2) behind stage 1's F1 (line 2), "
        "and stage 1's F1 (line 2) waits for stage 0's F1 (line 1) behind stage 0's B0 (line 1)",
    ),
    ("F0.1\nF0.0\nB0.1\nB0.0\n", "line 1, stage 0: F0.1 can never run: stage 0's F0.1 (line 1) waits for stage 0's F0.0 (line 2)"),
]


@pytest.mark.parametrize(("text", "line"), WRONG)
def test_what_is_wrong_is_named(text: str, line: str, save: Callable[..., Path]) -> None:
    found = schedule_problems(save(text))
    assert any(problem.startswith(line) for problem in found), found
    assert all("\n" not in problem for problem in found)


def test_a_file_that_cant_be_read(tmp_path: Path, save: Callable[..., Path]) -> None:
    assert schedule_problems(tmp_path / "none.csv") == ["cannot be read (No such file or directory): give an existing file"]
    path = save("")
    path.write_bytes(b"F0\xff")
    assert schedule_problems(path) == ["is not text in UTF-8: export it as CSV in UTF-8"]
    path.write_bytes(b"\xef\xbb\xbfF0,\r\n,F0 B0\r\nB0,\r\n")  # as spreadsheets write it
    assert schedule_problems(path) == []
    assert schedule_problems(save("x,y\n" * 50)) == [*schedule_problems(save("x,y\n" * 5)), "and 90 more problems"]


@pytest.mark.parametrize("removed", range(0, 32, 3))
def test_no_operation_can_be_left_out_or_doubled(removed: int, save: Callable[..., Path]) -> None:
    words = [word for word in as_lists(megatron_interleaved(2, 2, 4), 2).replace("\n", " \n ").split(" ") if word]
    at = [i for i, word in enumerate(words) if word[0] in "FB"][removed]
    for changed in (words[:at] + words[at + 1 :], words[: at + 1] + words[at:]):
        found = schedule_problems(save(" ".join(changed).replace("\n ", "\n"), "my.txt"))
        assert len(found) == 1 and words[at] in found[0] and found[0].startswith("line "), found


def test_a_rank_may_be_a_row_of_cells(save: Callable[..., Path]) -> None:
    cells = "# ops\nRank 1,F0,B0,,F1,B1\nrank 0,F0,F1,B0,B1\n"
    assert read_schedule(save(cells)).orders == read_schedule(save(GOOD, "my.txt")).orders


# ---------------------------------------------------------------- the script
def run_script(*arguments: object) -> int:
    try:
        runpy.run_path(str(SCRIPT))["main"]([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_script_draws_and_writes(save: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(as_lists(megatron_1f1b(2, 4), 1), "my.txt")
    assert run_script("--schedule", path, "--write", tmp_path / "out.csv") == 0
    shown = capsys.readouterr().out
    assert "my.txt: 2 stages, 1 chunk a stage, 4 microbatches" in shown
    assert "time    15 (a stage's forward of a microbatch 1, its backward 2), 1.00 times that of 1f1b; bubble 20.0%" in shown
    assert (tmp_path / "out.csv").read_text() == "stage 0,stage 1\nF0,\nF1,F0 B0\nF2 B0,F1 B1\nF3 B1,F2 B2\nB2,F3 B3\nB3,\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "PATH", "--pp", 4), "--pp 4 does not fit PATH, which has 2: leave it out"),
        (("--schedule", "none.csv"), "none.csv: cannot be read"),
        (("--schedule", "gpipe"), "--pp and --microbatches must be given with --schedule gpipe"),
        (("--schedule", "PATH", "--write", "out.json"), "--write=out.json would not be read as a schedule"),
        (("--schedule", "forward", "--pp", 2, "--microbatches", 2, "--write", "out.csv"), "schedule forward has no backwards"),
    ],
)
def test_the_script_refuses_in_one_line(
    arguments: tuple[object, ...], message: str, save: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save(GOOD, "my.txt"))
    assert run_script(*(path if argument == "PATH" else argument for argument in arguments)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and message.replace("PATH", path) in shown.err


def test_the_documentation_is_true(save: Callable[..., Path]) -> None:
    """Every example of docs/schedules.md can be read."""
    text = (SCRIPT.parents[1] / "docs" / "schedules.md").read_text()

    def blocks() -> Iterator[str]:
        for part in text.split("```")[1::2]:
            language, _, body = part.partition("\n")
            if language in ("csv", "txt"):
                yield body

    examples = list(blocks())
    assert len(examples) >= 3
    for body in examples:
        try:
            table = user_table(read_schedule(save(body)))[0]
        except ScheduleFileError as error:
            raise AssertionError(f"{error}\n{body}") from error
        assert interpret(table) == direct(table)
