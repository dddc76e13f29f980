"""scripts/slurm/train.sbatch on a Slurm cluster of two simulated nodes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import ROOT
from tests.nodes.slurm import ENDED, Cluster, missing_slurm
from zerobook.runlog.jsonl import stream

NEEDS = missing_slurm()
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.launch,
    pytest.mark.full,
    pytest.mark.skipif(NEEDS is not None, reason=str(NEEDS)),
]
START_S = 240
"""Seconds for a job to begin to train."""
ENDLESS = 100_000
"""Steps of a run that is ended from outside."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm) -> Iterator[Cluster]:
    yield slurm
    slurm.clear()


class Job:
    """A batch job that trains a tiny model, and what it has written.

    ``flags`` are flags of the recipe, as they are typed.
    """

    def __init__(
        self, cluster: Cluster, folder: Path, tiny: Path, *flags: str, steps: int, options: tuple[str, ...] = (), nodes: int = 2
    ):
        self.cluster = cluster
        self.output = folder / "run"
        self.log_file = folder / "job.log"
        config = folder / "config.yaml"
        content = {
            "model_name_or_path": str(tiny / "llama"),
            "train_file": str(tiny / "text.txt"),
            "format": "text",
            "block_size": 64,
            "per_device_train_batch_size": 1,
            "num_train_epochs": 1000,
            "max_train_steps": steps,
            "save_steps": 100,
            "save_total_limit": 2,
            "logging_steps": 5,
            "output_dir": str(self.output),
            "cache_dir": str(folder / "cache"),
        }
        config.write_text(yaml.safe_dump(content))
        resources = [f"--nodes={nodes}", "--gpus-per-node=0", f"--cpus-per-task={os.cpu_count()}"]
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PROCESSES_PER_NODE": "1",
        }
        self.number = cluster.submit(
            "scripts/slurm/train.sbatch",
            ["recipes/causal_lm.py", str(config), "accelerate_configs/ddp.yaml", *flags],
            [*resources, f"--output={self.log_file}", *options],
            environment,
            ROOT,
        )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def info(self, key: str) -> str:
        return self.cluster.job(self.number)[key]

    def steps(self) -> list[dict[str, Any]]:
        file = self.output / "runlog" / "steps.jsonl"
        return list(stream(file)) if file.exists() else []

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.output / "runlog" / "events.jsonl"
        events = list(stream(file)) if file.exists() else []
        return [event for event in events if event["type"] == kind]

    def attempt(self) -> int:
        """The number of the start that the last step is of; 0 before the first step."""
        steps = self.steps()
        return steps[-1]["attempt"] if steps else 0

    def wait_for_training(self, attempt: int = 1, seconds: float = START_S) -> None:
        def trains() -> bool:
            assert self.info("JobState") not in ENDED, self.log[-4000:]
            return self.attempt() >= attempt

        self.cluster.until(trains, seconds)

    def wait_for_end(self, seconds: float = START_S) -> str:
        """Return the job's last state."""
        self.cluster.until(lambda: self.info("JobState") in ENDED, seconds)
        return self.info("JobState")

    def assert_continued_from_warning(self) -> None:
        """The second start continued from what the first saved at its warning, and no launcher added a traceback."""
        (warning,) = self.events("preempted")
        resume = self.events("resume")[0]
        assert warning["signal"] == "SIGUSR1"
        assert warning["saved"]
        assert resume["checkpoint"].endswith(f"step-{warning['step']:06}")
        first_step = next(step for step in self.steps() if step["attempt"] == 2)
        assert first_step["step"] == warning["step"] + 1
        assert "Traceback" not in self.log


def ranks(cluster: Cluster) -> dict[int, int]:
    """Return rank -> process id on all nodes."""
    return {rank: pid for host in cluster.hosts for rank, pid in host.ranks().items()}


def test_a_job_on_two_nodes_trains_on_all_cores(cluster, tmp_path, tiny):
    job = Job(cluster, tmp_path, tiny, steps=300)
    job.wait_for_training()
    cores = [os.sched_getaffinity(pid) for pid in ranks(cluster).values()]
    state = job.wait_for_end()
    assert cores == [set(range(os.cpu_count()))] * 2
    assert state == "COMPLETED", job.log[-4000:]
    assert job.steps()[-1]["step"] == 300
    assert "2 x cpu over gloo" in job.log
    assert job.info("Restarts") == "0"


def test_slurms_warning_saves_and_the_job_goes_on_after_it_was_queued_again(cluster, tmp_path, tiny):
    # Slurm counts the time in minutes, and its warning comes up to a minute early. On a busy machine it may come before the
    # first step, and the job still has 3 minutes to save.
    job = Job(cluster, tmp_path, tiny, steps=ENDLESS, options=("--time=4", "--signal=B:USR1@180"))
    job.wait_for_training()
    job.wait_for_training(attempt=2, seconds=480)
    assert job.info("Restarts") == "1"
    job.assert_continued_from_warning()


