"""Something goes wrong in a real run, and the run mends itself: the same final loss, and the log tells all of it."""

from __future__ import annotations

import json

import pytest

from tests.harness import ROOT, launch
from zerobook.runlog.check import problems
from zerobook.runlog.history import History

AT, STEPS = 71, 100
WINDOW = {"labels": 8, "rate": 6, "nan": 1, "bit": 1, "drift": 1, "again": 20}
"""steps that a fault lasts, where it is not for good"""
FAULTS = ("labels", "rate", "nan", "bit")
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
SAMPLE = {("ddp", "bit"), ("fsdp", "labels")}

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """(strategy, fault, on_spike, flags) -> a finished run; each is launched once."""
    done = {}

    def train(strategy, fault=None, on_spike="rollback", expect=0, processes=2, **flags):
        key = (strategy, fault, on_spike, processes, str(flags))
        if key not in done:
            folder = tmp_path_factory.mktemp("rollback")
            settings = dict(
                model_name_or_path=tiny / "gpt2", dataset_name="embedded:chatterbot", cache_dir=folder.parent / "data",
                block_size=64, max_train_steps=STEPS, per_device_train_batch_size=4, learning_rate=6e-3, logging_steps=5,
                save_steps=10, save_total_limit=2, max_eval_samples=100, on_spike=on_spike,
            )  # fmt: skip
            faults = (
                {
                    "ZEROBOOK_FAULT": fault,
                    "ZEROBOOK_FAULT_AT": AT + 4 * (fault == "again"),
                    "ZEROBOOK_FAULT_STEPS": WINDOW[fault],
                }
                if fault
                else {}
            )
            wrapper = ROOT / "tests" / "distributed" / "faults.py"
            run = launch(
                strategy, processes, "causal_lm", folder / "run", through=wrapper if fault else None, environment=faults,
                expect=expect, **settings | flags,
            )  # fmt: skip
            done[key] = run
        return done[key]

    return train


def held_out(run):
    return run.event("eval")["loss"]


def story(run):
    return [(e["type"], e.get("measure") or e.get("phase") or e.get("reproduced")) for e in run.events
            if e["type"] in ("decision", "rollback", "skip") or (e["type"] == "verify" and e["after"] == "replay")]  # fmt: skip


