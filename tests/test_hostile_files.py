"""Files that somebody wrote to do harm: each is refused by name, within bounds of time and memory."""

from __future__ import annotations

import ast
import gzip
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from recipes.causal_lm import CausalLM
from recipes.lora_finetune import LoraConfig
from scripts.other_logs import read_log
from tests.harness import ROOT
from zerobook.checkpoint import store
from zerobook.checkpoint.origin import weights_digest
from zerobook.cli.chat import Conversation
from zerobook.cli.main import main
from zerobook.config_sources import parse
from zerobook.data import files, parquet, template_limits
from zerobook.data.files import file_source
from zerobook.data.samples import Chat
from zerobook.data.sources import open_source
from zerobook.data.templates import CausalEncoder
from zerobook.errors import ConfigError, DataError
from zerobook.evaluation import tasks
from zerobook.evaluation.tasks import read_task
from zerobook.launch import accelerate_file
from zerobook.models import load
from zerobook.plan.hardware import cluster
from zerobook.plan.job import read_config
from zerobook.runlog import jsonl, report
from zerobook.runlog.writer import RunLog
from zerobook.training import run as recipe_run
from zerobook.training import trackers
from zerobook.utils import reading, user_code
from zerobook.utils.files import staging_of
from zerobook.utils.host_memory import weight_bytes
from zerobook.utils.reading import file_digest, read_json, read_text
from zerobook.utils.yaml_text import load_yaml

DEEP = "[" * 200_000 + "]" * 200_000
LAUGHS = "\n".join(["a0: &a0 [lol]"] + [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 10)])


# --- checkpoints, runlogs, configs
def checkpoint_with(tmp_path: Path, write) -> Path:
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    write(checkpoint / store.MANIFEST)
    return checkpoint


@pytest.mark.parametrize("write", [
    lambda file: file.write_text(DEEP), os.mkfifo, lambda file: file.mkdir(), lambda file: file.write_bytes(b"\xff\xfe"),
], ids=["nested deeply", "pipe", "folder", "no text"])  # fmt: skip
def test_a_manifest_that_cannot_be_one_is_damage_that_names_the_file(tmp_path, write):
    checkpoint = checkpoint_with(tmp_path, write)

    reason = store.find_damage(checkpoint)

    assert reason is not None and store.MANIFEST in reason
    assert store.list_complete(checkpoint.parent) == []


@pytest.mark.timeout(60)
def test_no_reader_waits_for_a_pipe(tmp_path):
    pipe = tmp_path / "events.jsonl"
    os.mkfifo(pipe)

    readers = (
        read_text,
        read_json,
        lambda file: list(jsonl.stream(file)),
        lambda file: list(jsonl.backwards(file)),
        file_digest,
    )
    for read in readers:
        with pytest.raises(OSError, match="regular"):
            read(pipe)
    with pytest.raises(ConfigError, match="regular"):
        accelerate_file.load(str(pipe))
    with pytest.raises(DataError):
        list(file_source(pipe).read())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("write", [os.mkfifo, lambda file: file.write_text(" " * 5000), lambda file: file.write_text(DEEP)],
                         ids=["pipe", "large", "nested deeply"])  # fmt: skip
def test_small_files_of_others_are_refused_by_name_or_passed_over(tmp_path, monkeypatch, capsys, write):
    monkeypatch.setattr(reading, "MOST_BYTES", 4000)
    file = tmp_path / "evil.json"
    write(file)
    refused = {
        "a link's measurement": (ConfigError, lambda: cluster(gpu="a100-80gb", intra_node=str(file))),
        "a loss curve": (DataError, lambda: read_log(file)),
        "a task": (DataError, lambda: read_task(file)),
    }

    for kind, read in refused.values():
        with pytest.raises(kind, match=r"evil\.json"):
            read()
    assert trackers._read_ids(file) == {} and "evil.json" in capsys.readouterr().out
    shutil.copyfile(file, tmp_path / load.ORIGIN_FILE) if file.is_file() else os.mkfifo(tmp_path / load.ORIGIN_FILE)
    assert load._read_origin(tmp_path) == {}


def test_a_config_is_bounded_also_where_it_is_a_pipe(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_BYTES", 4000)
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("# \n" * 2000), daemon=True)
    writer.start()

    with pytest.raises(ConfigError, match=r"run\.yaml.*larger"):
        parse(LoraConfig, ["--config", str(pipe)])


@pytest.mark.parametrize("content", [(1 << 62).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]", b""],
                         ids=["a huge header", "a header of another kind", "empty"])  # fmt: skip
