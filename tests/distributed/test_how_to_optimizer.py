"""docs/how-to/optimizer.md: its file trains under ZeRO-3 and FSDP2 as in one process."""

from __future__ import annotations

import re

import pytest

from tests.distributed.test_parity import largest_difference
from tests.harness import ROOT, sampled


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    page = (ROOT / "docs" / "how-to" / "optimizer.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    name = code.splitlines()[0].removeprefix("# ")
    assert len(code.splitlines()) <= 60 and f"--optimizer {name}:Nesterov" in page
    file = tmp_path_factory.mktemp("own") / name
    file.write_text(code)
    return f"{file}:Nesterov"


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(["zero3", "fsdp"], "fsdp"))
def test_an_optimizer_from_a_users_file_trains_as_in_one_process(launches, own, strategy):
    flags = {"optimizer": own, "learning_rate": 0.05}
    one, run = launches("single", 1, 4, 1, **flags), launches(strategy, 2, 2, 1, **flags)
    assert largest_difference(run.losses, one.losses) < 1e-6 and largest_difference(run.norms, one.norms) < 1e-6
    assert run.losses[-1] < 0.9 * run.losses[0]
    state = run.state()
    assert any(name.startswith("velocity/") and tensor.any() for name, tensor in state.items())
