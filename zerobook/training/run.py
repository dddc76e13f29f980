"""The run of a recipe, from its flags to the saved model.

`run` is the last line of every recipe's file. `train` does the work, also for scripts and notebooks; ``zerobook data`` uses
`prepare_data`.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.checkpoint import store
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources, from_python, read
from zerobook.data.batch_loader import BatchLayout
from zerobook.health.position import enter
from zerobook.launch import account, by_name, preflight
from zerobook.launch.accelerate_cli import parent_flags
from zerobook.launch.build import build, resolve_this_process
from zerobook.launch.process import exit_on_error, launched, leave
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.training.data_commits import with_data_commits
from zerobook.training.recipe import Recipe
from zerobook.utils.chat_template import DEFAULT
from zerobook.utils.library_messages import hush
from zerobook.utils.terminal import console, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerobook.checkpoint.progress import Progress
    from zerobook.data.prepare import PreparedData
    from zerobook.strategy import Strategy
    from zerobook.training.hooks import Hook
    from zerobook.training.trainer import Trainer


def run(recipe_class: type[Recipe[Any]]) -> None:
    """Train with the flags of the command line; with ``--dry-run``, print the resolved config only. Ends a launched process.

    A user's error is printed without a traceback, and the process exits with 2.
    """
    # Silence messages of libraries. This has an effect only before transformers and DeepSpeed are imported.
    hush()
    # An error that every process raises before there is a process group ends the launcher too.
    with exit_on_error(ends_launcher=True):
        parsed = read(recipe_class.config_class)
        config = parsed.config
        # The model to start from may be a checkpoint of a run, which is exported first.
        if config.model_name_or_path and not parsed.dry_run and not parsed.problems:
            from zerobook.models.result import export_if_checkpoint

            name = export_if_checkpoint(config.model_name_or_path, trust_remote_code=config.trust_remote_code)
            config = config.model_copy(update={"model_name_or_path": name})
        launch_problems, notes = by_name.compare_with_launch(parsed.launch_keys)
        problems = parsed.problems if parsed.dry_run else [*parsed.problems, *launch_problems]
        plan, config, sources = resolve_this_process(
            config, parsed.sources, starts=not parsed.dry_run, config_problems=problems
        )
        plan.notes += notes
        if parsed.dry_run:
            print_dry_run(config, sources, plan)
            return
    with exit_on_error():
        announce(plan)
        train(recipe_class(config), sources=sources, plan=plan)
    leave()


def train(
    recipe: Recipe[Any], *, hooks: Sequence[Hook] = (), sources: ConfigSources | None = None, plan: LaunchPlan | None = None
) -> Progress:
    """Prepare the data, load the model, train it and save it. Return the final progress. Collective.

    A script or a notebook calls it in one process; a launched script calls it in every process.

    Args:
        hooks: hooks besides those in ``config.hooks``.
        sources: source of each value of the recipe's config, recorded in the runlog. None: the values were set in Python.
        plan: launch plan of this process. None: it is resolved from the environment.

    Raises:
        ConfigError: lists all problems in the config and the launch.
        ZerobookError: the run could not go on.
        SystemExit: the run has stopped for a person to decide about a spike (76), or was told to stop and has saved (75).
            A process ends with 77, without an exception, if it or another one blocks the run.
    """
    from zerobook.data.prepare import prepare
    from zerobook.evaluation.scorers import fetch_tasks
    from zerobook.models.load import check_fit, load_config, load_tokenizer
    from zerobook.models.vocabulary import fit_embeddings
    from zerobook.training.trainer import Trainer
    from zerobook.training.watching import watching

    # Resolve the config and the launch. `run` has done this already; a script or a notebook has not.
    if sources is None:
        sources = from_python(recipe.config)
    if plan is None:
        plan, config, sources = resolve_this_process(recipe.config, sources)
        recipe = type(recipe)(config)
    config = recipe.config
    strategy = build(config, plan)
    with watching(config, strategy) as watch:
        # Check what can be checked without the data: preparing them can take hours.
        preflight.check(strategy, config)
        tokenizer = load_tokenizer(config, strategy)
        recipe.check_model_config(load_config(config, strategy))

        # Prepare the data.
        config = with_data_commits(config, strategy)
        recipe = type(recipe)(config)
        objective = recipe.objective()
        enter("prepare data")
        # One process of each node downloads the tasks' data. A task that cannot be measured ends the run here.
        strategy.once_per_node(partial(fetch_tasks, config.eval_tasks, encoder_decoder=recipe.encoder_decoder))
        data = prepare(config, tokenizer, strategy, encoder=recipe.encoder(tokenizer), objective=objective)
        preflight.check_data(strategy, data.fingerprints)
        if data.uses_default_template:
            # The data are chats, and the tokenizer has no template. Put the default template into the config, so that
            # checkpoints, the saved model and its exports have it.
            config = config.with_chat_template(DEFAULT)
            sources["chat_template"] = "default of a tokenizer without one"
            recipe = type(recipe)(config)
            tokenizer.chat_template = config.chat_template_text

        # Load the model.
        enter("load")
        base_model = recipe.model(tokenizer, strategy)
        # Resize the embeddings before adapters are added, since an adapter copies embeddings that are trained in full.
        note = fit_embeddings(base_model, tokenizer)
        if note and strategy.is_main:
            say(f"  note: {note}")
        model = recipe.adapt(base_model)
        check_fit(base_model, tokenizer, data)
        reference_model = recipe.reference_model(tokenizer, strategy)
        collate = recipe.collator(tokenizer, model)
        scorers = recipe.scorers(tokenizer, model, data, collate)

        trainer = Trainer(
            config,
            sources,
            strategy,
            model,
            data,
            collate=collate,
            objective=objective,
            scorers=scorers,
            hooks=hooks,
            reference_model=reference_model,
            watch=watch,
            recipe_file=_find_recipe_file(recipe),
        )
        return _run_to_end(trainer, strategy, tokenizer)


def _run_to_end(trainer: Trainer, strategy: Strategy, tokenizer: PreTrainedTokenizerBase) -> Progress:
    """Train, save the model, and print the next commands. Return the final progress. Collective."""
    from zerobook.models.save import save_model

    try:
        progress = trainer.run(
            save_result=lambda: save_model(strategy, tokenizer, trainer.config, partial(_make_card, trainer))
        )
        strategy.finish()
        if trainer.save_results and strategy.is_main:
            say(next_commands(trainer.config))
    finally:
        # A script or a notebook goes on, so close the run's files. A launched process ends now, which closes them.
        if not launched():
            trainer.close()
    return progress


def _make_card(trainer: Trainer) -> str:
    """Return the README.md of the trained model."""
    from zerobook.models.card import Training, format_card

    config = trainer.config
    training = Training(
        run=Path(config.output_dir),
        progress=trainer.result.to_json(),
        strategy=trainer.strategy.describe()["strategy"],
        world_size=trainer.strategy.world_size,
    )
    model: Any = trainer.strategy.unwrapped
    return format_card(config.model_dump(), training, seq2seq=model.config.is_encoder_decoder, adapter=config.trains_adapters)


def _find_recipe_file(recipe: Recipe[Any]) -> Path | None:
    """Return the file that defines the recipe's class; None if a notebook defines it."""
    try:
        return Path(inspect.getfile(type(recipe))).resolve()
    except (OSError, TypeError):
        return None


