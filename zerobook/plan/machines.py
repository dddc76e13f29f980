"""Comparison of machines that a run could be trained on: the fastest run that fits each of them, its hours and its cost."""

import math
from collections.abc import Sequence
from dataclasses import replace

from zerobook.errors import ConfigError
from zerobook.plan.advise import Advice, Candidate, Request, advise
from zerobook.plan.hardware import Cluster
from zerobook.plan.table import WIDTH, Cells, fits_text, print_table, show_lines
from zerobook.plan.whole_run import TOKENS, WholeRun
from zerobook.utils.terminal import console
from zerobook.utils.units import gb


def compare_machines(request: Request, clusters: Sequence[Cluster]) -> list[tuple[Cluster, Advice]]:
    """Return each machine with the best run of the request's method on it, the cheapest first. Machines of unknown cost follow
    by time, and machines on which nothing fits come last.

    Raises:
        ConfigError: the config names a number of steps, which train on other amounts of tokens on other machines.
    """
    if request.recipe.config.max_train_steps is not None and request.tokens is None:
        raise ConfigError(
            "max_train_steps: more GPUs train on more tokens in as many steps, so machines cannot be compared. Give --tokens."
        )
    machines = []
    for cluster in clusters:
        advice = advise(request.on(cluster), cluster, [request.method])
        # Machines are compared by `TOKENS` tokens if the length of the run is not known.
        if advice.best is not None and advice.run is None:
            advice = replace(advice, run=replace(request, tokens=TOKENS).whole_run(advice.best, cluster))
        machines.append((cluster, advice))

    def sort_key(machine: tuple[Cluster, Advice]) -> tuple[float, float]:
        run = machine[1].run
        if run is None:
            return math.inf, math.inf
        return math.inf if run.cost is None else run.cost, run.seconds

    return sorted(machines, key=sort_key)


def show_machines(machines: Sequence[tuple[Cluster, Advice]]) -> None:
    """Print the machines on which a run fits, the cheapest and the fastest of them, and what the others lack."""
    rows: list[Cells] = []
    runs: list[tuple[str, WholeRun]] = []
    misfits: list[tuple[str, str]] = []
    for cluster, advice in machines:
        name = f"{cluster.nodes} x {cluster.gpus} {cluster.device.name}"
        if advice.best is None or advice.run is None:
            misfits += [("does not fit", f"{name}: {shortfall}") for shortfall in advice.shortfalls.values()]
            continue
        rows.append({"nodes x GPUs": name} | _cells(advice.best, advice.run))
        # A machine on which the run may run out of memory is not recommended.
        if not advice.best.row.tight:
            runs.append((name, advice.run))
    if rows:
        print_table(
            console(WIDTH, markup=True), "machines on which it fits", rows, ("nodes x GPUs", "fits"), [False] * len(rows)
        )
    lines = []
    if runs:
        fastest, fastest_run = min(runs, key=lambda run: run[1].seconds)
        # The machines are sorted by their cost, if it is known.
        cheapest, cheapest_run = runs[0]
        if cheapest_run.cost is not None:
            lines.append(("cheapest", f"{cheapest}: {cheapest_run.describe()}"))
        lines.append(("fastest", f"{fastest}: {fastest_run.describe()}"))
    show_lines(lines + misfits)


def _cells(best: Candidate, run: WholeRun) -> Cells:
    assert best.row.memory is not None
    shortest, longest = run.seconds_range
    cells = {"fits": fits_text(best.row)}
    if run.cost is not None and run.cost_range is not None:
        cells["cost, $"] = f"{run.cost:,.2f}"
        cells["cost,\nrange"] = "{:,.2f} - {:,.2f}".format(*run.cost_range)
    return cells | {
        "hours": f"{run.seconds / 3600:,.2f}",
        "hours,\nrange": f"{shortest / 3600:,.2f} - {longest / 3600:,.2f}",
        "tokens/s": f"{best.row.tokens_per_second:,.0f}",
        "strategy": best.row.file,
        "micro-\nbatch": str(best.config.per_device_train_batch_size),
        "recomputed": best.config.activation_checkpointing,
        "card, GB": gb(best.row.memory.total),
    }