SLOW_SAVE = """
import os, time
from zerobook.training.hooks import Hook

class SlowSave(Hook):
    def state_dict(self, trainer):
        if trainer.progress.step > 100 and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(3600)
        return {}
"""
"""Lets the second save of a job's first start take an hour."""


def test_a_job_whose_time_is_over_before_it_has_saved_goes_on_from_an_earlier_checkpoint(cluster, tmp_path, tiny):
    hook = tmp_path / "slow_save.py"
    hook.write_text(SLOW_SAVE)
    options = ("--time=4", "--signal=B:USR1@30")
    job = Job(cluster, tmp_path, tiny, "--hooks", f"{hook}:SlowSave", steps=ENDLESS, options=options)
    job.wait_for_training()
    job.wait_for_training(attempt=2, seconds=480)
    assert job.info("Restarts") == "1"
    assert job.events("preempted") == []
    assert job.events("resume")[0]["checkpoint"].endswith("step-000100")


def test_a_cancelled_job_saves_and_is_not_queued_again(cluster, tmp_path, tiny):
    job = Job(cluster, tmp_path, tiny, steps=ENDLESS)
    job.wait_for_training()
    cluster.command("scancel", job.number)
    state = job.wait_for_end()
    cluster.until(lambda: set(cluster.states().values()) == {"idle"}, 60)
    assert state == "CANCELLED"
    assert job.info("Restarts") == "0"
    (signalled,) = job.events("preempted")
    assert signalled["saved"]
    assert (job.output / "checkpoints" / f"step-{signalled['step']:06}").is_dir()
    assert ranks(cluster) == {}
    assert "Traceback" not in job.log


def test_a_job_waits_for_a_drained_node_and_goes_on(cluster, tmp_path, tiny):
    job = Job(cluster, tmp_path, tiny, steps=ENDLESS)
    job.wait_for_training()
    cluster.command("scontrol", "update", "NodeName=hostb", "State=DRAIN", "Reason=repair")
    steps_at_drain = len(job.steps())
    cluster.until(lambda: len(job.steps()) > steps_at_drain + 20, 60)
    assert cluster.states()["hostb"] == "draining", "a node that is drained finishes what it runs"
    # As an administrator who wants the node sooner.
    cluster.command("scancel", "--batch", "--signal=USR1", job.number)
    cluster.until(lambda: job.info("Restarts") == "1" and cluster.states()["hostb"] == "drained", 60)
    assert job.info("JobState") == "PENDING"
    cluster.command("scontrol", "update", "NodeName=hostb", "State=RESUME")
    job.wait_for_training(attempt=2)
    job.assert_continued_from_warning()


def test_a_job_array_trains_three_seeds(cluster, tmp_path, tiny):
    flags = ("--seed", "%a", "--output_dir", str(tmp_path / "seed-%a"))
    options = ("--array=1-3", f"--output={tmp_path}/job-%a.log")
    array = Job(cluster, tmp_path, tiny, *flags, steps=20, options=options, nodes=1)
    cluster.until(lambda: all(task["JobState"] in ENDED for task in cluster.jobs(array.number)), 180)
    logs = "\n".join(file.read_text() for file in tmp_path.glob("job-*.log"))
    assert [task["JobState"] for task in cluster.jobs(array.number)] == ["COMPLETED"] * 3, logs[-4000:]
    losses = {list(stream(tmp_path / f"seed-{seed}" / "runlog" / "steps.jsonl"))[-1]["loss"] for seed in (1, 2, 3)}
    assert len(losses) == 3


def test_a_job_without_the_environment_of_its_user_trains(cluster, tmp_path, tiny):
    """Nothing of the environment is there: the clone's ``.venv`` is used."""
    job = Job(cluster, tmp_path, tiny, steps=20, options=("--export=NONE",))
    state = job.wait_for_end()
    assert state == "COMPLETED", job.log[-4000:]
    assert job.steps()[-1]["step"] == 20


def test_a_killed_rank_costs_a_restart_and_not_the_job(cluster, tmp_path, tiny):
    job = Job(cluster, tmp_path, tiny, steps=ENDLESS)
    job.wait_for_training()
    cluster.until(lambda: job.events("checkpoint"), 60)
    os.kill(ranks(cluster)[1], signal.SIGKILL)
    job.wait_for_training(attempt=2)
    assert job.info("Restarts") == "0"
    assert "restart 1 of 3" in job.log
    assert len(job.events("resume")) == 1
