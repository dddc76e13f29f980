"""The log is always there, whole, and says what happened: torn, damaged, killed, without a disk, read by many."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobook.cli.checkpoint import checkpoint
from zerobook.cli.main import main
from zerobook.errors import CheckpointError, LockedError, RunLogError
from zerobook.runlog import machine, writer
from zerobook.runlog.check import problems
from zerobook.runlog.history import History, last_of, time_spent
from zerobook.runlog.jsonl import backwards, decode, encode, read_newest, stream
from zerobook.runlog.lifecycle import begin, log_failure
from zerobook.runlog.machine import describe_nearly_full, sample
from zerobook.runlog.tables import attempt_table
from zerobook.runlog.writer import EVENTS, NullRunLog, RunLog
from zerobook.utils.terminal import say

json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text()
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


# --- lines
@given(st.dictionaries(st.text().filter(lambda key: key != "crc"), json_values, min_size=1, max_size=5))
@settings(max_examples=200)
def test_a_line_comes_back_and_any_changed_byte_is_seen(record):
    line = encode(record)
    assert line.count(b"\n") == 1 and decode(line[:-1]) == record
    place = random.Random(len(line)).randrange(len(line) - 1)
    changed = bytearray(line[:-1])
    changed[place] ^= 1 << random.Random(place).randrange(8)
    with pytest.raises(ValueError):
        assert decode(bytes(changed)) == record  # CRC digits in capitals are the same number, and refused all the same


@given(st.lists(st.integers(0, 200_000), max_size=6), st.integers(0, 70_000))
@settings(max_examples=40)
def test_reading_backwards_is_reading_forwards_turned_round(tmp_path_factory, sizes, torn):
    file = tmp_path_factory.mktemp("lines") / "x.jsonl"
    file.write_bytes(b"".join(encode({"n": n, "x": "y" * size}) for n, size in enumerate(sizes)) + b"{" * torn)
    assert list(backwards(file)) == list(stream(file))[::-1]
    assert [record["n"] for record in stream(file)] == list(range(len(sizes)))


def test_the_newest_of_each_type_is_found_without_reading_the_rest(tmp_path):
    log = RunLog(tmp_path)
    for i in range(50):
        log.event("metrics", durable=False, step=i, text='not a "type":"spike" but a text', inner={"type": "spike"})
    log.event("spike", n=1)
    log.event("metrics", step=50)
    found = last_of(log.folder / "events.jsonl", ["metrics", "spike", "crash"])
    assert found["metrics"]["step"] == 50 and found["spike"]["n"] == 1 and "crash" not in found


# --- writing
def test_events_are_numbered_through_and_an_attempt_goes_on_where_the_last_one_ended(tmp_path):
    log = RunLog(tmp_path)
    cause = log.event("spike", step=3)
    log.branch += 1
    assert log.event("decision", parent=cause) == 2
    log.close()
    events = log.folder / "events.jsonl"
    with events.open("ab") as file:
        file.write(b'{"seq": 1, "type": "che')
    log = RunLog(tmp_path)
    log.event("resume")
    log.close()
    found = list(stream(events))
    assert [e["seq"] for e in found] == [0, 1, 2, 3, 4]
    assert [e["attempt"] for e in found] == [1, 1, 1, 2, 2] and [e["branch"] for e in found] == [0, 0, 1, 1, 1]
    assert found[2]["parent"] == 1 and "parent" not in found[1]
    assert found[3]["type"] == "repaired" and found[3]["torn_bytes"] == 23
    assert events.with_name("events.jsonl.torn").read_bytes() == b'{"seq": 1, "type": "che\n'
    assert problems(log.folder) == ([], {"events": 5, "steps": 0})


def test_a_second_writer_and_a_newer_format_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "GRACE_S", 0.2)
    log = RunLog(tmp_path)
    with pytest.raises(LockedError, match="another process writes this log") as refused:
        RunLog(tmp_path)
    assert refused.value.exit_code == 1
    file = log.folder / "events.jsonl"
    # The way out of the message, for a lock that nobody releases.
    assert f"rename {log.folder}" in str(refused.value)
    shutil.copytree(log.folder.rename(tmp_path / "locked"), log.folder)
    RunLog(tmp_path).close()
    assert [event["seq"] for event in stream(file)] == [0]
    log.close()
    file.write_bytes(encode({"seq": 0, "attempt": 1, "branch": 0, "type": "runlog", "format": 99}))
    with pytest.raises(RunLogError, match=r"format 99, and this version of Zerobook knows formats up to 2"):
        RunLog(tmp_path)


def test_a_full_disk_holds_up_nothing_and_loses_nothing(tmp_path, monkeypatch, capsys):
    log = RunLog(tmp_path)
    write = os.write
    full = True

    def short(handle, content):
        if full:
            write(handle, content[: len(content) // 2])  # as a disk does that fills up in the middle of a line
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content)

    monkeypatch.setattr(writer.os, "write", short)
    for i in range(10):
        log.event("metrics", step=i)
        log.steps([{"step": i}])
    assert [e["type"] for e in stream(log.folder / "events.jsonl")] == ["runlog"]
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    full = False
    log.event("metrics", step=10)
    found = list(stream(log.folder / "events.jsonl"))
    assert [e["seq"] for e in found] == list(range(13)) and found[-1]["type"] == "written_late" and found[-1]["lost"] == 0
    assert [e["step"] for e in stream(log.folder / "steps.jsonl")] == list(range(10))
    assert problems(log.folder)[0] == []


def test_a_disk_that_tells_only_at_the_end_that_it_is_full_gets_no_line_twice(tmp_path, monkeypatch):
    """A network disk takes what is written, and has no room for it when it is to be kept."""
    log = RunLog(tmp_path)

    def fail(handle):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patched:
        patched.setattr(writer.os, "fsync", fail)
        log.event("decision", action="none")
    log.event("metrics")
    log.close()
    assert [event["type"] for event in stream(log.folder / EVENTS)] == ["runlog", "decision", "metrics", "written_late"]
    assert problems(log.folder)[0] == []


def test_what_is_held_for_a_full_disk_is_bounded(tmp_path, monkeypatch):
    log = RunLog(tmp_path)
    monkeypatch.setattr(RunLog, "BACKLOG", 5)
    log._backlog = type(log._backlog)(maxlen=5)
    write = os.write
    monkeypatch.setattr(writer.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    for i in range(20):
        log.event("metrics", step=i)
    monkeypatch.setattr(writer.os, "write", write)
    log.event("metrics", step=20)
    found = list(stream(log.folder / "events.jsonl"))
    assert [e.get("step") for e in found[1:-1]] == [16, 17, 18, 19, 20] and found[-1]["lost"] == 16


def test_damage_in_the_middle_is_named_and_the_rest_is_read(tmp_path, capsys):
    log = RunLog(tmp_path)
    for i in range(6):
        log.event("metrics", steps=[i, i])
    log.close()
    file = log.folder / "events.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[3] = lines[3].replace(b'"metrics"', b'"metrixx"')
    file.write_bytes(b"\n".join(lines))
    assert main(["runlog", "verify", str(tmp_path)]) == 1
    assert "events.jsonl, line 4: its checksum does not fit." in capsys.readouterr().out
    assert [e["seq"] for e in History.read(tmp_path).events] == [0, 1, 2, 4, 5, 6]
    assert "line 4 is damaged" in capsys.readouterr().err, "a view that lacks an event says so"
    log = RunLog(tmp_path)
    assert log.event("note", text="", by="") == 7
    log.close()
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([*lines[:-2], lines[-2][:-5] + b'0000"}', b""]))  # the last line, with its newline
    log = RunLog(tmp_path)
    assert log.event("note", text="", by="") == 9, "the damaged one's number is not given again"
    log.close()
    file.write_bytes(encode({"seq": 1, "attempt": 1, "branch": 0, "type": "a", "monotonic": 100.0, "utc": ""})
                     + encode({"seq": 1, "attempt": 1, "branch": 1, "type": "a", "monotonic": 10.0, "utc": "", "parent": 5})
                     + encode({"seq": 4, "attempt": 1, "branch": 0, "type": "a", "monotonic": 11.0, "utc": ""}))  # fmt: skip
    found = "\n".join(problems(log.folder)[0])
    for said in ("events before it are missing", "two processes have written", "time goes back by 90 s", "comes after it",
                 "2 events before it", "branch 0 comes after 1"):  # fmt: skip
        assert said in found, said


# --- killed at any moment
WRITER = """
import os, sys
sys.path.insert(0, {root!r})
from zerobook.runlog.writer import RunLog
log = RunLog({folder!r})
log.branch += 1
os.write(1, b"r")
i = 0
while True:
    seq = log.event("metrics", durable=i % 7 == 0, step=i, filler="x" * (i % 500))
    log.steps([{{"step": i}}])
    os.write(1, b"%d\\n" % seq)
    i += 1
