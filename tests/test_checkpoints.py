"""Any cut of the state reads back as any other; every kind of damage is found; what is kept is what was meant."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import read_tensors, reseal, staged
from zerobook.checkpoint import save, state, store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.cli.checkpoint import checkpoint as command
from zerobook.errors import CheckpointError, LockedError
from zerobook.health import position
from zerobook.runlog.history import is_being_written
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Piece
from zerobook.utils import locks
from zerobook.utils.units import size

MOMENTS = ("exp_avg", "exp_avg_sq")
SHAPES = {"a.weight": [7, 5], "b.bias": [3], "c": [1]}
WHOLE = {
    f"{key}/{name}": torch.randn(shape, generator=torch.Generator().manual_seed(i + 10 * j))
    for i, (name, shape) in enumerate(SHAPES.items())
    for j, key in enumerate(("weight", *MOMENTS))
}


def spread(cuts, ranks):
    """Pieces per rank: every tensor cut at ``cuts``, the stretches dealt out."""
    dealt = [[] for _ in range(ranks)]
    for turn, (full, tensor) in enumerate(WHOLE.items()):
        kind, name = full.split("/", 1)
        ends = sorted({0, tensor.numel(), *(c for c in cuts if c < tensor.numel())})
        for nth, (start, stop) in enumerate(itertools.pairwise(ends)):
            values = tensor.flatten()[start:stop]
            dealt[(turn + nth) % ranks].append(Piece(name, None if kind == "weight" else kind, (start,), values))
    return dealt


class FakeStrategy:
    """One rank of several that save together, as far as `Saver` asks."""

    device = torch.device("cpu")
    plan = SimpleNamespace(optimizer="adamw")

    def __init__(self, rank, dealt, barrier=lambda: None, told=None):
        self.rank, self.dealt, self.world_size, self.is_main = rank, dealt, len(dealt), rank == 0
        self.barrier, self.told = barrier, told or SimpleNamespace(value=b"")

    def on_main(self, work):
        if self.is_main:
            self.told.value = (work() or "").encode()
        self.barrier()
        return self.told.value.decode() or None

    def pieces(self, more=None):
        return iter(self.dealt[self.rank])

    def trainable(self):
        return iter([(name, torch.zeros(shape)) for name, shape in SHAPES.items()])

    def shape(self, parameter):
        return parameter.shape

    def materialise_optimizer(self): ...

    def buffers(self):
        return {"router.bias": torch.tensor([1.0001]), "seen": torch.tensor(1001)}

    def state_shapes(self, parameter):
        return dict.fromkeys(MOMENTS, parameter.shape)

    def optimizer_steps(self):
        return 4

    def describe(self):
        return {"strategy": "ZeRO-2", "world_size": self.world_size}


def save_all(folder, step, dealt, *, background=False, keep=None, loss=None, break_rank=None, folders=None):
    """All ranks save, each in a thread; the results that rank 0 has. ``folders``: the run's folder as other ranks see it."""
    barrier, told = threading.Barrier(len(dealt)), SimpleNamespace(value=b"")
    savers = []

    def one(rank):
        seen = (folders or {}).get(rank, folder)
        saver = save.Saver(FakeStrategy(rank, dealt, barrier.wait, told), seen, keep=keep, background=background)
        savers.append((rank, saver))
        if rank == break_rank:
            saver.strategy.pieces = lambda more=None: iter([Piece("a.weight", None, (0,), SimpleNamespace())])
        saver.save(Progress(step=step, eval_loss=loss), {"config": {}})
        saver.wait()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(dealt))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return dict(savers)[0].results()


@given(
    st.sets(st.integers(1, 34)), st.integers(1, 4), st.integers(0, 34), st.integers(0, 35), st.sampled_from([1, 40, 1 << 20])
)
@settings(max_examples=40)
def test_any_cut_reads_back_as_any_other(tmp_path_factory, cuts, ranks, start, length, file_bytes):
    folder = tmp_path_factory.mktemp("run")
    before, save.FILE_BYTES = save.FILE_BYTES, file_bytes
    try:
        (result,) = save_all(folder, 3, spread(cuts, ranks))
    finally:
        save.FILE_BYTES = before
    assert result.problem is None and store.find_damage(result.checkpoint, thorough=True) is None
    assert not [f for f in result.checkpoint.iterdir() if f.name.startswith("rank-")]
    found = read_tensors(result.checkpoint)
    assert set(found) == set(WHOLE) and all(torch.equal(found[name], WHOLE[name]) for name in WHOLE)
    reader, stop = state.Reader(result.checkpoint), min(35, start + length)
    assert torch.equal(reader.read("exp_avg/a.weight", start, stop), WHOLE["exp_avg/a.weight"].flatten()[start:stop])
    assert reader.bytes_read == 4 * (stop - start)


