"""Tasks of EleutherAI's lm-evaluation-harness by name, or from its YAML files, for a model in one process or spread over ranks.

The harness makes the requests and computes the metrics; the likelihoods are those of `zerobook.evaluation.tasks`.
"""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from torch import nn

from zerobook.data.templates import render_prompt
from zerobook.errors import ConfigError
from zerobook.evaluation.held_out import rows_at_once
from zerobook.evaluation.tasks import Scored, likelihoods
from zerobook.utils.nearest import nearest
from zerobook.utils.reading import read_text
from zerobook.utils.yaml_text import BoundedLoader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerobook.strategy import Strategy

# Kinds of the harness's tasks that are measured here.
LIKELIHOODS = ("loglikelihood", "multiple_choice", "loglikelihood_rolling")


@contextmanager
def _harness_seed() -> Iterator[None]:
    """Return a context in which Python's random numbers have the harness's seed, by which some tasks shuffle their choices.

    All ranks need the same order. Afterwards the state is restored, so that an evaluation does not change the training.
    """
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)


class HarnessScorer:
    """Measures tasks of the harness on a causal model.

    Args:
        tasks: names of tasks, groups or tags, or YAML files of tasks.
        batch_size: choices in a forward, per process.
        max_length: tokens that the model takes; longer requests lose their beginning. None: no limit.
        apply_chat_template: each prompt becomes a user's turn in the tokenizer's chat template.
        limit: questions of each task; None means all.
        shots: worked examples before each question; None means the task's own number.

    Raises:
        ConfigError: the harness is not installed, it has no such task, or the task generates text.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        *,
        max_length: int | None = None,
        apply_chat_template: bool = False,
        limit: int | None = None,
        shots: int | None = None,
    ):
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(
                f"{tasks[0]}: a task of lm-evaluation-harness, which is not installed. Run: pip install 'zerobook[eval]'."
            )
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        # The harness needs a number. No text has as many tokens as this one.
        self.max_length = max_length or sys.maxsize
        self.options = {"limit": limit, "num_fewshot": shots, "apply_chat_template": apply_chat_template}
        self.manager, self.names, self.tasks = load_tasks(tasks)
        # Number of requests that lost their beginning.
        self.truncated_count = 0

    def __call__(
        self, strategy: Strategy | None, model: nn.Module, step: int = 0, progress: bool = False
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Measure the tasks; all ranks return the same. Collective if there is a strategy.

        Returns:
            (metrics ``task/NAME/METRIC`` of the tasks that the user named; an empty table, since the harness has no subjects).

        Raises:
            DivergenceError: the model's likelihoods are not numbers.
        """
        rows = self.measure(strategy, model, progress=progress)
        # A group also reports its subtasks. The user did not name them, so they are not metrics of the run.
        metrics = {f"task/{row['task']}/{row['metric']}": row["value"] for row in rows if row["task"] in self.names}
        return metrics, []

    def measure(
        self, strategy: Strategy | None, model: nn.Module, *, progress: bool = False, resamples: int = 0
    ) -> list[dict[str, Any]]:
        """Return a row for each task and metric, with ``task metric value stderr samples``. Collective with a strategy.

        Args:
            model: in evaluation mode.
            resamples: number of resamples from which the harness, in processes of its own, estimates the standard error of a
                metric that is not a mean. With 0, every ``stderr`` is None, also that of a mean.
        """
        from lm_eval.evaluator import simple_evaluate

        # The harness prints to stdout, which is for results alone.
        with redirect_stdout(StringIO()), _harness_seed():
            result = simple_evaluate(
                model=_harness_model(self, strategy, model, progress),
                tasks=[*self.tasks],
                # Without a manager, the harness would read its thousands of task files at each evaluation.
                task_manager=self.manager,
                bootstrap_iters=resamples,
                log_samples=False,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
                **self.options,
            )
        # The harness returns a result only if LOCAL_RANK is 0. All ranks get the rows of rank 0.
        rows = [] if result is None else _result_rows(dict(result))
        if strategy is not None:
            rows = strategy.from_main(rows)
        return rows


@_harness_seed()
def load_tasks(tasks: Sequence[str]) -> tuple[Any, list[str], list[Any]]:
    """Load tasks of the harness. Their data may be downloaded.

    Returns:
        (the harness's `TaskManager`, the names of the tasks and groups, the harness's objects for them in the same order).

    Raises:
        ConfigError: the harness has no such task, its data cannot be loaded, the task generates text, or two tasks have the
            same name.
    """
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # The tasks that come with the harness are thousands of files, which take seconds to read. Task files do not need them.
    manager = TaskManager(include_defaults=not all(map(is_yaml, tasks)))
    names: list[str] = []
    objects: list[Any] = []
    for task in tasks:
        name = _task_name(Path(task).expanduser()) if is_yaml(task) else task
        if not is_yaml(task) and name not in manager.all_tasks:
            raise ConfigError(f"{task}: lm-evaluation-harness has no such task.{nearest(name, manager.all_tasks, most=3)}")
        try:
            # A file is loaded by its path: another file of its folder may define a task of the same name.
            loaded = manager.load([task])
        # Datasets and their downloads raise errors of any type.
        except Exception as error:
            raise ConfigError(f"{task}: the task's data cannot be loaded: {str(error).splitlines()[0]}") from error
        for loaded_task in loaded["tasks"].values():
            if loaded_task.OUTPUT_TYPE not in LIKELIHOODS:
                raise ConfigError(
                    f"{task}: {loaded_task.config.task} generates text, and only likelihoods are measured here. Export the "
                    "model, and run: lm_eval --model hf --model_args pretrained=FOLDER --tasks ..."
                )
        # A group has one result, which the harness computes from those of its subtasks.
        if name in loaded["groups"]:
            names.append(name)
            objects.append(loaded["groups"][name])
        else:
            # A task is loaded alone. The tasks of a tag have no common result.
            names += loaded["tasks"]
            objects += loaded["tasks"].values()
    repeated_names = sorted({name for name in names if names.count(name) > 1})
    # Of several tasks with the same name, the harness would measure only the last.
    if repeated_names:
        raise ConfigError(f"{', '.join(tasks)}: two tasks are called {repeated_names[0]}. Rename one, or leave it out.")
    return manager, names, objects


