"""Failures at scale: the best interval of saves and the goodput, against a simulation of runs that fail."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from scripts import failures as page
from zerobook.cli.main import main
from zerobook.errors import ConfigError
from zerobook.plan.failures import RATES, RESTART_SECONDS, WRITE_RATE, best_interval, goodput, plan_failures
from zerobook.training.intervals import WRITE_SPEED

RUNS = 10_000
HOUR = 3600.0


def simulate(interval: float, save: float, restart: float, mean_time: float, *, segments: int, seed: int) -> np.ndarray:
    """Return the goodput of each of `RUNS` runs of ``segments`` saves, event by event: from one failure to the next one.

    Failures come at exponentially distributed times, whatever the run does: also in a save and in a restart, which then starts
    again. A segment, its work and its save, counts when it ends before the next failure.
    """
    generator = np.random.default_rng(seed)
    elapsed = np.zeros(RUNS)
    done = np.zeros(RUNS)
    # the restart that a run begins with after its failures; the first attempt has none
    delay = np.zeros(RUNS)
    running = np.arange(RUNS)
    while len(running):
        until_failure = generator.exponential(mean_time, len(running))
        fitting = np.floor(np.maximum(until_failure - delay[running], 0) / (interval + save))
        missing = segments - done[running]
        finishes = fitting >= missing
        elapsed[running] += np.where(finishes, delay[running] + missing * (interval + save), until_failure)
        done[running] += np.minimum(fitting, missing)
        delay[running] = restart
        running = running[~finishes]
    return segments * interval / elapsed


def expected_and_error(times: np.ndarray) -> tuple[float, float]:
    return float(times.mean()), float(times.std(ddof=1)) / math.sqrt(RUNS)


@pytest.mark.parametrize(
    "mean_time, save, restart",
    [
        (100 * HOUR, 60, 300), (3.09 * HOUR, 60, 300), (0.5 * HOUR, 60, 300), (0.5 * HOUR, 5, 60), (100, 60, 300),
        (HOUR, 1, 2 * HOUR), (HOUR, 2 * HOUR, 60),
    ],
)  # fmt: skip
def test_goodput_is_that_of_simulated_runs(mean_time, save, restart):
    """The formula is of the mean time of a run: within 4 standard errors of the simulated one."""
    interval = best_interval(save, mean_time)
    segments = 20
    simulated = simulate(interval, save, restart, mean_time, segments=segments, seed=7)
    mean, error = expected_and_error(segments * interval / simulated)
    assert segments * interval / goodput(interval, save, restart, mean_time) == pytest.approx(mean, abs=4 * error)


@pytest.mark.parametrize("mean_time, save", [(100 * HOUR, 60), (3.09 * HOUR, 60), (0.5 * HOUR, 60), (0.5 * HOUR, 300)])
def test_no_other_interval_is_better(mean_time, save):
    best = best_interval(save, mean_time)
    reached = goodput(best, save, 300, mean_time)
    others = [goodput(best * factor, save, 300, mean_time) for factor in np.geomspace(0.1, 10, 401)]
    assert reached == pytest.approx(max(others), rel=2e-4)
    # Also among simulated runs, saving four times as often or as rarely is worse.
    for factor in (0.25, 4):
        simulated = simulate(best * factor, save, 300, mean_time, segments=20, seed=11)
        mean, error = expected_and_error(20 * best * factor / simulated)
        assert 20 * best * factor / mean < reached - 4 * error / mean * reached


def test_limits():
    assert goodput(best_interval(60, 1e15), 60, 300, 1e15) == pytest.approx(1, abs=1e-5), "no failures"
    assert best_interval(0, HOUR) == 0, "free saves"
    assert 0 < goodput(best_interval(60, 100), 60, 300, 100) < 0.02, "failures come faster than restarts end"
    assert goodput(100, 60, 300, 0.1) == 0
    assert best_interval(100, 40) == 40, "a save takes longer than two times between failures"
    # Young's is the limit of short saves.
    assert best_interval(1e-3, HOUR) == pytest.approx(page.young_interval(1e-3, HOUR), rel=1e-3)
    shares = [goodput(best_interval(60, mean_time), 60, 300, mean_time) for mean_time in np.geomspace(100, 1e9, 50)]
    assert shares == sorted(shares)


@pytest.mark.parametrize("name, gpus, hours", [("llama3", 16_384, 3.09), ("opt-175b", 992, 13.7), ("bloom", 384, 112)])
def test_published_rates(name, gpus, hours):
    assert RATES[name].gpu_hours / gpus == pytest.approx(hours, rel=5e-3)
    assert "arXiv:" in RATES[name].source


def test_a_save_takes_the_time_to_write_the_checkpoint():
    assert WRITE_RATE == WRITE_SPEED, "the plan and a run assume the same rate"
    planned = plan_failures("50000", 64, 8, 980e9)
    assert planned.save == pytest.approx(980e9 / 8 / WRITE_RATE) and planned.restart == RESTART_SECONDS
    assert planned.mean_time == 50_000 * HOUR / 64
    known = plan_failures("llama3,restart=120,save=30", 64, 8, 980e9)
    assert (known.save, known.restart) == (30, 120) and known.interval == best_interval(30, known.mean_time)


@pytest.mark.parametrize("request_text", ["llama4", "0", "-1", "inf", "nan", "", "llama3,save", "llama3,load=3", "50,save=-1"])
def test_other_words_are_refused(request_text):
    with pytest.raises(ConfigError, match="--failures"):
        plan_failures(request_text, 8, 1, 1e9)


def test_the_command_expects_failures_on_several_nodes(capsys):
    line = ["plan", "--formulas", "--parameters", "405B", "--gpus", "8"]
    cluster = ["--nodes", "2048", "--interconnect", "400Gbps"]
    assert main([*line, *cluster, "--failures", "llama3,save=60,restart=300", "--json", "-"]) == 0
    planned = json.loads(capsys.readouterr().out)["failures"]
    assert planned["gpus"] == 16_384 and planned["mean_time"] == pytest.approx(3.09 * HOUR, rel=2e-3)
    assert planned["goodput"] == pytest.approx(0.876, abs=1e-3)
    assert main([*line, *cluster]) == 0
    assert "goodput" in capsys.readouterr().out
    assert main(line) == 0
    assert "goodput" not in capsys.readouterr().out, "on one node only where it is asked for"
    assert main([*line, "--failures", "bloom"]) == 0
    assert "BLOOM" in capsys.readouterr().out
    assert main(["plan", "--here", "--measure", "--failures", "bloom", "model"]) != 0
    assert "--measure and --failures" in capsys.readouterr().err


def test_the_guide_has_the_scripts_table():
    assert page.PAGE.read_text() == page.replaced(page.PAGE.read_text()), "run scripts/failures.py"
