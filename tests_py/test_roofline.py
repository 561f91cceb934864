"""The roofline's and the T4 model's pages say what the committed JSON says; the model on machine code made by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("tools.places", reason="the source tree is not beside the tests")

from tools import article, measured, places, roofline, sass, sm_model
from tools.__main__ import main
from tools.places import PROFILES, RESULTS, ROOT
from tools.sm_model import MACHINES


@pytest.mark.parametrize("which", [[], ["--t4"]], ids=["roofline", "t4"])
def test_the_pages_are_what_the_runs_say(which, capsys):
    assert main(["roofline", *which, "--check", "--root", str(ROOT)]) == 0, (
        "run `python -m tools roofline` and with --t4"
    )
    assert capsys.readouterr().err == ""


def test_a_page_that_differs_is_found(tmp_path, capsys):
    import shutil

    shutil.copytree(ROOT / "lab", tmp_path / "lab")
    page = tmp_path / "lab" / "roofline.md"
    page.write_text(page.read_text().replace("TFLOP/s |", "TFLOP/s! |", 1))
    assert main(["roofline", "--check", "--root", str(tmp_path)]) == 1
    assert "differs" in capsys.readouterr().err
    assert main(["roofline", "--no-picture", "--root", str(tmp_path)]) == 0
    assert main(["roofline", "--check", "--root", str(tmp_path)]) == 0


def test_the_articles_figures_are_the_runs(tmp_path, capsys):
    """Another run changes them; a figure that somebody typed, or whose name nothing gives, is found."""
    import json
    import re
    import shutil

    shutil.copytree(ROOT / "lab", tmp_path / "lab")
    page = tmp_path / "lab" / "article.md"
    text = page.read_text()
    assert len(article.MARK.findall(text)) > 60
    typed = re.findall(r"\d[\d.,]* ?(?:[TGM]FLOP|[TGM]B/s|us\b|ms\b|%|times\b)", article.MARK.sub("", text))
    assert not typed, "a figure that is not marked"
    assert main(["roofline", "--check", "--root", str(tmp_path)]) == 0
    file = tmp_path / RESULTS / "h200" / "linear.json"
    run = json.loads(file.read_text())
    for case in run["cases"]:
        case["us"]["ours"] *= 2
    file.write_text(json.dumps(run))
    assert main(["roofline", "--check", "--root", str(tmp_path)]) == 1
    assert "article.md differs" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"'fwd\.nothing' is no figure"):
        article.fill("<!--=fwd.nothing-->1<!--=-->", {})


def test_end_to_end_is_said_when_it_is_measured(tmp_path):
    import json

    (tmp_path / RESULTS / "h200").mkdir(parents=True)
    assert article._end_to_end(tmp_path) == {"e2e.gpu": "not measured"}
    ours = {"decode_tokens_per_second": 2500.4, "ratio_to_best_peer": 3.14159}
    row = {"case": "gpt2", "shape": {"batch": 1}, "best_peer": "hf_sdpa", "providers": {"flashkernel": ours}}
    run = {"schema": "e2e-1", "method": {"quick": False}, "rows": [row, {**row, "shape": {"batch": 8}}]}
    (tmp_path / RESULTS / "h200" / "e2e.json").write_text(json.dumps(run))
    assert article._end_to_end(tmp_path) == {"e2e.gpu": "gpt2 2500 (x 3.14 of hf_sdpa)"}


def test_outside_of_a_checkout(tmp_path):
    with pytest.raises(ValueError, match="run it in a checkout"):
        places.find_root(tmp_path)


def test_sections():
    page = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb"
    assert roofline.replace_section(page, "x", "new") == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb"
    with pytest.raises(ValueError, match="x:begin"):
        roofline.replace_section("nothing", "x", "new")


def test_every_committed_run_is_read():
    found = measured.points(ROOT / RESULTS / "h200")
    assert {f"{name}.json" for name in measured.BY_HAND} <= {point.source for point in found}
    assert all(point.seconds > 0 and point.bytes > 0 for point in found)
    one = next(p for p in found if p.kernel == "attention_fwd/cuda/sm90a/f16/d128" and p.case == "seq 4096 full")
    assert one.flop == 4 * 4 * 16 * 4096**2 * 128 and one.bytes == 4 * (4 * 16 * 4096 * 128 * 2) + 4 * 4 * 16 * 4096
    assert one.tflops == pytest.approx(678.9)


def test_a_run_of_the_bench_is_read():
    """Each of our kernels in a row is a point; peers, CPU rows and quick runs are not."""
    ours = {"kind": "ours", "p50": 2e-3, "kernels": ["attention_fwd/cuda/sm80/f16/d64"]}
    tiled = {"kind": "variant", "p50": 9e-3, "kernels": ["attention_fwd/cuda/generic/tiled"]}
    shape = {"batch": 2, "heads": 8, "seq": 1024, "head_dim": 64, "causal": True}
    row = {"device": "cuda", "case": "x", "dtype": "float16", "shape": shape, "flop": 2.0**31, "bytes": None}
    providers = {"flashkernel": ours, "tiled": tiled, "sdpa": {"kind": "peer", "p50": 3e-3}}
    data = {"rows": [{**row, "providers": providers}, {**row, "device": "cpu", "providers": providers}]}
    one, two = measured._suite(data)
    assert (one.kernel, two.kernel) == (ours["kernels"][0], tiled["kernels"][0])
    assert one.flop == 2.0**31 and one.exponentials == 2 * 8 * 1024**2 / 2
    assert one.bytes == 4 * (2 * 8 * 1024 * 64 * 2) + 4 * 2 * 8 * 1024 and two.seconds == 9e-3


def test_the_ladder_sets_the_same_work_side_by_side(tmp_path):
    """A run with naive and tiled adds their rungs below the others."""
    import json
    import shutil

    from tools import ladder

    folder = tmp_path / RESULTS / "h200"
    folder.mkdir(parents=True)
    for name in measured.BY_HAND:  # the older files; no run of the bench that may stand beside them
        if (path := ROOT / RESULTS / "h200" / f"{name}.json").is_file():
            shutil.copy(path, folder)
    shape = {"batch": 4, "heads": 16, "seq": 4096, "head_dim": 128, "causal": False}
    flop = 4.0 * 4 * 16 * 4096**2 * 128
    providers = {
        name: {"kind": "ours", "p50": flop / rate * 1e-12, "kernels": [f"attention_fwd/cuda/generic/{name}"]}
        for name, rate in (("naive", 4.0), ("tiled", 20.0))
    }
    row = {"device": "cuda", "case": "x full", "dtype": "float16", "shape": shape, "flop": flop, "bytes": None}
    run = {"schema": 2, "method": {}, "machine": {"date": ""}, "rows": [{**row, "providers": providers}]}
    (folder / "new.json").write_text(json.dumps(run))
    row_of = "| d128, seq 4096, full | "
    key = {"head_dim": 128, "seq": 4096, "causal": False, "pass": "forward"}
    rows = json.loads((folder / "attention_sm75.json").read_text())["rows"]
    sm75 = next(r["tflops"] for r in rows if key.items() <= r.items())
    lines = ladder.render(tmp_path)["attention"].splitlines()
    rows = json.loads((folder / "attention_sm80.json").read_text())["rows"]
    key = {"S": 4096, "D": 128, "causal": False, "pass": "forward"}
    sm80 = next(r["tflops"]["flashkernel"] for r in rows if key.items() <= r.items())
    steps = f"{sm75:.4g} (x {sm75 / 20:.2f}) | {sm80:.4g} (x {sm80 / sm75:.2f}) | 678.9 (x {678.9 / sm80:.2f}) |"
    assert row_of + "4 | 20 (x 5.00) | " + steps in lines
    # A run of the bench goes before the older files, whatever their names; its first provider counts.
    kernel = {"kind": "ours", "kernels": ["attention_fwd/cuda/sm80/f16/d128"]}
    providers |= {"a": {**kernel, "p50": flop / 340.0 * 1e-12}, "b": {**kernel, "p50": flop / 1000.0 * 1e-12}}
    (folder / "a_new.json").write_text(json.dumps(run))
    lines = ladder.render(tmp_path)["attention"].splitlines()
    steps = f"{sm75:.4g} (x {sm75 / 20:.2f}) | 340 (x {340 / sm75:.2f}) | 678.9 (x 2.00) |"
    assert row_of + "4 | 20 (x 5.00) | " + steps in lines


def test_what_no_run_has_is_said():
    """Every case and rung of the ladder has a cell: a rate of a committed run, or that there is none."""
    from tools import ladder

    tables = ladder.render(ROOT)
    for name, op in (("attention", "attention_fwd"), ("attention_bwd", "attention_bwd")):
        head, _, *lines = tables[name].splitlines()
        assert head.count("|") == len(ladder.RUNGS[op]) + 2
        assert len(lines) >= 8 and all(line.count("|") == head.count("|") for line in lines)
        found = ladder.attention(measured.points(ROOT / RESULTS / "h200"), op)
        cells = sum(len(found.get(case, {})) for case in {*ladder.CASES, *found} if case[1] in (512, 4096))
        words = sum(line.count(ladder.NOT_MEASURED) for line in lines)
        assert words + cells >= len(lines) * len(ladder.RUNGS[op]) > words


def test_what_binds_a_kernel():
    limits = roofline.Limits(tensor=600e12, fp32=60e12, special=4e12, copy=4e12, read=4.5e12)

    def bound(kernel: str, **work: float) -> tuple[str, float]:
        values = {"flop": 0.0, "bytes": 1.0, "seconds": 1.0, **work}
        placed = roofline.place(measured.Point(kernel, "", **values), limits)
        return placed.bound, round(placed.share, 3)

    assert bound("add/cuda/generic", bytes=3e12) == ("memory", 0.75)
    assert bound("softmax/cuda/generic", flop=50e12) == ("fp32", round(5 / 6, 3))
    assert bound("attention_fwd/cuda/sm90a/f16/d64", flop=300e12, exponentials=3e12) == ("special function unit", 0.75)
    assert bound("attention_fwd/cuda/sm80/f32/d64", flop=100e12) == ("tensor", 0.5)
    assert bound("linear/cuda/sm80/f16/tiles", flop=6e12)[0] == "latency (tensor)"


# A loop as ptxas writes it: a branch around a slow copy with an inner loop, a rare search, products in two blocks.
CODE = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_loop:
        /*0010*/              @!P0 BRA `(.L_slow) ;
        /*0020*/                   STS.128 [R2], R4 ;
        /*0030*/                   STS.128 [R2+0x800], R8 ;
        /*0040*/                   BRA `(.L_products) ;
.L_slow:
        /*0050*/                   LDG.E.U16.SYS R4, [R6] ;
        /*0060*/                   STS.U16 [R2], R4 ;
        /*0070*/               @P1 BRA `(.L_slow) ;
.L_products:
        /*0080*/                   BAR.SYNC 0x0 ;
        /*0090*/                   LDSM.16.M88.4 R12, [R3] ;
        /*00a0*/                   HMMA.1688.F32 R16, R12, R14, R16 ;
        /*00b0*/                   HMMA.1688.F32 R16, R12, R15, R16 ;
        /*00c0*/              @!P2 BRA `(.L_sum) ;
        /*00d0*/                   LDS.U.128 R24, [R3] ;
        /*00e0*/                   STS.128 [R3], R24 ;
.L_sum:
        /*00f0*/                   MUFU.EX2 R20, R16 ;
        /*0100*/                   FADD R21, R20, R21 ;
        /*0110*/              @!P3 BRA `(.L_fetched) ;
        /*0120*/                   LDG.E.128.SYS R4, [R6] ;
        /*0130*/                   LDG.E.128.SYS R8, [R6+0x800] ;
.L_fetched:
        /*0140*/               @P4 BRA `(.L_loop) ;
        /*0150*/                   EXIT ;
.L_end:
        /*0160*/                   BRA `(.L_end) ;
"""


