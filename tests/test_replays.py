"""The page of published spikes is what the code does now, and its curve has the published points."""

from __future__ import annotations

from scripts import replays
from scripts.other_runs import judge_run, points_of


def test_the_page_of_published_spikes_is_made_of_the_code():
    assert replays.PAGE.read_text() == replays.page(), "run scripts/replays.py"


def test_the_reconstruction_has_the_published_points_and_its_spike():
    records = {record["step"]: record for record in replays.bloom()}

    assert {step: (records[step]["loss"], records[step]["grad_norm"]) for step in replays.BLOOM} == replays.BLOOM
    judgements = judge_run(points_of(records.values()), replays.BLOOM_SAVES).judgements
    assert 31_214 <= judgements[0].finding.onset <= 31_219, "nothing is found in the part before the spike"
