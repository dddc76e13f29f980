"""Text from files is printed as text: it moves no cursor and makes no line of its own, and its brackets are no markup."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zerobook
from recipes.causal_lm import CausalLMConfig
from tests.test_checkpoints import save_all, spread
from tests.test_runlog import attempt
from zerobook.cli import chat, doctor
from zerobook.cli import data as data_command
from zerobook.cli.eval import print_table
from zerobook.cli.main import main
from zerobook.cli.show_rows import print_histogram, show_rows
from zerobook.config import DatasetSpec
from zerobook.config_sources import ConfigSources
from zerobook.data.batch_loader import BatchLayout
from zerobook.errors import ConfigError
from zerobook.launch import process
from zerobook.plan import table as plan_table
from zerobook.runlog.records import EvaluationRecord, StepRecord
from zerobook.runlog.tables import VIEWS
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.training import run
from zerobook.training.console import Console
from zerobook.utils import bars
from zerobook.utils.bars import tqdm
from zerobook.utils.library_messages import hush
from zerobook.utils.terminal import plain

FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
EVIL = "a\x1b[2J\x1b]0;owned\x07b\x9b31mc\r\x08d\u202ee\n[99] All is well."
BRACKETS = "[/red][bold]:smile:[x]"


@given(st.text(st.one_of(st.characters(), st.sampled_from("\x1b[]0;m\x07\\\x9b\r\n\t\u202e")), max_size=40))
def test_nothing_of_any_text_steers_a_terminal(text):
    found = plain(text)
    assert not FORBIDDEN.search(found) and plain(found) == found
    assert "\n" not in plain(text, lines=False) and "\t" not in plain(text, lines=False)
    if not FORBIDDEN.search(text):
        assert found == text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b(Bb\x1bcd", "bd"),
        ("\x1b]never ends", "never ends"),
        ("\x1b]never ends" * 30_000, "never ends" * 30_000),
        ("\u200f1 \u061c2\u20283", "1 23"),
        ("line\r\nline\ttab", "line\nline\ttab"),
        ("שלום é 漢字 👍", "שלום é 漢字 👍"),
    ],
)
def test_sequences_go_whole_and_text_stays(text, expected):
    assert plain(text) == expected


def test_a_runs_words_are_one_line_each_and_steer_nothing(tmp_path, capsys):
    log = attempt(tmp_path, {"seed": 1, EVIL: 1}, plan={}, argv=[])
    log.event("spike", kind="spike", alarm=True, step=3, onset=2, points=3, base=2.0, peak=3.0, reason=EVIL)
    log.event("decision", parent=log.seq - 1, measure="none", rule=EVIL, why=EVIL, options=[], to_step=None,
              leaves_out_steps=None, hardware=None, ladder={})  # fmt: skip
    log.event("skip", ranges=[[1, 2]], samples=1, steps=[1, 2], why=EVIL)
    log.event("note", text=EVIL, by=EVIL)
    log.event("crash", reason=EVIL)
    log.close()
    for action, *view in (["status"], *(["show", view] for view in VIEWS)):
        main(["runlog", action, str(tmp_path), *view])
        said = capsys.readouterr().out
        assert said and not FORBIDDEN.search(said)
        assert "\n[99]" not in said, "nothing can be added to the log by a reason"
    main(["runlog", "report", str(tmp_path)])
    page = (tmp_path / "runlog" / "report.html").read_text()
    assert "[99] All is well." in page and not FORBIDDEN.search(page)
    assert main(["checkpoint", "list", EVIL]) == 2
    assert not FORBIDDEN.search(capsys.readouterr().err)


def test_brackets_in_a_path_are_part_of_it(tmp_path, capsys):
    run = tmp_path / "run[" / f"red]\x1b[2J{BRACKETS.replace('/', '')}"
    save_all(run, 1, spread({9}, 1), loss=1.0)
    save_all(run, 2, spread({9}, 1))
    (run / "checkpoints" / "step-000002" / "progress.json").unlink()
    for words in (["list", str(run)], ["inspect", str(run / "checkpoints" / "step-000001")]):
        assert main(["checkpoint", *words]) == 0
        said = "".join(capsys.readouterr().out.split())
        assert plain(str(run)) in re.sub(r"[│┃]", "", said) and not FORBIDDEN.search(said)
    assert main(["checkpoint", "verify", str(run)]) == 1
    said = capsys.readouterr().out
    assert plain(str(run)) in said and not FORBIDDEN.search(said)


def test_brackets_are_shown_wherever_a_table_or_a_line_takes_a_persons_words(tmp_path, capsys, monkeypatch):
    config = CausalLMConfig(model_name_or_path=BRACKETS, dataset_name="x", output_dir=str(tmp_path))
    sources = ConfigSources(dict.fromkeys(CausalLMConfig.model_fields, "default"))
    plan = LaunchPlan(kind="single", world_size=1, device="cpu", backend=None, precision="no", precision_source="default")
    plan.config_file = BRACKETS
    plan.notes.append(BRACKETS)
    run.print_dry_run(config, sources, plan)
    assert capsys.readouterr().out.count(BRACKETS) == 2
    monkeypatch.setattr(doctor, "inspect_launch", lambda *_: (plan, [BRACKETS], config, sources))
    assert doctor.doctor(["--x"]) == 1
    assert capsys.readouterr().out.count(BRACKETS) == 3

    row = {"task": BRACKETS, "subject": None, "questions": 1, "chance": 0.5}
    row |= {f"{name}{end}": 0.5 for name in ("acc", "acc_norm") for end in ("", "_stderr")}
    print_table(BRACKETS, [row, row | {"subject": BRACKETS}])
    assert capsys.readouterr().out.count(BRACKETS) == 4

    data_command.print_lengths(BRACKETS, torch.tensor([1, 2]).numpy())
    assert BRACKETS in capsys.readouterr().out
    shape = SimpleNamespace(source=1, target=0, rows=1)
    config = SimpleNamespace(
        accumulation_steps_on=lambda ranks: 1,
        gradient_accumulation_steps=1,
        mixed_precision=None,
        activation_checkpointing="none",
        attn_implementation=None,
    )
    job = SimpleNamespace(name=BRACKETS, shape=shape, config=config)
    subject = SimpleNamespace(job=job, model=SimpleNamespace(parameters=1, trained_elements=1))
    monkeypatch.setattr(plan_table, "_describe_checkpoints", lambda row: BRACKETS)
    monkeypatch.setattr(plan_table, "_build_table", lambda *_: "")
    row = dict(
        file="ddp",
        sent=0,
        fits=False,
        time=None,
        memory=None,
        problems=[],
        exceeded=[],
        uncounted=[BRACKETS],
        bare=False,
        untraced=False,
        paper=None,
        checkpoint=1,
    )
    where = SimpleNamespace(
        ranks=1, host_memory=0, name="x", cpu=False, device=SimpleNamespace(like="", memory=1, has_run=True)
    )
    plan_table.show(subject, [SimpleNamespace(**row)], where)
    assert capsys.readouterr().out.count(BRACKETS) == 3


def test_samples_and_answers_steer_nothing(capsys):
    tokenizer = SimpleNamespace(decode=lambda ids, **_: EVIL)
    ids = torch.tensor([1, 2]).numpy()
    row = {"input_ids": ids, "labels": ids}
    show_rows([("x", row)], tokenizer)
    said = capsys.readouterr().out
    assert "All is well." in said and not FORBIDDEN.search(said)
    assert r"a\x1b[2J\x1b]0;owned\x07b\x9b31mc\r\x08d\u202ee" in said.replace("\n", ""), "nothing of a row is left out"
    assert "\n[99]" not in said, "and no line of it begins where the command's own lines do"
    row |= {"labels": ids * 0 - 100}
    show_rows([("x", row)], SimpleNamespace(decode=lambda ids, **_: "«learnt»"))
    assert "«learnt" not in capsys.readouterr().out, "a row's guillemets are not the command's"
    streamer = chat._Answer(tokenizer)
    for piece in ("a\x1b", "[31mb\x1b[2Jc", "\u202e\x07"):
        streamer.on_finalized_text(piece)
    assert capsys.readouterr().out == "a[31mbc"
    assert streamer.text == "a\x1b[31mb\x1b[2Jc\u202e\x07", "the model reads again what it said"


def test_a_target_as_long_as_its_source_is_shown_as_supervised(capsys):
    row = {"input_ids": np.array([5, 6, 7]), "labels": np.array([8, 9, -100])}
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    show_rows([("x", row)], tokenizer, encoder_decoder=True)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "5 6 7" in lines and "«8 9»" in lines


def test_each_length_is_in_one_line_of_the_histogram(capsys):
    print_histogram(np.arange(1, 14))
    lengths = 0
    for line in capsys.readouterr().out.splitlines():
        low, _, high, *_, count = line.split()
        assert int(count) == int(high) - int(low) + 1
        lengths += int(count)
    assert lengths == 13


def test_bars_and_what_is_printed_beside_them_steer_nothing(capsys):
    bar = tqdm(total=2, desc=EVIL)
    tqdm.write(EVIL)
    bar.close()
    said = "".join(capsys.readouterr())
    assert "All is well." in said and not FORBIDDEN.search(re.sub(r"\r|\x1b\[A", "", said)) and "owned" not in said
    assert DatasetSpec(path="a", name=EVIL).name == plain(EVIL, lines=False) != DatasetSpec(path="b\nc: fine.jsonl").name
    assert DatasetSpec(path="b\nc: fine.jsonl").name == "b c: fine"


def test_every_bar_is_one_that_steers_nothing():
    files = [f for f in Path(zerobook.__file__).parent.rglob("*.py") if f.name != "bars.py"]
    assert files and not [f for f in files if re.search(r"^\s*(from|import) tqdm", f.read_text(), re.MULTILINE)]


def test_errors_steer_nothing(capsys, monkeypatch):
    def fail():
        raise ConfigError(EVIL)

    monkeypatch.setattr(process.os, "_exit", lambda code: None)
    with process.exit_on_error():
        fail()
    said = capsys.readouterr().err
    assert "owned" not in said and "All is well" in said and not FORBIDDEN.search(said)


def test_text_from_files_in_tracebacks_and_library_logs_is_plain(tmp_path):
    title = "\x1b]0;PWNED\x07"
    program = (
        "import sys\n"
        "from transformers.utils import logging as library\n"
        "from zerobook.utils.terminal import keep_logs_plain, say_traceback\n"
        "sys.excepthook = say_traceback\nkeep_logs_plain('transformers')\nkeep_logs_plain('transformers')\n"
        f"library.get_logger('transformers.x').warning('unexpected tensor ' + {title!r} + 'w')\n"
        f"raise RuntimeError('no dtype ' + {title!r} + 'f32')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "\x1b" not in done.stderr and "PWNED" not in done.stderr
    assert "unexpected tensor w" in done.stderr and "RuntimeError: no dtype f32" in done.stderr and "Traceback" in done.stderr


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"model": 1, "added_tokens": []}'])
def test_a_tokenizer_that_cannot_be_read_is_a_sentence(text, tmp_path):
    from zerobook.models.load import open_tokenizer

    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^tokenizer_name: .* is a folder here, but AutoTokenizer cannot load it"):
        open_tokenizer(str(tmp_path), template=None, revision="main", trust_remote_code=False)


def test_broken_weights_and_folders_that_cannot_be_written_are_sentences(tiny, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    from zerobook.models.load import _from_pretrained
    from zerobook.models.result import load_result

    folder = tmp_path / "model"
    shutil.copytree(tiny / "llama", folder)
    header = json.dumps({"w": {"dtype": "\x1b]0;PWNED\x07", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0000")
    with pytest.raises(ConfigError, match=r"model_name_or_path: .* cannot load it"):
        _from_pretrained(AutoModelForCausalLM, str(folder), "model_name_or_path", {})
    shutil.copy(tiny / "llama" / "model.safetensors", folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"attn_implementation": "kernels-community/evil"}))
    assert load_result(folder).model.config._attn_implementation in ("sdpa", "eager"), "no code from the hub"
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    assert main(["runlog", "report", str(tmp_path / "file" / "run")]) == 2
    assert "Traceback" not in capsys.readouterr().err


# --- a run in a terminal of 80 columns
def view_of_a_run(step: int, total: int):
    record = StepRecord(
        step=step, loss=3.41612, grad_norm=1.25, learning_rate=2e-5, tokens=10, cursor=(0, 1), ids=[]
    )  # fmt: skip
    trainer = SimpleNamespace(
        state=SimpleNamespace(total_steps=total),
        progress=SimpleNamespace(step=0),
        pace=SimpleNamespace(tokens_per_second=12345.6),
    )
    return record, trainer


def read_to_the_end(reader: int) -> str:
    """Return what was written to a pseudo-terminal, whose other end is closed. One read may return a part of it."""
    written = b""
    with suppress(OSError):
        while chunk := os.read(reader, 1 << 16):
            written += chunk
    return written.decode()


def test_the_bar_of_a_long_run_leaves_room_for_itself_at_80_columns(monkeypatch):
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    record, trainer = view_of_a_run(40_000, 100_000)
    with os.fdopen(terminal, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        console = Console(silent=False)
        console.on_start(trainer)
        console.bar.update(40_000)
        console.on_log(trainer, [record])
        console.bar.refresh()
        console.close_bar()
    written = read_to_the_end(reader)
    os.close(reader)
    bars = [line for line in re.split(r"[\r\n]", written) if "loss 3.4161" in line and "|" in line]
    assert bars and all(len(line) <= 80 for line in bars)
    assert all(len(line.split("|")[1]) >= 15 for line in bars), "the bar itself"


def test_the_loss_stands_in_a_line_of_each_log_point(capsys):
    record, trainer = view_of_a_run(40, 100)
    console = Console(silent=False)
    console.on_start(trainer)
    console.on_log(trainer, [record])
    console.close_bar()
    out, err = capsys.readouterr()
    assert err == "", "a file gets no bar"
    (line,) = out.splitlines()
    assert line.startswith("step 40 of 100: loss 3.4161") and "2e-05" in line and len(line) <= 80


def test_answers_of_an_evaluation_are_printed_in_the_columns_of_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(silent=False)
    samples = [{"prompt": f"Why {n}?", "answer": "Because\nof \x1b[31mit. " * 40} for n in range(5)]
    console.on_evaluate(None, EvaluationRecord(step=4, seconds=1.0, result={"loss": 1.0, "perplexity": 2.7}, samples=samples))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not FORBIDDEN.search("".join(lines))
    assert "Why 0?" in lines[1] and "Because of it." in lines[2]
    assert len(lines) < 20, "long answers are cut, and of many samples a few are shown"


@pytest.mark.parametrize(("number", "text"), [(1, "1 process ="), (2, "2 processes =")])
def test_the_batch_counts_processes_in_words_that_fit(number, text):
    layout = BatchLayout(world_size=number, rank=0, micro=2, accumulation=1)
    assert text in layout.arithmetic


def test_a_log_file_gets_lines_in_place_of_a_bar(monkeypatch):
    short, long = io.StringIO(), io.StringIO()

    for _ in bars.tqdm(range(3), desc="short work", file=short):
        pass
    monkeypatch.setattr(bars, "LINE_EVERY_S", 0)
    for _ in bars.tqdm(range(3), desc="long work", file=long):
        pass

    assert short.getvalue().strip() == ""
    lines = long.getvalue().splitlines()
    assert lines[0].startswith("long work") and "3/3" in long.getvalue() and "\r" not in long.getvalue().rstrip()


def test_a_compiler_without_a_gpu_is_not_mentioned():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("torch.utils.cpp_extension")
    hush()
    logger.addHandler(handler)
    try:
        logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local")
        logger.warning("the compiler is too old")
    finally:
        logger.removeHandler(handler)
    assert messages == ["the compiler is too old"]