def test_the_main_loops_usual_path():
    blocks = sass.functions(CODE)["kernel"]
    path = sass.main_loop(blocks)
    assert sass.mix(path) == {
        "BRA": 5, "HMMA.1688.F32": 2, "LDG.128": 2, "STS.128": 2, "BAR": 1, "FADD": 1, "LDSM.4": 1, "MUFU": 1,
    }  # fmt: skip


def test_registers_of_an_instruction():
    def parse(text: str) -> sass.Instruction:
        return sass.functions(f".text.k:\n        /*0000*/   {text} ;\n")["k"][0].instructions[0]

    product = parse("HMMA.1688.F32 R16, R12.reuse, R14, R20")
    assert product.writes() == {"R16", "R17", "R18", "R19"}
    assert product.reads() == {"R12", "R13", "R14", "R20", "R21", "R22", "R23"}
    assert parse("STS.128 [R2+0x10], R4").reads() == {"R2", "R4", "R5", "R6", "R7"}
    assert parse("LDG.E.64 R4, desc[UR4][R6.64]").reads() == {"UR4", "R6", "R7"}
    assert parse("@!P0 FADD R1, R2, RZ").reads() == {"P0", "R2"}
    assert parse("ISETP.GE.AND P1, PT, R0, UR4, PT").writes() == {"P1"}
    assert parse("LDSM.16.MT88.4 R12, [R3+0x80]").writes() == {"R12", "R13", "R14", "R15"}