MENDED = [("decision", "replay"), ("rollback", "replay"), ("rollback", "outcome"), ("verify", False)]
SKIPPED = [
    ("decision", "replay"), ("rollback", "replay"), ("rollback", "outcome"), ("verify", True),
    ("decision", "skip"), ("rollback", "skip"), ("skip", None), ("rollback", "outcome"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [pytest.param(s, f, marks=[] if (s, f) in SAMPLE else pytest.mark.full) for s in STRATEGIES for f in FAULTS],
)
def test_the_run_goes_back_by_itself_and_ends_as_if_nothing_had_happened(trained, strategy, fault):
    clean, run = trained("ddp"), trained(strategy, fault)
    assert abs(held_out(run) / held_out(clean) - 1) < 0.01
    # all that was done is in the log, in its order, and the log is sound
    assert [step for step in story(run) if step[0] != "rollback" or step[1] != "intent"] == (
        SKIPPED if fault == "labels" else MENDED
    )
    assert problems(run.output / "runlog")[0] == []
    history = History.read(run.output)
    assert [s["step"] for s in history.steps(living=True)] == list(range(1, STEPS + 1))
    for outcome in [e for e in run.events if e["type"] == "rollback" and e["phase"] == "outcome"]:
        assert outcome["step"] == 60 and outcome["verified"] == ["learning rate", "random numbers", "samples"]
        causes = [e["type"] for e in history.causes(outcome)]
        assert causes[0] in ("spike", "verify", "anomaly") and causes[-3:] == ["decision", "rollback", "rollback"]
    # with nothing changed, the recorded losses come back: bit for bit where a replay has the same order of additions
    (again, *_) = [e for e in run.events if e["type"] == "verify" and e["after"] != "replay"]
    assert again["steps"][0] == 61 and again["largest_relative_difference"] <= (0 if strategy == "ddp" else 1e-6)
    if fault == "labels":
        poisoned = set(json.loads((run.output / "poisoned.json").read_text()))
        taken = [json.loads(line) for file in run.output.glob("fault-*.jsonl") for line in file.read_text().splitlines()]
        after = [record for record in taken if record["redone"] > 20]
        assert {record["row"] for record in taken} == poisoned and len(poisoned) == 32 and after == []
        assert not poisoned & {row for s in history.steps(living=True) for row in s["ids"]}
        left_out = {n for a, b in run.event("skip")["ranges"] for n in range(a, b)}
        assert poisoned <= left_out and run.event("skip")["samples"] == len(left_out) == 72
    else:
        assert not [e for e in run.events if e["type"] == "skip"], "no data is left out for what the data has not done"
    if (strategy, fault) == ("ddp", "bit"):
        assert "rank 1's copy of transformer.wpe.weight is not the others'" in run.event("decision")["hardware"]


@pytest.mark.parametrize("fault", ["labels", *[pytest.param(f, marks=pytest.mark.full) for f in FAULTS[1:]]])
def test_the_same_fault_without_a_rollback_does_harm(trained, fault):
    """Or it would have been too weak to prove anything."""
    clean = trained("ddp")
    if fault == "bit":  # the loss is not finite from then on: there is no model to evaluate
        run = trained("ddp", fault, on_spike="log", expect=1)
        assert "DivergenceError" in run.text and "none was finite for a while" in run.text and run.event("crash")
        return
    run = trained("ddp", fault, on_spike="log")
    assert held_out(run) > 1.05 * held_out(clean)
    assert {e["measure"] for e in run.events if e["type"] == "decision"} == {"none"}
    assert not [e for e in run.events if e["type"] in ("rollback", "skip", "lr_change")]


def test_a_clean_run_does_nothing(trained):
    run = trained("ddp")
    assert not [e for e in run.events if e["type"] in ("spike", "decision", "rollback", "skip", "lr_change")]
    assert [e["step"] for e in run.events if e["type"] == "checkpoint" and e["state"] == "proven_good"] == list(
        range(10, 100, 10)
    )
    assert (run.output / "runlog" / "report.html").exists() and "Finished: step 100" in (
        run.output / "runlog" / "report.md"
    ).read_text()


@pytest.mark.full
def test_copies_that_drift_apart_are_found_before_they_are_saved(trained):
    clean, run = trained("ddp"), trained("ddp", "drift")
    decision = run.event("decision")
    assert decision["hardware"].startswith("the copies of transformer.wpe.weight on ranks [0, 1] differ (element 0: ")
    assert (decision["measure"], run.event("spike")["step"]) == ("replay", 80), "at the first save after step 71"
    assert [s["loss"] for s in History.read(run.output).steps(living=True)] == clean.losses and held_out(run) == held_out(clean)


@pytest.mark.full
def test_packs_lose_only_what_was_bad_and_streams_go_back_too(trained):
    packed = trained("fsdp", "labels", packing=True)
    assert [step for step in story(packed) if step[0] != "rollback" or step[1] != "intent"] == SKIPPED
    skip, poisoned = packed.event("skip"), set(json.loads((packed.output / "poisoned.json").read_text()))
    assert skip["samples"] > 72, "several samples a row"
    assert not poisoned & {row for s in History.read(packed.output).steps(living=True) for row in s["ids"]}
    streamed = trained("zero2", "rate", streaming=True)
    assert [step for step in story(streamed) if step[0] != "rollback" or step[1] != "intent"] == MENDED
    (again,) = [e for e in streamed.events if e["type"] == "verify" and e["after"] != "replay"]
    assert again["largest_relative_difference"] <= 1e-6


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero1", "zero3_offload", "zero3_nvme", "fsdp_hybrid", "zero3_hpz"])
def test_every_other_strategy_goes_back_too(trained, strategy):
    split = {"processes": 4, "per_device_train_batch_size": 2} if strategy in ("fsdp_hybrid", "zero3_hpz") else {}
    clean, run = trained(strategy, **split), trained(strategy, "rate", **split)
    assert story(run) == [*MENDED[:2], *MENDED[2:]]
    assert run.event("rollback")["verified"] == ["learning rate", "random numbers", "samples"]
    assert abs(held_out(run) / held_out(clean) - 1) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_twenty_rollbacks_take_no_memory_and_little_more_than_a_load(trained, tiny, strategy):
    faults = {"model_name_or_path": tiny / "wide", "max_rollbacks": 30}
    run = trained(strategy, "again", **faults)
    outcomes = [e for e in run.events if e["type"] == "rollback" and e["phase"] == "outcome"]
    assert len(outcomes) == 20 and {e["step"] for e in outcomes} == {70} and run.event("rollback")["branch"] == 20
    verified = [e["largest_relative_difference"] for e in run.events if e["type"] == "verify" and e["after"] != "replay"]
    assert len(verified) == 20 and max(verified) <= (0 if strategy == "ddp" else 1e-6)
    for rank in (0, 1):
        times = json.loads((run.output / f"again-{rank}.json").read_text())
        assert times[-1]["rss"] < 1.01 * times[4]["rss"], [t["rss"] for t in times]
        assert sum(t["rollback"] for t in times[1:]) < 1.5 * sum(t["load"] for t in times[1:])


@pytest.mark.full
def test_trackers_get_the_story_at_steps_that_never_go_back(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained("zero2", "rate", report_to="tensorboard")
    (file,) = run.output.glob("logs/zerobook/events.out.tfevents.*")
    found = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    steps = [e.step for e in found.Scalars("loss")]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS + 20, "twenty steps were given up"
    assert [e.value for e in found.Scalars("step")][-1] == STEPS
    texts = b"".join(e.tensor_proto.string_val[0] for e in found.Tensors("runlog/text_summary")).decode()
    assert "spike: loss" in texts and "decision: replay" in texts and "does not come again" in texts


@pytest.mark.full
def test_leaving_out_without_going_back_and_stopping(trained):
    skipped = trained("zero2", "labels", on_spike="skip")
    assert (
        next(e["measure"] for e in skipped.events if e["type"] == "decision") == "leave_out"
        and skipped.event("skip")["samples"]
    )
    assert not [e for e in skipped.events if e["type"] == "rollback"]
    stopped = trained("ddp", "labels", on_spike="stop", expect=1)
    stop = stopped.event("stop")
    assert stop["exit_code"] == 76 and "exitcode  : 76" in stopped.text and stop["go_on_from"].endswith("step-000060")
    assert "STOPPED at step 80" in stopped.text


@pytest.mark.full
def test_what_was_decided_outlives_a_kill(trained, tiny, tmp_path):
    """Killed after a rollback and before the next checkpoint, the next attempt still leaves the data out."""
    settings = dict(
        model_name_or_path=tiny / "gpt2", dataset_name="embedded:chatterbot", cache_dir=tmp_path / "data", block_size=64,
        max_train_steps=STEPS, per_device_train_batch_size=4, learning_rate=6e-3, logging_steps=5, save_steps=30,
        max_eval_samples=100,
    )  # fmt: skip
    faults = {"ZEROBOOK_FAULT": "labels", "ZEROBOOK_FAULT_AT": AT, "ZEROBOOK_FAULT_STEPS": 8, "ZEROBOOK_FAULT_KILL_AFTER": 2}
    wrapper = ROOT / "tests" / "distributed" / "faults.py"
    launch("ddp", 2, "causal_lm", tmp_path / "run", through=wrapper, environment=faults, expect=None, **settings)
    del faults["ZEROBOOK_FAULT_KILL_AFTER"]
    run = launch(
        "zero3",
        2,
        "causal_lm",
        tmp_path / "run",
        through=wrapper,
        environment=faults,
        resume_from_checkpoint="auto",
        **settings,
    )
    second = [e for e in run.events if e["attempt"] == 2]
    assert next(e["reason"] for e in second if e["type"] == "crash").startswith("it ended without a word")
    assert not [e for e in second if e["type"] == "decision"], "the poisoned data is still left out"
    poisoned = set(json.loads((run.output / "poisoned.json").read_text()))
    assert not poisoned & {row for s in run.steps if s["attempt"] == 2 for row in s["ids"]}
    assert problems(run.output / "runlog")[0] == []
