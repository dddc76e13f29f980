"""A save that is killed at any of its file-system calls, or runs out of disk, costs nothing that was complete."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.harness import disk_of, read_tensors
from tests.test_checkpoints import FakeStrategy, save_all, spread
from zerobook.checkpoint import save, store
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.strategy import Piece

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Calls:
    """Counts a process's changes of the file system, and kills the process right before number ``fatal``."""

    def __init__(self, counter, fatal):
        self.counter, self.fatal = counter, fatal
        sys.addaudithook(self._audit)  # there is no way to remove one: for forked children only
        os.fsync = self._counted(os.fsync)
        save._File.add = self._counted(save._File.add)

    def _audit(self, event, args):
        if event in WATCHED and not (event == "open" and args[1] in ("r", "rb", None)):
            self._count()

    def _counted(self, inner):
        def call(*args, **options):
            self._count()
            return inner(*args, **options)

        return call

    def _count(self):
        self.counter.value += 1
        if self.counter.value == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def _rank(rank, folder, dealt, barrier, told, counter, fatal, step):
    saver = save.Saver(FakeStrategy(rank, dealt, barrier.wait, told), folder, keep=1, background=step % 2 == 0)
    if fatal is not None:
        Calls(counter, fatal)
    saver.save(Progress(step=step), {"config": {}})
    saver.wait()
    os._exit(0)


def save_in_processes(folder, step, victim=None, fatal=None):
    """Two forked ranks save; the launcher's part: once one is dead the other is killed. Returns calls counted."""
    context = multiprocessing.get_context("fork")
    barrier, counter, told = context.Barrier(2), context.Value("i", 0), context.Array("c", 1000)
    dealt = spread({step % 30 + 1}, 2)
    ranks = [
        context.Process(target=_rank, args=(r, folder, dealt, barrier, told, counter, fatal if r == victim else None, step))
        for r in range(2)
    ]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode not in (None, 0) for process in ranks):
            for process in ranks:
                process.kill()
        time.sleep(0.002)
    for process in ranks:
        process.join()
    return counter.value, [process.exitcode for process in ranks]


@pytest.mark.parametrize(
    ("victim", "every"),
    [(0, 4), (1, 2), pytest.param(0, 1, marks=pytest.mark.full), pytest.param(1, 1, marks=pytest.mark.full)],
)
def test_a_save_killed_at_any_call_leaves_a_checkpoint_to_go_on_from(tmp_path, victim, every):
    checkpoints = store.folder_of(tmp_path)
    save_in_processes(tmp_path, 1)
    calls, codes = save_in_processes(tmp_path, 2, victim, fatal=10**6)
    assert codes == [0, 0] and calls > (15 if victim == 0 else 3)
    assert [store.step_of(c) for c in store.list_complete(checkpoints)] == [2], "save_total_limit 1"
    step, killed = 3, 0
    fatal_calls = range(1, calls + 1, every)
    for fatal in fatal_calls:
        _, codes = save_in_processes(tmp_path, step, victim, fatal)
        killed += codes[victim] == -signal.SIGKILL
        with store.locked(checkpoints):  # what the next attempt does first
            resolution = resolve_resume(tmp_path, "auto", thorough=True)
        found = resolution.checkpoint
        assert found is not None and store.find_damage(found, thorough=True) is None, f"call {fatal}"
        assert store.step_of(found) in (step - 1, step) and not resolution.skipped
        assert len(read_tensors(found)) == 9
        assert not [f for f in checkpoints.iterdir() if f.name.startswith(".step")], "leftovers are swept away"
        if store.step_of(found) != step - 1:
            step += 1
            continue
        _, codes = save_in_processes(tmp_path, step)
        assert codes == [0, 0] and store.step_of(resolve_resume(tmp_path, "auto").checkpoint) == step
        step += 1
    assert killed == len(fatal_calls), "every one of the calls was the last of a process"


@pytest.fixture
def small_disk(tmp_path):
    with disk_of(tmp_path / "small", "512k") as folder:
        yield folder