def test_no_loop_is_said():
    with pytest.raises(ValueError, match="no loop"):
        sass.main_loop(sass.functions(".text.k:\n        /*0000*/   EXIT ;\n")["k"])


def test_units_and_bounds():
    path = sass.main_loop(sass.functions(CODE)["kernel"])
    busy = sm_model.pipe_cycles(path, MACHINES["t4"])
    assert busy["tensor"] == 2 * 8 and busy["special"] == 8 and busy["issue"] == len(path)
    # LDSM.4, two stores and two loads of 512 bytes at 64 bytes a cycle, for each of four parts.
    assert busy["shared"] == 5 * 512 / 64 * 4
    for name, gpu in MACHINES.items():
        alone = sm_model.simulate(path, gpu, blocks=1, warps=1)
        two = sm_model.simulate(path, gpu, blocks=2, warps=1)
        bound = max(sm_model.pipe_cycles(path, gpu).values())
        assert bound <= alone * 1.01, name
        assert 2 * bound * 0.99 <= two <= 2 * alone * 1.05, name  # blocks share the units and hide each other's waits


def test_a_chain_of_products_waits_for_each():
    chain = [sass.Instruction("HMMA.1688.F32", ("R0", "R4", "R6", "R0"))] * 10
    apart = [sass.Instruction("HMMA.1688.F32", (f"R{8 + 4 * i}", "R4", "R6", f"R{8 + 4 * i}")) for i in range(10)]
    gpu = MACHINES["t4"]
    assert sm_model.simulate(chain, gpu, 1, 1) == pytest.approx(10 * gpu.latency["tensor"], rel=0.05)
    assert sm_model.simulate(apart, gpu, 1, 1) == pytest.approx(10 * gpu.tensor, rel=0.05)