def test_a_share_that_is_missing_or_there_twice_is_no_checkpoint(tmp_path):
    (good,) = save_all(tmp_path, 1, spread({9}, 2))
    lost = spread({9}, 2)
    lost[1].pop()
    (result,) = save_all(tmp_path, 2, lost)
    assert "the ranks gave" in result.problem and store.list_complete(store.folder_of(tmp_path)) == [good.checkpoint]
    twice = spread({9}, 2)
    twice[0].append(twice[1][0])
    (result,) = save_all(tmp_path, 3, twice)
    assert "numbers, and the ranks gave" in result.problem
    assert [f.name for f in store.folder_of(tmp_path).iterdir()] == ["step-000001"], "nothing half-made is left"


def test_a_rank_that_fails_is_named_and_nothing_is_published(tmp_path):
    (result,) = save_all(tmp_path, 2, spread({9}, 3), break_rank=2)
    assert result.problem.startswith("rank 2: AttributeError")
    assert not list(store.folder_of(tmp_path).iterdir())


def test_in_the_background_what_is_written_is_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    live = {name: tensor.clone() for name, tensor in WHOLE.items()}
    pieces = [
        Piece(n.split("/", 1)[1], None if n.startswith("weight") else n.split("/")[0], (0,), t.flatten())
        for n, t in live.items()
    ]
    released, real = threading.Event(), save.write_pieces
    monkeypatch.setattr(save, "write_pieces", lambda *args: (released.wait(30), real(*args))[1])
    saver = save.Saver(FakeStrategy(0, [pieces]), tmp_path, keep=None, background=True)
    saver.save(Progress(step=1), {})
    assert saver.results() == [], "training goes on"
    for tensor in live.values():
        tensor.add_(1)
    released.set()
    saver.save(Progress(step=2), {})
    saver.wait()
    first, second = saver.results()
    one, two = read_tensors(first.checkpoint), read_tensors(second.checkpoint)
    assert all(torch.equal(one[n], WHOLE[n]) and torch.equal(two[n], WHOLE[n] + 1) for n in WHOLE)
    assert json.loads((first.checkpoint / "progress.json").read_text())["step"] == 1


def test_every_piece_that_is_written_is_progress_of_a_save(tmp_path):
    pieces = [piece for dealt in spread({9}, 1) for piece in dealt]
    saver = save.Saver(FakeStrategy(0, [pieces]), tmp_path, keep=None)
    before = position.here().since
    saver.save(Progress(step=1), {})
    assert saver.results()[0].problem is None
    assert position.here().since > before


@pytest.mark.parametrize(
    ("final_model", "room", "keeps_proven", "keeps_best"),
    [
        ("last", 2, False, False),
        ("last", 3, True, False),
        ("last", 4, True, True),
        ("best", 2, False, False),
        ("best", 3, False, True),
        ("best", 4, True, True),
    ],
)
def test_a_tight_disk_keeps_the_best_checkpoint_first_where_its_model_is_written(final_model, room, keeps_proven, keeps_best):
    manager = SimpleNamespace(config=SimpleNamespace(final_model=final_model), saver=SimpleNamespace())
    drawbacks = CheckpointManager._keep_fewer(manager, room, is_new=False, has_held_out=True)
    assert (manager._keeps_proven, manager.saver.keep_best) == (keeps_proven, keeps_best)
    assert ("cannot be rolled back" in drawbacks, "lowest" in drawbacks) == (not keeps_proven, not keeps_best)


def test_every_block_that_is_read_before_a_rollback_is_progress(tmp_path):
    """A spike is decided on in a step, whose phases have less time than reading a large checkpoint takes."""
    [saved] = save_all(tmp_path, 1, spread({9}, 1))
    strategy = SimpleNamespace(on_main=lambda work, takes_long: work())
    manager = SimpleNamespace(strategy=strategy, path_of=lambda step: saved.checkpoint, skipped={})
    before = position.here().since
    assert CheckpointManager.is_undamaged(manager, 1)
    assert position.here().since > before


