"""Pages for readers: commands run here or resolve, links lead somewhere, examples are of the format they name."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from string import Template

import pytest
import yaml

from scripts.reference import header
from tests.distributed.test_library_messages import NOTICES
from tests.distributed.test_parity import STRATEGIES
from tests.harness import ROOT
from zerobook.cli.doctor import inspect_launch
from zerobook.cli.main import COMMANDS
from zerobook.config import RecipeConfig
from zerobook.data import formats
from zerobook.launch.resolve import Hardware
from zerobook.training import run as recipe_run
from zerobook.training.recipe_file import recipe_class

README = (ROOT / "README.md").read_text()
TUTORIAL, RECIPES = ((ROOT / "docs" / name).read_text() for name in ("tutorial.md", "guides/recipes.md"))
COMMAND_PAGE = (ROOT / "docs" / "reference" / "commands.md").read_text()
DATA = (ROOT / "docs" / "guides" / "data.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")),
         ROOT / "ds_configs" / "published" / "README.md"]  # fmt: skip
CONFIGS = {
    "causal_lm_gpt2_xl": "causal_lm", "lora_smollm2": "lora_finetune", "mixture_smollm2": "causal_lm",
    "seq2seq_blenderbot": "seq2seq_chatbot",
}  # fmt: skip
"""File in recipes/configs/ -> its recipe. tests/test_recipe_configs.py covers those in its folders."""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(text: str) -> list[tuple[str, str | None]]:
    """(command, the hardware it says it needs). A note holds for all commands up to the next one, in its block."""
    found = []
    for block in blocks(text, "bash"):
        needs = None
        for line in re.sub(r"\s*\\\n\s*", " ", block).strip().splitlines():
            if line.startswith("# needs:"):
                needs = line.removeprefix("# needs:").strip()
            else:
                found.append((line, needs))
    return found


# --- the README as a whole
RUN_PAGES = {"README.md": README, "tutorial.md": TUTORIAL, "recipes.md": RECIPES}
for page in sorted((ROOT / "docs" / "how-to").glob("coming_from_*.md")):
    RUN_PAGES[page.name] = page.read_text()
"""Pages whose commands are run, unless a note says what they need."""
RUN_HERE = {
    name: [line for line, needs in commands(text) if needs is None and not line.startswith(("make ", "source "))]
    for name, text in RUN_PAGES.items()
}


def test_pages_name_every_command_target_and_recipe():
    assert "make demo" in blocks(README, "bash")[0].splitlines() and "make test" in [line for line, _ in commands(README)]
    run = [line for lines in RUN_HERE.values() for line in lines]
    assert all(line.startswith(("accelerate launch ", "zerobook ", "python ")) for line in run)
    assert len(RUN_HERE["tutorial.md"]) > 10 and len(RUN_HERE["recipes.md"]) > 10
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\| `make ([a-z-]+)`", COMMAND_PAGE)) == targets
    assert set(re.findall(r"\bmake ([a-z-]+)(?![\w+-])", README)) <= targets
    assert set(COMMANDS) <= set(re.findall(r"`zerobook (\w+)", COMMAND_PAGE))
    for file in (ROOT / "recipes").glob("*.py"):
        assert f"(recipes/{file.name})" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("https://"):
            file, _, anchor = target.partition("#")
            there = page.parent / file if file else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target
    named_paths(text)


def test_the_workflows_run_the_parts_of_make_test():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = ""
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            commands += "\n".join(step.get("run", "") for step in job["steps"]) + "\n"
    called = set(re.findall(r"\bmake ([a-z-]{2,})", commands))  # not "make g++"
    assert {"checks", "test-fast", "test-launches", "test-versions", "test-nodes"} <= called <= targets


def test_the_workflow_launches_every_test_file_once():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    parts = workflow["jobs"]["launches"]["strategy"]["matrix"]["tests"]
    files = []
    for pattern in " ".join(parts).split():
        paths = [ROOT / pattern] if (ROOT / pattern).is_dir() else ROOT.glob(pattern)
        files += [file for path in paths for file in (path.glob("test_*.py") if path.is_dir() else [path])]
    assert sorted(files) == sorted((ROOT / "tests").rglob("test_*.py"))


def test_the_forms_for_issues_name_each_field_once():
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"):
        names = [field["id"] for field in yaml.safe_load(form.read_text())["body"]]
        assert names and len(set(names)) == len(names)


def anchors(page: Path) -> set[str]:
    """Return the names of a Markdown page's headings in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named_paths(text: str) -> None:
    roots = "accelerate_configs|ds_configs|recipes|docs|zerobook|tests|scripts"
    for path in re.findall(rf"(?<![\w./~-])((?:{roots})/[\w./-]*[\w/])", text):
        assert re.fullmatch("[A-Z]+", Path(path).stem) or (ROOT / path).exists(), path


