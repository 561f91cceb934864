"""200 requests at once on the CPU, of every kind: each answer equals the one that its request gets alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from flashkernel.generate import Engine, SamplingOptions, TextOutput
from serving import MODEL, NAME, TOKENIZER, serving

PROMPTS = [
    "def fibonacci(n):",
    "import",
    "class Stack:\n    ",
    "x = [",
    "# The following code\n" * 6,
    "for i in range(",
]
COUNT = 200


def requests() -> list[dict[str, Any]]:
    numbers = random.Random(4)
    found = []
    for seed in range(COUNT):
        asked: dict[str, Any] = {"prompt": numbers.choice(PROMPTS) + numbers.choice(["", " ", "\n"]), "seed": seed}
        asked["max_tokens"] = numbers.choice([1, 3, 17, 40])
        asked["temperature"] = numbers.choice([0.0, 0.8, 1.3])
        asked["top_p"] = numbers.choice([1.0, 0.9])
        asked["frequency_penalty"] = numbers.choice([0.0, 0.0, 0.7])
        asked["presence_penalty"] = numbers.choice([0.0, 0.0, -0.4])
        asked["stop"] = numbers.choice([[], [], ["\n\n"], ["("]])
        asked["logit_bias"] = numbers.choice([{}, {}, {"40": 3.0}])
        asked["extra_body"] = numbers.choice([{}, {"typical_p": 0.9}, {"min_p": 0.05, "repetition_penalty": 1.2}])
        found.append(asked)
    return found


def alone(engine: Engine, asked: dict[str, Any]) -> tuple[str, str | None]:
    """One request after the other in an engine that keeps no prefixes."""
    options = {**asked, **asked["extra_body"]}
    names = ("seed", "temperature", "top_p", "frequency_penalty", "presence_penalty", "typical_p", "min_p")
    sampling = SamplingOptions(
        **{name: options[name] for name in (*names, "repetition_penalty") if name in options},
        logit_bias={int(token): bias for token, bias in asked["logit_bias"].items()},
    )
    ids = TOKENIZER.encode(asked["prompt"])
    output, text, finish = TextOutput(TOKENIZER, ids, asked["stop"]), "", None
    events = engine.generate(
        [ids],
        max_new_tokens=asked["max_tokens"],
        sampling=sampling,
        stop_strings=asked["stop"],
        tokenizer=TOKENIZER,
    )
    for event in events:
        text += output.put(event.token)
        finish = event.finish
    return text + output.end(), finish


@pytest.mark.long
def test_200_at_once_are_each_as_alone() -> None:
    engine = Engine(MODEL, page_size=64, prefix_sharing=False)
    asked = requests()
    expected = [alone(engine, one) for one in asked]
    assert len({text for text, _ in expected}) > COUNT / 3 and {finish for _, finish in expected} == {"stop", "length"}
    # Few pages and rows, so that requests wait and some are computed again.
    with serving(pages=40, max_batch=24, max_sequences=COUNT) as server:

        async def ask(client: Any, one: dict[str, Any], stream: bool) -> tuple[str, str | None]:
            if not stream:
                choice = (await client.completions.create(model=NAME, **one)).choices[0]
                return choice.text, choice.finish_reason
            text, finish = "", None
            async for part in await client.completions.create(model=NAME, stream=True, **one):
                text += part.choices[0].text
                finish = part.choices[0].finish_reason or finish
            return text, finish

        async def ask_all() -> list[tuple[str, str | None]]:
            async with openai.AsyncOpenAI(
                base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=280
            ) as client:
                return await asyncio.gather(*(ask(client, one, i % 2 == 0) for i, one in enumerate(asked)))

        got = asyncio.run(ask_all())
        text = server.app.state.metrics.text().decode()
    for i, (found, wanted) in enumerate(zip(got, expected, strict=True)):
        assert found == wanted, f"request {i}: {asked[i]}"
    beside = {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if line[0] != "#"}
    steps = beside["flashkernel_batch_size_count"]
    assert beside["flashkernel_batch_size_sum"] / steps > 8  # they did run beside each other