def test_cycles_that_were_counted_join_the_models_page(tmp_path):
    import shutil

    from tools.profile_report import Launch, write_csv

    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    assert "counted" not in roofline.render_t4(tmp_path)["error"]
    launches = [Launch("gemm_kernel<a>", "", {"sm_cycles": 2e6}), Launch("gemm_kernel<b>", "", {"sm_cycles": 1e6})]
    write_csv(tmp_path / PROFILES / "linear_bwd/cuda/sm75/f16" / "metrics.csv", [*launches, Launch("other", "", {})])
    line = roofline.render_t4(tmp_path)["error"].splitlines()[-1]
    assert line.startswith("| `linear_bwd/cuda/sm75/f16` | 3000000 | ")
    # Two products of 4096^3 on 132 x 4 parts that take 8 cycles for 1024 multiply-adds: 2.03 million cycles at least.
    assert 2.03e6 < float(line.split("|")[3]) < 3e6


@pytest.fixture
def resources():
    """scripts/kernel_resources.py"""
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("kernel_resources", ROOT / "scripts" / "kernel_resources.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_resources"] = module
    spec.loader.exec_module(module)
    return module


def test_occupancy_is_the_resource_scripts(resources):
    """scripts/kernel_resources.py counts the same blocks."""
    for machine, code in (("t4", 75), ("h200", 90)):
        for registers, threads, shared in ((255, 128, 16384), (208, 128, 8192), (244, 128, 32768), (230, 256, 49152)):
            kernel = resources.Kernel("", code, registers, 0, 0, threads, shared)
            expected = kernel.blocks_per_sm(resources.ARCHS[code])
            assert sm_model.blocks_per_sm(MACHINES[machine], registers, threads, shared) == expected


def test_the_resource_script_asks_for_half_a_multiprocessor_of_row_kernels(resources):
    def problems(name, registers):
        return resources.problems(
            resources.Kernel(f"{name}<__nv_bfloat16,512,1,4,8>", 90, registers, 0, 64, 512, 0), 90
        )

    assert not problems("norm_kernel", 62) and not problems("other_kernel", 75)
    assert problems("norm_kernel", 75) == ["512 threads a multiprocessor on sm_90 (75 registers); needs 1024"]


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    roofline.draw(ROOT, tmp_path / "a.svg")
    roofline.draw_t4(ROOT, tmp_path / "b.svg")
    article.draw(ROOT, tmp_path / "c.svg", roofline._save)
    assert all("<svg" in (tmp_path / name).read_text() for name in ("a.svg", "b.svg", "c.svg"))
