"""The chat page in a real browser, headless."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import chromium
from serving import serving, until

PROGRAM = chromium.find()
if PROGRAM is None and os.environ.get("FLASHKERNEL_TEST_CHROMIUM") != "1":
    pytest.skip("no Chromium on the PATH; the CI job `page` has one", allow_module_level=True)


def test_a_conversation(tmp_path: Path) -> None:
    """Typed, sent by Enter, streamed; the second question carries the first; the text is what the API gives."""
    assert PROGRAM is not None
    with serving(max_tokens=24) as server, chromium.Page(PROGRAM, tmp_path) as page:
        page.open(server.url + "/")
        page.until("document.getElementById('model').textContent === 'demo'")
        page.value("document.getElementById('temperature').value = '0'")
        messages = []
        for question in ("def <b>main</b>():", "import os"):
            page.value("document.getElementById('text').focus()")
            page.type(question)
            page.press_enter()
            messages.append({"role": "user", "content": question})
            count = len(messages) // 2 + 1
            page.until(f"document.querySelectorAll('.assistant[data-finish]').length === {count}")
            body = {"model": "demo", "messages": messages, "temperature": 0}
            found = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=120).json()["choices"][0]
            answers = page.value("[...document.querySelectorAll('.assistant')].map((box) => box.textContent)")
            assert answers[-1] == found["message"]["content"] and len(answers[-1]) > 0
            messages.append({"role": "assistant", "content": answers[-1]})
        assert page.value("[...document.querySelectorAll('.user')].map((box) => box.textContent)") == [
            "def <b>main</b>():",
            "import os",
        ]
        assert page.value("document.querySelectorAll('b').length") == 0  # text is no markup
        assert page.errors == []
        page.value("document.getElementById('clear').click()")
        assert page.value("document.querySelectorAll('.message').length") == 0


def test_stop_and_continuing_text(tmp_path: Path) -> None:
    """Without a chat template the page continues text; Stop ends an answer in the engine, too."""
    assert PROGRAM is not None
    with serving(chat=False) as server, chromium.Page(PROGRAM, tmp_path) as page:
        page.open(server.url + "/")
        page.until("document.getElementById('model').textContent.includes('no chat template')")
        page.value("document.getElementById('text').focus()")
        page.type("import")
        page.press_enter()
        page.until("document.querySelector('.assistant').textContent.length > 0")
        page.value("document.getElementById('stop').click()")
        page.until("document.querySelector('.assistant[data-finish]') !== null")
        assert page.value("document.querySelector('.assistant').dataset.finish") in ("stopped", "length", "stop")
        until(lambda: server.engine.idle)
        assert page.errors == []


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    assert PROGRAM is not None
    with serving(api_key="k", max_tokens=24) as server, chromium.Page(PROGRAM, tmp_path) as page:
        page.open(server.url + "/")
        page.until("document.querySelector('.error') !== null")
        assert "no API key was given" in page.value("document.querySelector('.error').textContent")
        page.value("document.getElementById('key').value = 'k'")
        page.value("document.getElementById('temperature').value = '0'")
        page.value("document.getElementById('text').focus()")
        page.type("x")
        page.press_enter()
        page.until("document.querySelector('.assistant[data-finish]') !== null")
        assert page.value("document.querySelector('.assistant').textContent")
        assert [error for error in page.errors if "401" not in error] == []
