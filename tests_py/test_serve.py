"""The server, asked by OpenAI's own client; refusals, limits, disconnects, metrics and shutdown over plain HTTP."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from flashkernel.generate import Engine, PromptLookup, SamplingOptions, TextOutput, find_model
from serving import MODEL, NAME, TOKENIZER, Server, http, render, serving, until

PROMPT = "def fibonacci(n):"
CONTEXT = MODEL.max_positions


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def alone(prompt: str, count: int, sampling: SamplingOptions, sequence: int = 0, stop: Any = (), **more: Any) -> Any:
    """The oracle: text and finish of one sequence in an engine of its own."""
    engine = Engine(MODEL, page_size=64)
    ids = TOKENIZER.encode(prompt, add_special=not more.pop("chat", False))
    output, text = TextOutput(TOKENIZER, ids, stop), ""

    def until(token: int) -> bool:
        nonlocal text
        text += output.put(token)
        return output.stopped

    request = engine.submit(ids, max_new_tokens=count, sampling=sampling, sequence=sequence, until=until, **more)
    while not request.finish:
        engine.step()
    return text + output.end(), request.finish, request.generated


# --- answers


def test_completion_is_the_engines(client: Any) -> None:
    sampling = SamplingOptions(temperature=0.9, top_p=0.95, seed=7, frequency_penalty=0.5)
    asked: dict[str, Any] = dict(temperature=0.9, top_p=0.95, seed=7, frequency_penalty=0.5)
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, n=2, **asked)
    for i, choice in enumerate(found.choices):
        text, finish, _ = alone(PROMPT, 24, sampling, i)
        assert (choice.index, choice.text, choice.finish_reason) == (i, text, finish)
    assert found.usage.prompt_tokens == len(TOKENIZER.encode(PROMPT)) and found.usage.completion_tokens == 48
    greedy = client.completions.create(model=NAME, prompt=[PROMPT, "import"], max_tokens=8, temperature=0)
    expected = [alone(text, 8, SamplingOptions(), i)[0] for i, text in enumerate((PROMPT, "import"))]
    assert [choice.text for choice in greedy.choices] == expected
    tokens = client.completions.create(model=NAME, prompt=TOKENIZER.encode(PROMPT), max_tokens=8, temperature=0)
    assert tokens.choices[0].text == expected[0]


def test_stream_is_the_whole_answer_in_parts(client: Any) -> None:
    asked: dict[str, Any] = dict(model=NAME, prompt=PROMPT, max_tokens=40, temperature=1.2, seed=3, n=2)
    whole = client.completions.create(**asked)
    texts, finish, usage, chunks = ["", ""], [None, None], None, 0
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        chunks += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert texts == [choice.text for choice in whole.choices] and chunks > 10
    assert finish == [choice.finish_reason for choice in whole.choices] and usage == whole.usage


def test_chat_and_its_stream(client: Any) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Write"}, {"type": "text", "text": " code."}]},
    ]
    asked: dict[str, Any] = dict(model=NAME, messages=messages, max_completion_tokens=20, temperature=0.7, seed=5)
    found = client.chat.completions.create(**asked)
    text = render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write code."}])
    expected = alone(text, 20, SamplingOptions(temperature=0.7, seed=5), chat=True)
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == expected[:2]
    assert found.choices[0].message.role == "assistant"
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected[0]
    assert parts[-1].choices[0].finish_reason == expected[1]


def test_stop_strings_and_ignore_eos(client: Any) -> None:
    more: dict[str, Any] = dict(model=NAME, prompt=PROMPT, max_tokens=60, temperature=0)
    plain = client.completions.create(**more, extra_body={"ignore_eos": True}).choices[0].text
    stop = plain[12:15]
    found = client.completions.create(**more, stop=["\0", stop], extra_body={"ignore_eos": True}).choices[0]
    assert found.text == plain[: plain.index(stop)] and found.finish_reason == "stop"
    streamed = client.completions.create(**more, stop=stop, stream=True, extra_body={"ignore_eos": True})
    assert "".join(part.choices[0].text for part in streamed) == found.text


def test_logprobs_of_both_kinds(client: Any, server: Server) -> None:
    text, _, tokens = alone(PROMPT, 12, SamplingOptions())
    ids = TOKENIZER.encode(PROMPT)
    expected = Engine(MODEL, page_size=64).score(ids + tokens)[len(ids) - 1 :].tolist()
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3).choices[0]
    count = len(found.logprobs.tokens)
    assert count in (len(tokens), len(tokens) - 1)  # an end-of-text token is no part of the text
    assert found.logprobs.token_logprobs == pytest.approx(expected[:count], abs=1e-3)
    assert "".join(found.logprobs.tokens) == text and len(found.logprobs.text_offset) == count
    for token, value, top in zip(
        found.logprobs.tokens, found.logprobs.token_logprobs, found.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values())
    messages = [{"role": "user", "content": "x"}]
    asked: dict[str, Any] = dict(model=NAME, messages=messages, max_tokens=6, logprobs=True, top_logprobs=2, seed=1)
    chat = client.chat.completions.create(**asked).choices[0]
    for entry in chat.logprobs.content:
        assert len(entry.top_logprobs) == 2 and entry.logprob <= 0
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    parts = client.chat.completions.create(**asked, stream=True)
    streamed = [e for part in parts if part.choices[0].logprobs for e in part.choices[0].logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in chat.logprobs.content]


def test_bias_reaches_the_engine(client: Any) -> None:
    token = TOKENIZER.encode("import")[0]
    found = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={str(token): 100}
    )
    assert found.choices[0].text == TOKENIZER.decode([token] * 3)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list().data] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_page_runs_its_own_script_alone(server: Server) -> None:
    found = http.get(server.url + "/")
    policy = found.headers["content-security-policy"]
    assert found.headers["content-type"].startswith("text/html") and "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/=]{44}'", policy) and "unsafe" not in policy
    assert not re.search(r"https?://", found.text)  # nothing from elsewhere


# --- refusals


@pytest.mark.parametrize(
    ("changes", "status", "param", "code", "text"),
    [
        ({"model": "other"}, 404, "model", "model_not_found", "'other' does not exist; 'demo' is served"),
        ({"model": None}, 400, "model", None, "model is missing"),
        ({"max_tokens": 10**6}, 400, "prompt", "context_length_exceeded", "1000000 are asked for"),
        ({"prompt": "x = 1\n" * 3000}, 400, "prompt", "context_length_exceeded", "shorten prompt"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value", r"an integer in \[1,"),
        ({"max_tokens": "4"}, 400, "max_tokens", "invalid_type", "max_tokens is a string; an integer is needed"),
        ({"temperature": -1}, 400, "temperature", "invalid_value", "temperature=-1.0; a finite number >= 0"),
        ({"temperature": True}, 400, "temperature", "invalid_type", "a boolean; a number"),
        ({"top_p": 0}, 400, "top_p", "invalid_value", "top_p=0.0"),
        ({"frequency_penalty": 3}, 400, "frequency_penalty", None, r"in \[-2, 2\]"),
        ({"n": 1000}, 400, "n", "invalid_value", r"an integer in \[1, 128\]"),
        ({"logprobs": 21}, 400, "logprobs", "invalid_value", r"in \[0, 20\]"),
        ({"logit_bias": {"99999999": 1}}, 400, "logit_bias", None, "has the key '99999999'"),
        pytest.param({"logit_bias": {"1" * 5000: 1}}, 400, "logit_bias", None, "has the key '11111", id="digits"),
        ({"logit_bias": {"1": 101}}, 400, "logit_bias", None, r"not a number in \[-100, 100\]"),
        ({"stop": ["a"] * 5}, 400, "stop", None, "at most 4 strings"),
        ({"stop": ""}, 400, "stop", None, "none empty"),
        ({"prompt": [[]]}, 400, "prompt", None, "no tokens"),
        ({"prompt": [[-1]]}, 400, "prompt", None, "the token id -1"),
        ({"prompt": {"a": 1}}, 400, "prompt", None, "prompt is not a string"),
        ({"prompt": "\ud800"}, 400, "prompt", None, "surrogate"),
        ({"echo": True}, 400, "echo", "unsupported_parameter", "not supported"),
        ({"best_of": 3}, 400, "best_of", None, "best_of"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", None, "without stream=true"),
        ({"temprature": 1}, 400, "temprature", "unknown_parameter", "'temprature' is unknown"),
    ],
    ids=str,
)
def test_bad_requests(
    server: Server, changes: dict[str, Any], status: int, param: str, code: str | None, text: str
) -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, **changes}
    headers = {"Content-Type": "application/json"}  # escapes half a surrogate pair, which httpx's own JSON does not
    found = http.post(server.url + "/v1/completions", content=json.dumps(body), headers=headers)
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["code"]) == (status, param, code), error
    assert re.search(text, error["message"]) and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 10**7}, "messages"),
    ],
    ids=str,
)
def test_bad_chats(server: Server, changes: dict[str, Any], param: str) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], **changes}
    found = http.post(server.url + "/v1/chat/completions", json=body)
    assert found.status_code == 400 and found.json()["error"]["param"] == param, found.text


@pytest.mark.parametrize(
    ("content", "headers", "status", "text"),
    [
        (b"{", {}, 400, "not valid JSON"),
        (b"[" * 100000, {}, 400, "not valid JSON"),
        (b"\xff", {}, 400, "not valid JSON"),
        (b'{"model": NaN}', {}, 400, "NaN is no number"),
        (b"[]", {}, 400, "an array; a JSON object"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "application/json is needed"),
        (b" " * (5 << 20), {}, 413, "more than 4194304 bytes"),
    ],
    ids=["broken", "deep", "bytes", "nan", "array", "type", "large"],
)
def test_bad_bodies(server: Server, content: bytes, headers: dict[str, str], status: int, text: str) -> None:
    headers = {"Content-Type": "application/json", **headers}
    found = http.post(server.url + "/v1/completions", content=content, headers=headers)
    assert found.status_code == status and text in found.json()["error"]["message"], found.text


def test_unknown_paths_and_methods(server: Server) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
        found = http.request(method, server.url + path)
        assert found.status_code == status and found.json()["error"]["type"] == "invalid_request_error"


def test_a_model_without_template_refuses_chat() -> None:
    with serving(chat=False) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="has no chat template; use /v1/completions") as caught:
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])
        assert caught.value.code == "no_chat_template"


def test_keys_hosts_and_limits() -> None:
    options: dict[str, Any] = dict(api_key="s3cret", hosts=("127.0.0.1",), max_sequences=4, max_tokens=1000)
    with serving(**options) as server:
        wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="other", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            assert http.get(server.url + path).status_code == 401
        assert http.get(server.url + "/health").status_code == 200
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="s3cret", max_retries=0)
        assert client.models.list().data
        found = http.get(server.url + "/health", headers={"Host": "evil.example:80"})
        assert found.status_code == 403 and found.json()["error"]["code"] == "unknown_host"
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=NAME, prompt=PROMPT, n=5)
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="at most 1000"):
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1001)


# --- clients that go away, time that is over, shutdown


LONG: dict[str, Any] = {"model": NAME, "prompt": "x", "max_tokens": CONTEXT - 8, "ignore_eos": True, "n": 4, "seed": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_job(server: Server, stream: bool) -> None:
    worker_idle = lambda: http.get(server.url + "/health").json()["sequences"] == 0
    before = metric(server, "flashkernel_cancelled_total")
    if stream:
        with http.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}) as response:
            assert next(response.iter_lines()).startswith("data: ")
    else:
        with socket.create_connection(server.listener.getsockname()) as client:
            body = json.dumps(LONG).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            until(lambda: not worker_idle())
    until(lambda: worker_idle() and server.engine.idle and server.engine.pages_in_use == 0)
    assert metric(server, "flashkernel_cancelled_total") == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_time_that_is_over(stream: bool) -> None:
    with serving(timeout=0.2) as server:
        found = http.post(server.url + "/v1/completions", json={**LONG, "stream": stream})
        if stream:
            error = json.loads(found.text.split("\n\n")[-3].removeprefix("data: "))["error"]
            assert found.text.endswith("data: [DONE]\n\n")
        else:
            assert found.status_code == 504
            error = found.json()["error"]
        assert error["code"] == "timeout" and "within 0.2 seconds" in error["message"]
        until(lambda: server.engine.idle)


def metric(server: Server, name: str) -> float:
    text = http.get(server.url + "/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))


def test_metrics_count() -> None:
    with serving() as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, n=2, extra_body={"ignore_eos": True})
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=10**6)
        until(lambda: metric(server, "flashkernel_kv_pages_used") == 0)
        text = http.get(server.url + "/metrics").text
        assert 'flashkernel_requests_total{endpoint="completions",status="200"} 1.0' in text
        assert 'flashkernel_requests_total{endpoint="completions",status="400"} 1.0' in text
        assert metric(server, "flashkernel_prompt_tokens_total") == 2 * found.usage.prompt_tokens
        assert metric(server, "flashkernel_generated_tokens_total") == found.usage.completion_tokens == 10
        assert metric(server, "flashkernel_time_to_first_token_seconds_count") == 1
        assert metric(server, "flashkernel_request_seconds_count") == 1
        assert metric(server, "flashkernel_batch_size_sum") >= 2 and metric(server, "flashkernel_kv_pages") == 64
        assert metric(server, "flashkernel_sequences_waiting") == 0 == metric(server, "flashkernel_sequences_running")


def test_metrics_of_drafts() -> None:
    """A text that repeats itself, with drafts from it: the same answer, and what was drafted is told."""
    body = {
        "model": NAME,
        "prompt": "import os\nimport sys\n" * 6,
        "max_tokens": 40,
        "ignore_eos": True,
        "temperature": 0,
    }
    texts = []
    for speculation in (None, PromptLookup(adaptive=False)):
        with serving() as server:
            server.engine.speculation = speculation
            texts.append(http.post(server.url + "/v1/completions", json=body).json()["choices"][0]["text"])
            until(lambda server=server: metric(server, "flashkernel_kv_pages_used") == 0)
            stats = server.engine.stats
            told = [
                metric(server, f"flashkernel_{name}_total") for name in ("drafts", "drafted_tokens", "accepted_tokens")
            ]
            assert told == [stats.drafts, stats.drafted_tokens, stats.accepted_tokens]
    assert texts[0] == texts[1] and told[2] > told[0] > 0


def test_logits_that_are_not_finite_end_one_job(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told; the server goes on."""
    forward = MODEL.forward
    with monkeypatch.context() as patch:

        def broken(*args: Any) -> Any:
            return forward(*args) * math.nan

        patch.setattr(MODEL, "forward", broken, raising=False)
        found = http.post(server.url + "/v1/completions", json={"model": NAME, "prompt": PROMPT})
    assert found.status_code == 500 and found.json()["error"]["type"] == "server_error"
    assert "nan" in found.json()["error"]["message"]
    good = http.post(server.url + "/v1/completions", json={"model": NAME, "prompt": "x", "max_tokens": 2})
    assert good.status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_thread_that_ends_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait get an error, and so do later ones."""

    def broken(self: TextOutput) -> str:
        raise RuntimeError("planted")

    with serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr(TextOutput, "end", broken)
            body = {"model": NAME, "prompt": "x", "max_tokens": 2}
            found = http.post(server.url + "/v1/completions", json=body)
            assert found.status_code == 500 and found.json()["error"]["message"] == "the engine failed: RuntimeError"
        until(lambda: http.get(server.url + "/health").status_code == 503)
        found = http.post(server.url + "/v1/completions", json=body)
        assert found.status_code == 503 and found.json()["error"]["code"] == "stopped"


def test_a_signal_loses_nothing() -> None:
    """`flashkernel serve` in a process of its own: SIGTERM while answers are written, and all come to their end."""
    command = [sys.executable, "-m", "flashkernel", "serve", "--model", "demo", "--port", "0", "--name", NAME]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = re.search(r"http://\S+:\d+", line)
        assert url, line
        until(lambda: _healthy(url[0]))
        count = CONTEXT // 2
        body = {"model": NAME, "prompt": "x", "max_tokens": count, "ignore_eos": True, "stream": True, "temperature": 0}
        body["stream_options"] = {"include_usage": True}
        begun, ends = threading.Barrier(4), []

        def ask() -> None:
            with http.stream("POST", url[0] + "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                first = next(lines)
                begun.wait(120)
                ends.append([first, *lines])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait(120)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(120)
        assert len(ends) == 3
        for lines in ends:
            said = [line for line in lines if line]
            assert said[-1] == "data: [DONE]"
            assert json.loads(said[-2].removeprefix("data: "))["usage"]["completion_tokens"] == count
        process.wait(60)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return bool(http.get(url + "/health").status_code == 200)
    except httpx.ConnectError:
        return False


@pytest.mark.parametrize("key", [None, "secret"])
def test_json_says_where_it_listens(
    key: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stdout, printed when the port takes connections; none of it on stderr."""
    import uvicorn

    from flashkernel.cli import main

    seen: list[dict[str, Any]] = []

    def run(server: Any, sockets: list[socket.socket]) -> None:
        (line,) = capsys.readouterr().out.splitlines()
        facts = json.loads(line)
        assert sockets[0].getsockname()[1] == facts["port"]
        socket.create_connection((facts["host"], facts["port"]), 60).close()
        seen.append(facts)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.delenv("FLASHKERNEL_API_KEY", raising=False)
    options = ["--api-key", key] if key else ["--kv-dtype", "int8"]
    assert main(["serve", "--model", "demo", "--json", "--port", "0", "--name", NAME, "--device", "cpu", *options]) == 0
    (facts,) = seen
    assert capsys.readouterr() == ("", "")
    assert facts["url"] == f"http://127.0.0.1:{facts['port']}/v1" and facts["page"] == facts["url"][:-2]
    assert (facts["model"], facts["api_key"], facts["context"]) == (NAME, key is not None, CONTEXT)
    assert (facts["device"], facts["dtype"], facts["kv_dtype"]) == ("cpu", "float32", None if key else "int8")
    page = Path(__file__).parent.parent / "docs" / "command_line.md"
    if page.is_file():  # the source tree may not be beside the tests
        section = page.read_text(encoding="utf-8").split("### `flashkernel serve --json`")[1].split("###")[0]
        assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.M)))) == set(facts)


def test_bad_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from flashkernel.cli import main

    for options, text in (
        (["--kv-memory", "0.0001"], "needs"),
        (["--max-batch", "0"], "--max-batch 0; an integer >= 1"),
        (["--port", "70000"], "--port 70000"),
        (["--model", str(find_model("demo") / "none")], "none"),
    ):
        assert main(["serve", "--model", "demo", *options]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_count_what_is_held_back(client: Any, stream: bool) -> None:
    """Text that may begin a stop string, and bytes of an unfinished character, come with a later token."""
    for seed in range(4):
        asked: dict[str, Any] = dict(model=NAME, prompt="# \u00e9\u65e5 x", max_tokens=60, temperature=1.5, seed=seed)
        found = client.completions.create(**asked, logprobs=1, stop=["    return zzz", "\n\n\n\n"], stream=stream)
        parts = [choice for part in (found if stream else [found]) for choice in part.choices]
        text = "".join(part.text for part in parts)
        places: list[tuple[str, int]] = []
        for part in parts:
            if part.logprobs:
                places += zip(part.logprobs.tokens, part.logprobs.text_offset, strict=True)
        assert len(places) > 20
        assert all(text.startswith(token, place) for token, place in places if "\ufffd" not in token)
