"""Programs of scripts/ and benchmarks/, as they are started in a clone with the package alone installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from benchmarks import runlog
from tests.harness import ROOT

IMPORT_EACH = """
import runpy, sys
path = list(sys.path)
for file in sys.argv[1:]:
    sys.path[:] = path
    for name in list(sys.modules):
        if name.partition(".")[0] in ("scripts", "benchmarks", "tests"):
            del sys.modules[name]
    runpy.run_path(file)
"""
OTHER_FOLDER = re.compile(r"^from (scripts|benchmarks|tests)\b", re.M)


def test_programs_of_the_clone_find_what_they_import(tmp_path):
    (tmp_path / "zerobook").symlink_to(ROOT / "zerobook")
    programs = []
    for file in [*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")]:
        text = file.read_text()
        if "__main__" in text and OTHER_FOLDER.search(text):
            programs.append(str(file))

    result = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *programs],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert programs
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_cost_of_a_step_of_the_runlog_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(runlog, "ROUNDS", 1)

    costs = runlog.per_step(tmp_path)

    assert all(0 < cost < 1e5 for cost in costs.values())