"""


def kill_at_random_moments(tmp_path, times, seed):
    """Returns the log's folder; raises where an event that was acknowledged is not there, or more than a line is torn."""
    root = str(Path(__file__).resolve().parents[1])
    rng = random.Random(seed)
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER.format(root=root, folder=str(tmp_path))], stdout=subprocess.PIPE
        )
        assert process.stdout.read(1) == b"r"
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split(b"\n")[:-1]
        process.wait(timeout=30)
        if said:
            last, _ = read_newest(tmp_path / "runlog" / "events.jsonl")
            assert last is not None and int(said[-1]) <= last["seq"], "an acknowledged event is lost"
    return tmp_path / "runlog"


@pytest.mark.parametrize("times", [12, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.timeout(900)
def test_a_log_that_is_killed_at_any_moment_opens_and_lacks_nothing(tmp_path, times):
    folder = kill_at_random_moments(tmp_path, times, seed=times)
    log = RunLog(tmp_path)
    log.close()
    found, counts = problems(folder)
    events = list(stream(folder / "events.jsonl"))
    attempts = {event["attempt"] for event in events}  # who was killed before a first line left no number
    assert found == [] and log.attempt == max(attempts) + 1 == len(attempts) + 1
    # On a busy machine, more of them are killed before their first line.
    assert times / 2 < len(attempts) <= times
    assert counts["events"] > times / 2
    torn = [e for e in events if e["type"] == "repaired"]
    for file in ("events.jsonl", "steps.jsonl"):
        of_one = [e["attempt"] for e in torn if e["file"] == file]
        assert len(of_one) == len(set(of_one)), "at most one torn line an attempt"


# --- what an attempt learns from those before it
START = {"live": {"strategy": "DDP", "world_size": 2}, "batch": "4 samples", "total_steps": 10}


def attempt(folder, config, step=0, **facts):
    log = RunLog(folder)
    begin(log, config=config, versions={"torch": "2"}, step=step, **START, **facts)
    return log


def test_a_death_without_a_word_is_told_by_the_next_attempt_and_memory_is_suspected_where_it_was_full(tmp_path):
    log = attempt(tmp_path, {"seed": 1})
    log.event("machine", **(sample() | {"memory_used": 96 * 2**30, "memory_total": 100 * 2**30}))
    log.close()
    log = attempt(tmp_path, {"seed": 1})
    (crash,) = [e for e in stream(log.folder / "events.jsonl") if e["type"] == "crash"]
    assert crash["of_attempt"] == 1 and "probably killed for lack of memory: host memory 96.0 of 100.0 GiB" in crash["reason"]
    log.event("run_end", progress={"step": 10})
    log.close()
    log = attempt(tmp_path, {"seed": 1})
    log.event("machine", **(sample() | {"memory_used": 1, "memory_total": 100}))
    log.close()
    assert len([e for e in stream(log.folder / "events.jsonl") if e["type"] == "crash"]) == 1, "the second one had ended well"
    attempt(tmp_path, {"seed": 1}).close()
    assert "out of memory, or a power failure" in list(stream(log.folder / "events.jsonl"))[-3]["reason"]


def test_an_event_behind_the_end_is_no_death(tmp_path):
    log = attempt(tmp_path, {"seed": 1})
    log.event("run_end", progress={"step": 10})
    log.close()
    log = RunLog(tmp_path, attempt=False)
    log.event("note", text="well done", by="me")
    log.close()
    log = attempt(tmp_path, {"seed": 1})
    assert not [e for e in stream(log.folder / "events.jsonl") if e["type"] == "crash"]


def test_changed_settings_and_lost_steps_are_told(tmp_path):
    log = attempt(tmp_path, {"seed": 1, "learning_rate": 1e-3})
    log.steps([{"step": s, "loss": 1.0} for s in range(1, 9)])
    log.event("preempted", step=8, signal="SIGTERM", exit_code=75)
    log.close()
    log = attempt(tmp_path, {"seed": 1, "learning_rate": 2e-3}, step=8)
    assert log.branch == 0, "no step is done again"
    found = list(stream(log.folder / "events.jsonl"))
    assert [e["differing"] for e in found if e["type"] == "config_diff"] == [{"learning_rate": [1e-3, 2e-3]}]
    assert not [e for e in found if e["type"] in ("env_diff", "crash")]
    log.close()
    log = attempt(tmp_path, {"seed": 1, "learning_rate": 2e-3}, step=5)
    assert log.branch == 1, "steps 6 to 8 are done again"
    log.close()


def test_an_error_is_the_last_word_and_other_ranks_leave_a_file(tmp_path):
    log = RunLog(tmp_path)
    with pytest.raises(ZeroDivisionError), log_failure(log, tmp_path, 0):
        1 / 0  # noqa: B018
    found = list(stream(log.folder / "events.jsonl"))
    assert (found[-1]["type"], found[-1]["error"]) == ("crash", "ZeroDivisionError") and "1 / 0" in found[-1]["traceback"]
    assert any(e["type"] == "machine" for e in found), "the machine was sampled"
    with pytest.raises(ZeroDivisionError), log_failure(NullRunLog(tmp_path), tmp_path, 3):
        1 / 0  # noqa: B018
    assert "ZeroDivisionError" in (log.folder / "crash-rank-3.txt").read_text()
    # A rank that cannot write its file ends with the error of the training, not with that of the disk.
    with pytest.raises(ZeroDivisionError), log_failure(NullRunLog(tmp_path), tmp_path / "missing", 3):
        1 / 0  # noqa: B018
    with pytest.raises(KeyboardInterrupt), log_failure(log, tmp_path, 0):
        raise KeyboardInterrupt
    assert list(stream(log.folder / "events.jsonl"))[-1]["type"] == "stop"


def test_the_machine_is_sampled_as_it_is():
    now = sample()
    assert 0 < now["own"] < now["memory_total"] and 0 < now["memory_used"] < now["memory_total"]
    assert describe_nearly_full(now | {"memory_used": 93, "memory_total": 100}) and not describe_nearly_full(
        now | {"memory_used": 90, "memory_total": 100}
    )


def on_gpu(monkeypatch, allocated: int, reserved: int) -> None:
    """Imitate torch's allocator on two devices; this process uses the second."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A100")
    figures = {"allocated_bytes.all": allocated, "reserved_bytes.all": reserved}
    stats = {f"{name}.{moment}": number for name, number in figures.items() for moment in ("current", "peak")}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats if device == 1 else {})


@pytest.mark.parametrize("own", ["", "system.slice/job_7/step_0/user"])
def test_the_memory_of_a_container_or_a_job_is_its_limit(tmp_path, monkeypatch, own):
    """A container sees its own cgroup as the top one. Slurm limits a job, and not its steps."""
    limited = tmp_path / ("system.slice/job_7" if own else "")
    (tmp_path / own).mkdir(parents=True, exist_ok=True)
    (tmp_path / own / "memory.max").write_text("max\n")
    (limited / "memory.max").write_text("1000000\n")
    (limited / "memory.current").write_text("700000\n")
    (limited / "memory.stat").write_text("anon 500000\ninactive_file 200000\n")
    (tmp_path / "of_this_process").write_text(f"4:memory:/elsewhere\n0::/{own}\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "PROCESS_CGROUPS", tmp_path / "of_this_process")
    state = sample()
    assert (state["memory_used"], state["memory_total"]) == (500_000, 1_000_000)


def test_samples_have_what_torch_reserved_beside_what_it_allocated(monkeypatch):
    assert sample()["allocator"] is None, "a CPU has no such allocator"
    on_gpu(monkeypatch, 70 * 2**30, 78 * 2**30)
    found = sample()["allocator"]
    assert found["allocated"] == found["allocated_peak"] == 70 * 2**30 and found["reserved"] == 78 * 2**30


def test_out_of_gpu_memory_is_told_with_the_way_out(tmp_path, monkeypatch):
    on_gpu(monkeypatch, 70 * 2**30, 78 * 2**30)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    log = attempt(tmp_path, {}, plan={}, argv=[])
    for own, rank in ((log, 0), (None, 1)):
        with pytest.raises(torch.OutOfMemoryError) as caught, log_failure(own, tmp_path, rank):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        (said,) = caught.value.__notes__
        for word in (
            "78.0 GiB",
            "70.0 GiB",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "--per_device_train_batch_size",
        ):
            assert word in said
    crash = list(stream(log.folder / "events.jsonl"))[-1]
    assert crash["type"] == "crash" and said in crash["reason"]
    assert said in (log.folder / "crash-rank-1.txt").read_text()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(torch.OutOfMemoryError) as caught, log_failure(None, tmp_path, 1):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in caught.value.__notes__[0], "it is set already"


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 does not tell its settings")
def test_torch_reads_the_allocators_settings_from_the_name_that_is_advised():
    line = [sys.executable, "-c", "import torch; print(torch._C._accelerator_getAllocatorSettings())"]
    given = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
    }
    said = subprocess.run(line, env=given, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "expandable_segments:True", "of the two names this one is read first"


# --- reading it
@pytest.fixture
def run(tmp_path):
    """A run with a spike that was rolled back and skipped, killed, and resumed from an earlier checkpoint."""
    log = attempt(tmp_path, {"seed": 1, "output_dir": "x"}, plan={}, argv=[])

    def train(first, last):
        log.steps(
            [
                {"step": s, "loss": 2.0 + (s in (18, 19)), "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 9}
                for s in range(first, last + 1)
            ]
        )
        log.event("metrics", steps=[first, last], loss=2.0, mean_loss=2.0, grad_norm=1.0, learning_rate=1e-3,
                  tokens_per_second=10.0, data_wait=0.0)  # fmt: skip

    def checkpoint(step, **facts):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        log.event("checkpoint", **{"state": "complete", "step": step, "folder": str(folder), "seconds": 0.1} | facts)

    train(1, 10)
    checkpoint(10)
    train(11, 20)
    log.event("checkpoint", state="proven_good", step=10)
    spike = log.event("spike", kind="damage", alarm=True, step=20, onset=18, points=3, base=2.0, peak=3.0, reason="<b>high</b>")
    decision = log.event(
        "decision", parent=spike, action="skip", rule="skip: the last one, step 10", why="damage", options=["skip", "stop"],
        to_step=10, leaves_out_steps=[17, 20], hardware=None, policy={"rollbacks": 1, "trouble": None},
    )  # fmt: skip
    intent = log.event("rollback", parent=decision, phase="intent", action="skip", from_step=20, to_step=10, why="damage")
    log.event("skip", parent=intent, ranges=[[5, 7], [9, 10]], samples=3, steps=[17, 20], why="damage")
    log.branch += 1
    log.event("rollback", parent=intent, phase="outcome", step=10, steps_given_up=10, seconds=0.5, bytes_read=[1], set_aside=[],
              verified=["samples"], differing={})  # fmt: skip
    train(11, 30)
    checkpoint(30)
    train(31, 34)
    log.close()
    log = attempt(tmp_path, {"seed": 2, "output_dir": "x"}, step=30)
    log.event("resume", step=30, verified=["samples"], checkpoint="c", differing={})
    train(31, 40)
    log.event("eval", step=40, seconds=0.2, samples=[], loss=1.5, perplexity=4.5, tokens=9)
    log.event("run_end", progress={"step": 40}, eval=None, seconds={})
    log.close()
    return tmp_path


def told(capsys, *arguments):
    code = main(["runlog", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_a_run_that_ended_far_above_its_best_says_so_in_its_status_and_on_its_page(tmp_path, capsys):
    from zerobook.runlog.report import write

    for far, said in (({}, False), ({"loss": [math.inf, 3.381], "held-out loss": [8.26, 3.37]}, True)):
        log = attempt(tmp_path / str(said), {"seed": 1})
        log.event("run_end", progress={"step": 10}, seconds={}, far_above_best=far)
        log.close()
        sentence = "far above its best: loss not finite (median of its end), was 3.381, held-out loss 8.26, was 3.37."
        status = told(capsys, "status", tmp_path / str(said))[1]
        assert status.startswith("Finished") and (sentence in status) == said
        text = write(tmp_path / str(said)).read_text()
        assert text.count(sentence) == 2 * said, "in the state, and in the events"
        assert ('class="entry bad"' in text) == said


def test_a_run_on_another_host_whose_disk_grants_a_lock_to_each_host_is_live(tmp_path, capsys):
    for host, state in ((socket.gethostname(), "ENDED WITHOUT AN EVENT"), ("another-host", "Training")):
        log = attempt(tmp_path, {"seed": 1})
        log.event("env", host=host)
        log.close()
        assert told(capsys, "status", tmp_path)[1].startswith(state)
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="another host"):
        checkpoint(["prune", str(tmp_path), "--keep", "1"])
    long_ago = time.time() - 600
    os.utime(log.folder / EVENTS, (long_ago, long_ago))
    assert told(capsys, "status", tmp_path)[1].startswith("ENDED WITHOUT AN EVENT")


def test_the_story_is_told_from_every_side(run, capsys):
    said = {action: told(capsys, action, run)[1] for action in ("status", "verify")}
    views = ("spikes", "decisions", "time", "checkpoints", "skipped", "branches")
    said |= {view: told(capsys, "show", run, view)[1] for view in views}
    said["show"] = told(capsys, "show", run)[1]
    assert all(said[view].strip() in said["show"] for view in views)
    assert "Finished: step 40 of 10" in said["status"] and "attempt 2, branch 2" in said["status"]
    assert "Held-out loss 1.5000 at step 40" in said["status"] and "Last decision: skip" in said["status"]
    decisions = said["decisions"]
    assert "DAMAGE at step 18" in decisions and "3 samples of steps 17 to 20 are left out" in decisions
    assert decisions.index("DAMAGE") < decisions.index("Decision") < decisions.index("Back at step 10")
    assert "2 -> 3" in said["spikes"] and "skip" in said["spikes"]
    assert "training abandoned: rollback" in said["time"] and "training abandoned: stop before a save" in said["time"]
    assert "proven good" in said["checkpoints"] and "not proven yet" in said["checkpoints"]
    assert "5-6, 9" in said["skipped"]
    branches = said["branches"]
    assert "step 10" in branches and "Resumed" not in branches and "goes on from step 30" in branches
    assert "all sound" in said["verify"], said["verify"]
    events = told(capsys, "show", run, "events")[1]
    assert events.index("DAMAGE") < events.index("Resumed from step 30") and "log point" not in events


def test_the_living_path_leaves_out_what_was_given_up(run, capsys):
    history = History.read(run)
    assert [s["step"] for s in history.steps(current=True)] == list(range(1, 41))
    assert [s["branch"] for s in history.steps(current=True)] == [0] * 10 + [1] * 20 + [2] * 10
    assert [(b.number, b.start, b.end, b.lives_to) for b in history.branches()] == [
        (0, 0, 20, 10),
        (1, 10, 34, 30),
        (2, 30, 40, 40),
    ]
    spent = time_spent(history)
    assert spent.abandoned_steps == {"rollback": 10, "stop before a save": 4}
    assert spent.saving == pytest.approx(0.2) and spent.evaluating == pytest.approx(0.2) and spent.going_back == 0.5
    assert [history.ending(a) for a in history.attempts()] == ["killed", "finished"]
    _, text = told(capsys, "show", run, "steps")
    rows = text.splitlines()
    assert rows[0].startswith("step,loss") and len(rows) == 41
    assert [s["step"] for s in json.loads(told(capsys, "show", run, "steps", "--json")[1])] == list(range(1, 41))


def write_events(folder, *events):
    """Write a log of events at set times: (type, attempt, UTC time of day, monotonic seconds, fields)."""
    (folder / "runlog").mkdir(exist_ok=True)
    lines = []
    for seq, (kind, attempt_number, time_of_day, monotonic, fields) in enumerate(events):
        common = {"seq": seq, "attempt": attempt_number, "branch": 0, "type": kind, "monotonic": monotonic}
        lines.append(encode({**common, "utc": f"2026-11-28T{time_of_day}+00:00", **fields}))
    (folder / "runlog" / EVENTS).write_bytes(b"".join(lines))


def test_a_clock_that_is_set_back_makes_no_run_shorter_than_its_training(tmp_path, capsys):
    write_events(
        tmp_path,
        ("run_start", 1, "12:00:00", 100.0, {"step": 0, "live": {}, "batch": "", "total_steps": 10}),
        ("metrics", 1, "11:00:50", 150.0, {"steps": [1, 5]}),
        ("metrics", 1, "11:01:30", 190.0, {"steps": [6, 10]}),
        ("stop", 1, "11:01:40", 200.0, {"reason": "a test"}),
    )
    spent = time_spent(History.read(tmp_path))
    assert (spent.total, spent.training, spent.ratio) == (100.0, 90.0, 0.9)
    assert "1 min 40 s" in attempt_table(History.read(tmp_path)).rows[0]


def test_only_what_holds_up_the_steps_is_taken_from_their_time(tmp_path):
    """Loading a checkpoint is no step, a save in the background holds up none, and another trainer's evaluation was before."""
    write_events(
        tmp_path,
        ("eval", 1, "12:00:00", 10.0, {"step": 5, "seconds": 5000.0}),
        ("imported", 1, "12:00:00", 10.0, {}),
        ("run_start", 2, "12:01:00", 100.0, {"step": 5}),
        ("resume", 2, "12:03:00", 220.0, {"step": 5}),
        ("metrics", 2, "12:03:50", 270.0, {"steps": [6, 10]}),
        ("checkpoint", 2, "12:04:30", 310.0, {"state": "complete", "step": 10, "seconds": 40.0, "background": True}),
        ("metrics", 2, "12:04:40", 320.0, {"steps": [11, 15]}),
        ("checkpoint", 2, "12:04:50", 330.0, {"state": "complete", "step": 15, "seconds": 10.0, "background": False}),
    )
    spent = time_spent(History.read(tmp_path))
    assert (spent.total, spent.stopped, spent.training) == (290.0, 60.0, 100.0)
    assert (spent.evaluating, spent.saving) == (0.0, 10.0)
    assert spent.other == 120.0


def test_the_strategy_and_the_first_loss_that_differs_are_among_the_changes(tmp_path, capsys):
    zero3 = {"name": "ZeRO-3", "world_size": 4, "deepspeed_config": {"zero_optimization": {"stage": 3}}}
    for step, plan, losses in ((0, {"name": "DDP", "world_size": 2}, [3.0, 2.5, 2.0]), (1, zero3, [2.5, 2.125])):
        log = attempt(tmp_path, {"seed": 1}, step=step, plan=plan)
        log.steps([{"step": number, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 9}
                   for number, loss in enumerate(losses, step + 1)])  # fmt: skip
        log.close()
    (found,) = [e for e in History.read(tmp_path).events if e["type"] == "launch_diff"]
    assert found["differing"] == {
        "strategy": ["DDP", "ZeRO-3"], "processes": [2, 4], "deepspeed.zero_optimization.stage": [None, 3],
    }  # fmt: skip
    for attempts in ((1, 2), (2, 1)):
        text = told(capsys, "compare", tmp_path, "--attempts", *attempts)[1]
        assert "ZeRO-3" in text and "processes" in text and "differ from step 3 on" in text
    told(capsys, "report", tmp_path)
    assert "strategy DDP -&gt; ZeRO-3" in (tmp_path / "runlog" / "report.html").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_no_password_of_an_address_is_printed_or_logged(tmp_path, capsys, rank):
    address = "https://me:secret@mirror.example/models"
    log = RunLog(tmp_path)

    with pytest.raises(OSError, match="mirror"), log_failure(log if rank == 0 else None, tmp_path, rank):
        raise OSError(f"no answer from {address}")
    say(f"no answer from {address}")
    log.close()

    written = "".join(file.read_text() for file in (tmp_path / "runlog").iterdir()) + capsys.readouterr().out
    assert "secret" not in written
    assert "mirror.example/models" in written


def test_no_password_of_an_address_in_a_setting_is_logged(tmp_path):
    address = "https://me:secret@mirror.example/data.jsonl"
    settings = {"train_file": address, "datasets": [{"path": address}], "seed": 1}

    for _ in range(2):
        log = attempt(tmp_path, settings, argv=["recipe.py", "--train_file", address], plan={"asked": settings})
        log.close()

    written = log.folder / "events.jsonl"
    assert "secret" not in written.read_text()
    (start, again) = [event for event in stream(written) if event["type"] == "run_start"]
    assert start["config"] == again["config"]
    assert start["config"]["seed"] == 1
    assert start["config"]["train_file"].endswith("mirror.example/data.jsonl")
    assert not [event for event in stream(written) if event["type"] == "config_diff"]


def test_comparing_attempts_and_runs(run, tmp_path, capsys):
    text = told(capsys, "compare", run, "--attempts", 1, 2)[1]
    assert "seed" in text and "strategy" not in text
    assert "losses of the 4 steps that both have are the same" in text, "steps 31 to 34 were done again"
    assert "the same, bit for bit" in told(capsys, "compare", run, run)[1]
    of_the_log = (
        ["compare", run],
        ["compare", run, "--attempts", 1, 7],
        ["compare", run, run, "--attempts", 1, 2],
        ["status", tmp_path / "none"],
    )
    for wrong in of_the_log:
        assert main(["runlog", *map(str, wrong)]) == 2
        assert "RunLogError" in capsys.readouterr().err
    for wrong in (["show", run, "x"], ["status", run, "x"], ["note", run, "x"]):
        with pytest.raises(SystemExit, match="2"):
            main(["runlog", *map(str, wrong)])
        assert capsys.readouterr().err.startswith("zerobook runlog")


@pytest.mark.parametrize("field", ["steps", "utc", "step", "action"])
def test_a_log_that_lacks_a_field_is_one_sentence_with_its_file(run, capsys, field):
    file = run / "runlog" / "events.jsonl"
    forged = [{key: value for key, value in event.items() if key != field} for event in stream(file)]
    file.write_bytes(b"".join(encode(event) for event in forged))

    code = main(["runlog", "report", str(run)])

    error = capsys.readouterr().err
    assert code == 2 and error.startswith(f"RunLogError: {file}") and field in error
    assert not (run / "runlog" / "report.html").exists()


def test_a_log_whose_starts_are_damaged_has_a_page(run):
    file = run / "runlog" / "events.jsonl"
    file.write_bytes(b"".join(encode(event) for event in stream(file) if event["type"] != "run_start"))
    assert main(["runlog", "report", str(run)]) == 0
    assert "DAMAGE at step 18" in (run / "runlog" / "report.html").read_text()


def test_a_line_without_the_fields_of_every_event_is_found(run, capsys):
    file = run / "runlog" / "events.jsonl"
    events = list(stream(file))
    del events[3]["seq"]
    file.write_bytes(b"".join(encode(event) for event in events))
    code, text = told(capsys, "verify", run)
    assert code == 1 and "line 4: it lacks seq" in text


def test_status_reads_little_of_a_long_log(tmp_path, capsys):
    """A million events: counted in bytes that are parsed, not in seconds, which belong to benchmarks/."""
    from zerobook.runlog import history
    from zerobook.runlog import jsonl as lines

    log = attempt(tmp_path, {"seed": 1})
    log.event("decision", action="none", rule="r", why="w", options=[], policy={})
    line = {"steps": [1, 2], "loss": 1.0, "tokens_per_second": 1.0}
    for _ in range(20_000):
        log.event("metrics", durable=False, **line)
    parsed = []
    inner = lines.decode
    history.decode = lambda text: parsed.append(text) or inner(text)
    try:
        assert told(capsys, "status", tmp_path)[0] == 0
    finally:
        history.decode = inner
    assert 2 < len(parsed) < 20


def test_json_is_what_the_files_are(run):
    lines = (run / "runlog" / "events.jsonl").read_text().splitlines()
    plain = [json.loads(line) for line in lines]
    assert [{k: v for k, v in e.items() if k != "crc"} for e in plain] == History.read(run).events


def test_fields_of_earlier_logs_are_read_under_their_names_of_today(tmp_path, capsys):
    log = attempt(tmp_path, {"seed": 1})
    log.event("decision", measure="none", rule="r", why="w", options=[], ladder={})
    log.close()

    (decision,) = History.read(tmp_path).of("decision")

    assert decision["action"] == "none" and decision["policy"] == {} and "measure" not in decision
    assert told(capsys, "show", tmp_path, "decisions")[0] == 0
