"""Tasks of EleutherAI's lm-evaluation-harness by name, or from its YAML files, for a model in one process or spread over ranks.

The harness makes the requests and computes the metrics; the likelihoods are those of `zerobook.evaluation.tasks`.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from torch import nn

from zerobook.errors import ConfigError, DivergenceError
from zerobook.evaluation.held_out import rows_at_once
from zerobook.evaluation.tasks import Scored, likelihoods
from zerobook.utils.reading import read_text
from zerobook.utils.yaml_text import BoundedLoader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from zerobook.strategy import Strategy

LIKELIHOODS = ("loglikelihood", "multiple_choice", "loglikelihood_rolling")
"""Kinds of the harness's tasks that are measured here."""


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
        self.tokenizer, self.batch_size, self.max_length = tokenizer, batch_size, max_length
        self.options = {"limit": limit, "num_fewshot": shots, "apply_chat_template": apply_chat_template}
        with _random_numbers_kept():
            self.names, self.tasks = _load(tasks)

    def __call__(
        self, strategy: Strategy | None, model: nn.Module, step: int = 0, progress: bool = False
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Measure the tasks; all ranks return the same. Collective where there is a strategy.

        Returns:
            (``task/NAME/METRIC`` of each task that was named, without the tables of `zerobook.evaluation.tasks`).

        Raises:
            DivergenceError: the model's likelihoods are not numbers.
        """
        found = self.measure(strategy, model, progress=progress)
        metrics = {f"task/{row['task']}/{row['metric']}": row["value"] for row in found if row["task"] in self.names}
        return metrics, []

    def measure(self, strategy: Strategy | None, model: nn.Module, *, progress: bool = False) -> list[dict[str, Any]]:
        """Return a row for each task and metric, with ``task metric value stderr samples``. Collective with a strategy."""
        from lm_eval.evaluator import simple_evaluate

        training = model.training
        model.eval()
        try:
            seeds: dict[str, Any] = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
            with redirect_stdout(StringIO()), _random_numbers_kept():
                result = simple_evaluate(
                    model=_answering(self, strategy, model, progress), tasks=[*self.tasks], bootstrap_iters=0,
                    log_samples=False, **seeds, **self.options,
                )  # fmt: skip
        finally:
            model.train(training)
        rows = [] if result is None else _rows(dict(result))  # the harness computes metrics on rank 0 of a node alone
        rows = rows if strategy is None else strategy.from_main(rows)
        broken = [row for row in rows if isinstance(row["value"], float) and math.isnan(row["value"])]
        if broken:
            raise DivergenceError(f"{broken[0]['task']}: {broken[0]['metric']} is nan: the model's weights are broken.")
        return rows


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore Python's random state, which the harness sets: a run with an evaluation has to train as one without."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _load(tasks: Sequence[str]) -> tuple[list[str], list[Any]]:
    """Return the tasks' names, and the harness's objects for them."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    files = [Path(task).expanduser() for task in tasks if is_yaml(task)]
    # its own tasks are thousands of files, which take seconds to read
    everything = len(files) < len(tasks)
    manager = TaskManager(include_path=sorted({str(file.parent) for file in files}) or None, include_defaults=everything)
    names, objects = [], []
    for task in tasks:
        name = _named_in(Path(task).expanduser()) if is_yaml(task) else task
        if name not in manager.all_tasks:
            import difflib

            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            raise ConfigError(
                f"{task}: lm-evaluation-harness has no such task.{' Did you mean ' + ', '.join(near) + '?' if near else ''}"
            )
        try:
            loaded = manager.load([name])
        except Exception as error:  # whatever a dataset's download raises
            raise ConfigError(f"{task}: the task's data cannot be loaded: {str(error).splitlines()[0]}") from error
        for one in loaded["tasks"].values():
            if one.OUTPUT_TYPE not in LIKELIHOODS:
                raise ConfigError(
                    f"{task}: {one.config.task} generates text, and only likelihoods are measured here. Export the model, and "
                    "run: lm_eval --model hf --model_args pretrained=FOLDER --tasks ..."
                )
        names += [name] if name in {**loaded["groups"], **loaded["tasks"]} else [*loaded["tasks"]]  # else a tag
        objects += [loaded["groups"][name]] if name in loaded["groups"] else [*loaded["tasks"].values()]
    return names, objects


def is_yaml(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _named_in(file: Path) -> str:
    class Loader(BoundedLoader):
        """Ignores the harness's own tags, which name Python functions."""

    Loader.add_multi_constructor("!", lambda *_: None)
    try:
        name = yaml.load(read_text(file), Loader=Loader)["task"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: this is not a task file of lm-evaluation-harness: {error!r}.") from None
    return str(name)


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task, values in {**result["results"], **result.get("groups", {})}.items():
        for key, value in values.items():
            metric, _, kept = key.partition(",")
            if not kept or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kept}")
            rows.append({
                "task": task, "metric": metric if kept == "none" else f"{metric} ({kept})", "value": float(value),
                "stderr": error if isinstance(error, int | float) else None,
                "samples": values.get("sample_len") or result.get("n-samples", {}).get(task, {}).get("effective"),
            })  # fmt: skip
    return rows


def _answering(scorer: HarnessScorer, strategy: Strategy | None, model: nn.Module, progress: bool) -> Any:
    """Return the model as the harness calls it. Every rank gets all requests, and all answers."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = scorer.tokenizer
    spread: dict[str, Any] = {"device": next(model.parameters()).device}
    if strategy is not None:
        spread = {"device": strategy.device, "rank": strategy.rank, "world_size": strategy.world_size,
                  "reduce": strategy.sum_over_ranks}  # fmt: skip

    class Answering(TemplateLM):  # type: ignore[misc, unused-ignore]  # the harness may not be installed
        tokenizer_name = str(tokenizer.name_or_path)

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eos_token_id

        @property
        def prefix_token_id(self) -> int:
            return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return tokenizer(string, verbose=False, **special)["input_ids"]

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return str(tokenizer.apply_chat_template(chat_history, tokenize=False, add_generation_prompt=add_generation_prompt))

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
        ) -> list[tuple[float, bool]]:
            sequences = []
            for _, context, continuation in requests:
                ids = [*context, *continuation][-(scorer.max_length or 0) :]
                sequences.append(Scored(ids, max(1, len(ids) - len(continuation))))
            rows = rows_at_once(scorer.batch_size, max(len(row.ids) for row in sequences), len(tokenizer))
            found = likelihoods(
                model, sequences, pad_token_id=tokenizer.pad_token_id or 0, batch_size=rows, progress=progress, **spread
            )
            return [(value, bool(greedy)) for value, greedy in found]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            windows, owners = [], []
            for number, request in enumerate(requests):
                ids = self.tok_encode(request.args[0])
                longest = scorer.max_length or len(ids) + 1
                cut = get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=longest - 1, context_len=1)
                parts = [make_disjoint_window(window) for window in cut]
                windows += [(None, *part) for part in parts]
                owners += [number] * len(parts)
            totals = [0.0] * len(requests)
            for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
                totals[owner] += value
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError("refused when the task is loaded")

    return Answering()
