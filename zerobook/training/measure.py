"""Evaluate the model of a finished run on a file, in the same way as during the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from zerobook.config_sources import ConfigSources
from zerobook.data.collate import to_device
from zerobook.data.views import PreparedRows
from zerobook.errors import ConfigError
from zerobook.evaluation.answers import AnswerSampler
from zerobook.launch.build import build, resolve_this_process
from zerobook.runlog.history import History
from zerobook.runlog.records import EvaluationRecord
from zerobook.training.evaluator import Evaluator
from zerobook.training.recipe import Recipe
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.shipped import find, names, shipped

# Number of prompts of a file that are answered.
ANSWERS = 8
# Keys of the run's config that an evaluation ignores. The data come from the file, and the tokenizer from the saved model.
# Nothing is trained, and the run's folders may be those of another machine.
_UNUSED_KEYS = {
    "dataset_name",
    "dataset_config_name",
    "datasets",
    "validation_file",
    "streaming",
    "max_train_samples",
    "tokenizer_name",
    "chat_template",
    "new_tokens",
    "config_name",
    "adapter_path",
    "hooks",
    "optimizer",
    "output_dir",
    "cache_dir",
    "eval_tasks",
    "resume_from_checkpoint",
    "report_to",
    "early_stopping_patience",
    "expect",
    "policy",
}


def evaluate_on_file(path: str, file: str, *, rows: int | None, trust_remote_code: bool) -> EvaluationRecord:
    """Measure the loss of a run's model on a file, and generate answers.

    Args:
        path: the run's output_dir, or the model, the adapter or a checkpoint in it.
        file: a data file, in any format that a run reads.
        rows: maximum number of rows that are measured; None for all rows.

    Raises:
        ConfigError: the folder is not in a run, the recipe's file is missing, the data cannot be read, or a sample is longer
            than the model allows.
    """
    from zerobook.data.prepare import prepare
    from zerobook.data.templates import end_tokens
    from zerobook.models.isolation import choose_isolating_collator
    from zerobook.models.load import check_fit, load_tokenizer
    from zerobook.models.vocabulary import fit_embeddings

    recipe, sources = _make_recipe(path, file, rows, trust_remote_code)
    # One process evaluates, without an optimizer, in the precision and with the quantisation of the run.
    plan, config, _ = resolve_this_process(recipe.config, sources, trains=False)
    recipe = type(recipe)(config)
    strategy = build(config, plan)
    tokenizer = load_tokenizer(config, strategy)
    objective = recipe.objective()
    data = prepare(config, tokenizer, strategy, encoder=recipe.encoder(tokenizer), objective=objective)
    # `_make_recipe` passes the file as training data. Make its rows the held-out data.
    file_rows = cast("PreparedRows", data.train)
    data = replace(data, held_out={Path(file).name: file_rows})
    model = recipe.model(tokenizer, strategy)
    fit_embeddings(model, tokenizer)
    adapted = recipe.adapt(model)
    # Check after the adapter is added, since it may have embeddings with more rows than those of the model.
    check_fit(model, tokenizer, data)
    collate = recipe.collator(tokenizer, adapted)
    strategy.model = strategy.prepare_frozen(adapted)
    collate = choose_isolating_collator(
        strategy,
        collate,
        keep_mask=objective.needs_attention_mask(strategy.model),
        flag=config.rows_shared_by,
        chooses_attention=config.attn_implementation == "auto",
        trains=False,
    )
    scorers = [*recipe.scorers(tokenizer, adapted, data, collate)]
    # Generate answers if there are prompts. Running text has none, and neither has a chat whose tokens are all trained on. The
    # scorers of an encoder-decoder generate answers already.
    formats = {name for name, _ in data.formats.values()}
    has_prompts = formats != {"text"} and getattr(config, "assistant_only_loss", True)
    if has_prompts and not recipe.encoder_decoder:
        scorers.append(AnswerSampler(file_rows, tokenizer, count=ANSWERS, ends=end_tokens(tokenizer)))

    def summed_loss(batch: dict[str, Any]) -> torch.Tensor:
        result = objective.loss(strategy.model, to_device(batch, strategy.device))
        return result[0] if isinstance(result, tuple) else result

    evaluator = Evaluator(config, strategy, data, scorers, collate, summed_loss, objective.is_cross_entropy)
    return cast("EvaluationRecord", evaluator.evaluate(0))


def _make_recipe(path: str, file: str, rows: int | None, trust_remote_code: bool) -> tuple[Recipe[Any], ConfigSources]:
    """Return the recipe of the run that a folder belongs to, with the run's result as the model and ``file`` as the data.

    The second value has the source of each key of the recipe's config.
    """
    from zerobook.models.result import locate_result

    start = _read_run_start(path)
    recipe_type = recipe_class(str(_find_script(path, start, trust_remote_code)))
    if recipe_type.reference_model is not Recipe.reference_model:
        raise ConfigError(f"{path}: its recipe compares the model with another one, which --file cannot do.")
    fields = recipe_type.config_class.model_fields
    # Leave defaults out: a setting of adapters, for example, is refused if the model has no adapter.
    values = {}
    for key, value in start["config"].items():
        if key in fields.keys() - _UNUSED_KEYS and value != fields[key].default:
            values[key] = value
    changes = {
        "model_name_or_path": locate_result(path, trust_remote_code=trust_remote_code),
        "train_file": file,
        "validation_split_percentage": 0,
        "max_train_samples": rows,
        "mixed_precision": start["plan"]["precision"],
        "trust_remote_code": trust_remote_code,
        "eval_samples": 0,
    }
    values |= {key: value for key, value in changes.items() if key in fields}
    config = recipe_type.config_class(**values)
    problems = config.problems()
    if problems:
        raise ConfigError(problems)
    # No setting counts as set by the user, since those of an adapter come from its folder.
    sources = ConfigSources(dict.fromkeys(fields, "default"))
    sources["mixed_precision"] = "the run"
    return recipe_type(config), sources


# Return the last ``run_start`` event of the run that a folder belongs to.
def _read_run_start(path: str) -> dict[str, Any]:
    folder = Path(path).expanduser().absolute()
    # ``path`` is the run's folder itself, output_dir/model or output_dir/adapter, or output_dir/checkpoints/step-10.
    for run in (folder, *folder.parents[:2]):
        if (run / "runlog").is_dir():
            starts = History.read(run).of("run_start")
            if starts:
                return starts[-1]
            break
    raise ConfigError(f"{path}: --file measures a run's model as the run does, and there is no run. Give an output_dir.")


def _find_script(path: str, start: dict[str, Any], trust_remote_code: bool) -> Path:
    """Return the file of the run's recipe: one of the package, or the user's, which needs ``trust_remote_code``."""
    script = Path(start["argv"][0])
    # Runs of earlier versions did not record their code.
    name = start.get("code", {}).get("file", script.name).removesuffix(".py")
    if name in names("recipes"):
        script = find(name, "recipes")
    if not trust_remote_code and script.resolve().parent != shipped("recipes").resolve():
        # The runlog of somebody else may name any file, and the working folder may have a recipe of a shipped one's name.
        raise ConfigError(f"{path}: its recipe is {script}, whose code would run. Read it, and give --trust_remote_code.")
    return script
