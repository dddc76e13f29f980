"""A recipe is code that commands run. No other file is run, whatever its name."""

from __future__ import annotations

import contextlib

import pytest

from tests.harness import ROOT
from zerobook.cli.main import main
from zerobook.errors import ConfigError
from zerobook.training.recipe_file import check_recipe, recipe_class

DATA = {
    "rows.txt": "open({mark!r}, 'w')\n",
    "rows.jsonl": "open({mark!r}, 'w')\n",
    "recipe": "open({mark!r}, 'w')\n",
    "script.py": "import os\nopen({mark!r}, 'w')\n",
    "config.py": "open({mark!r}, 'w')\nclass MyConfig(dict): pass\n",
    "uses.py": "from zerobook.config import RecipeConfig\nopen({mark!r}, 'w')\nRecipeConfig()\n",
    "runs.py": "from subprocess import run\nopen({mark!r}, 'w')\nrun(CausalLM)\n",
    "broken.py": "open({mark!r}, 'w')\nclass (\n",
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("command", [["data", "inspect"], ["data", "prepare"], ["doctor"], ["plan"]])
def test_a_file_that_is_no_recipe_is_not_run(tmp_path, tiny, capsys, command, name):
    file, mark = tmp_path / name, tmp_path / "it-was-run"
    file.write_text(DATA[name].format(mark=str(mark)))
    if command == ["data", "inspect"] and file.suffix != ".py":  # a data file, which is read
        assert main([*command, str(file), "--model", str(tiny / "llama")]) in (0, 1, 2) and not mark.exists()
        return
    code = main([*command, str(file), "--x", "1"])
    said = "".join(capsys.readouterr())
    assert code in (1, 2) and not mark.exists()
    if command != ["plan"] or file.suffix == ".py":
        assert name in said and "recipe" in said
    if command[0] == "data" and file.suffix != ".py":
        assert f"--train_file {file}" in said, "the way out"


@pytest.mark.parametrize(
    "text",
    [
        "from zerobook.training.run import run\nfrom recipes.causal_lm import CausalLM\nclass Mine(CausalLM): ...\nrun(Mine)\n",
        "from zerobook.training.run import run as go\nclass Mine: pass\nif __name__ == '__main__':\n    go(Mine)\n",
    ],
)
def test_a_recipe_of_ones_own_is_one(tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    assert check_recipe(str(tmp_path / "mine.py")) == (tmp_path / "mine.py", "Mine")


def test_every_recipe_of_the_package_is_one_and_its_other_files_are_not(tmp_path):
    recipes = sorted((ROOT / "recipes").glob("*.py"))
    assert len(recipes) == 3 and [check_recipe(str(file))[0] for file in recipes] == recipes
    for file in (ROOT / "zerobook" / "training" / "trainer.py", tmp_path / "none.py", tmp_path):
        with pytest.raises(ConfigError, match=r"declares no recipe|no such recipe file"):
            check_recipe(str(file))


@pytest.mark.parametrize("command", ["data", "doctor", "plan"])
def test_help_says_that_a_recipe_is_run(capsys, command):
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert "A recipe is Python code: it is run" in " ".join(capsys.readouterr().out.split())


def test_a_recipe_that_is_loaded_is_not_run_again_by_another_name(tmp_path):
    recipe = ROOT / "recipes" / "causal_lm.py"
    link = tmp_path / "mine.py"
    link.symlink_to(recipe)
    assert recipe_class(str(link)) is recipe_class(str(recipe))
