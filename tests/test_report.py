"""The report, in a real browser: what is in it, that it zooms, that it asks nobody for anything."""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.test_runlog import attempt, run  # noqa: F401  a fixture
from zerobook.cli.main import main
from zerobook.runlog import figures, report
from zerobook.runlog.events import EVENT_TYPES, Mark, declare
from zerobook.runlog.history import History
from zerobook.runlog.lifecycle import begin, code_state
from zerobook.runlog.summary import summary
from zerobook.runlog.writer import RunLog

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x00\x1b[31m|`*"


class Browser:
    """Chromium without a window, spoken to over its debugging pipe (JSON messages that end with a zero byte)."""

    def __init__(self, folder: Path):
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1200,1600"]

        def wire():  # the browser reads from 3 and writes to 4
            os.dup2(to_child, 13)
            os.dup2(from_child, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *quiet, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._number, self._rest, self.events = 0, b"", []
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = None
        self._session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self):
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser is gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path):
        self.ask("Page.navigate", url=page.as_uri())
        for _ in range(200):
            if self.value("document.readyState === 'complete' && !!document.querySelector('#curves path.line')"):
                return
            time.sleep(0.05)
        raise AssertionError("the page was not drawn")

    def value(self, script):
        result = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def of(self, method):
        return [e["params"] for e in self.events if e.get("method") == method]

    def close(self):
        self._process.kill()
        self._process.wait(timeout=30)
        os.close(self._out)
        os.close(self._in)


@contextmanager
def browser(folder):
    if CHROMIUM is None:
        pytest.skip("not run: there is no chromium (apt-get install chromium)")
    one = Browser(folder)
    try:
        yield one
    finally:
        one.close()


def test_numbers_that_are_not_finite_are_told_as_such(run, capsys):  # noqa: F811
    log = RunLog(run, attempt=False)
    nowhere = float("nan")
    log.event("eval", step=40, seconds=0.2, samples=[], loss=nowhere, perplexity=math.inf, tokens=9, metrics={"rouge": nowhere})
    log.event("verify", after="steps done again", steps=[31, 32], largest_relative_difference=nowhere)
    log.steps([{"step": 41, "loss": nowhere, "grad_norm": math.inf, "learning_rate": 1e-3, "tokens": 9}])
    log.close()
    assert main(["runlog", "status", str(run)]) == 0
    assert "Held-out loss not finite at step 40" in capsys.readouterr().out
    assert main(["runlog", "report", str(run)]) == 0
    text = (run / "runlog" / "report.html").read_text()
    for said in ("held-out loss not finite", "rouge not finite", "difference of the losses is not finite"):
        assert said in text, said
    assert "<b>not finite</b><span>held-out loss</span>" in text


@pytest.mark.timeout(180)
def test_the_page_in_a_browser(run, tmp_path_factory, capsys):  # noqa: F811
    log = RunLog(run, attempt=False)
    note = log.event("note", text=EVIL, by="<i>me</i>")
    log.close()
    assert main(["runlog", "report", str(run)]) == 0
    page = run / "runlog" / "report.html"
    with browser(tmp_path_factory.mktemp("chromium")) as chromium:
        chromium.open(page)
        text = chromium.value("document.body.innerText")
        for said in ("Finished: step 40", "DAMAGE at step 18: <b>high</b>", "3 samples of steps 17 to 20 are left out",
                     "effective training time", "Back at step 10", "5-6, 9",
                     "The run ended at step 40", "seed 1 -> 2"):  # fmt: skip
            assert said in text, said
        assert chromium.value(f"document.querySelector('#seq-{note} p').textContent").startswith("note: text <script>")
        assert chromium.value("document.title") == f"{run.name}: runlog"
        assert chromium.value("document.querySelectorAll('.entry img, .entry script, td img, td b').length") == 0
        # the curves: the living path, what was given up, and the marks
        names = chromium.value("[...document.querySelectorAll('#curves .legend button')].map(b => b.textContent)")
        for name in ("the run as it is", "abandoned: branch 0", "spike", "rollback", "skip", "checkpoint"):
            assert any(name in label for label in names), (name, names)
        living = "document.querySelector('#curves').chart.panels[0].curves.find(c => c.name == 'the run as it is')"
        assert chromium.value(f"{living}.x") == list(range(1, 41))
        check_hover_zoom_and_hiding(chromium)
        check_gaps_and_steps(chromium)
        # nobody was asked for anything, and nothing went wrong
        asked = [e["request"]["url"] for e in chromium.of("Network.requestWillBeSent")]
        assert {url.split(":")[0] for url in asked} <= {"file", "data", "blob"}, asked
        assert chromium.of("Runtime.exceptionThrown") == []
        assert [e for e in chromium.of("Log.entryAdded") if e["entry"]["level"] == "error"] == []
        assert [e for e in chromium.of("Runtime.consoleAPICalled") if e["type"] in ("error", "warning")] == []


def check_hover_zoom_and_hiding(chromium):
    view = "document.querySelector('#curves').chart.view"
    whole = chromium.value(view)
    left, top, width = chromium.value(
        "{const r = document.querySelector('#curves svg svg').getBoundingClientRect(); [r.x, r.y, r.width]}"
    )
    # the value under the pointer, and the event at a mark
    chromium.ask(
        "Input.dispatchMouseEvent", type="mouseMoved", x=left + width * (18 - whole[0]) / (whole[1] - whole[0]), y=top + 100
    )
    tip = chromium.value("document.querySelector('#curves .tip').innerText")
    assert "step 18" in tip and "the run as it is: 3" in tip and "DAMAGE at step 18: <b>high</b>" in tip, tip
    # zoom by the mouse, move with Shift, and back by a double click
    drag(chromium, left + width * 0.25, left + width * 0.5, top + 100)
    zoomed = chromium.value(view)
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1], (whole, zoomed)
    assert math.isclose(zoomed[1] - zoomed[0], (whole[1] - whole[0]) / 4, rel_tol=0.1)
    drag(chromium, left + width * 0.5, left + width * 0.75, top + 100, modifiers=8)
    moved = chromium.value(view)
    assert moved[0] < zoomed[0] and math.isclose(moved[1] - moved[0], zoomed[1] - zoomed[0])
    chromium.value("document.querySelector('#curves > svg').dispatchEvent(new MouseEvent('dblclick'))")
    assert chromium.value(view) == whole
    # a click on a name hides the curve in all panels, and a second one shows it again
    lines = "document.querySelectorAll('#curves path.line').length"
    before = chromium.value(lines)
    click = "[...document.querySelectorAll('#curves .legend button')].find(b => b.textContent.includes('as it is')).click()"
    chromium.value(click)
    assert chromium.value(lines) == before - 3
    chromium.value(click)
    assert chromium.value(lines) == before


def check_gaps_and_steps(chromium):
    """A value that is not finite is a gap in its line, and a step is never rounded."""
    paths = chromium.value(
        """{
        const chart = document.querySelector('#curves').chart;
        const curve = chart.panels[0].curves.find((curve) => curve.name === 'the run as it is');
        curve.y[5] = null;
        chart.draw();
        [...document.querySelectorAll('#curves path.line')].map((line) => line.getAttribute('d'));
        }"""
    )
    assert [path.count("M") for path in paths if path.count("L") > 30].count(2) == 1
    texts = [chromium.value(f"format({value})") for value in (1234567, 0.00123456, 12345.6)]
    assert texts == ["1,234,567", "0.0012346", "12,346"]


def drag(chromium, start, end, y, modifiers=0):
    def mouse(kind, x, buttons):
        chromium.ask(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=1, modifiers=modifiers
        )

    mouse("mouseMoved", start, 0)
    mouse("mousePressed", start, 1)
    for share in (0.3, 0.6, 1.0):
        mouse("mouseMoved", start + (end - start) * share, 1)
    mouse("mouseReleased", end, 0)


def test_the_page_says_what_happened_and_keeps_what_people_write_harmless(run):  # noqa: F811
    log = RunLog(run, attempt=False)
    log.event("note", text=EVIL, by="me")
    log.event("note", text="![p](http://a/b.png) <a href=http://a>q</a> `c`", by="me")
    log.close()
    text = report.write(run).read_text()
    assert "![p](http://a/b.png) &lt;a href=http://a&gt;q&lt;/a&gt; `c`" in text
    assert "<img" not in text and "<a " not in text, "no picture is fetched, no link leads away"
    assert "<script>document" not in text and "&lt;script&gt;document" in text
    assert "\x1b" not in text and "\x00" not in text
    for said in (
        "<h2>Rollbacks</h2>",
        "<h2>Data left out</h2>",
        "DAMAGE at step 18",
        "effective training time",
    ):
        assert said in text, said


def test_speed_memory_and_held_out_losses_are_drawn(tmp_path):
    """Two datasets are held out, a GPU waits for data, and the first evaluation of step 4 was given up."""
    log = attempt(tmp_path, {"seed": 1})
    common = {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 9}
    gpu = {"memory_used": 2**33, "memory_total": 2**34, "utilisation": 0.5, "celsius": 60}

    def train(first, last, loss):
        log.steps([{"step": step, "loss": 2.0, **common} for step in range(first, last + 1)])
        log.event("metrics", steps=[first, last], loss=2.0, mean_loss=2.0, grad_norm=1.0, learning_rate=1e-3,
                  tokens_per_second=100.0, all_tokens_per_second=400.0, data_wait=0.25, mfu=0.41)  # fmt: skip
        log.event("machine", memory_used=3 * 2**30, memory_total=2**35, swap_used=0, own=2**30, gpus=[gpu], allocator=None)
        parts = {name: {"loss": loss + add, "perplexity": 1.0, "tokens": 9} for name, add in (("chats", 0.5), ("news", 1.5))}
        log.event("eval", step=last, seconds=0.1, samples=[], loss=loss + 1, perplexity=1.0, tokens=18, datasets=parts,
                  metrics={"arithmetic": loss / 10, "rougeL": 10 * loss})  # fmt: skip

    train(1, 2, 2.0)
    train(3, 4, 9.0)
    log.branch += 1
    log.event("rollback", phase="outcome", step=2, steps_given_up=2, seconds=0.1, bytes_read=[1], set_aside=[], verified=[],
              differing={})  # fmt: skip
    train(3, 4, 1.0)
    log.close()
    history = History.read(tmp_path)
    assert figures.held_out_curves(history) == {"held out: chats": {2: 2.5, 4: 1.5}, "held out: news": {2: 3.5, 4: 2.5}}
    assert figures.score_curves(history) == {"arithmetic": {2: 0.2, 4: 0.1}, "rougeL": {2: 20.0, 4: 10.0}}
    text = report.write(tmp_path).read_text()
    for name in ("arithmetic", "rougeL", "supervised tokens/s", "all tokens/s", "waiting for data", "MFU", "host memory",
                 "this run", "GPU 0 memory", "GPU 0 busy", "held out: chats"):  # fmt: skip
        assert f'"name": "{name}"' in text or f'"title": "{name}"' in text, name
    assert "waited for data for 25% of the training time" in text and "41.0%" in text


def test_a_run_of_one_step_and_an_event_of_another_version_are_shown(tmp_path):
    log = RunLog(tmp_path)
    begin(log, config={}, versions={}, step=0, live={"world_size": 1, "strategy": "ddp"}, batch="1", total_steps=1)
    log.steps([{"step": 1, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 5, "cursor": [0, 1], "ids": [0]}])
    log.event("eclipse", darkness=7)
    log.close()

    text = report.write(tmp_path).read_text()

    assert text.count('"x": [1], "y": [') == 3, "loss, gradient norm and rate"
    assert "eclipse: darkness 7" in text


def test_the_page_is_one_file_of_at_most_600_kB_also_for_a_long_run(tmp_path):
    log = attempt(tmp_path, {"seed": 1})
    gpu = {"memory_used": 2**33 + 1, "memory_total": 2**34, "utilisation": 0.512345, "celsius": 60}
    for last in range(100, 60_001, 100):
        for step in range(last - 99, last + 1):
            value = random.Random(step).gauss(2, 0.1)
            log.steps([{"step": step, "loss": value, "grad_norm": value / 3, "learning_rate": value / 7e3, "tokens": 9}])
        log.event("metrics", durable=False, steps=[last - 99, last], loss=2.0, mean_loss=2.0, grad_norm=1.0, learning_rate=1e-3,
                  tokens_per_second=1234.5678, all_tokens_per_second=2345.6789, data_wait=0.012345, mfu=0.4123456)  # fmt: skip
        log.event("machine", durable=False, memory_used=3 * 2**30, memory_total=2**35, swap_used=0, own=2**30, gpus=8 * [gpu],
                  allocator=None)  # fmt: skip
    log.close()

    text = report.write(tmp_path).read_text()

    assert len(text) <= 600_000
    assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(""", text), "it loads nothing"


def test_thinning_loses_no_spike():
    values = [random.Random(i).gauss(2, 0.1) for i in range(100_000)]
    values[54_321], values[777] = 99.0, -5.0
    values[10] = math.nan
    steps, kept = figures.thin(list(range(100_000)), values)
    assert len(steps) <= figures.POINTS and steps == sorted(steps)
    assert (54_321, 99.0) in zip(steps, kept, strict=True) and (777, -5.0) in zip(steps, kept, strict=True) and 10 not in steps
    assert figures.thin([1, 2], [1.0, None]) == ([1], [1.0])


def test_a_line_over_time_loses_no_peak_and_not_its_end(tmp_path):
    log = attempt(tmp_path, {"seed": 1})
    for step in range(1, 1001):
        own = (9 if step == 500 else 1) * 2**30
        log.event("machine", durable=False, memory_used=own, memory_total=2**35, swap_used=0, own=own, gpus=[], allocator=None)
        log.event("metrics", durable=False, steps=[step, step], loss=2.0, tokens_per_second=1.0, data_wait=0.0)
    log.close()

    charts = figures.make_charts(History.read(tmp_path))

    curves = {curve["name"]: curve for panel in charts["machine"]["panels"] for curve in panel["curves"]}
    assert max(curves["this run"]["y"]) == 9.0
    (timeline,) = charts["timeline"]["panels"]
    assert timeline["curves"][0]["y"][-1] == 1000
    assert len(timeline["curves"][0]["x"]) <= figures.TIME_POINTS


def test_a_run_that_has_only_begun_has_a_page_too(tmp_path):
    attempt(tmp_path, {"seed": 1}).close()
    text = report.write(tmp_path).read_text()
    assert "ENDED WITHOUT AN EVENT" in text and "<h2>Events</h2>" in text


def test_a_page_that_does_not_fit_leaves_the_old_one_and_nothing_else(run):  # noqa: F811
    """A full disk took half a page once, and the run's model had no room left."""
    page = report.write(run)
    before, there = page.read_text(), sorted(file.name for file in page.parent.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))  # larger files fail in the middle, as on a full disk
    try:
        with pytest.raises(OSError):
            report.write(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert page.read_text() == before and sorted(file.name for file in page.parent.iterdir()) == there


def test_the_page_names_model_data_rate_rank_and_commit(tmp_path):
    log = RunLog(tmp_path)
    begin(
        log, step=0, sources={}, argv=[], plan={}, live={"strategy": "DDP", "world_size": 2}, batch="2 micro", total_steps=3,
        config={"model_name_or_path": "org/<base>", "dataset_name": "org/chats", "learning_rate": 2e-4, "adapter": "lora",
                "lora_r": 16}, data={}, versions={}, code={"file": "mine.py", "commit": "0123456789abcdef", "changed_files": 2},
    )  # fmt: skip
    log.close()
    page = report.write(tmp_path).read_text()
    for text in ("org/chats", "0.0002", "mine.py, commit 0123456789ab with local changes"):
        assert text in page
    assert "<dt>model</dt><dd>org/&lt;base&gt;</dd>" in page and "<dt>adapter rank</dt><dd>16</dd>" in page


def test_the_commit_is_that_of_the_repository_which_tracks_the_recipe(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("")
    assert code_state(recipe) == {"file": "mine.py"}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "mine.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    state = code_state(recipe)
    assert len(state["commit"]) == 40 and state["changed_files"] == 0
    (tmp_path / "ignored.py").write_text("")
    assert code_state(tmp_path / "ignored.py") == {"file": "ignored.py"}, "the repository does not know this file"


def test_what_was_found_on_an_abandoned_branch_is_marked_there(tmp_path):
    """Steps 3 and 4 are done twice. The peak of the spike is that of a later step than the one it began at."""
    log = attempt(tmp_path, {"seed": 1})
    common = {"grad_norm": 1.0, "learning_rate": 0.1, "tokens": 5}
    log.steps([{"step": step, "loss": loss, **common} for step, loss in enumerate((2.0, 2.0, 5.0, 9.0), 1)])
    log.event("spike", kind="divergence", alarm=True, step=4, onset=3, points=2, base=2.0, peak=9.0, reason="high")
    intent = log.event("rollback", phase="intent", action="skip", from_step=4, to_step=2, why="high")
    log.branch += 1
    log.event("rollback", phase="outcome", parent=intent, step=2, steps_given_up=2, seconds=0.1, bytes_read=0, set_aside=[],
              verified=[], differing=[])  # fmt: skip
    log.steps([{"step": step, "loss": 1.5, **common} for step in (3, 4)])
    log.event("checkpoint", state="complete", step=4, path="x", seconds=0.1)
    log.close()

    curves = {curve["name"]: curve for curve in figures.make_charts(History.read(tmp_path))["curves"]["panels"][0]["curves"]}

    assert curves["the run as it is"]["y"] == [2.0, 2.0, 1.5, 1.5] and curves["abandoned: branch 0"]["y"] == [5.0, 9.0]
    assert (curves["spike"]["x"], curves["spike"]["y"]) == ([3], [5.0])
    assert (curves["rollback"]["x"], curves["rollback"]["y"]) == ([4], [9.0])
    assert (curves["checkpoint"]["x"], curves["checkpoint"]["y"]) == ([4], [1.5])


def test_the_held_out_loss_of_abandoned_steps_is_not_that_of_the_run(tmp_path):
    log = attempt(tmp_path, {"seed": 1})
    log.event("eval", step=2, seconds=1.0, samples=[], loss=1.5, held_out_fingerprint="a")
    log.event("eval", step=4, seconds=1.0, samples=[], loss=9.9, held_out_fingerprint="a")
    intent = log.event("rollback", phase="intent", action="skip", from_step=4, to_step=2, why="high")
    log.branch += 1
    log.event("rollback", phase="outcome", parent=intent, step=2, steps_given_up=2, seconds=0.1, bytes_read=0, set_aside=[],
              verified=[], differing=[])  # fmt: skip
    log.steps([{"step": 3, "loss": 1.5, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 5}])
    log.close()

    history = History.read(tmp_path)
    cards = re.findall(r"([\d.]+)</[^>]+>\s*<[^>]+>held-out loss", report.render(history))
    assert cards == ["1.5000"]
    assert "9.9" not in summary(history.folder)


@pytest.mark.parametrize(
    ("checkpoint", "advice"), [("out/checkpoint-40", "Go on from out/checkpoint-40"), (None, "start again")]
)
def test_a_run_that_a_spike_stopped_names_the_next_step(tmp_path, checkpoint, advice):
    log = attempt(tmp_path, {"seed": 1})
    log.event("stop", step=60, rule="all was tried", why="divergence", exit_code=76, go_on_from=checkpoint, set_aside=[])
    log.close()

    text = report.write(tmp_path).read_text()
    assert text.count(advice) >= 3, "in the state, in the table of attempts, and in the events"


def test_an_event_that_is_declared_once_is_in_the_terminal_and_on_the_page(tmp_path, capsys):
    """Nothing else names an event: neither the state of a run, nor a list, nor the loss curve."""
    before = dict(EVENT_TYPES)

    @declare(
        "eclipse",
        when="The sun went dark.",
        fields={"step": "step at which it was seen", "darkness": "0 to 1"},
        style="warn",
        mark=Mark(colour="rebeccapurple", symbol="☾"),
        ending="Darkened",
    )
    def _eclipse(event):
        return f"The sun went dark at step {event['step']}: {event['darkness']:.0%}."

    try:
        log = attempt(tmp_path, {"seed": 1})
        log.steps([{"step": step, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 5} for step in (1, 2, 3)])
        log.event("eclipse", step=2, darkness=0.75)
        log.close()

        assert main(["runlog", "status", str(tmp_path)]) == 0
        status = capsys.readouterr().out
        assert main(["runlog", "show", str(tmp_path), "events"]) == 0
        shown = capsys.readouterr().out
        page = report.write(tmp_path).read_text()
        drawn = figures.make_charts(History.read(tmp_path))
    finally:
        EVENT_TYPES.clear()
        EVENT_TYPES.update(before)

    sentence = "The sun went dark at step 2: 75%."
    assert status.startswith("Darkened") and sentence in status
    assert sentence in shown
    assert 'class="entry warn"' in page and f"<p>{sentence}</p>" in page
    (mark,) = [curve for curve in drawn["curves"]["panels"][0]["curves"] if curve["name"] == "eclipse"]
    assert (mark["x"], mark["y"], mark["symbol"], mark["colour"]) == ([2], [2.0], "☾", "rebeccapurple")
    attempts = [curve["name"] for curve in drawn["timeline"]["panels"][0]["curves"]]
    assert "attempt 1: eclipse" in attempts and "stopped" in attempts