def is_yaml(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


# Return the name of the task that a YAML file of the harness defines.
def _task_name(file: Path) -> str:
    class Loader(BoundedLoader):
        """Ignores the harness's own tags, which name Python functions."""

    Loader.add_multi_constructor("!", lambda *_: None)
    try:
        name = yaml.load(read_text(file), Loader=Loader)["task"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        # KeyError: the mapping has no key ``task``. TypeError: the file holds no mapping.
        raise ConfigError(f"{file}: this is not a task file of lm-evaluation-harness: {error!r}.") from None
    if isinstance(name, list):
        raise ConfigError(f"{file}: this is the file of a group. Give the files of its tasks, or their names.")
    return str(name)


def _result_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each task or group and each of its metrics in the harness's result."""
    rows = []
    for task, values in {**result["results"], **result.get("groups", {})}.items():
        # The number of samples is among the values, or else in an entry of its own. None if the harness gives neither.
        samples = values.get("sample_len") or result.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in values.items():
            # The key of a metric has the form ``acc,none``: its name, and the filter that was applied to the answers.
            metric, comma, answer_filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{answer_filter}")
            # If the harness computes no standard error, the value is the text N/A.
            if not isinstance(error, int | float):
                error = None
            if answer_filter != "none":
                metric = f"{metric} ({answer_filter})"
            rows.append({"task": task, "metric": metric, "value": float(value), "stderr": error, "samples": samples})
    return rows


class _HarnessMethods:
    """The methods of a model that the harness calls.

    The harness runs on every rank as if it were alone: each rank passes all requests, and the ranks compute them together.
    """

    def __init__(self, scorer: HarnessScorer, strategy: Strategy | None, model: nn.Module, progress: bool):
        super().__init__()
        self.scorer = scorer
        self.strategy = strategy
        self.model = model
        self.progress = progress
        self.tokenizer = scorer.tokenizer

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that is put before a text without a context, so that its first token has a likelihood too."""
        return self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        # Chat templates write the first token of a text themselves. The tokenizer must not add a second one.
        first_token = self.tokenizer.bos_token or self.tokenizer.eos_token
        if first_token and string.startswith(first_token):
            add_special_tokens = False
        return self.tokenizer(string, verbose=False, add_special_tokens=add_special_tokens)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_prompt(self.tokenizer, chat_history, opens_turn=add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood of the continuation, whether greedy decoding generates it) for each request.

        Args:
            requests: (text, token ids of the context, token ids of the continuation) each.
        """
        sequences = []
        for _, context, continuation in requests:
            ids = [*context, *continuation]
            # The last token is only predicted, so the model's input is one token shorter.
            if len(ids) > self.scorer.max_length + 1:
                self.scorer.truncated_count += 1
                ids = ids[-(self.scorer.max_length + 1) :]
            # The continuation counts from its first token on, but not from the first of all: no token precedes that one, so it
            # has no likelihood.
            sequences.append(Scored(ids, max(1, len(ids) - len(continuation))))
        longest = max(len(sequence.ids) for sequence in sequences)
        scores = likelihoods(
            self.strategy,
            self.model,
            sequences,
            pad_token_id=self.tokenizer.pad_token_id or 0,
            batch_size=rows_at_once(self.scorer.batch_size, longest, len(self.tokenizer)),
            progress=self.progress,
        )
        return [(score.log_probability, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, which may be longer than the model's limit."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        # The windows of all texts are scored in one call, so that batches are full.
        windows: list[tuple[None, list[int], list[int]]] = []
        # For each window, the index of its text in ``requests``.
        request_of_window: list[int] = []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            # A window has ``max_length`` tokens of input, and predicts one more. Each token counts in exactly one window.
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.scorer.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                request_of_window.append(index)
        totals = [0.0] * len(requests)
        for index, (log_probability, _) in zip(request_of_window, self._loglikelihood_tokens(windows), strict=True):
            totals[index] += log_probability
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("refused when the task is loaded")


def _harness_model(scorer: HarnessScorer, strategy: Strategy | None, model: nn.Module, progress: bool) -> Any:
    """Return ``model`` as an object of the harness's model class."""
    from lm_eval.api.model import TemplateLM

    # The class is made here, since the harness may not be installed when this module is imported.
    model_class = type("HarnessModel", (_HarnessMethods, TemplateLM), {})
    return model_class(scorer, strategy, model, progress)
