"""The time of a step by phase: phases in every run's log, and profiles of some steps."""

from __future__ import annotations

import gzip
import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from recipes.lora_finetune import LoraFinetune
from tests.alone import train
from tests.harness import launch, sampled
from zerobook.config_sources import parse
from zerobook.errors import ConfigError
from zerobook.health import position
from zerobook.runlog.figures import step_times
from zerobook.runlog.history import History

PHASES = {"data", "forward", "backward", "optimizer", "reduce"}


def settings(tiny):
    return {
        "model_name_or_path": str(tiny / "llama"), "train_file": str(tiny / "chats.jsonl"), "max_seq_length": 64,
        "per_device_train_batch_size": 2, "on_spike": "log",
    }  # fmt: skip


def test_a_log_point_says_where_the_time_went(tiny, tmp_path):
    began = time.monotonic()
    run = train(
        tmp_path, LoraFinetune, page=True, **settings(tiny), max_train_steps=6, logging_steps=2, eval_steps=4, save_steps=4
    )
    took = time.monotonic() - began
    points = [event for event in run.events if event["type"] == "metrics"]
    assert len(points) == 3
    assert all(point["seconds"].keys() | {"reduce"} >= PHASES for point in points)
    assert "evaluate" in points[2]["seconds"] and "save" in points[2]["seconds"], "they belong to the steps after them"
    assert 0 < sum(sum(point["seconds"].values()) for point in points) < took
    for point in points:
        assert point["tflops"] > 0 and point["mfu"] is None
    found = step_times(History.read(tmp_path / "runlog"))
    assert {"forward", "backward", "optimizer", "evaluate", "save"} <= found.keys()
    assert found["forward"][0] == [2, 4, 6]
    page = (tmp_path / "runlog" / "report.html").read_text()
    assert "Where a step" in page and "TFLOPS per device" in page
    types = [event["type"] for event in run.events]
    assert types[-2:] == ["machine", "run_end"], "a run that is shorter than the time between two samples has one of its end"


class FakeEvent:
    """Imitates torch.cuda.Event on a device whose clock is ``now``. It is ``lag`` events behind the host."""

    now = 0.0
    lag = 0
    recorded = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.now
        FakeEvent.recorded += 1
        self.number = FakeEvent.recorded

    def query(self):
        if FakeEvent.lag < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.number <= FakeEvent.recorded - FakeEvent.lag

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


def test_phases_of_a_gpu_last_from_one_event_to_the_next(monkeypatch):
    from zerobook.training.pace import Pace

    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    position.reset()
    pace = Pace(SimpleNamespace(type="cuda"))
    for phase, seconds in (("data", 1), ("forward", 2), ("backward", 4), ("optimizer", 8), ("reduce", 16), ("data", 32)):
        position.enter(phase, 1)
        FakeEvent.now += seconds
    position.enter("reduce")
    pace.measure(1)
    assert pace.seconds == {"data": 33, "forward": 2, "backward": 4, "optimizer": 8, "reduce": 16}
    FakeEvent.now += 64
    position.enter("data")
    pace.measure(2)
    assert pace.seconds == {"reduce": 64}, "the newest event begins the next measurement"
    position.enter("failed")  # the device may raise now: nothing is recorded
    assert pace.clock.read() == {}
    position.reset()


def test_a_gpu_is_compared_with_the_others_by_its_own_seconds(monkeypatch):
    """The host gives work to the device in no time, and the device needs 4 s for a forward pass."""
    from zerobook.training.pace import Pace

    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    position.reset()
    pace = Pace(SimpleNamespace(type="cuda"))
    for step in (1, 2):
        for phase, seconds in (("data", 1), ("forward", 4), ("backward", 2), ("reduce", 0)):
            position.enter(phase, step)
            FakeEvent.now += seconds
        pace.measure(step)
    assert position.window()[3:] == (1, 4)
    position.reset()


def test_another_thread_asks_the_gpu_of_this_process(monkeypatch):
    from zerobook.training.pace import DeviceClock

    chosen = []
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    position.reset()
    clock = DeviceClock()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(clock.locate).result()
    position.reset()

    assert chosen == [3]


def test_a_gpu_that_stops_is_where_it_stopped_although_its_host_went_on(monkeypatch):
    from zerobook.training.pace import Pace

    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    position.reset()
    clock = Pace(SimpleNamespace(type="cuda")).clock
    for phase in ("data", "forward", "backward", "optimizer", "reduce"):
        position.enter(phase, 7)
    assert clock.locate() == position.here(), "a device that has done its work is where its host is"
    monkeypatch.setattr(FakeEvent, "lag", 3)
    stopped = clock.locate()
    assert stopped[:3] == ("forward", 7, 2) and stopped.since > position.here().since
    time.sleep(0.01)
    assert clock.locate() == stopped, "its time counts from when it was first seen there"
    monkeypatch.setattr(FakeEvent, "lag", 2)
    assert clock.locate().phase == "backward" and clock.locate().since > stopped.since
    # A device that raises is not asked again.
    monkeypatch.setattr(FakeEvent, "lag", -1)
    assert clock.locate() == position.here()
    position.reset()


def test_a_gpu_that_has_failed_and_cannot_be_chosen_leaves_the_hosts_position(monkeypatch):
    from zerobook.training.pace import DeviceClock

    def fail(gpu):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "lag", 0)
    position.reset()
    clock = DeviceClock()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", fail)
    assert clock.locate() == position.here()
    position.reset()


def test_a_run_that_ends_within_the_profiled_steps_says_so(tiny, tmp_path, capsys):
    import torch

    run = train(tmp_path, LoraFinetune, **settings(tiny), max_train_steps=4, profile="3-9")
    assert not [event for event in run.events if event["type"] == "profile"]
    assert "did not run all of steps 3 to 9" in capsys.readouterr().out and not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("said", ["0", "5-3", "a", "3-", "-4", "1-2-3"])
def test_a_wrong_range_of_steps_is_an_error(said, tiny):
    flags = [word for key, value in settings(tiny).items() for word in (f"--{key}", str(value))]
    with pytest.raises(ConfigError, match="profile"):
        parse(LoraFinetune.config_class, [*flags, f"--profile={said}"])


@pytest.mark.launch
@pytest.mark.parametrize("strategy", sampled(["ddp", "zero3"], "zero3"))
def test_every_rank_writes_a_trace_of_the_steps(strategy, tiny, tmp_path):
    run = launch(strategy, 2, "lora_finetune", tmp_path, **settings(tiny), max_train_steps=5, profile="3-4")
    found = run.event("profile")
    assert found["steps"] == [3, 4]
    for rank in range(2):
        packed = (tmp_path / "runlog" / "profile" / f"steps-3-4.rank{rank}.json.gz").read_bytes()
        trace = json.loads(gzip.decompress(packed))
        names = {entry.get("name", "") for entry in trace["traceEvents"]}
        assert any(name.startswith("aten::") for name in names)
    assert len(run.losses) == 5
