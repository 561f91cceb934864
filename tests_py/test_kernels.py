"""The registry from Python: list, explain, force; threads and CPU features."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import flashkernel as fk

Q = np.random.default_rng(0).standard_normal((1, 2, 40, 32)).astype(np.float32)


def test_kernels_list_every_op_with_a_scalar_row():
    rows = fk.kernels()
    ops = {row.op for row in rows}
    scalar = {row.op for row in rows if row.id == f"{row.op}/cpu/scalar"}
    assert ops == scalar and {"attention_fwd", "attention_bwd", "linear", "rope", "kv_append"} <= ops
    for row in rows:
        assert row.id.startswith(row.op + "/" + row.device) and row.id in repr(row)
        if row.id.endswith("/scalar"):
            assert row.available and row.cpu_features == "" and (row.cc_min, row.cc_max) == (0, 0)
        if row.device == "cpu" and row.available:
            assert set(row.cpu_features.split()) <= set(fk.cpu_features())
        assert row.arithmetic
    order = [row.op for row in rows]
    assert order == sorted(order)


def test_explain_names_what_then_runs():
    explanation = fk.explain("attention", Q, Q, Q, causal=True)
    assert explanation.op == "attention_fwd"
    accepted = [c.kernel for c in explanation.candidates if c.accepted]
    assert explanation.kernel == accepted[0] and "attention_fwd/cpu/scalar" in accepted
    costs = {c.kernel: c.modelled_us for c in explanation.candidates if c.accepted}
    assert 0 < explanation.modelled_us == costs[explanation.kernel] == min(costs.values())
    assert all(f"{c.kernel}: accepts, modelled " in str(explanation) for c in explanation.candidates if c.accepted)
    assert all(c.accepted or c.reason for c in explanation.candidates)
    assert explanation.kernel in str(explanation)

    def calls():
        return {row.id: row.calls for row in fk.kernels()}

    before = calls()
    fk.explain("attention", Q, Q, Q, causal=True)
    assert calls() == before
    fk.attention(Q, Q, Q, causal=True)
    changed = {name for name, count in calls().items() if count != before[name]}
    assert changed == {explanation.kernel}


def test_explain_writes_nothing():
    out = np.full_like(Q, 7)
    fk.explain("attention", Q, Q, Q, out=out)
    assert (out == 7).all()
    with pytest.raises(ValueError, match=r"attention: k"):
        fk.explain("attention", Q, Q[..., :8], Q)
    assert fk.explain("linear", Q[0, 0], Q[0, 0]).op == "linear"
    assert (fk.attention(Q, Q, Q, out=out) is out) and not (out == 7).all()


@pytest.mark.chooses_kernels
def test_force():
    with fk.force("attention_fwd/cpu/scalar"):
        assert fk.forced_kernels() == "attention_fwd/cpu/scalar"
        assert fk.explain("attention", Q, Q, Q).kernel == "attention_fwd/cpu/scalar"
        slow = fk.attention(Q, Q, Q)
        with fk.force("*/cpu/scalar"):
            assert fk.explain("linear", Q[0, 0], Q[0, 0]).kernel == "linear/cpu/scalar"
        assert fk.forced_kernels() == "attention_fwd/cpu/scalar"
    np.testing.assert_allclose(fk.attention(Q, Q, Q), slow, atol=1e-5)
    with pytest.raises(RuntimeError, match="stop"), fk.force("*/cpu/scalar"):
        raise RuntimeError("stop")
    with pytest.raises(ValueError, match=r"force_kernels: no kernel matches"), fk.force("nothing/cpu"):
        pass
    assert fk.forced_kernels() == ""


@pytest.mark.chooses_kernels
def test_prefer():
    """A pattern with a question mark puts kernels first where they accept, and nothing aside."""
    softmax = np.zeros((3, 5, 4), np.float32)
    with fk.force("*/cpu/scalar?"):
        explanation = fk.explain("attention", Q, Q, Q)
        assert explanation.kernel == "attention_fwd/cpu/scalar"
        assert sum(c.accepted for c in explanation.candidates) == sum(c.accepted for c in _free(Q).candidates)
        assert fk.explain("softmax", softmax, axis=1).kernel == "softmax/cpu/scalar"
    if "avx2" in fk.cpu_features():
        with fk.force("*/cpu/avx2?"):
            assert fk.explain("softmax", softmax).kernel == "softmax/cpu/avx2"
            assert fk.explain("softmax", softmax, axis=1).kernel == "softmax/cpu/scalar"  # avx2 refuses
            before = next(row.calls for row in fk.kernels() if row.id == "attention_fwd/cpu/avx2")
            fk.attention(Q, Q, Q)
            assert next(row.calls for row in fk.kernels() if row.id == "attention_fwd/cpu/avx2") == before + 1
        with fk.force("*/cpu/avx2?,softmax/cpu/scalar"):  # forced goes before preferred
            assert fk.explain("softmax", softmax).kernel == "softmax/cpu/scalar"
            assert fk.explain("attention", Q, Q, Q).kernel == "attention_fwd/cpu/avx2"
    with pytest.raises(ValueError, match=r"no kernel matches \"\*/cpu/nothing\?\""), fk.force("*/cpu/nothing?"):
        pass


def _free(q):
    with fk.force(""):
        return fk.explain("attention", q, q, q)


@pytest.mark.parametrize("mark", ["", "?"])
def test_force_from_the_environment(mark):
    program = (
        "import flashkernel as fk, numpy as np; q = np.ones((1, 1, 4, 8), np.float32);"
        "print(fk.explain('attention', q, q, q).kernel)"
    )
    environment = {**os.environ, "FLASHKERNEL_FORCE": f"attention_fwd/cpu/scalar{mark}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "attention_fwd/cpu/scalar"


@pytest.mark.parametrize("pattern", ["attention_fwd/cpu/scala", "atention_fwd/cpu/scalar", "*/nothing", "add, x"])
def test_an_unknown_kernel_in_the_environment_is_refused(pattern):
    """A misspelt id that is passed over would run, and be taken for, another kernel."""
    calls = ("fk.add(q, q)", "fk.kernels()", "fk.explain('add', q, q)", "fk.add(q, q)")
    program = "import flashkernel as fk, numpy as np; q = np.ones(4, np.float32)\n" + "\n".join(
        f"try: {call}; print('ran')\nexcept ValueError as error: print(error)" for call in calls
    )
    environment = {**os.environ, "FLASHKERNEL_FORCE": pattern}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(calls)
    for line in lines:
        assert line.startswith("FLASHKERNEL_FORCE: no kernel") and f'"{pattern.split(", ")[-1]}"' in line


def test_threads():
    before = fk.get_num_threads()
    try:
        results = []
        for count in (1, 2, 4):
            fk.set_num_threads(count)
            assert fk.get_num_threads() == count
            results.append(fk.attention(Q, Q, Q))
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])
    finally:
        fk.set_num_threads(before)


def test_threads_follow_omp_num_threads():
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    program = "import flashkernel as fk; print(fk.get_num_threads())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "3"


def test_memory_stats():
    stats = fk.memory_stats()
    pool = fk.KvPagePool(4, heads_kv=1, head_dim=8, page_size=16, dtype="float32")
    now = fk.memory_stats("cpu")
    assert now.allocated_bytes - stats.allocated_bytes >= 2 * 4 * 16 * 8 * 4
    assert now.peak_allocated_bytes >= now.allocated_bytes and now.reserved_bytes >= now.allocated_bytes
    assert now.num_allocations > stats.num_allocations and pool.num_free == 4
