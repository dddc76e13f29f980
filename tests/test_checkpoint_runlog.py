"""Checkpoints appear whole or not at all; locks that nobody holds go."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from zerobook import ops
from zerobook.checkpoint import state, store
from zerobook.errors import CheckpointError, ConfigError
from zerobook.progress import Progress


def make(folder, step, content=b"abc"):
    with store.staged(store.folder_of(folder), step) as staging:
        (staging / "tensors.bin").write_bytes(content)
    return store.folder_of(folder) / f"step-{step:06d}"


def test_a_failed_save_leaves_no_checkpoint_and_harms_no_other(tmp_path):
    first = make(tmp_path, 5)
    with pytest.raises(OSError), store.staged(store.folder_of(tmp_path), 6) as staging:
        (staging / "tensors.bin").write_bytes(b"half")
        raise OSError("disk full")
    assert store.complete(store.folder_of(tmp_path)) == [first]
    assert store.find(tmp_path, "auto") == first
    again = make(tmp_path, 6)
    assert store.find(tmp_path, "auto") == again


def test_auto_walks_past_damage_and_a_named_one_is_refused(tmp_path):
    good, bad = make(tmp_path, 1), make(tmp_path, 2)
    (bad / "tensors.bin").write_bytes(b"ab")
    assert store.find(tmp_path, "auto") == good
    with pytest.raises(CheckpointError, match=r"2 bytes, the manifest says 3 bytes"):
        store.find(tmp_path, str(bad))
    (bad / "tensors.bin").unlink()
    assert "missing" in store.damage(bad)
    (bad / store.MANIFEST).write_text("{")
    assert "cannot be read: JSONDecodeError" in store.damage(bad)
    assert store.find(tmp_path / "nothing", "auto") is None


def test_a_step_saved_again_replaces_the_old_one_and_pruning_keeps_the_newest(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    make(tmp_path, 3, b"newer")
    assert (store.folder_of(tmp_path) / "step-000003" / "tensors.bin").read_bytes() == b"newer"
    removed = store.prune(store.folder_of(tmp_path), 2)
    assert [store.step_of(c) for c in removed] == [1]
    assert [store.step_of(c) for c in store.complete(store.folder_of(tmp_path))] == [2, 3]
    assert not [f for f in store.folder_of(tmp_path).iterdir() if f.name.startswith(".")]


def steps(folder):
    return [store.step_of(c) for c in store.complete(store.folder_of(folder))]


def test_going_on_from_an_earlier_checkpoint_gives_the_later_ones_up(tmp_path):
    for step in (6, 12, 18):
        make(tmp_path, step)
    checkpoints = store.folder_of(tmp_path)
    (aside,) = store.set_aside(checkpoints, 12)
    assert aside.name == "step-000018.abandoned" and steps(tmp_path) == [6, 12]
    assert store.find(tmp_path, "auto") == checkpoints / "step-000012"
    assert store.find(tmp_path, str(aside)) == aside, "named in full, it can be had back"
    new = make(tmp_path, 14)
    assert [c.name for c in store.prune(checkpoints, 3)] == ["step-000018.abandoned"]
    make(tmp_path, 18, b"newer")
    store.set_aside(checkpoints, 14)
    make(tmp_path, 18, b"newest")
    (aside,) = store.set_aside(checkpoints, 14)
    assert (aside / "tensors.bin").read_bytes() == b"newest", "given up twice"
    store.prune(checkpoints, 1)
    assert list(checkpoints.iterdir()) == [new], "a limit counts what was given up too"


def test_checkpoints_of_two_runs_do_not_mix(tmp_path):
    mine, other = make(tmp_path / "mine", 12), make(tmp_path / "other", 30)
    assert store.find(tmp_path / "fresh", str(other)) == other
    for asked in (other, tmp_path / "other"):
        with pytest.raises(CheckpointError, match=r"another run than the 1 checkpoint.* in .*mine, the newest step-000012"):
            store.find(tmp_path / "mine", str(asked))
    assert store.find(tmp_path / "mine", str(mine)) == mine
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert store.find(tmp_path / "link", str(mine)) == mine


def _on_a_node(rank, folder, cwds, output_dir, queue):
    """One process of two, each with a working folder of its own, as nodes have disks of their own."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from zerobook.strategy import ReplicatedStrategy

    os.chdir(cwds[rank])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    strategy = ReplicatedStrategy.__new__(ReplicatedStrategy)
    strategy.accelerator = SimpleNamespace(process_index=rank, num_processes=2, is_main_process=rank == 0)
    for attempt in (output_dir, str(folder / "shared")):
        try:
            state.check_shared(strategy, attempt)
            queue.put((rank, "fine"))
        except ConfigError as error:
            queue.put((rank, str(error)))
    dist.destroy_process_group()