def test_host_memory_of_saves_in_the_background_is_made_once_and_holds_any_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "_FIRST_BLOCK", 4)
    monkeypatch.setattr(save, "_LARGEST_BLOCK", 16)
    pieces = [piece for dealt in spread({9}, 1) for piece in dealt]
    saver = save.Saver(FakeStrategy(0, [pieces]), tmp_path, keep=None, background=True)
    made, real = [], torch.empty

    def empty(*size, **options):
        made.append(size)
        return real(*size, **options)

    monkeypatch.setattr(save.torch, "empty", empty)
    for step in (1, 2):
        saver.save(Progress(step=step), {})
        saver.wait()
    total = sum(piece.values.numel() for piece in pieces)
    assert total > 100 and sum(size for (size,) in made) < total + 16, "made at the first save, and no larger than a block more"
    for result in saver.results():
        found = read_tensors(result.checkpoint)
        assert set(found) == set(WHOLE) and all(torch.equal(found[name], WHOLE[name]) for name in WHOLE)


@pytest.mark.parametrize("background", [False, True])
def test_a_host_that_sees_the_folder_late_writes_late(tmp_path, background):
    """On NFS, a host may see a folder that another one made a minute later."""
    mine, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    late = threading.Timer(1.0, lambda: elsewhere.symlink_to(mine))
    late.start()
    (result,) = save_all(mine, 1, spread({9}, 2), background=background, folders={1: elsewhere})
    assert result.problem is None and len(read_tensors(result.checkpoint)) == 9


def test_a_host_that_never_sees_the_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "_BEGIN_S", 1)
    (result,) = save_all(tmp_path / "run", 1, spread({9}, 2), folders={1: tmp_path / "elsewhere"})
    assert result.problem.startswith("rank 1: it did not begin to write within 1 s")
    assert store.list_complete(store.folder_of(tmp_path / "run")) == []


def test_a_rank_that_writes_for_long_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "_BEGIN_S", 1)
    real = save.write_pieces

    def slow(folder, rank, pieces):
        def late():
            pieces_ = list(pieces)
            yield pieces_[0]
            time.sleep(2.5)
            yield from pieces_[1:]

        return real(folder, rank, late() if rank else pieces)

    monkeypatch.setattr(save, "write_pieces", slow)
    (result,) = save_all(tmp_path, 1, spread({9}, 2))
    assert result.problem is None and len(read_tensors(result.checkpoint)) == 9


def test_pruning_keeps_the_newest_the_best_and_what_is_pinned(tmp_path):
    losses = {1: 3.0, 2: 1.5, 3: None, 4: 2.0, 5: 2.5, 6: None}
    for step, loss in losses.items():
        save_all(tmp_path, step, spread(set(), 1), loss=loss)
    checkpoints = store.folder_of(tmp_path)
    assert command(["pin", str(checkpoints / "step-000001")]) == 0
    assert store.find_best(checkpoints).name == "step-000002"
    (tmp_path / "half").mkdir()
    (checkpoints / ".step-000009.partial").mkdir()
    save_all(tmp_path, 7, spread(set(), 1), keep=2)
    assert [store.step_of(c) for c in store.list_complete(checkpoints)] == [1, 2, 6, 7]
    assert resolve_resume(tmp_path, "best").checkpoint.name == "step-000002"
    command(["unpin", str(checkpoints / "step-000001")])
    assert command(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert [store.step_of(c) for c in store.list_complete(checkpoints)] == [2, 7]
    with pytest.raises(CheckpointError, match="--keep is None"):
        command(["prune", str(tmp_path)])
    store.sweep(checkpoints)
    assert not (checkpoints / ".step-000009.partial").exists()
    (tmp_path / "new").mkdir()
    save_all(tmp_path / "new", 1, spread(set(), 1))
    with pytest.raises(CheckpointError, match="none is the best"):
        resolve_resume(tmp_path / "new", "best")


def test_a_save_without_a_limit_reads_no_other_checkpoint(tmp_path, monkeypatch):
    save_all(tmp_path, 1, spread(set(), 1), loss=1.0)
    examined = []
    monkeypatch.setattr(store, "find_damage", lambda checkpoint, **options: examined.append(checkpoint))
    (result,) = save_all(tmp_path, 2, spread(set(), 1), loss=2.0)
    assert result.problem is None and examined == []


def test_a_lower_limit_makes_room_before_the_next_save(tmp_path, monkeypatch):
    for step in (1, 2, 3, 4):
        save_all(tmp_path, step, spread(set(), 1), loss=1.0 if step == 1 else 2.0)
    checkpoints, write, steps = store.folder_of(tmp_path), save.write_pieces, []

    def recording(*arguments):
        steps.extend(map(store.step_of, store.list_complete(checkpoints)))
        return write(*arguments)

    monkeypatch.setattr(save, "write_pieces", recording)
    save_all(tmp_path, 5, spread(set(), 1), keep=1)
    assert steps == [1, 4], "the best and the newest"
    assert [store.step_of(c) for c in store.list_complete(checkpoints)] == [1, 5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "1.0", None])
