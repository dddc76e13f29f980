"""Saving, going back, pinning, pruning, damage and kills in any order: what must not be lost is there."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.harness import make_staging
from zerobook.checkpoint import store
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.errors import CheckpointError

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Killed(BaseException):
    """No code but the test catches it, and once it was raised no change of the file system succeeds."""


class Calls:
    """The calls left before the process is dead; None while it cannot die."""

    left: int | None = None


def _audit(event, args):
    if Calls.left is None or not (event in CHANGES or (event == "open" and args[1] not in ("r", "rb", None))):
        return
    Calls.left -= 1
    if Calls.left < 0:
        raise Killed


sys.addaudithook(_audit)  # for the rest of this process; it does nothing while `Calls.left` is None
MAYBE = st.one_of(st.none(), st.integers(0, 25))


class Store(RuleBasedStateMachine):
    """One run's folder, and people who look after it."""

    def __init__(self):
        super().__init__()
        self.run = Path(tempfile.mkdtemp(prefix="store-"))
        self.folder = store.folder_of(self.run)
        self.folder.mkdir()
        self.number = 0
        self.step = 0  # where the run stands
        self.running = True
        self.pinned: set[str] = set()
        self.broken: set[str] = set()
        self.any_whole = False

    def teardown(self):
        Calls.left = None
        shutil.rmtree(self.run)

    # --- helpers
    def everything(self):
        """name -> number of the save, of all that has a visible name."""
        found = {}
        for one in (*store.list_candidates(self.folder), *(a for k in ("abandoned", "unreadable")
                                                      for a in store.list_aside(self.folder, k))):  # fmt: skip
            found[(one / "data").read_text()] = one
        return found

    def mortal(self, kill, work):
        """Do ``work``, killed before its call number ``kill``; what the next start does first follows. Returns if it lived."""
        Calls.left = kill
        try:
            work()
            return True
        except Killed:
            self.running = False
            return False
        finally:
            Calls.left = None
            if not self.running:
                with store.locked(self.folder):
                    pass

    # --- the run
    @precondition(lambda self: self.running)
    @rule(ahead=st.integers(0, 3), keep=st.sampled_from([None, 1, 2]), loss=st.sampled_from([None, 1.0, 2.0, 3.0]), kill=MAYBE)
    def save(self, ahead, keep, loss, kill):
        self.step += ahead
        self.number += 1
        number, step, published = str(self.number), self.step, []

        def work():
            staging = make_staging(self.folder, step)
            (staging / "progress.json").write_text(json.dumps({"eval_loss": loss}))
            (staging / "data").write_text(number)
            store.publish(staging, step, {})
            published.append(True)
            best.append(store.find_best(self.folder))
            best[0] = best[0] and (best[0] / "data").read_text()
            store.prune(self.folder, keep)

        best: list = []
        lived = self.mortal(kill, work)
        if published:
            self.any_whole = True
            assert number in self.everything(), "what was just published is gone"
            if best and best[0]:
                assert best[0] in self.everything(), "the best is gone"
        assert published or not lived

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kill=MAYBE)
    def roll_back(self, data, kill):
        there = [c for c in store.list_complete(self.folder) if store.find_damage(c, thorough=True) is None]
        there = [c for c in there if store.step_of(c) < self.step]
        if not there:
            return
        to = store.step_of(data.draw(st.sampled_from(there)))
        if self.mortal(kill, lambda: store.set_aside(self.folder, to)):
            self.step = to

    @rule()
    def die(self):
        self.running = False

    @precondition(lambda self: not self.running)
    @rule(data=st.data(), kill=MAYBE)
    def resume(self, data, kill):
        named = [str(c) for c in self.everything().values()]
        asked = data.draw(st.sampled_from(["auto", "auto", "best", *named]))
        whole = [c for c in store.list_candidates(self.folder) if store.find_damage(c, thorough=True) is None]
        found = []

        def work():
            with store.locked(self.folder):
                resolution = resolve_resume(self.run, asked, thorough=True)
                one = resolution.checkpoint
                found.append(one)
                if one is not None:
                    step = json.loads((one / store.MANIFEST).read_text())["step"]
                    store.set_aside(self.folder, step, resolution.skipped)
                    if store.step_of(one) < 0:
                        store.restore_name(one, step)
                    found.append(step)

        try:
            lived = self.mortal(kill, work)
        except CheckpointError:
            assert asked != "auto" or not whole, "auto is refused, and a whole checkpoint is there"
            return
        if asked == "auto" and found:
            if whole:
                assert found[0] == whole[-1]
            else:
                assert found[0] is None and not self.everything(), "a run would start at step 0 beside what is there"
        if lived and found:
            self.running = True
            self.step = found[1] if found[0] is not None else 0

    # --- people
    @rule(data=st.data(), wanted=st.booleans())
    def pin(self, data, wanted):
        there = self.everything()
        if there:
            number = data.draw(st.sampled_from(sorted(there)))
            store.pin(there[number], wanted)
            (self.pinned.add if wanted else self.pinned.discard)(number)

    @precondition(lambda self: not self.running)
    @rule(keep=st.integers(1, 3), kill=MAYBE)
    def prune(self, keep, kill):
        best = store.find_best(self.folder)

        def work():
            with store.locked(self.folder, wait=0):
                store.prune(self.folder, keep)

        self.mortal(kill, work)
        assert best is None or best.exists()

    @rule(data=st.data(), how=st.sampled_from(["manifest", "json", "byte", "missing"]))
    def damage(self, data, how):
        there = {n: c for n, c in self.everything().items() if store.find_damage(c) is None}
        if not there:
            return
        number = data.draw(st.sampled_from(sorted(there)))
        one = there[number]
        if how == "manifest":
            (one / store.MANIFEST).write_text("{")
            self.broken.add(number)
        elif how == "missing":
            (one / "tensors.json").unlink()
            self.broken.add(number)
        elif how == "json":
            (one / "tensors.json").write_text("[]")  # of the same size
            self.broken.add(number)
        else:
            (one / "buffers.safetensors").write_text("[]")  # found when every byte is read

    @invariant()
    def nothing_is_lost(self):
        there = self.everything()
        for number in self.pinned:
            assert number in there, f"the pinned {number} is gone"
            assert store.is_pinned(there[number]), f"{number} is not pinned any more"
        for number in self.broken:
            assert number in there, f"{number} could not be read, and is gone"
        pinned = {number for number, one in there.items() if store.is_pinned(one)}
        assert pinned == self.pinned, "a pin has gone over to another checkpoint"
        if self.any_whole:
            assert there, "all is gone"


Store.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStore = Store.TestCase
