"""A model that two GPUs share: the three ways of its sums against one GPU, and the bits of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not torch.distributed.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("two GPUs are needed", allow_module_level=True)

import rank_sum_cases
import tensor_parallel_cases as cases
from flashkernel.generate import load_model
from model_families import family_model
from ranks import Ranks

PROMPTS = [[5, 3, 90], [*range(1, 41)], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]
WAYS: dict[str, dict[str, Any]] = {"nccl": {"fused": False}, "one_shot": {"one_shot": True}, "fused": {}}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Any:
    group = Ranks(2, tmp_path_factory.mktemp("two"))
    yield group
    group.close()


@pytest.mark.parametrize("name", ["llama-yarn", "gemma2"])  # gemma2: norms between a sum and the residual
@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_of_one_gpu(two, tmp_path, name, way) -> None:
    family_model(name).save_pretrained(tmp_path)
    alone = cases.everything(load_model(str(tmp_path), device="cuda"), PROMPTS, 12)
    answers = two.ask(cases.on_gpus, str(tmp_path), "float32", PROMPTS, 12, WAYS[way])
    assert all(isinstance(answer, dict) for answer in answers), answers
    for answer in answers:
        assert answer["greedy"] == alone["greedy"]
        np.testing.assert_array_equal(answer["scores"], answers[0]["scores"])
    np.testing.assert_allclose(answers[0]["scores"], alone["scores"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bits_of_the_sums(two, dtype) -> None:
    """A chain of calls of several numbers of rows in a CUDA graph, replayed: each replay, and each rank, the same."""
    answers = two.ask(rank_sum_cases.chain, dtype, 4096, [1, 3, 32, 2, 1, 8], 20)
    assert all(isinstance(answer, tuple) for answer in answers), answers
    for found, worst in answers:
        assert worst <= 8  # roundings, against the sum in float64
        for ours, theirs in zip(found, answers[0][0], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_rank_that_stays_away_is_an_error(two) -> None:
    answers = two.ask(cases.late_sum)
    assert answers[0].startswith("PeerError: tensor_parallel: rank 0 of 2"), answers
