"""Every op of the list (src/ops/op_list.hpp, in Python `flashkernel.ops.OPS`) has its entry in each table of ops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashkernel as fk
from conftest import needs_triton
from flashkernel import reference, selfcheck
from flashkernel.bench.case import Settings
from flashkernel.bench.suites import kernels as rows
from flashkernel.ops import OPS

KERNEL_OPS = sorted(set(OPS.values()))
CONFORMANCE = Path(__file__).resolve().parents[1] / "tests_cpp" / "conformance"
NO_NUMBERS = {"check_block_table"}  # it looks at a table and raises: nothing for an oracle, nor for Triton
# sample's sums are of 64-bit integers in bins of shared memory, which Triton has no way to add to in place.
# A loss takes up the chunks of a product; Triton's `linear` and `cross_entropy` have the logits between them.
LINEAR_LOSSES = {op for op in OPS if op.startswith(("linear_cross_entropy", "linear_selected_log_prob"))}
# Norms with an output of 8 bits have no twin yet.
QUANTIZED_NORMS = {"layer_norm_quantized", "rms_norm_quantized"}
# quantized_linear takes bytes apart in registers, and has no twin yet; nor have ops of 8-bit floats,
# attention_mla_decode, latent_append and attention_cascade, which is attention_paged and merge_states in one call.
ATTENTION = {"attention_mla_decode", "attention_cascade", "latent_append"}
FLOAT8 = {"attention_fp8", "linear_fp8", "quantize_fp8_blocks"}
# fused_linear and qkv_append are there for what a chain of launches costs, which Triton's launches have much more of;
# decode_step is one launch. Each is a chain of ops that have twins.
FUSED = {"fused_linear", "qkv_append", "decode_step"}
NO_TWIN = NO_NUMBERS | LINEAR_LOSSES | QUANTIZED_NORMS | ATTENTION | FLOAT8 | FUSED | {"sample", "quantized_linear"}


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_doctor_has_a_case(op: str) -> None:
    assert selfcheck.samples_of(op) or op in selfcheck.CASES


def test_tables_name_no_other_op() -> None:
    assert set(selfcheck.SAMPLES) <= set(OPS) and set(selfcheck.CASES) | set(rows.OPS) <= set(KERNEL_OPS)


@pytest.mark.parametrize("op", OPS)
def test_the_oracle_has_it(op: str) -> None:
    assert (op in reference.__all__) != (op in NO_NUMBERS)


@needs_triton
def test_triton_has_them() -> None:
    import flashkernel.triton as fk_triton

    assert set(fk_triton.OPS) == set(OPS) - NO_TWIN


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_bench_has_a_row(op: str) -> None:
    assert rows.representative(f"{op}/cpu/scalar").op == op


def test_bench_times_doctors_sample_where_there_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("add", "swiglu_bwd", "merge_states"):
        monkeypatch.delitem(rows.OPS, op)
    for dtype in ("float32", "bfloat16"):
        cases = {case.name: case for case in rows.kernels(Settings("cpu", quick=True, dtypes=(dtype,)))}
        for op in ("add", "swiglu_bwd", "merge_states"):
            work = cases[op].build()
            assert {f"{op}/cpu/scalar"} <= {provider.name for provider in work.providers}
            assert work.read > work.written > 0 and work.sizes.startswith("[")
            with fk.force(work.providers[0].forced):
                work.providers[0].calls[0]()


@pytest.mark.parametrize("name", selfcheck.SAMPLES)
def test_samples_are_right_at_any_size(name: str) -> None:
    for dtype in selfcheck.DTYPES:
        for as_torch in (False, True):
            inputs = selfcheck.Inputs(dtype, "cpu", rows=(12, 40), as_torch=as_torch)
            sample = selfcheck.SAMPLES[name](inputs)
            assert sample.op == name
            for result, expected in sample.pairs(inputs):
                selfcheck.testing.assert_close(inputs.get(result), expected, dtype)


@pytest.mark.skipif(not CONFORMANCE.is_dir(), reason="the source tree is not beside the tests")
def test_conformance_has_cases() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in CONFORMANCE.glob("*_cases.cpp"))
    assert set(re.findall(r'OpCases \w+\("(\w+)"', text)) == set(KERNEL_OPS)
