"""Checkpoints appear whole or not at all; locks that nobody holds go."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from tests.harness import staged
from zerobook.checkpoint import state, store
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.checkpoint.resume import find_earlier_run
from zerobook.cli.checkpoint import checkpoint as command
from zerobook.errors import CheckpointError, ConfigError
from zerobook.launch import ops
from zerobook.utils import files


def make(folder, step, content=b"abc"):
    with staged(folder, step) as staging:
        (staging / "tensors.bin").write_bytes(content)
    return store.folder_of(folder) / f"step-{step:06d}"


def test_a_failed_save_leaves_no_checkpoint_and_harms_no_other(tmp_path):
    first = make(tmp_path, 5)
    with pytest.raises(OSError), staged(tmp_path, 6) as staging:
        (staging / "tensors.bin").write_bytes(b"half")
        raise OSError("disk full")
    assert store.list_complete(store.folder_of(tmp_path)) == [first]
    assert resolve_resume(tmp_path, "auto").checkpoint == first
    again = make(tmp_path, 6)
    assert resolve_resume(tmp_path, "auto").checkpoint == again


def test_auto_walks_past_damage_and_a_named_one_is_refused(tmp_path):
    good, bad = make(tmp_path, 1), make(tmp_path, 2)
    (bad / "tensors.bin").write_bytes(b"ab")
    assert resolve_resume(tmp_path, "auto").checkpoint == good
    with pytest.raises(CheckpointError, match=r"2 bytes, the manifest says 3 bytes"):
        resolve_resume(tmp_path, str(bad))
    (bad / "tensors.bin").unlink()
    assert "missing" in store.find_damage(bad)
    (bad / store.MANIFEST).write_text("{")
    assert "cannot be read: JSONDecodeError" in store.find_damage(bad)
    assert resolve_resume(tmp_path / "nothing", "auto").checkpoint is None


@pytest.mark.parametrize("own", [False, True])
def test_a_runs_folder_is_walked_like_auto(tmp_path, monkeypatch, own):
    for step in (1, 2, 3):
        make(tmp_path / "run", step)
    monkeypatch.chdir(tmp_path)
    there = Path("run/checkpoints") if own else tmp_path / "run" / "checkpoints"
    output_dir = "run" if own else "new"
    (there / "step-000003" / "tensors.bin").write_bytes(b"abd")
    resolution = resolve_resume(output_dir, str(tmp_path / "run"), thorough=True)
    assert resolution.checkpoint == there / "step-000002"
    assert list(resolution.skipped) == [there / "step-000003"], "by the paths under which a run sets its own aside"
    for step in (1, 2):
        (there / f"step-{step:06d}" / "tensors.bin").write_bytes(b"ab")
    with pytest.raises(CheckpointError, match=r"run: it holds 3 checkpoint.*none of them can be read") as refused:
        resolve_resume(output_dir, str(tmp_path / "run"), thorough=True)
    assert str(refused.value).count("step-0000") == 3


@pytest.mark.parametrize("aside", ["", ".abandoned", ".unreadable-2"])
def test_who_names_a_damaged_checkpoint_hears_of_the_whole_one_before_it(tmp_path, aside):
    for step in (1, 2, 3, 4):
        make(tmp_path / "run", step)
    there = store.folder_of(tmp_path / "run")
    for step in (2, 3):
        (there / f"step-{step:06d}" / "tensors.bin").write_bytes(b"abd")
    bad = (there / "step-000003").rename(there / f"step-000003{aside}")
    with pytest.raises(
        CheckpointError, match=r"is damaged.*--resume_from_checkpoint \S*step-000001, the newest complete checkpoint before"
    ):
        resolve_resume(tmp_path / "new", str(bad), thorough=True)
    (there / "step-000001" / "tensors.bin").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint before it") as refused:
        resolve_resume(tmp_path / "new", str(bad), thorough=True)
    assert "auto" not in str(refused.value), "in a new folder, that begins at step 0"


def test_a_step_saved_again_replaces_the_old_one_and_pruning_keeps_the_newest(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    make(tmp_path, 3, b"newer")
    assert (store.folder_of(tmp_path) / "step-000003" / "tensors.bin").read_bytes() == b"newer"
    removed = store.prune(store.folder_of(tmp_path), 2)
    assert [store.step_of(c) for c in removed] == [1]
    assert [store.step_of(c) for c in store.list_complete(store.folder_of(tmp_path))] == [2, 3]
    assert not [f for f in store.folder_of(tmp_path).iterdir() if f.name.startswith(".")]


def no_format(checkpoint, version):
    file = checkpoint / store.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": version}))


def no_file(checkpoint):
    """An I/O error when the manifest is read."""
    (checkpoint / store.MANIFEST).unlink()
    (checkpoint / store.MANIFEST).mkdir()


UNREADABLE = {
    "newer": (lambda c: no_format(c, 99), "format 99 is newer"),
    "older": (lambda c: no_format(c, 2), "format 2 is older"),
    "flipped byte": (lambda c: (c / "tensors.bin").write_bytes(b"abd"), "its content is damaged"),
    "I/O error": (no_file, "not a regular file"),
    "half": (lambda c: (c / store.MANIFEST).unlink(), "the save was not finished"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_run_does_not_start_over_checkpoints_that_it_cannot_read(tmp_path, kind):
    harm, words = UNREADABLE[kind]
    for step in (6, 12):
        harm(make(tmp_path, step))
    with pytest.raises(CheckpointError) as caught:
        resolve_resume(tmp_path, "auto", thorough=True)
        said = str(caught.value)
        assert said.count(words) == 2 and "step-000006" in said and "step-000012" in said and "--output_dir" in said
    fresh = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=None)
    said = find_earlier_run(fresh)
    assert said is not None and "2 checkpoints" in said, "nor without --resume_from_checkpoint"
    if kind != "flipped byte":
        assert said.count(words) == 2
        with pytest.raises(CheckpointError, match=words):  # what every process asks before the ranks know each other
            resolve_resume(tmp_path, "auto")
    assert resolve_resume(tmp_path / "new", "auto", thorough=True).checkpoint is None


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_checkpoint_that_cannot_be_read_is_set_aside_and_never_removed(tmp_path, capsys, kind):
    harm, _ = UNREADABLE[kind]
    checkpoints = store.folder_of(tmp_path)
    make(tmp_path, 6)

    def content(folder):
        return {f.name: f.read_bytes() if f.is_file() else None for f in folder.iterdir()}

    bad = make(tmp_path, 12)
    harm(bad)
    before = content(bad)
    resolution = resolve_resume(tmp_path, "auto", thorough=True)
    assert store.step_of(resolution.checkpoint) == 6 and list(resolution.skipped) == [bad]
    (aside,) = store.set_aside(checkpoints, 6, resolution.skipped)
    assert aside.name == "step-000012.unreadable" and content(aside) == before
    harm(make(tmp_path, 12, b"abc"))
    make(tmp_path, 12, b"new")  # published over one that cannot be read
    assert content(checkpoints / "step-000012.unreadable-2") == before
    make(tmp_path, 18)
    store.sweep(checkpoints)
    store.prune(checkpoints, 1)
    left = sorted(c.name for c in checkpoints.iterdir())
    assert left == ["step-000012.unreadable", "step-000012.unreadable-2", "step-000018"]
    assert content(aside) == before
    for whole in store.list_complete(checkpoints):
        shutil.rmtree(whole)
    command(["list", str(tmp_path)])
    assert "12 unreadable-2" in capsys.readouterr().out
    assert command(["verify", str(tmp_path)]) == 1
    with pytest.raises(CheckpointError, match=r"step-000012\.unreadable-2"):
        resolve_resume(tmp_path, "auto", thorough=True)


def test_where_all_was_given_up_no_run_starts_anew(tmp_path):
    make(tmp_path, 12)
    checkpoints = store.folder_of(tmp_path)
    (aside,) = store.set_aside(checkpoints, 6)
    fresh = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=None)
    assert str(aside) in find_earlier_run(fresh)
    for thorough in (False, True):
        with pytest.raises(CheckpointError, match="abandoned") as refused:
            resolve_resume(tmp_path, "auto", thorough=thorough)
        assert str(aside) in str(refused.value)
    assert resolve_resume(tmp_path, str(aside), thorough=True).checkpoint == aside


@pytest.mark.parametrize("kind", ["abandoned", "unreadable"])
def test_a_run_from_elsewhere_does_not_start_beside_what_was_set_aside(tmp_path, kind):
    """It would prune what was given up, and ``auto`` would take what can be read again one day."""
    other, mine = make(tmp_path / "other", 3), make(tmp_path / "mine", 12)
    if kind == "unreadable":
        (mine / "tensors.bin").unlink()
    (aside,) = store.set_aside(store.folder_of(tmp_path / "mine"), 6)
    assert aside.name == f"step-000012.{kind}"
    for asked in (other, tmp_path / "other"):
        with pytest.raises(CheckpointError, match=f"step-000012.{kind}") as refused:
            resolve_resume(tmp_path / "mine", str(asked), thorough=True)
        assert "Another run there would" in str(refused.value) and "another --output_dir" in str(refused.value)
    assert resolve_resume(tmp_path / "fresh", str(other), thorough=True).checkpoint == other


def test_a_kill_while_checkpoints_are_set_aside_leaves_the_ones_nearest_to_the_goal(tmp_path, monkeypatch):
    for step in (6, 12, 18, 24):
        make(tmp_path, step)
    checkpoints, real = store.folder_of(tmp_path), store._set_one_aside
    left = [True, True]
    monkeypatch.setattr(store, "_set_one_aside", lambda *args: left.pop() and real(*args))
    with pytest.raises(IndexError):
        store.set_aside(checkpoints, 6)
    assert [store.step_of(c) for c in store.list_complete(checkpoints)] == [6, 12]


def test_a_checkpoint_is_pinned_from_inside_its_folder(tmp_path, monkeypatch):
    one = make(tmp_path, 12)
    monkeypatch.chdir(one)
    assert command(["pin", "."]) == 0
    assert store.is_pinned(one) and not (one / store.LOCK).exists()


manifests = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-1, 99), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["format_version", "step", "files", "bytes", "xxh3_128", "a", "..", "\0", "a" * 300]), inner
        ),
    ),
    max_leaves=8,
)


@given(manifests | st.fixed_dictionaries({"format_version": st.just(4) | manifests, "step": st.just(1), "files": manifests}))
def test_no_manifest_is_an_error_of_the_reader(tmp_path_factory, manifest):
    one = tmp_path_factory.mktemp("run") / "step-000001"
    one.mkdir()
    (one / store.MANIFEST).write_text(json.dumps(manifest))
    assert isinstance(store.find_damage(one, thorough=True), str), (
        "a reason: none of the files that a manifest must list is there"
    )


def test_a_folder_that_is_not_of_a_run_loses_no_file_of_its_own(tmp_path):
    (tmp_path / "list.pinned").write_text("mine")
    kept = make(tmp_path, 6).rename(tmp_path / "step-000006")  # a checkpoint that somebody copied there
    store.pin(tmp_path / "step-000007")
    assert command(["pin", str(kept)]) == 0
    store.sweep(tmp_path)
    assert (tmp_path / "list.pinned").read_text() == "mine" and store.is_pinned(kept)
    assert not store.is_pinned(tmp_path / "step-000007"), "a pin without its checkpoint"


def steps(folder):
    return [store.step_of(c) for c in store.list_complete(store.folder_of(folder))]


def test_going_on_from_an_earlier_checkpoint_gives_the_later_ones_up(tmp_path):
    for step in (6, 12, 18):
        make(tmp_path, step)
    checkpoints = store.folder_of(tmp_path)
    (aside,) = store.set_aside(checkpoints, 12)
    assert aside.name == "step-000018.abandoned" and steps(tmp_path) == [6, 12]
    assert resolve_resume(tmp_path, "auto").checkpoint == checkpoints / "step-000012"
    assert resolve_resume(tmp_path, str(aside)).checkpoint == aside, "named in full, it can be had back"
    new = make(tmp_path, 14)
    assert [c.name for c in store.prune(checkpoints, 3)] == ["step-000018.abandoned"]
    make(tmp_path, 18, b"newer")
    store.set_aside(checkpoints, 14)
    make(tmp_path, 18, b"newest")
    (aside,) = store.set_aside(checkpoints, 14)
    assert (aside / "tensors.bin").read_bytes() == b"newest", "given up twice"
    store.prune(checkpoints, 1)
    assert list(checkpoints.iterdir()) == [new], "a limit counts what was given up too"


def test_a_pin_goes_with_its_checkpoint_when_the_branch_is_given_up(tmp_path):
    for step in (6, 12, 18):
        make(tmp_path, step)
    checkpoints = store.folder_of(tmp_path)
    store.pin(checkpoints / "step-000018")
    (aside,) = [c for c in store.set_aside(checkpoints, 12) if c.name.startswith("step-000018")]
    assert store.is_pinned(aside)
    make(tmp_path, 18, b"newer")
    assert not store.is_pinned(checkpoints / "step-000018"), "the next branch's step has no pin"
    store.pin(checkpoints / "step-000018")
    (again,) = store.set_aside(checkpoints, 12)
    make(tmp_path, 24)
    store.prune(checkpoints, 1)
    assert steps(tmp_path) == [24]
    assert (aside / "tensors.bin").read_bytes() == b"abc" and (again / "tensors.bin").read_bytes() == b"newer"
    store.pin(again, False)
    store.pin(checkpoints / "step-000024")
    make(tmp_path, 24, b"other")
    make(tmp_path, 30)
    store.prune(checkpoints, 1)
    left = sorted(c.name for c in checkpoints.iterdir() if c.is_dir())
    assert left == ["step-000018.abandoned", "step-000024.abandoned", "step-000030"], "saved again, a pinned one stays"


def test_a_kill_between_two_renames_loses_neither_a_pin_nor_a_checkpoint(tmp_path, monkeypatch):
    checkpoints, rename = store.folder_of(tmp_path), Path.rename
    make(tmp_path, 6)
    store.pin(make(tmp_path, 12))

    class Killed(BaseException):
        pass

    def killed(self, target):
        rename(self, target)
        raise Killed

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Killed):
        store.set_aside(checkpoints, 6)
    monkeypatch.undo()
    store.sweep(checkpoints)
    assert store.is_pinned(checkpoints / "step-000012.abandoned")
    assert not store.is_pinned(make(tmp_path, 12)), "a pin without its checkpoint is removed"

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            make(tmp_path, 12, b"newer")
    assert steps(tmp_path) == [6], "killed when the old one was hidden and the new one had no name yet"
    store.sweep(checkpoints)
    assert steps(tmp_path) == [6, 12]


def test_checkpoints_of_two_runs_do_not_mix(tmp_path):
    mine, other = make(tmp_path / "mine", 12), make(tmp_path / "other", 30)
    assert resolve_resume(tmp_path / "fresh", str(other)).checkpoint == other
    for asked in (other, tmp_path / "other"):
        with pytest.raises(CheckpointError, match=r"another run than the 1 checkpoint.* in .*mine, the newest step-000012"):
            resolve_resume(tmp_path / "mine", str(asked))
    assert resolve_resume(tmp_path / "mine", str(mine)).checkpoint == mine
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert resolve_resume(tmp_path / "link", str(mine)).checkpoint == mine


def test_a_folder_that_takes_no_writes_at_any_place_is_refused(tmp_path, monkeypatch):
    """A bucket that is mounted as a folder may write files from their beginning alone."""
    monkeypatch.setattr(state, "uuid4", lambda: SimpleNamespace(hex="1"))
    pipe = tmp_path / ".seen-by-all-1"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    alone = SimpleNamespace(is_main=True, from_main=lambda value: value)

    with pytest.raises(ConfigError, match=r"output_dir.*bucket"):
        state.require_shared_folder(alone, str(tmp_path))
    os.close(reader)
    assert not pipe.exists()


def _on_a_node(rank, folder, cwds, output_dir, queue):
    """One process of two, each with a working folder of its own, as nodes have disks of their own."""
    import torch.distributed as dist

    from zerobook.strategy import ReplicatedStrategy
    from zerobook.strategy.mesh import Mesh

    os.chdir(cwds[rank])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    strategy = ReplicatedStrategy.__new__(ReplicatedStrategy)
    strategy.mesh = Mesh(SimpleNamespace(process_index=rank, num_processes=2, is_main_process=rank == 0))
    for attempt in (output_dir, str(folder / "shared")):
        try:
            state.require_shared_folder(strategy, attempt)
            queue.put((rank, "fine"))
        except ConfigError as error:
            queue.put((rank, str(error)))
    dist.destroy_process_group()


def test_a_folder_that_another_host_shows_late_is_shared(tmp_path):
    """NFS may answer for a while that a new folder is missing, where it was looked for before."""
    folder = tmp_path / "run"

    def show():
        folder.mkdir()
        (folder / "token").touch()

    told = ("token", None, f"{folder} on hosta")
    strategy = SimpleNamespace(is_main=False, world_size=2, from_main=lambda value: told, gather=lambda node: [None, node])
    timer = threading.Timer(0.5, show)
    timer.start()
    state.require_shared_folder(strategy, str(folder))
    timer.join()


def test_nodes_that_do_not_share_the_output_folder_all_hear_of_it(tmp_path, monkeypatch):
    import torch.multiprocessing as mp

    monkeypatch.setattr(files, "SEEN_S", 0.5)

    cwds = [tmp_path / "a", tmp_path / "b"]
    for cwd in cwds:
        cwd.mkdir()
    (tmp_path / "file").touch()
    queue = mp.get_context("fork").SimpleQueue()
    mp.start_processes(_on_a_node, (tmp_path, cwds, "run", queue), nprocs=2, start_method="fork")
    said = sorted(queue.get() for _ in range(4))
    assert [rank for rank, text in said if "not visible on" in text and f"{tmp_path}/a/run" in text] == [0, 1]
    assert [rank for rank, text in said if text == "fine"] == [0, 1]
    assert not list((tmp_path / "shared").iterdir()) and not list((tmp_path / "a" / "run").iterdir())
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    output = str(tmp_path / "file" / "run")
    mp.start_processes(_on_a_node, (tmp_path, cwds, output, queue), nprocs=2, start_method="fork")
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
    """Makes lock files in a cache of their own, for a torch that waits for them: (op, seconds old) -> path."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton, raising=False)

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


def test_locks_are_listed_if_torch_waits_for_them(tmp_path, monkeypatch):
    """From 2.15 on, torch leaves a file behind each compile, and does not wait for it."""
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "_write_ninja_file_and_build_library", lambda **_: None)
    monkeypatch.setattr(cpp_extension, "_import_module_from_library", lambda *_: None)
    waits = []

    def release(seconds):
        waits.append(seconds)
        lock.unlink()

    listed = ops.list_locks()
    monkeypatch.setattr("torch.utils.file_baton.time.sleep", release)
    (tmp_path / "op.cpp").touch()
    cpp_extension.load("op", [str(tmp_path / "op.cpp")], build_directory=str(lock.parent))

    assert listed == ([lock] if waits else [])


def test_locks_are_looked_for_where_torch_keeps_them(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ops.sys, "prefix", sys.base_prefix)  # no virtual environment
    assert ops.cache_root().parent == tmp_path / "torch_extensions"
