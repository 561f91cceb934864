"""scripts/where_time_went.py over records of a pretended run, and pytest's --share."""

import subprocess
import sys
from pathlib import Path

import share

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import where_time_went

NINJA = """# ninja log v5
0\t9000\t1\tCMakeFiles/lib.dir/src/a.cpp.o\taa
0\t2000\t1\tCMakeFiles/lib.dir/src/a.cpp.o\tab
2000\t5000\t1\tCMakeFiles/lib.dir/src/b.cpp.o\tac
5000\t5500\t1\tlibx.so\tad
6000\t7000\t1\tpython/_C.pyi\tae
6000\t7000\t1\tpython/marker\tae
"""
CTEST = """<testsuite><testcase name="kernel_conformance_0" classname="kernel_conformance_0" time="12.5"/>
<testcase name="fork_test" classname="fork_test" time="2.5"/></testsuite>"""
PYTEST = """<testsuites><testsuite><testcase classname="tests_py.test_a" name="test_x[1]" time="1.0"/>
<testcase classname="tests_py.test_a.TestK" name="test_x[2]" time="3.0"/>
<testcase classname="tests_py.test_b" name="test_y" time="2.0"/></testsuite></testsuites>"""


def test_the_report_adds_up(tmp_path):
    (tmp_path / ".ninja_log").write_text(NINJA)
    (tmp_path / "ctest.xml").write_text(CTEST)
    (tmp_path / "pytest.xml").write_text(PYTEST)
    (tmp_path / "stages").write_text("90 lint\n300 the tests\n")
    text = where_time_went.report([tmp_path], tmp_path / "stages", top=2)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "stages: 390 s in 2 steps" in lines
    # The second run of a.cpp replaces the first; the command with two outputs counts once.
    assert any(line.endswith(": build: 6 s in 4 steps") for line in lines)
    assert "5.0 77 2 lib (b.cpp.o 3.0)" in lines
    assert "1.5 23 2 links, the stub and others (_C.pyi 1.0)" in lines
    assert "12.5 83 1 kernel_conformance_0 (kernel_conformance_0 12.5)" in lines
    assert "4.0 67 2 test_a (test_x[2] 3.0)" in lines


def test_what_does_not_fit_is_one_line(tmp_path):
    (tmp_path / "pytest.xml").write_text(PYTEST)
    assert "1 more" in where_time_went.report([tmp_path], None, top=1)
    assert "no .ninja_log" in where_time_went.report([tmp_path / "nothing"], None, top=1)


def test_shares_cover_every_case_and_keep_small_tests_whole():
    for count in (1, share.SMALL, share.SMALL + 1, 100):
        kept = share.keep("tests_py/test_a.py::test_x", count, 3)
        assert len(kept) == count
        expected = count if count <= share.SMALL else count / 3
        assert expected - 1 < sum(kept) < expected + 1


TESTS = """
import pytest
@pytest.mark.parametrize("i", range(30))
def test_many(i): pass
@pytest.mark.parametrize("i", range(6))
def test_few(i): pass
@pytest.mark.long
def test_long(): pass
"""


def test_a_run_of_a_share_says_what_it_left_out(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests_py')!r})\n"
        "from share import Share\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'long: x')\n"
        "    config.pluginmanager.register(Share(3), 'share')\n"
    )
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "16 passed, 21 deselected" in done.stdout, done.stdout + done.stderr
