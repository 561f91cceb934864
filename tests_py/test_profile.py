"""`python -m tools profile` without a GPU: cases, command line, the reader of ncu's table and what is stored."""

from __future__ import annotations

import pytest

import flashkernel as fk
from flashkernel.bench.suites.kernels import OPS, call_for

pytest.importorskip("tools.places", reason="the source tree is not beside the tests")

from tools import profile, profile_report
from tools.__main__ import main
from tools.places import PROFILES, ROOT

# In the form of `ncu --csv --page raw`, made by hand: two launches of one range, one of another; units that ncu scales.
HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC",'
    '"thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",'
    '"gpu__time_duration.sum","dram__bytes.sum","launch__registers_per_thread","launch__shared_mem_per_block_dynamic",'
    '"sm__warps_active.avg.pct_of_peak_sustained_active","smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",'
    '"smsp__sass_thread_inst_executed_op_ffma_pred_on.sum","sm__ops_path_tensor_src_fp16_dst_fp32.sum",'
    '"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",'
    '"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",'
    '"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio","another__metric"'
)
UNITS = (
    '"","","","","","","","","","","","","usecond","Mbyte","register/thread","Kbyte/block","%","inst","inst",""'
    + ',"inst"' * 3
    + ',""'
)
BWD, FWD = "attention_bwd/cuda/sm75/f16/d64", "attention_fwd/cuda/sm75/f16/d64"


def row(number: int, name: str, mark: str, values: str) -> str:
    cells = [str(number), "7", "python3", "host", name, "1", "7", "(128, 1, 1)", "(2,048, 1, 1)", "0", "9.0"]
    ranges = f'77  ""<default domain>:{mark}:none:none:none:none:none:none""  ""<default domain>:inner:none:none""'
    return ",".join(f'"{cell}"' for cell in (*cells, ranges, *values.split()))


SAMPLE = "\n".join(
    [
        "==PROF== Connected to process 7 (/usr/bin/python3.12)",
        "some/kernel: a line of the program",
        HEAD,
        UNITS,
        row(0, "prepare_kernel", BWD, "12.5 33.5 40 0 55.1 1,000 2,000 0 0.5 1.25 1.0 x"),
        row(1, "attention_bwd_kernel", BWD, "1,250.0 67.1 255 49.15 12.5 0 0 5,000,000 3.5 1.25 1.0 x"),
        row(2, "attention_fwd_kernel", FWD, "400 67.1 255 16.38 24.9 10 n/a 9 0.1 2 1 x"),
        "==PROF== Disconnected from process 7",
    ]
)  # fmt: skip


def test_ncus_table_is_read():
    prepare, backward, forward = profile_report.parse(SAMPLE)
    assert (prepare.kernel, prepare.range_name) == ("prepare_kernel", BWD)
    assert prepare["duration_ns"] == 12500 and prepare["dram_bytes"] == 33.5e6 and prepare["registers"] == 40
    assert backward["duration_ns"] == 1.25e6 and backward["dynamic_shared_bytes"] == pytest.approx(49150)
    assert backward["occupancy_achieved_pct"] == 12.5
    assert prepare.flop == 1000 + 2 * 2000 and backward.flop == 5e6
    assert forward.range_name == FWD and "ffma" not in forward and forward.flop is None
    assert backward.stalls(2) == [("barrier", 3.5), ("wait", 1.25)]
    assert "l2_pct" not in backward


@pytest.mark.parametrize("text", ["", "==ERROR== No kernels were profiled.", HEAD])
def test_other_output_is_refused(text):
    with pytest.raises(ValueError, match="profile: "):
        profile_report.parse(text)


def test_a_cut_row_is_refused():
    with pytest.raises(ValueError, match="a row of 12 fields"):
        profile_report.parse("\n".join([HEAD, UNITS, ",".join(['"1"'] * 12)]))


def test_results_are_stored_by_kernel_id(tmp_path):
    found = profile.store(tmp_path, [BWD, FWD], profile_report.parse(SAMPLE))
    assert list(found) == [BWD, FWD] and len(found[BWD]) == 2
    again = profile_report.read_csv(tmp_path / BWD / "metrics.csv")
    assert [x.kernel for x in again] == ["prepare_kernel", "attention_bwd_kernel"]
    assert again[1]["duration_ns"] == 1.25e6 and again[1]["stall_barrier"] == 3.5
    # By counters: 5 thousand and 5 million FLOP over 33.5 + 67.1 MB. The forward's ffma is missing: no figure.
    assert profile_report.counters(tmp_path) == {BWD: f"{5.005e6 / 100.6e6:.3g}"}
    table = profile_report.summary(found[BWD])
    assert len(table.splitlines()) == 4 and "barrier 3.5" in table


def test_kernels_are_chosen_by_pattern():
    ids = ["attention_fwd/cuda/sm80/f16/d64", "attention_fwd/cuda/sm75/f16/d64", "add/cuda/generic"]
    assert profile.select(ids, []) == ids
    assert profile.select(ids, ["*/sm75/*", "add/*"]) == ids[1:]
    with pytest.raises(ValueError, match="'sm99' matches no CUDA kernel"):
        profile.select(ids, ["sm99"])


def test_ncus_command_line():
    line = profile.command("ncu", [FWD], ["a.sum", "b.avg"])
    assert line[0] == "ncu" and line[-1] == FWD and "tools.profile_target" in line
    assert line[line.index("--clock-control") + 1] == "none" and line[line.index("--metrics") + 1] == "a.sum,b.avg"
    assert "--export" in profile.command("ncu", [FWD], [], profile.Path("report"))


