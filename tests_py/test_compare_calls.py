"""scripts/compare_calls.py: its calls run, and what it says of two pretended builds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
if not SCRIPTS.is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)
sys.path.insert(0, str(SCRIPTS))

import compare_calls


def test_its_calls_run() -> None:
    medians = compare_calls.measure(3)
    assert medians.keys() == compare_calls.calls().keys() and min(medians.values()) > 0


@pytest.mark.parametrize("now, code", [(104.0, 0), (106.0, 1)])
def test_more_than_5_percent_is_too_much(
    now: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The builds take turns, each comes first in every other round, and noise is left out."""
    asked: list[str] = []

    def pretended(folder: Path, count: int) -> dict[str, float]:
        asked.append(folder.name)
        noise = 40.0 if asked.count(folder.name) == 2 else 0.0
        return {
            "add": noise + (100.0 if folder.name == "old" else now),
            **({"new one": 1.0} if folder.name == "new" else {}),
        }

    monkeypatch.setattr(compare_calls, "measured_by", pretended)
    monkeypatch.setattr(sys, "argv", ["compare_calls", "old", "new", "--rounds", "3"])
    assert compare_calls.main() == code
    assert asked == ["old", "new", "new", "old", "old", "new"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == [f"{now / 100:.3f}"]


def test_a_build_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flashkernel").mkdir()
    (tmp_path / "flashkernel" / "__init__.py").write_text("raise ImportError('broken')")
    with pytest.raises(SystemExit, match=f"compare_calls: with {tmp_path}: .*broken"):
        compare_calls.measured_by(tmp_path, 3)