def test_functions_that_pages_name_are_there():
    """``name`` in ``file`` stands for a function, class, method or field that a reader opens."""
    pages = [page.read_text() for page in PAGES]
    named = [found for text in pages for found in re.findall(r"`([A-Z_a-z][\w.]*)`\s+in\s+`([\w/]+\.py)`", text)]
    assert len(named) > 20
    for name, file in named:
        tree = ast.parse((ROOT / file).read_text())
        assert name in defined(tree), f"{name} in {file}"


def defined(tree: ast.Module) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    inner = {f"{node.name}.{part.name}" for node in classes for part in node.body if isinstance(part, kinds)}
    assigned = {ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    return {node.name for node in tree.body if isinstance(node, kinds)} | inner | assigned


# --- headers
@pytest.mark.parametrize("file", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda f: f.stem)
def test_header_of_a_strategy_file(file):
    said = header(file)
    assert all(said[key] for key in ("Purpose", "Memory", "Traffic", "Choose", "Units")) and "1910.02054" in said["Source"]
    processes = STRATEGIES[file.stem]
    ran = f"{processes} CPU processes over gloo (parity-tested against one process)" if processes > 1 else (
        "1 CPU process (the reference of every parity test)")  # fmt: skip
    assert re.fullmatch(re.escape(ran) + r"\. GPU: .+", said["Run on"])
    assert processes == 1 or f"--num_processes {processes} " in said["A laptop"]
    named_paths(file.read_text())


def test_every_recipe_config_is_covered():
    assert {f.stem for f in (ROOT / "recipes" / "configs").glob("*.yaml")} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_dry_run_of_a_recipe_config(name, monkeypatch, capsys):
    file = f"recipes/configs/{name}.yaml"
    said = header(ROOT / file)
    assert all(said[key] for key in ("Purpose", "Hardware", "Launch", "Override", "Limits"))
    assert f"recipes/{CONFIGS[name]}.py --config {file}" in said["Launch"]
    monkeypatch.chdir(ROOT)
    for more in ("", said["Override"].partition(":")[0]):
        monkeypatch.setattr(sys, "argv", ["recipe", "--config", file, "--dry-run", *shlex.split(more)])
        recipe_run.run(recipe_class(f"recipes/{CONFIGS[name]}.py"))
        printed = capsys.readouterr().out
        assert "samples a step" in printed and "strategy one process" in printed
        for key in yaml.safe_load((ROOT / file).read_text()):
            assert f"│ {key}" in printed or key in ("n_train", "n_val")


# --- launch lines that are not run here
def launch_lines() -> list:
    """Every ``accelerate launch`` that is shown and not run, as it stands in its file."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for line, _ in commands(text) if line.startswith("accelerate ")]
        run = RUN_HERE[page.name] if page.name in RUN_HERE and text == RUN_PAGES[page.name] else []
        found += [(page.name, line, shown_files(text)) for line in lines if line not in run]
    for file in sorted((ROOT / "recipes").glob("*.py")):
        source = file.read_text().split('"""')[1]
        shown = re.findall(r"^    (accelerate launch .*(?:(?<=\\)\n.*)*)", source, re.M)
        assert len(shown) == 2, file
        found += [(file.name, line, {}) for line in shown]
    for name in CONFIGS:
        found.append((f"{name}.yaml", header(ROOT / "recipes" / "configs" / f"{name}.yaml")["Launch"], {}))
    return [pytest.param(line, files, id=f"{name}-{i}") for i, (name, line, files) in enumerate(found)]


def shown_files(text: str) -> dict[str, str]:
    """Return the files that a page asks its reader to save: blocks whose first line is ``# NAME.py`` or ``# NAME.yaml``."""
    found = [*blocks(text, "python"), *blocks(text, "yaml")]
    return {name[1]: block for block in found if (name := re.match(r"# (\w+\.(?:py|yaml))\n", block))}


@pytest.mark.parametrize("line, files", launch_lines())
def test_shown_launch_resolves(line, files, clone, monkeypatch):
    """A launch that needs GPUs and a hub to run needs neither to be resolved. Nothing is started."""
    monkeypatch.chdir(clone)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # the tests' own, on a machine without GPUs
    for name, code in files.items():
        (clone / name).write_text(code)
    line = re.sub(r"\\\n", " ", line).replace("<your GPUs>", "8")
    exported = dict(re.findall(r"(\w+)=(\S+)", "\n".join(re.findall(r"^export (.*)$", README, re.M))))
    line = re.sub(r"\$(\w+)", lambda found: exported[found[1]], line)
    program, launch, *arguments = shlex.split(line)
    assert (program, launch) == ("accelerate", "launch")
    processes = int(arguments[arguments.index("--num_processes") + 1])
    plan, problems, _, _ = inspect_launch(arguments, Hardware(gpus=processes, gpu_name="a GPU"))
    assert not problems and not plan.problems
    assert plan.world_size == processes
    strategy = Path(arguments[arguments.index("--config_file") + 1]).stem
    stage = re.search(r"zero(\d)", strategy)
    assert plan.zero_stage == (int(stage[1]) if stage else None)


# --- docs/guides/data.md
def test_examples_of_formats_are_of_their_format():
    section = DATA.partition("## Formats")[2].partition("## Sources")[0]
    found = re.findall(r"^\*\*`(\w+)`\*\*.*?```jsonl\n(.*?)\n```", section, re.S | re.M)
    assert [name for name, _ in found] == list(formats.FORMATS)
    for name, line in found:
        row = json.loads(line)
        assert formats.detect(row) == name
        formats.parse(name, row)
    (chat,) = blocks(README, "jsonl")
    assert formats.detect(json.loads(chat)) == "messages"


def test_examples_of_mixtures_are_configs():
    examples = blocks(DATA, "yaml")
    assert examples
    for example in examples:
        assert not RecipeConfig(**yaml.safe_load(example)).problems()


# --- commands that are run
@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder that looks like a fresh clone to the commands, so that they write their outputs there."""
    for name in ("accelerate_configs", "ds_configs", "recipes", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "chats.jsonl").write_text(blocks(README, "jsonl")[0])
    return tmp_path


def run(line: str, cwd: Path, limit: int = 240) -> subprocess.CompletedProcess:
    program, *arguments = shlex.split(line)
    if arguments[0] == "launch":
        # Several launches run at the same time here.
        arguments = [arguments[0], "--main_process_port", "0", *arguments[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    path = str(Path(sys.executable).with_name(program))
    return subprocess.run(
        [path, *arguments], cwd=cwd, env=environment, input="Who are you?\n", capture_output=True, text=True, timeout=limit,
        check=False,
    )  # fmt: skip


@pytest.mark.launch
@pytest.mark.full  # minutes of the embedded model's training, much of which the demo does, too
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page, lines in RUN_HERE.items() if lines])
def test_every_command_without_a_note_runs(page, clone):
    for name, content in shown_files(RUN_PAGES[page]).items():
        (clone / name).write_text(content)
    # in order: some of them go on from what another saved
    for line in RUN_HERE[page]:
        # A training of a page takes minutes where other programs have the cores.
        result = run(line, clone, limit=600)
        said = result.stdout + result.stderr
        assert result.returncode == 0, f"{line}\n{said[-5000:]}"
        if "--resume_from_checkpoint" in line:
            assert re.search(r"resumed outputs/\w+/checkpoints/step-0*(\d+) at step \1\b", said)
        if "--dry-run" in line:
            assert "4 micro x 1 accumulation x 2 processes = 8 samples a step" in result.stdout
            assert line.split()[line.split().index("--config") + 1] in result.stdout
            assert "strategy ZeRO-2 | 2 x cpu" in result.stdout
        if line.startswith("zerobook chat"):
            assert len(result.stdout.split()) > 2
        if line.startswith("zerobook eval"):
            assert "arithmetic" in result.stdout
    for code in blocks(RECIPES, "python") if page == "recipes.md" else ():  # loads what the commands saved
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, timeout=120, check=False
        )
        assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.launch
def test_the_launch_of_the_readme_trains(clone, tiny):
    """The line is launched as the page has it, with a tiny model on two processes."""
    values = {"MODEL": str(tiny / "llama"), "TRAIN_FILE": "chats.jsonl", "GPUS": "2"}
    (launch,) = [line for line, _ in commands(README) if line.startswith("accelerate launch") and "$MODEL" in line]
    (clone / "chats.jsonl").write_text(12 * blocks(README, "jsonl")[0])

    trained = run(Template(launch).substitute(values), clone)

    said = trained.stdout + trained.stderr
    assert trained.returncode == 0 and "ZeRO-3" in said, said
    assert [line for line in re.split(r"[\r\n]+", said) if NOTICES.search(line)] == [], "of libraries"
    assert (clone / "outputs" / "mine" / "adapter" / "adapter_config.json").exists()


@pytest.mark.launch
@pytest.mark.full
@pytest.mark.timeout(900)
def test_demo():
    result = subprocess.run(
        [sys.executable, "scripts/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=840, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for part in ("ZeRO stage 2", "ZeRO stage 3", "came in the order of a run that was never stopped", "adapter:", "runlog:"):
        assert part in result.stdout
    assert result.stdout.count("before:") == result.stdout.count("after:") == 2