def test_metrics_that_ncu_does_not_know_are_found_in_its_words():
    text = "==ERROR== Failed to find metric lts__no.sum\n==PROF== dram__bytes.sum\n"
    assert profile._unknown(text, ["lts__no.sum", "dram__bytes.sum", "lts__no"]) == ["lts__no.sum"]


def test_a_machine_without_gpu_is_told_so(capsys):
    if any(kernel.device == "cuda" and kernel.available for kernel in fk.kernels()):
        pytest.skip("this machine has a GPU")
    assert main(["profile"]) == 2
    assert "profile: no CUDA device" in capsys.readouterr().err
    with pytest.raises(ValueError, match="install Nsight Compute"):
        profile._ncu(["ncu-that-is-not-there"], 1)


FAKE_NCU = """#!{python}
import sys
kernels = sys.argv[sys.argv.index("tools.profile_target") + 1 :]
if "--export" in sys.argv:
    open(sys.argv[sys.argv.index("--export") + 1], "wb").write(b"report" * 1000)
    sys.exit()
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
if "launch__waves_per_multiprocessor" in metrics:
    print("==ERROR== Failed to find metric launch__waves_per_multiprocessor")
    sys.exit(1)
if "bad/cuda/generic" in kernels:
    sys.exit(9)  # a kernel that takes its process with it
header = ["ID", "Kernel Name", "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg", *metrics]
marks = [f'1  "<default domain>:{{name}}:none:none"' for name in kernels]
rows = [[i, "k<float>", mark, *["2.5"] * len(metrics)] for i, mark in enumerate(marks)]
for row in [header, [""] * len(header), *rows]:
    print(",".join('"' + str(cell).replace('"', '""') + '"' for cell in row))
"""


def test_a_whole_run_with_an_ncu_that_is_not_one(tmp_path, monkeypatch, capsys):
    """Metrics that it does not know, a kernel that takes its process with it, and a raw report."""
    import sys
    from types import SimpleNamespace

    from flashkernel.bench import machine

    ids = ["bad/cuda/generic", "add/cuda/generic", "rope/cuda/generic", "norm/cuda/generic"]
    kernels = [SimpleNamespace(id=id, device="cuda", available=True) for id in ids]
    about = {"gpu": "none", "driver_version": None, "commit": "abc", "date": "2026-01-02T03:04:05"}
    monkeypatch.setattr(fk, "kernels", lambda: kernels)
    monkeypatch.setattr(profile, "_require_gpu", lambda: None)
    monkeypatch.setattr(machine, "machine_info", lambda device: about)
    ncu = tmp_path / "ncu"
    ncu.write_text(FAKE_NCU.format(python=sys.executable))
    ncu.chmod(0o755)
    out = tmp_path / "profiles"
    options = ["--out", str(out), "--ncu", str(ncu), "--batch", "3"]
    assert main(["profile", *options, "--raw", "rope/*"]) == 1
    said = capsys.readouterr()
    assert "left out, unknown to this ncu: launch__waves_per_multiprocessor" in said.err
    assert "profile: bad/cuda/generic: no launch was profiled" in said.err
    for kernel in ("add/cuda/generic", "rope/cuda/generic", "norm/cuda/generic"):
        (launch,) = profile_report.read_csv(out / kernel / "metrics.csv")
        assert launch.kernel == "k<float>" and launch["dram_bytes"] == 2.5 and "waves" not in launch
        assert f"| {kernel} |" in said.out
    assert (out / "rope/cuda/generic/report.ncu-rep").stat().st_size == 6000
    table = (out / "README.md").read_text()
    assert (
        table == profile_report.page(out)
        and "| `norm/cuda/generic` | 0.0 |" in table
        and "- 3 kernels: gpu none, commit abc, date 2026-01-02" in table
    )
    assert not (out / "bad").exists()
    assert main(["profile", "add/*", *options, "--raw", "add/*", "--raw-limit", "0.001"]) == 0
    assert "not kept" in capsys.readouterr().err and not (out / "add/cuda/generic/report.ncu-rep").exists()
    (out / "README.md").unlink()
    assert main(["profile", "--page", "--out", str(out)]) == 0
    assert (out / "README.md").read_text() == profile_report.page(out)
    assert main(["profile", "--page", "--out", str(tmp_path / "none")]) == 2
    capsys.readouterr()
    assert main(["profile", "--list", "r*"]) == 0
    assert capsys.readouterr().out == "rope/cuda/generic\n"


def test_the_page_is_what_the_profiles_say():
    profiles = ROOT / PROFILES
    if list(profiles.glob("**/metrics.csv")):
        assert (profiles / "README.md").read_text() == profile_report.page(profiles), (
            "run `python -m tools profile --page`"
        )


@pytest.mark.parametrize("op", sorted({kernel.op for kernel in fk.kernels()}))
def test_every_op_has_a_case_that_runs_it(op):
    """On the CPU's own kernel, with small sizes; a kernel added to the registry without a case fails here."""
    pytest.importorskip("torch")
    assert op in OPS
    kernel = f"{op}/cpu/scalar"
    before = next(x.calls for x in fk.kernels() if x.id == kernel)
    with fk.force(kernel):
        call_for(kernel, "cpu", quick=True)()
    assert next(x.calls for x in fk.kernels() if x.id == kernel) > before


@pytest.mark.parametrize("kernel", ["attention_fwd/cuda/sm80/decode/bf16/d64", "linear/cuda/sm80/bf16/few_rows"])
def test_kernels_for_few_rows_get_few_rows(kernel):
    pytest.importorskip("torch")
    out = call_for(kernel, "cpu", quick=True)()
    assert out.numel() // out.shape[-1] <= 64 and str(out.dtype) == "torch.bfloat16"