def test_a_header_of_weights_is_bounded(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        weight_bytes(tmp_path, "auto")


@pytest.mark.timeout(60)
def test_weights_that_are_a_pipe_are_refused(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")

    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        weight_bytes(tmp_path, "auto")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        weights_digest(tmp_path)


def test_no_file_of_others_is_read_around_the_bounded_readers():
    """Files of the kernel are read as they are."""
    kernel = {"machine.py", "hardware.py", "gpus.py", "build.py", "links.py"}
    bounded = {"reading.py", "yaml_text.py", "harness.py"}
    found = []
    for file in (ROOT / "zerobook").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        is_free = {name for name in names if name in ("json.load", "yaml.safe_load", "yaml.load")}
        is_free |= {name for name in names if name.endswith(".read_text") and not name.startswith("reading.")}
        if is_free and file.name not in kernel | bounded:
            found.append((file.name, is_free))
    assert not found


@pytest.mark.parametrize("text", [LAUGHS, DEEP, "a: &a [*a]", "a: &a {b: *a}"], ids=["laughs", "deep", "cycle", "mapping"])
def test_yaml_has_bounds(text):
    begun = time.process_time()

    with pytest.raises(yaml.YAMLError):
        load_yaml(text)

    assert time.process_time() - begun < 20


def test_ordinary_aliases_are_read():
    assert load_yaml("base: &base {a: 1}\nboth: [*base, *base]\nmore:\n  <<: *base\n  b: 2") == {
        "base": {"a": 1}, "both": [{"a": 1}, {"a": 1}], "more": {"a": 1, "b": 2},
    }  # fmt: skip


# --- data
def test_a_folder_of_data_has_no_links_out_of_it(tmp_path):
    outside = tmp_path / "secret.jsonl"
    outside.write_text('{"text": "secret"}\n')
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").symlink_to(outside)

    with pytest.raises(DataError, match=r"train\.jsonl"):
        open_source(str(folder))

    # links within the folder, and those of the hub's cache, are as they should be
    shutil.move(outside, folder / "real.txt")
    (folder / "train.jsonl").unlink()
    (folder / "train.jsonl").symlink_to(folder / "real.txt")
    assert len(list(open_source(str(folder)).train.read())) == 1
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a1").write_text("{}\n")
    part = tmp_path / "snapshots" / "commit" / "en"
    part.mkdir(parents=True)
    (part / "a.jsonl").symlink_to(tmp_path / "blobs" / "a1")
    for snapshot in (part.parent, part):
        assert len(list(open_source(str(snapshot)).train.read())) == 1


@pytest.mark.parametrize("rows", [1, 0], ids=["one long line", "an open quote"])
def test_a_small_compressed_table_does_not_fill_the_memory(tmp_path, rows):
    bomb = tmp_path / "train.csv.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        file.write(b"text,label\n")
        for _ in range(300):
            file.write((b"a," if rows else b'"a\n') * (1 << 19))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(DataError, match=r"train\.csv\.gz"):
        list(file_source(bomb).read())

    assert bomb.stat().st_size < 2 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"


def write_parquet(file: Path, columns: dict[str, pyarrow.Array], **options) -> Path:
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, file, compression="zstd", dictionary_pagesize_limit=1 << 30, **options)
    return file


def one_category(file: Path, **options) -> Path:
    text = pyarrow.array(["a" * (64 << 20)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000, "int32"), text)
    return write_parquet(file, {"text": column}, **options)


def one_text_in_many_rows(file: Path) -> Path:
    return one_category(file, store_schema=False)


def large_columns(file: Path) -> Path:
    column = pyarrow.array(["a" * (60 << 20)])
    return write_parquet(file, {f"text{index}": column for index in range(4)})


def a_list_of_nulls(file: Path) -> Path:
    nulls = pyarrow.nulls(20_000_000, pyarrow.int8())
    return write_parquet(file, {"text": pyarrow.ListArray.from_arrays(pyarrow.array([0, len(nulls)], "int32"), nulls)})


@pytest.mark.parametrize(("write", "reason"), [
    (one_text_in_many_rows, "times its size"), (one_category, "times its size"), (large_columns, "more than 256 MiB of memory"),
    (a_list_of_nulls, "a row has more than 256 MiB"),
])  # fmt: skip
def test_a_small_parquet_file_does_not_fill_the_memory(tmp_path, monkeypatch, write, reason):
    bomb = write(tmp_path / "train.parquet")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.setattr(parquet, "MOST_TOTAL", 256 << 20)
    if write is large_columns:
        monkeypatch.setattr(parquet, "MOST_MEMORY", 256 << 20)

    with pytest.raises(DataError, match=rf"train\.parquet.*{reason}"):
        for _ in file_source(bomb).read():
            pass

    assert bomb.stat().st_size < 1 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 3 << 20, "KiB"


@pytest.mark.parametrize("store_schema", [True, False], ids=["categories", "texts"])
def test_a_parquet_file_of_large_rows_is_read(tmp_path, store_schema):
    texts = [str(index) * (8 << 20) for index in range(10)] * 40
    dictionary = pyarrow.array(texts[:10])
    indices = pyarrow.array([index % 10 for index in range(400)], "int32")
    column = pyarrow.DictionaryArray.from_arrays(indices, dictionary)
    file = write_parquet(tmp_path / "train.parquet", {"text": column}, store_schema=store_schema)

    count = sum(row["text"] == texts[index] for index, (_, row, _) in zip(range(30), file_source(file).read(), strict=False))

    assert count == 30


@pytest.mark.timeout(60)
def test_a_parquet_file_that_is_a_pipe_is_refused(tmp_path):
    pipe = tmp_path / "train.parquet"
    os.mkfifo(pipe)

    with pytest.raises(DataError, match=r"train\.parquet.*regular"):
        list(file_source(pipe).read())
    with pytest.raises(DataError, match=r"train\.parquet.*regular"):
        file_source(pipe).shards()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_has_an_end(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(files, "MOST_TOTAL", 1 << 20)
    monkeypatch.setattr(files, "MOST_EXPANSION", 100)
    bomb = tmp_path / f"train.jsonl{suffix}"
    with pyarrow.CompressedOutputStream(str(bomb), "gzip" if suffix == ".gz" else "zstd") as file:
        for _ in range(50):
            file.write(b'{"text": "a"}\n' * 10_000)

    with pytest.raises(DataError, match=r"train\.jsonl.*times its size"):
        for _ in file_source(bomb).read():
            pass


# --- templates
ENDLESS = "{% for _ in range(90000) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set kept = namespace(text='a' * 1000000) %}" + "{% set kept.text = kept.text ~ kept.text %}" * 12
HOSTILE_TEMPLATES = {
    "no end": ENDLESS,
    "text of gigabytes": DOUBLED,
    "a constant of gigabytes": "{{ 'a' * 4000000000 }}",
    "a long text": "{{ 'a' * (messages | length) * 70000000 }}",
    "nested deeply": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
}


@pytest.fixture
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny / "llama")


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(template_limits, "SECONDS", 0.5)


@pytest.mark.parametrize("template", HOSTILE_TEMPLATES.values(), ids=list(HOSTILE_TEMPLATES))
def test_a_template_that_takes_too_much_is_stopped(tokenizer, short_limit, template):
    chat = Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = resource.getrlimit(resource.RLIMIT_AS)

    with pytest.raises(DataError, match="chat_template"):
        CausalEncoder(tokenizer, length=64, chat_template=template).encode([chat])

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20, "KiB"
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.parametrize("template", HOSTILE_TEMPLATES.values(), ids=list(HOSTILE_TEMPLATES))
def test_a_template_is_stopped_in_chats_and_evaluations_too(tiny, tokenizer, short_limit, template):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny / "llama")
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer, kind="causal", context=64)
    conversation = Conversation(loaded, None, "", None, 0.0)
    tokenizer.chat_template = template
    ask = tasks.Encoder(tokenizer, apply_chat_template=True)

    with pytest.raises(DataError, match="chat_template"):
        Conversation(loaded, None, "", None, 0.0)
    with pytest.raises(DataError, match="chat_template"):
        conversation.answer("a")
    with pytest.raises(DataError, match="chat_template"):
        ask("a", "b")