def test_a_disk_that_fills_up_keeps_the_last_good_checkpoint(small_disk):
    codes = save_in_processes(small_disk, 1)[1]
    assert codes == [0, 0] and resolve_resume(small_disk, "auto").checkpoint is not None
    free = shutil.disk_usage(small_disk).free
    failed = 0
    for step, room in enumerate(range(0, 262_144, 32_768), start=2):  # less and less: every call fails once
        (small_disk / "ballast").write_bytes(b"x" * max(0, free - room))
        before = resolve_resume(small_disk, "auto", thorough=True).checkpoint
        save_in_processes(small_disk, step)
        (small_disk / "ballast").unlink()
        after = resolve_resume(small_disk, "auto", thorough=True).checkpoint
        assert after is not None and store.step_of(after) in (store.step_of(before), step)
        failed += store.step_of(after) != step
        assert not [f for f in store.folder_of(small_disk).iterdir() if f.name.startswith(".step")]
    assert failed >= 3, "some of them did run out of room"
    assert save_in_processes(small_disk, 99)[1] == [0, 0] and store.step_of(resolve_resume(small_disk, "auto").checkpoint) == 99


def test_files_of_a_save_that_fails_take_no_space(tmp_path):
    """On a full disk, not even the error could be written otherwise."""

    def pieces():
        yield "layer.weight", None, (0,), torch.ones(100_000)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        save.write_pieces(tmp_path, 0, pieces())
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [0]


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_still_writes_when_rank_0_gives_up_ends_as_quietly(tmp_path, background):
    dealt, barrier, told = spread({9}, 2), threading.Barrier(2), SimpleNamespace(value=b"")
    staging = store.staging_of(store.folder_of(tmp_path), 1)
    errors, results = [], {}
    threading.excepthook = lambda found: errors.append(found.exc_value)

    class Slow(FakeStrategy):
        def pieces(self, more=None):
            if background:
                return iter(self.dealt[self.rank])
            return self._late()

        def _late(self):
            if self.rank == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            while staging.exists():
                time.sleep(0.01)
            yield from self.dealt[1]

    def one(rank):
        saver = save.Saver(Slow(rank, dealt, barrier.wait, told), tmp_path, keep=None, background=background)
        if background:
            saver._copy_pieces = lambda pieces: saver.strategy._late()
        saver.save(Progress(step=1), {"config": {}})
        saver.wait()
        results[rank] = saver.results()

    try:
        ranks = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(60)
    finally:
        threading.excepthook = threading.__excepthook__
    assert errors == [] and results[1] == []
    assert [r.problem for r in results[0]] == [f"rank 0: No space left on device ({staging})"]


@pytest.fixture
def stuck(monkeypatch):
    """No file called ``.nfs1`` can be deleted, as on NFS while a process has it open."""
    real = os.unlink

    def unlink(path, *args, **options):
        if os.path.basename(path) == ".nfs1":
            raise OSError(errno.EBUSY, "Device or resource busy", os.fspath(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    return monkeypatch.undo


def published(folder, step, keep=None):
    (result,) = save_all(folder, step, spread({9}, 2), keep=keep)
    assert result.problem is None
    return result.checkpoint


def test_what_cannot_be_deleted_fails_no_save_and_is_tried_again(tmp_path, capsys, stuck):
    checkpoints = store.folder_of(tmp_path)
    (published(tmp_path, 1) / ".nfs1").touch()
    (published(tmp_path, 2) / ".nfs1").touch()
    published(tmp_path, 3, keep=1)
    said = capsys.readouterr().err
    assert [store.step_of(c) for c in store.list_complete(checkpoints)] == [3]
    assert said.count("cannot be cleaned up") == 2 and "step-000001.deleted: " in said
    assert ".nfs1: Device or resource busy" in said
    (published(tmp_path, 1) / ".nfs1").touch()  # of another branch; its hidden name is taken
    published(tmp_path, 4, keep=1)
    with store.locked(checkpoints):  # nor does the next start fail
        assert "cannot be cleaned up" in capsys.readouterr().err
    stuck()
    with store.locked(checkpoints):
        pass
    assert sorted(c.name for c in checkpoints.iterdir() if store.LOCK not in c.name) == ["step-000004"]


def test_a_half_deleted_checkpoint_does_not_come_back_instead_of_a_whole_one(tmp_path, stuck):
    checkpoints = store.folder_of(tmp_path)
    (published(tmp_path, 1) / ".nfs1").touch()
    whole = published(tmp_path, 1)
    whole.rename(checkpoints / ".step-000001.replaced-2")  # killed while the next one was published
    with store.locked(checkpoints):
        found = resolve_resume(tmp_path, "auto", thorough=True).checkpoint
    assert found == whole and store.find_damage(found, thorough=True) is None


def test_what_a_killed_save_left_never_becomes_part_of_the_next(tmp_path, capsys, stuck, monkeypatch):
    staging = store.staging_of(store.folder_of(tmp_path), 3)
    staging.mkdir(parents=True)
    for stale in ("rank-0.json", "rank-1.json", ".nfs1"):
        (staging / stale).write_text('{"pieces": {}, "digests": {}}')
    found = published(tmp_path, 3)
    assert not (found / ".nfs1").exists() and len(read_tensors(found)) == 9
    staging.mkdir()
    (staging / "rank-1.json").write_text('{"pieces": {}, "digests": {}}')
    monkeypatch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(PermissionError(1, "Not permitted", self)))
    (result,) = save_all(tmp_path, 3, spread({9}, 2))
    assert "cannot be made" in result.problem and "Not permitted" in result.problem
    assert store.list_complete(store.folder_of(tmp_path)) == [found]


def test_links_are_swept_and_what_they_lead_to_is_not(tmp_path):
    checkpoints = store.folder_of(tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    first = published(tmp_path, 1)
    for name in (".step-000009.partial", ".step-000002.abandoned.deleted", "step-000003", "step-000004.abandoned"):
        (checkpoints / name).symlink_to(kept)
    (checkpoints / ".step-000005.deleted").touch()
    with store.locked(checkpoints):
        pass
    published(tmp_path, 6, keep=1)
    assert not first.exists() and (kept / "file").exists()
    left = sorted(c.name for c in checkpoints.iterdir() if store.LOCK not in c.name)
    assert left == ["step-000003", "step-000004.abandoned", "step-000006"]


def anonymous_kb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))


