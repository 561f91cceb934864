"""Control characters in text that others wrote: escapes on a terminal, themselves in a pipe or a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
pytest.importorskip("tqdm")
pty = pytest.importorskip("pty")

import checkpoint_fuzz
from flashkernel.terminal import visible

NASTY = ["\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\x1b[5n", "\r", "\x08", "\x7f", "\u202e", "\u2066", "\x00", "\x0e"]


def test_every_control_character_is_escaped() -> None:
    kept = "\n\t"
    for code in [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]:
        character = chr(code)
        shown = visible(f"a{character}b")
        assert shown == (f"a{character}b" if character in kept else f"a{ascii(character)[1:-1]}b")
    text = "def f(x):\n\treturn 'Grüße, 世界 \U0001f469\u200d\U0001f4bb \u200f עברית \u00a0' # \\x1b"
    assert visible(text) == text  # what is no control stays, joiners of emoji and marks of direction too
    assert "".join(map(visible, "\x1b[31m red")) == visible("\x1b[31m red")  # in any pieces


def hostile_model(directory: Path) -> Path:
    """A model each of whose tokens is a control sequence."""
    checkpoint_fuzz.make(directory, "gpt2", False)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = {f"{NASTY[i % len(NASTY)]}{i}": i for i in range(20)}
    tokenizer["model"]["vocab"] = {**words, "[UNK]": 20, "x\x1b[1m": 21, "y\x1b[1m": 22, "z\x1b[1m": 23}
    path.write_text(json.dumps(tokenizer))
    return directory


def run(directory: Path, terminal: bool) -> tuple[str, str]:
    """stdout and stderr of the command, either one a pipe or stdout a terminal."""
    arguments = ["--model", str(directory), "--prompt", "\x1b[31mred \x1b]52;c;x\x07", "--max-new-tokens", "12"]
    command = [sys.executable, "-m", "flashkernel.cli", "generate", "--ignore-eos", "--device", "cpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"}
    if not terminal:
        done = subprocess.run(command, capture_output=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode(), done.stderr.decode()
    master, slave = pty.openpty()
    try:
        with subprocess.Popen(command, stdout=slave, stderr=subprocess.PIPE, env=environment) as process:
            os.close(slave)
            output = b""
            while True:
                try:
                    piece = os.read(master, 4096)
                except OSError:  # the other end is closed
                    break
                if not piece:
                    break
                output += piece
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return output.decode().replace("\r\n", "\n"), errors.decode()  # the terminal's own ends of lines
    finally:
        os.close(master)


def test_generated_text_does_not_command_the_terminal(tmp_path: Path) -> None:
    directory = hostile_model(tmp_path / "model")
    raw, _ = run(directory, terminal=False)
    shown, _ = run(directory, terminal=True)
    text, escaped = raw, shown
    assert "\x1b[31mred" in text and any(word in text.partition("x\x07")[2] for word in NASTY)
    assert escaped == visible(text) != text
    assert visible(shown) == shown


def test_errors_do_not_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flashkernel.cli import main

    assert main(["generate", "--prompt", "a", "--model", str(tmp_path / "\x1b[2Jx")]) == 2
    directory = hostile_model(tmp_path / "model")
    path = directory / "config.json"
    for changes in ({"model_type": "\x1b[2J"}, {"activation_function": "\x1b[2J"}, {"n_head": "\x1b[2J\n\n"}):
        sound = path.read_text()
        path.write_text(json.dumps({**json.loads(sound), **changes}))
        assert main(["generate", "--prompt", "a", "--model", str(directory), "--device", "cpu"]) == 2
        path.write_text(sound)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(visible(line) == line and "x1b[2J" in line for line in lines)