def test_a_template_that_python_cannot_compile_is_a_problem_of_the_config(tokenizer):
    nested = "{% for _ in [1] %}" * 30 + "{% endfor %}" * 30

    with pytest.raises(ConfigError, match="chat_template"):
        CausalEncoder(tokenizer, length=64, chat_template=nested)


def test_what_ends_in_time_is_not_stopped(short_limit):
    with template_limits.template_time():
        pass
    until = time.process_time() + 1.0
    while time.process_time() < until:
        pass

    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0), "no limit outlives the rendering"


# --- the report
def test_the_report_shows_names_of_columns_as_text(tmp_path):
    log = RunLog(tmp_path)
    evil = "<img src=x onerror=alert(1)>\x1b[31m|"
    log.event("eval", step=1, seconds=0.1, loss=1.0, perplexity=2.7, tokens=4, datasets={}, metrics={}, samples=[{evil: evil}])
    log.close()

    text = report.write(tmp_path).read_text()

    assert "<img" not in text and "\x1b" not in text
    assert "&lt;img" in text


# --- links in a run's folder
def report_of_a_run(folder):
    RunLog(folder).close()
    report.write(folder)


def pin_a_checkpoint(folder):
    store.pin(store.folder_of(folder) / "step-000001")


def hold_the_checkpoints(folder):
    with store.locked(store.folder_of(folder), wait=0):
        pass


