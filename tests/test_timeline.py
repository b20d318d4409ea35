"""The drawing of timelines, through the script that a user calls: what it prints, what it writes, how it refuses."""

import runpy
from collections import Counter
from pathlib import Path

import pytest

from jaxmeg.pipeline.schedules import NAMES

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "schedule.py"
ORDINARY = ("--schedule", "1f1b", "--pp", "4", "--microbatches", "8")
INTERLEAVED = ("--schedule", "interleaved", "--pp", "2", "--microbatches", "4", "--chunks", "2")


def run_script(*arguments: str) -> int:
    """Its exit code."""
    try:
        runpy.run_path(str(SCRIPT))["main"](list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.parametrize("name", NAMES)
def test_it_draws_every_schedule(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    chunks = 2 if name == "interleaved" else 1
    assert run_script("--schedule", name, "--pp", "4", "--microbatches", "8", "--chunks", str(chunks)) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stage ")]
    assert len(rows) == 4
    per_microbatch = chunks * (1 if name == "forward" else 2)
    for row in rows:
        assert Counter(row.replace("·", " ").split()[2:]) == Counter({str(m): per_microbatch for m in range(8)})


def test_the_drawing_of_1f1b(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run_script("--schedule", "1f1b", "--pp", "2", "--microbatches", "3") == 0
    assert capsys.readouterr().out == """\
1f1b: 2 stages, 1 chunk a stage, 3 microbatches
bubble  25.0%: 3 of 12, formula 3 (time of forward 1, backward 2 of one microbatch on one stage)
live    3 microbatches at most on a stage, formula 3
slots   ring 3, forward inbox 2, backward inbox 2
ticks   E, EF, 3 EFHBG, BG, G
        E embedding, F forward, H head and loss, B backward, G embedding gradient

          F F B F B F B B
stage 0   0 1 · 2 0 · 1 2
stage 1   · 0 0 1 1 2 2 ·

 forward  backward   · bubble
"""


def test_a_narrow_terminal_wraps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run_script(*ORDINARY) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stage 3")]
    assert len(rows) == 2 and max(map(len, rows)) <= 40
    assert Counter("".join(row[7:] for row in rows).split())["7"] == 2


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_it_writes_a_figure(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / f"timeline{suffix}"
    assert run_script(*INTERLEAVED, "--out", str(out)) == 0
    head = out.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in out.read_bytes()[:2000]
    assert out.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*ORDINARY, "--chunks", "2"), "takes one chunk a stage"),
        ((*ORDINARY, "--schedule", "gpip"), "gpipe"),
        ((*ORDINARY, "--microbatches", "0"), "num_microbatches=0"),
        ((*ORDINARY, "--pp", "four"), "four"),
        (("--pp", "4"), "--microbatches"),
        ((*ORDINARY, "--out", "timeline.doc"), ".png or .svg"),
        ((*ORDINARY, "--forward_cost", "0"), "must be positive"),
        ((*ORDINARY, "--out", "/no/such/folder/t.png"), "/no/such"),
    ],
)
def test_it_says_what_is_wrong_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and message in shown.err
