"""The preview: what it says of a row, colours on a terminal and none in a pipe, mistakes in one line, no jax."""

import json
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "preview_data.py"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Three short documents and one that is longer than a row of 16."""
    monkeypatch.setenv("JAXMEG_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "notes.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("one\nline", "two", "a\tb", "seventeen letters")))
    return ["--data", str(path), "--data.validation_fraction", "0", "--data.packing", "fit", "--seq_len", "16"]


def show(capsys, argv) -> str:
    runpy.run_path(str(SCRIPT))["main"](argv)
    return capsys.readouterr().out


def test_rows_of_a_pipe(notes, capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    out = show(capsys, [*notes, "--rows", "2"])
    assert "\x1b" not in out
    rows = [block.splitlines() for block in out.split("\n\n") if block.startswith("row")]
    texts = {re.sub(r"^row \d: notes.jsonl, epoch 0, row \d of it: ", "", head): text for head, text in rows}
    # 17 letters fill a row whose last label is the 17th; the other documents share one.
    assert texts["16 tokens, 16 trained, 1 document"] == " document 3, position 0 seventeen letter -> s"
    shared = texts["14 tokens, 11 trained, 3 documents"]
    assert shared.startswith(" document 0, position 0 one⏎line document ") and shared.endswith(" 2 x padding")
    assert " document 1, position 0 two" in shared and " document 2, position 0 a⇥b" in shared
    assert re.search(r"tokens trained +27\n", out) and "only on a terminal" in out


def test_colours_on_a_terminal(notes, capsys, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = show(capsys, [*notes, "--rows", "2"])
    [shared] = [line for line in out.splitlines() if "one" in ANSI.sub("", line) and "position" in line]
    styles = re.findall(r"\x1b\[([0-9;]*)m(.)\x1b\[0m", shared)
    grounds = [style.split(";")[-1] for style, _ in styles]
    assert "".join(char for _, char in styles).startswith("one⏎line")
    assert all(a != b for a, b in pairwise(grounds[:8]))  # a shade a token
    assert not set(grounds[:8]) & set(grounds[8:11])  # a colour a document
    assert ["3" in style.split(";") for style, _ in styles[:8]] == [False] * 7 + [True]  # nothing is predicted from the last one
    assert "one shade a token" in out


def test_from_is_a_row_of_the_stream(notes, capsys):
    few, later = (show(capsys, [*notes, *argv]) for argv in (["--rows", "4"], ["--rows=1", "--from=3"]))
    block = next(block for block in few.split("\n\n") if block.startswith("row 3: "))
    assert "epoch 1" in block and block in later and "row 2:" not in later


def test_positions_go_on_where_documents_are_joined(notes, capsys):
    out = show(capsys, [*notes, "--data.separate=false", "--rows", "2"])
    [shared] = [line for line in out.splitlines() if "one⏎line" in line]
    assert shared.count("position 0") == 1 and shared.count(" document ") == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rows", "0"], "error: --rows 0 --from 0 is out of range: use rows 1 or more, from row 0 or a later one"),
        (["--rows", "two"], "error: argument --rows: invalid int value: 'two'"),
        (["--sq_len", "8"], "error: unknown key sq_len: did you mean data.seq_len?"),
        (["--seq_len", "0"], "error: data.seq_len=0 is out of range"),
        (["--data", "nowhere.txt"], "error: data.train=nowhere.txt does not exist"),
        (["--data.end_token", "<|end|>"], "error: end_token=<|end|> is not a token of bytes"),
        (["--data.source", "my.rows:data"], "error: data.source=my.rows:data has rows of its own making"),
    ],
)
def test_a_mistake_is_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(SCRIPT))["main"](argv)
    out, err = capsys.readouterr()
    assert error.value.code == 2 and out == "" and err.startswith(message) and err.count("\n") == 1


def test_it_needs_no_jax_and_ends_when_its_pipe_does():
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r})['main'](['--rows', '1']); sys.exit('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "") and "shipped with jaxmeg" in result.stdout
    script = subprocess.Popen([sys.executable, SCRIPT, "--rows", "2000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert script.stdout is not None and script.stderr is not None
    script.stdout.readline()
    script.stdout.close()
    assert script.stderr.read() == ""
    script.stderr.close()
    script.wait(timeout=60)