def test_a_held_out_loss_that_is_not_finite_is_never_the_best(tmp_path, bad):
    for step, loss in {1: bad, 2: 1.0, 3: bad, 4: 2.0, 5: bad}.items():
        save_all(tmp_path, step, spread(set(), 1), loss=loss, keep=1 if step == 5 else None)
    checkpoints = store.folder_of(tmp_path)
    assert [store.step_of(c) for c in store.list_complete(checkpoints)] == [2, 5]
    assert resolve_resume(tmp_path, "best").checkpoint == store.find_best(checkpoints) == checkpoints / "step-000002"
    command(["list", str(tmp_path)])


@given(st.lists(st.sampled_from([None, math.nan, math.inf, 1.0, 2.0, 3.0]), min_size=1, max_size=6))
@settings(max_examples=20)
def test_best_is_the_same_checkpoint_for_all_who_ask(tmp_path_factory, losses):
    folder = tmp_path_factory.mktemp("run")
    for step, loss in enumerate(losses, 1):
        with staged(folder, step) as staging:
            (staging / store.PROGRESS).write_text(json.dumps(Progress(step=step, eval_loss=loss).to_json()))
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    best = store.find_best(store.folder_of(folder))
    assert (best is None) == (not finite)
    if best is not None:
        assert store.eval_loss(best) == min(finite) and resolve_resume(folder, "best").checkpoint == best
        store.prune(store.folder_of(folder), 1)
        assert store.find_best(store.folder_of(folder)) == best


@given(st.lists(st.sampled_from([math.nan, math.inf, 1.0, 2.0, 3.0]), max_size=6), st.sampled_from([None, math.nan, 2.5]))
def test_the_best_loss_of_a_run_is_a_finite_one(losses, before):
    progress = Progress(best_eval_loss=before)
    for loss in losses:
        progress.eval_loss = None
        progress.evaluated(loss)
        assert progress.eval_loss == (loss if math.isfinite(loss) else None)
    finite = [loss for loss in (*losses, before) if loss is not None and math.isfinite(loss)]
    assert not finite or progress.best_eval_loss == min(finite)