def test_nodes_that_do_not_share_the_output_folder_all_hear_of_it(tmp_path):
    import torch.multiprocessing as mp

    cwds = [tmp_path / "a", tmp_path / "b"]
    for cwd in cwds:
        cwd.mkdir()
    (tmp_path / "file").touch()
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_on_a_node, (tmp_path, cwds, "run", queue), nprocs=2)
    said = sorted(queue.get() for _ in range(4))
    assert [rank for rank, text in said if "not seen on" in text and f"{tmp_path}/a/run" in text] == [0, 1]
    assert [rank for rank, text in said if text == "fine"] == [0, 1]
    assert not list((tmp_path / "shared").iterdir()) and not list((tmp_path / "a" / "run").iterdir())
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    mp.spawn(_on_a_node, (tmp_path, cwds, str(tmp_path / "file" / "run"), queue), nprocs=2)
    assert [rank for rank, text in sorted(queue.get() for _ in range(4)) if "cannot be written to: Not a dir" in text] == [0, 1]


def test_progress_round_trips_and_refuses_a_partial_record():
    progress = Progress(step=3, cursor=12, skip_ranges=[[1, 4]], detector={"a": 1.5})
    record = json.loads(json.dumps(progress.to_json()))
    assert Progress.from_json(record) == progress
    del record["cursor"]
    with pytest.raises(CheckpointError, match=r"missing \['cursor'\]"):
        Progress.from_json(record)


@pytest.fixture
def lock_files(tmp_path, monkeypatch):
    """Makes lock files in a cache of their own: (op, seconds old) -> path."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def make_lock(op, old):
        lock = tmp_path / "py311_cpu" / op / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - old,) * 2)
        return lock

    return make_lock


def test_stale_locks_are_cleared_and_held_ones_are_not(lock_files):
    stale, held = lock_files("stale", 3600), lock_files("held", 3600)
    descriptor = os.open(held, os.O_RDONLY)
    try:
        assert ops.clear_stale_locks() == [stale]
        assert held.exists() and not stale.exists()
    finally:
        os.close(descriptor)
    assert ops.clear_stale_locks() == [held]


def test_a_young_lock_may_be_another_machines_and_is_waited_for(lock_files, monkeypatch):
    young, said = lock_files("young", 10), []

    def elsewhere(seconds):  # the compile on another machine ends
        assert young.exists() and "waiting" in said[0]
        young.unlink()

    monkeypatch.setattr(ops.time, "sleep", elsewhere)
    assert ops.clear_stale_locks(said.append) == [] and not young.exists()
    killed = lock_files("killed", 10)
    monkeypatch.setattr(ops.time, "sleep", lambda seconds: os.utime(killed, (time.time() - 3600,) * 2))
    assert ops.clear_stale_locks(said.append) == [killed]
    assert f"removed {killed}" in said[-1]


def test_locks_are_looked_for_where_torch_keeps_them(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ops.sys, "prefix", sys.base_prefix)  # no virtual environment
    assert ops.cache_root() == tmp_path / "torch_extensions"