def _save_and_load_again_and_again(folder, queue):
    pieces = spread(set(), 1)
    pieces[0] = [piece._replace(values=torch.randn(1_000_000)) for piece in pieces[0]]
    strategy = FakeStrategy(0, pieces)
    strategy.trainable = lambda: iter([(n, torch.empty(1_000_000)) for n in ("a.weight", "b.bias", "c")])
    saver = save.Saver(strategy, folder, keep=1, background=True)
    sizes = []
    for step in range(1, 26):
        saver.save(Progress(step=step), {})
        saver.wait()
        assert len(read_tensors(saver.results()[0].checkpoint)) == 9
        gc.collect()
        sizes.append(anonymous_kb())
    queue.put(sizes)


@pytest.mark.full  # growth
def test_twenty_saves_and_loads_do_not_grow_memory(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_save_and_load_again_and_again, args=(tmp_path, queue))
    process.start()
    sizes = queue.get()
    process.join()
    # One tensor that each round left behind would be 80 MB. Saves in another thread move the heap's end by a few tensors.
    assert sizes[-1] < max(sizes[:5]) + 20_000, f"anonymous memory over 25 rounds, kB: {sizes}"


def _save_once(folder, queue):
    save.FILE_BYTES = 16 << 20
    pieces = [Piece(f"layer{i}", None, (0,), torch.randn(1 << 20)) for i in range(64)]  # 256 MiB
    pieces += [
        piece._replace(key=key) for key in ("exp_avg", "exp_avg_sq") for piece in pieces[:64]
    ]  # 768 MiB, of which 256 are in memory
    strategy = FakeStrategy(0, [pieces])
    strategy.trainable = lambda: iter([(f"layer{i}", torch.empty(1 << 20)) for i in range(64)])
    before = anonymous_kb()
    peak, done = [before], threading.Event()

    def watch():
        while not done.wait(0.001):
            peak.append(anonymous_kb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    saver = save.Saver(strategy, folder, keep=1)
    saver.save(Progress(step=1), {})
    done.set()
    watcher.join()
    queue.put((max(peak) - before, saver.results()[0].problem))


@pytest.mark.full  # 768 MiB
def test_a_save_takes_no_memory_to_speak_of_however_large_the_state(tmp_path):
    """768 MiB of state in files of 16, in pieces of 4."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_save_once, args=(tmp_path, queue))
    process.start()
    extra, problem = queue.get()
    process.join()
    assert problem is None and extra < 16 * 1024, f"{extra} kB above what was held"
