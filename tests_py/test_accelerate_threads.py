"""Several threads at one engine: `generate` of an accelerated model in turns, an engine's own methods refused, and
fork() while another thread generates.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flashkernel.generate import Engine
from flashkernel.integrations.transformers import accelerate
from test_accelerate import make

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def models_and_prompts() -> tuple[Any, list[Any], list[Any]]:
    """An accelerated model, prompts, and what the stock model makes of them."""
    torch.manual_seed(0)
    model = make("gpt2")
    prompts = [torch.randint(0, model.config.vocab_size, (1, 5 + i)) for i in range(4)]
    wanted = [model.generate(prompt, **OPTIONS) for prompt in prompts]
    return accelerate(model, page_size=16), prompts, wanted


def at_once(works: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "step by step": {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]},
    "with drafts": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_threads_generate_in_turns(way: str) -> None:
    """As the stock model can. Once tokens were mixed up, or pages were lost."""
    model, prompts, wanted = models_and_prompts()
    ways = [WAYS[way], WAYS[way if way == "step by step" else "plain"]]

    def work(i: int) -> None:
        for _ in range(5):
            assert torch.equal(model.generate(prompts[i], **OPTIONS, **ways[i % 2]), wanted[i])

    at_once([lambda i=i: work(i) for i in range(len(prompts))])


def test_an_engine_refuses_a_second_thread() -> None:
    """In the midst of a step of the first one, which goes on as if nothing had been."""
    model, prompts, wanted = models_and_prompts()
    engine = model.flashkernel
    assert isinstance(engine, Engine)
    inside, done = threading.Event(), threading.Event()

    def until(token: int) -> bool:
        inside.set()
        assert done.wait(60)
        return False

    request = engine.submit(prompts[0][0].tolist(), max_new_tokens=12, stop_tokens=frozenset(), until=until)

    def first() -> None:
        while request.finish is None:
            engine.step()

    def second() -> None:
        assert inside.wait(60)
        try:
            for call in (
                lambda: engine.submit([1]),
                engine.step,
                lambda: engine.cancel(request),
                lambda: next(iter(engine.generate([[1, 2]]))),
                lambda: engine.score([1, 2]),
                lambda: engine.lockstep([[1]], 2),
                lambda: engine.reserve(10),
                engine.forget_prefixes,
            ):
                with pytest.raises(RuntimeError, match="another thread is inside this engine"):
                    call()
        finally:
            done.set()

    at_once([first, second])
    assert request.generated == wanted[0][0, prompts[0].shape[1] :].tolist()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_fork_generates() -> None:
    """Of a process whose other thread is inside the engine: the child does not wait for a thread that it lacks."""
    model, prompts, wanted = models_and_prompts()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            assert torch.equal(model.generate(prompts[1], **OPTIONS), wanted[1])

    def fork() -> None:
        try:
            for _ in range(10):
                child = os.fork()
                if child == 0:
                    signal.alarm(60)
                    torch.set_num_threads(1)
                    same = torch.equal(model.generate(prompts[2], **OPTIONS), wanted[2])
                    os._exit(0 if same else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            stop.set()

    at_once([work, fork])