def next_commands(config: RecipeConfig) -> str:
    """Return the commands that a user may want after a run."""
    output_dir = shlex.quote(config.output_dir)
    checkpoints = store.folder_of(config.output_dir)
    # If the newest checkpoint is not the best one, propose an export of the best one.
    best = store.find_best(checkpoints)
    is_last_best = best is None or best == store.list_complete(checkpoints)[-1]
    option = "" if is_last_best else " --checkpoint best"
    commands = [
        "next:",
        f"zerobook chat {output_dir}",
        f"zerobook export {output_dir}{option} --output MODEL",
        f"zerobook runlog report {output_dir}",
    ]
    return "\n  ".join(commands)


def prepare_data(recipe: Recipe[Any], sources: ConfigSources, workers: int) -> tuple[PreparedData, PreTrainedTokenizerBase]:
    """Prepare the data of a recipe as its run would. Return (data, tokenizer).

    Args:
        workers: processes that tokenize.
    """
    from zerobook.data.prepare import prepare
    from zerobook.models.load import load_config, load_tokenizer

    plan, config, _ = resolve_this_process(recipe.config, sources, trains=False)
    strategy = build(config, plan)
    config = with_data_commits(config, strategy)
    recipe = type(recipe)(config)
    tokenizer = load_tokenizer(config, strategy)
    recipe.check_model_config(load_config(config, strategy))
    data = prepare(
        config,
        tokenizer,
        strategy,
        encoder=recipe.encoder(tokenizer),
        objective=recipe.objective(),
        workers=workers,
        read_ahead=False,
    )
    return data, tokenizer


def announce(plan: LaunchPlan) -> None:
    """Print the strategy in one line, and notes on choices that were made for the user. Rank 0 only."""
    if int(os.environ.get("RANK", 0)) == 0:
        say(plan.line)
        for note in plan.notes:
            say(f"  note: {note}")


def print_dry_run(config: RecipeConfig, sources: ConfigSources, plan: LaunchPlan) -> None:
    """Print the resolved config with the source of each value, the batch arithmetic and the strategy. Rank 0 only."""
    if int(os.environ.get("RANK", 0)) != 0:
        return
    from rich.table import Table

    out = console()
    table = Table(title="resolved config", title_justify="left")
    for column in ("key", "value", "from"):
        table.add_column(column, overflow="fold")
    values = config.model_dump()
    # Values that the user has set come first.
    for key in sorted(values, key=lambda key: not sources.is_set(key)):
        table.add_row(key, str(values[key]), sources[key], style="" if sources.is_set(key) else "dim")
    out.print(table)
    layout = BatchLayout.from_plan(config, plan)
    entries = account.entries(plan, config, sources, flags=parent_flags())
    if entries:
        out.print(account.table(entries))
    announce(plan)
    out.print(f"batch: {layout.arithmetic}")
    steps = f"ceil({config.num_train_epochs} x training samples / {layout.global_batch}), known once the data is read"
    if config.max_train_steps:
        steps = f"{config.max_train_steps}"
    out.print(f"steps: {steps}")