@pytest.mark.parametrize("name, write", [
    ("runlog/report.html", report_of_a_run),
    ("runlog/report.html.partial", report_of_a_run),
    ("runlog/events.jsonl", lambda folder: RunLog(folder).close()),
    ("runlog/steps.jsonl", lambda folder: RunLog(folder).close()),
    ("checkpoints/.lock", hold_the_checkpoints),
    ("checkpoints/.lock.holder", hold_the_checkpoints),
    ("checkpoints/step-000001.pinned", pin_a_checkpoint),
])  # fmt: skip
@pytest.mark.timeout(60)
def test_nothing_is_written_through_a_link_in_a_runs_folder(tmp_path, name, write):
    outside = tmp_path / "outside.txt"
    outside.write_text("a line\nand one without its end")
    there = outside.stat().st_mtime_ns
    for number, target in enumerate((outside, tmp_path / "not-there", None)):
        run = tmp_path / f"run-{number}"
        link = run / name
        link.parent.mkdir(parents=True)
        if target is None:
            os.mkfifo(link)
        else:
            link.symlink_to(target)

        with suppress(OSError):
            write(run)

    assert outside.stat().st_mtime_ns == there
    assert not (tmp_path / "not-there").exists()


def test_what_a_link_leads_to_is_no_staging_folder(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / ".model.partial").symlink_to(outside)

    assert not staging_of(tmp_path / "model").exists()

    assert not (tmp_path / ".model.partial").is_symlink()
    assert outside.is_dir()


# --- code that a recipe's YAML names
OPTIMIZER = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from zerobook.optimizer import SGD
class Own(SGD):
    pass
"""


@pytest.fixture
def recipe_with_code(tmp_path, tiny):
    """The flags of a recipe whose YAML names an optimizer in a file; the file's folder gets ``ran`` when it is run."""
    (tmp_path / "own.py").write_text(OPTIMIZER)
    content = {
        "model_name_or_path": str(tiny / "llama"),
        "train_file": str(tiny / "few.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "optimizer": f"{tmp_path / 'own.py'}:Own",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return [str(ROOT / "recipes" / "causal_lm.py"), "--config", str(tmp_path / "recipe.yaml")]


@pytest.mark.parametrize("command", ["doctor", "plan", "dry run"])
def test_commands_that_only_look_run_no_code_that_the_yaml_alone_names(tmp_path, monkeypatch, recipe_with_code, command):
    def look(*flags):
        if command == "doctor":
            return main(["doctor", *recipe_with_code, *flags])
        if command == "plan":
            return main(["plan", "--gpus", "2", "--strategies", "ddp", *recipe_with_code, *flags])
        monkeypatch.setattr(sys, "argv", [*recipe_with_code, "--dry-run", *flags])
        return recipe_run.run(CausalLM) or 0

    code = look()

    assert not (tmp_path / "ran").exists()
    # a plan needs the size of the optimizer's state
    assert code == (2 if command == "plan" else 0)

    assert look("--optimizer", f"{tmp_path / 'own.py'}:Own") == 0
    assert (tmp_path / "ran").exists()


def test_a_plan_runs_a_models_code_on_the_command_lines_word_alone(tmp_path, tiny, capsys, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    model = tmp_path / "model"
    model.mkdir()
    facts = json.loads((tiny / "llama" / "config.json").read_text())
    facts |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (model / "config.json").write_text(json.dumps(facts))
    (model / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import LlamaConfig\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (tmp_path / "recipe.yaml").write_text(f"model_name_or_path: {model}\ntrust_remote_code: true\n")
    line = ["plan", "--gpus", "2", "--strategies", "ddp", str(ROOT / "recipes/causal_lm.py")]

    main([*line, "--config", str(tmp_path / "recipe.yaml"), "--block_size", "64"])

    assert not (tmp_path / "ran").exists()
    assert "--trust_remote_code" in capsys.readouterr().err


def test_a_look_for_a_module_runs_no_package(tmp_path, monkeypatch):
    package = tmp_path / "some_package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (package / "inside.py").write_text("class Own:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert user_code.problem("hooks", "some_package_of_mine.inside:Own") is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model", "config.json"])
def test_a_plan_loads_no_kernel_that_a_models_config_names(tmp_path, tiny, name):
    facts = json.loads((tiny / "llama" / "config.json").read_text())
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(facts | {"attn_implementation": "somebody/kernel"}))

    model_config = read_config(str(model if name == "model" else model / name))

    assert model_config._attn_implementation is None