def flip(checkpoint):
    file = next(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x10
    file.write_bytes(content)


def truncate(checkpoint):
    file = next(checkpoint.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)


def link_out(checkpoint):
    file = next(checkpoint.glob("*.safetensors"))
    file.rename(checkpoint.parent.parent / "elsewhere")
    file.symlink_to(checkpoint.parent.parent / "elsewhere")


def manifest(checkpoint, **changes):
    file = checkpoint / store.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def unlist(checkpoint, name):
    """The manifest forgets a file, which is then changed: sizes and digests have nothing to say about it."""
    files = json.loads((checkpoint / store.MANIFEST).read_text())["files"]
    manifest(checkpoint, files={other: facts for other, facts in files.items() if other != name})
    (checkpoint / name).write_bytes((checkpoint / name).read_bytes().replace(b"{", b"{ ", 1))


DAMAGE = {
    "flipped": (flip, "its content is damaged"),
    "missing": (lambda c: next(c.glob("*.safetensors")).unlink(), "missing, the manifest says"),
    "truncated": (truncate, "bytes, the manifest says"),
    "other": (lambda c: manifest(c, step=99), "it is the manifest of step 99"),
    "half": (lambda c: (c / store.MANIFEST).unlink(), "the save was not finished"),
    "link": (link_out, "leads out of the checkpoint's folder"),
    "path": (lambda c: manifest(c, files={"../../elsewhere": {"bytes": 0, "xxh3_128": ""}}), "leads out of the checkpoint's"),
    "config": (lambda c: unlist(c, "config.json"), "it does not list config.json"),
    "index": (lambda c: unlist(c, "tensors.json"), "it does not list tensors.json"),
    "progress": (lambda c: unlist(c, "progress.json"), "it does not list progress.json"),
    "buffers": (lambda c: unlist(c, "buffers.safetensors"), "it does not list buffers.safetensors"),
    "newer": (lambda c: manifest(c, format_version=99), "format 99 is newer"),
    "garbage": (lambda c: (c / store.MANIFEST).write_text("[1]"), "cannot be read: TypeError"),
    "torn": (lambda c: (c / store.MANIFEST).write_text("{"), "cannot be read: JSONDecodeError"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_kind_of_damage_is_found_and_walked_past(tmp_path, capsys, kind):
    harm, words = DAMAGE[kind]
    for step in (1, 2):
        save_all(tmp_path, step, spread({9}, 2))
    good, bad = store.list_complete(store.folder_of(tmp_path))
    harm(bad)
    resolution = resolve_resume(tmp_path, "auto", thorough=True)
    assert resolution.checkpoint == good
    assert list(resolution.skipped) == [bad] and words in resolution.skipped[bad]
    assert command(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("step-000001: undamaged") and words in said[1]
    with pytest.raises(CheckpointError, match=f"Use --resume_from_checkpoint {good}"):
        resolve_resume(tmp_path, str(bad), thorough=True)


def test_a_checkpoint_that_is_pruned_while_others_are_verified_is_not_damaged(tmp_path, capsys, monkeypatch):
    for step in (1, 2):
        save_all(tmp_path, step, spread({9}, 2))
    first, second = store.list_complete(store.folder_of(tmp_path))
    read = store.find_damage

    def find_damage(checkpoint, **flags):
        shutil.rmtree(second, ignore_errors=True)
        return read(checkpoint, **flags)

    monkeypatch.setattr(store, "find_damage", find_damage)
    assert command(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{first}: undamaged"]


@pytest.mark.parametrize("name", ["config.json", "progress.json", "tensors.json"])
@pytest.mark.parametrize("harm", [lambda b: bytes(len(b)), lambda b: b.replace(b'"', b"'", 1)])
def test_readers_that_do_not_read_tensors_see_a_changed_json_file_too(tmp_path, capsys, name, harm):
    """Every process reads the batch size and the losses from these before the ranks look at every byte together."""
    for step, loss in ((1, 2.0), (2, 1.0)):
        save_all(tmp_path, step, spread({9}, 2), loss=loss)
    good, bad = store.list_complete(store.folder_of(tmp_path))
    (bad / name).write_bytes(harm((bad / name).read_bytes()))
    assert store.list_complete(store.folder_of(tmp_path)) == [good]
    assert resolve_resume(tmp_path, "auto").checkpoint == good
    assert resolve_resume(tmp_path, "best").checkpoint == good
    assert store.find_best(store.folder_of(tmp_path)) == good
    assert command(["list", str(tmp_path)]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "damaged" in shown and "itscontentisdamaged" in re.sub(r"[^a-z]", "", shown) and "2.0000" in shown


def test_an_index_cannot_name_a_file_elsewhere(tmp_path):
    for step in (1, 2):
        save_all(tmp_path, step, spread({9}, 1))
    one, other = store.list_complete(store.folder_of(tmp_path))
    index = json.loads((one / "tensors.json").read_text())
    for pieces in index["pieces"].values():
        for piece in pieces:
            piece[2] = f"../{other.name}/{piece[2]}"
    (one / "tensors.json").write_text(json.dumps(index))
    reseal(one)
    with pytest.raises(CheckpointError, match="leads out of the checkpoint's folder"):
        read_tensors(one)


def test_a_pickle_is_never_opened(tmp_path):
    save_all(tmp_path, 1, spread({9}, 1))
    (one,) = store.list_complete(store.folder_of(tmp_path))
    fired = tmp_path / "fired"
    (one / "tensors.pt").write_bytes(b"cos\nmkdir\n(S'" + str(fired).encode() + b"'\ntR.")
    assert store.find_damage(one, thorough=True) is None and len(read_tensors(one)) == 9
    assert not fired.exists()


def test_commands_show_what_there_is(tmp_path, capsys):
    save_all(tmp_path, 12, spread({9}, 2), loss=1.25)
    save_all(tmp_path, 24, spread({9}, 2))
    checkpoints = store.folder_of(tmp_path)
    truncate(checkpoints / "step-000024")
    command(["list", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "1.2500" in shown and "best" in shown and "ZeRO-2, 2 processes" in shown and "damaged" in shown
    command(["inspect", str(checkpoints / "step-000012")])
    shown = capsys.readouterr().out
    assert "ZeRO-2" in shown and "cursor" in shown and "eval_loss" in shown
    with pytest.raises(CheckpointError, match="there are no checkpoints"):
        command(["list", str(tmp_path / "nothing")])
    assert [size(n) for n in (999, 1_620_000_000, 2_500)] == ["999 B", "1.62 GB", "2.50 kB"]


def test_a_second_run_into_one_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_GRACE_S", 0)
    for step in (1, 2):
        save_all(tmp_path / "run", step, spread({9}, 1))
    tmp_path = store.folder_of(tmp_path / "run")
    hold = "import sys, time; from pathlib import Path; from zerobook.checkpoint import store\n"
    hold += "with store.locked(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "mine\n"
        with (
            pytest.raises(LockedError, match=f"process {other.pid} on .* uses this folder.*--output_dir") as refused,
            store.locked(tmp_path),
        ):
            pass
        assert refused.value.exit_code == 1, "schedulers start a run with exit code 2 never again"
        assert f"delete {tmp_path / '.lock'}" in str(refused.value)
        start = time.monotonic()
        monkeypatch.setattr(store, "_GRACE_S", 60)  # a person does not wait for a killed run's processes
        first = tmp_path / "step-000001"
        with pytest.raises(LockedError, match=f"process {other.pid} on .* uses this folder"):
            command(["prune", str(tmp_path), "--keep", "1"])
        assert time.monotonic() - start < 30
        assert [store.step_of(c) for c in store.list_complete(tmp_path)] == [1, 2]
        command(["pin", str(first)])
        assert store.is_pinned(first), "people pin while a run trains"
        command(["unpin", str(first)])
        assert not store.is_pinned(first)
    finally:
        other.kill()
        other.wait()
    with store.locked(tmp_path):
        pass
    assert command(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert [store.step_of(c) for c in store.list_complete(tmp_path)] == [2]


def test_a_run_holds_its_folder_until_its_process_ends(tmp_path):
    words = "import os, sys; from pathlib import Path; from zerobook.checkpoint import store\n"
    words += "store.lock_until_exit(Path(sys.argv[1])); store.lock_until_exit(Path(sys.argv[1]))\n"
    words += "print('mine', flush=True); sys.stdin.read()\n"
    words += "import atexit; atexit._run_exitfuncs(); os._exit(0)"  # as launched processes end
    other = subprocess.Popen(
        [sys.executable, "-c", words, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "mine\n"
    with pytest.raises(LockedError, match=f"process {other.pid}"), store.locked(tmp_path, wait=0):
        pass
    other.communicate("", timeout=60)
    assert other.returncode == 0 and not (tmp_path / ".lock.holder").exists()
    with store.locked(tmp_path, wait=0):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_taken_for_another_process(tmp_path, monkeypatch, capsys, number):
    def flock(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    save_all(tmp_path, 1, spread({9}, 1))
    save_all(tmp_path, 2, spread({9}, 1))
    with store.locked(store.folder_of(tmp_path)):
        assert "has no locks" in capsys.readouterr().err
    assert command(["prune", str(tmp_path), "--keep", "1"]) == 0
    log = RunLog(tmp_path)
    log.event("note", text="x", by="me")
    assert is_being_written(log.folder), "it may be: nobody can tell"
    log.close()


@pytest.mark.parametrize("number, meaning", [(errno.EAGAIN, False), (errno.EACCES, False), (errno.EIO, OSError)])
def test_a_lock_that_another_process_holds_is_told_from_an_error(tmp_path, monkeypatch, number, meaning):
    def flock(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if meaning is OSError:
        with pytest.raises(OSError, match="Input/output"):
            locks.lock(0)
    else:
        assert locks.lock(0) is False
        with pytest.raises(LockedError, match="uses this folder"), store.locked(tmp_path, wait=0):
            pass
