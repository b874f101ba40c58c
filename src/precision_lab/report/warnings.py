"""All warnings that a comparison can carry: one text each, and when it applies.

A text's fields are filled by what its rule returns; a rule that returns nothing leaves the warning out.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from precision_lab.columns import kind_of_step
from precision_lab.report.benchmarks import Benchmark
from precision_lab.report.compare import FIGURES, Comparison, Row, Sample
from precision_lab.report.loss import PAIRS_FOR_A_VERDICT

MEASURED_STEPS = 20  # below this the median of the step times hangs on a few
UNSTEADY = 0.1  # range of an arm's step times over its median
FEW_SITTINGS = 8  # below which the bootstrap over them has few values to take
WAITING = 0.1  # share of the step time
ROUNDING = 0.005  # of the loss, between the arm's precision and float32


@dataclass(frozen=True)
class Rule:
    """What may mislead a reader of a comparison, or of a benchmark.

    `applies` gives the fields of `text`, or None where all is well.
    """

    code: str
    text: str
    applies: Callable[[Any], dict[str, Any] | None]


@cache
def warnings_of(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    """(code, text) of every warning the comparison carries, those of its benchmark among them."""
    own = _given(WARNINGS, comparison)
    return own + (warnings_of_benchmark(comparison.benchmark) if comparison.benchmark else ())


@cache
def warnings_of_benchmark(benchmark: Benchmark) -> tuple[tuple[str, str], ...]:
    """(code, text) of every warning that a benchmark carries by itself."""
    return _given(OF_A_BENCHMARK, benchmark)


def _given(rules: tuple[Rule, ...], one: Any) -> tuple[tuple[str, str], ...]:
    known = [(rule, rule.applies(one)) for rule in rules]
    return tuple((rule.code, rule.text.format(**fields)) for rule, fields in known if fields is not None)


def _arms(rows: Iterable[Row], said: Callable[[Row], str | None]) -> dict[str, Any] | None:
    """`arms`: each row's label and what is said of it; rows of which nothing is said are left out."""
    told = [f"{row.arm} {words}".rstrip() for row in rows if (words := said(row)) is not None]
    return {"arms": ", ".join(told)} if told else None


def _where(figure: str, template: str, beyond: Callable[[Sample], bool]) -> Callable[[Comparison], Any]:
    """The rule of a warning that applies to the arms of which one figure lies beyond a bound."""

    def said(row: Row) -> str | None:
        known = row.figures.get(figure)
        return template.format(known) if known and beyond(known) else None

    return lambda comparison: _arms(comparison.rows, said)


def _in_turn(comparison: Comparison) -> dict[str, Any] | None:
    known = [row for row in comparison.others if "speed_ratio" in row.against]
    in_turn = [row.arm for row in known if row.timing is None]
    if not in_turn:
        return None
    return {"arms": "Arms were" if len(in_turn) == len(known) else f"{', '.join(in_turn)}: these arms were"}


def _benchmark_versions(comparison: Comparison) -> dict[str, Any] | None:
    if not comparison.benchmark:
        return None
    there, here = comparison.benchmark["versions"], comparison.newest.versions
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    told = [f"{key} {there.get(key) or 'unknown'}, the newest run {here.get(key) or 'unknown'}" for key in keys]
    return {"which": "; ".join(told)} if told else None


def _benchmark_not_used(comparison: Comparison) -> dict[str, Any] | None:
    newest = comparison.benchmarks[0] if comparison.benchmarks else None
    return _floor(newest) if newest and newest is not comparison.benchmark else None


def _no_reference(comparison: Comparison) -> dict[str, Any] | None:
    if comparison.reference:
        return None
    others = [row.arm for row in comparison.rows if row.counted]
    other = f", or name another with --reference: {', '.join(others)}" if others else ""
    return {"reference": comparison.reference_name, "other": other}


def _one_seed(comparison: Comparison) -> dict[str, Any] | None:
    return _arms(comparison.rows, lambda row: "" if len(row.counted) == 1 else None)


def _few_pairs(comparison: Comparison) -> dict[str, Any] | None:
    def said(row: Row) -> str | None:
        pairs = row.against["loss_difference"].pairs if "loss_difference" in row.against else 0
        # of one run alone there is a warning already
        return str(pairs) if len(row.counted) > 1 and pairs < PAIRS_FOR_A_VERDICT else None

    few = _arms(comparison.others, said) if comparison.reference else None
    return few and few | {"enough": PAIRS_FOR_A_VERDICT}


def _not_completed(comparison: Comparison) -> dict[str, Any] | None:
    def said(row: Row) -> str | None:
        bad = [f"{n} {status}" for status, n in row.statuses.items() if status != "completed"]
        return f"{' and '.join(bad)} of {row.statuses.total()}" if bad else None

    return _arms(comparison.rows, said)


def _unequal_seeds(comparison: Comparison) -> dict[str, Any] | None:
    seeds = {row.arm: sorted(run.seed for run in row.counted) for row in comparison.rows if row.counted}
    if len({tuple(one) for one in seeds.values()}) < 2:
        return None
    return {"seeds": ", ".join(f"{arm} has {ranges(one)}" for arm, one in seeds.items())}


def ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2 5`; the numbers are sorted."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _unequal_start(comparison: Comparison) -> dict[str, Any] | None:
    if not comparison.reference:
        return None
    partner = {run.seed: run.hashes for run in comparison.reference.counted}

    def said(row: Row) -> str | None:
        unlike = [
            run.seed
            for run in row.counted
            for key in ("initial_weights", "batches")
            if run.seed in partner and run.hashes.get(key) != partner[run.seed].get(key)
        ]
        return f"seed {ranges(sorted(set(unlike)))}" if unlike else None

    return _arms(comparison.others, said)


def _unreadable(comparison: Comparison) -> dict[str, Any] | None:
    def said(row: Row) -> str | None:
        most = max((run.unreadable for run in row.counted), default=0)
        return f"up to {most}" if most else None

    return _arms(comparison.rows, said)


def _evaluation_rounds(comparison: Comparison) -> dict[str, Any] | None:
    def said(row: Row) -> str | None:
        losses = [[run.summary.get(FIGURES[name]) for name in ("val_loss", "val_loss_fp32")] for run in row.counted]
        both = [pair for pair in losses if None not in pair]
        if not both:
            return None
        own, exact = (fmean(side) for side in zip(*both, strict=True))
        return f"{own:.4g}, in float32 {exact:.4g}" if abs(own - exact) > ROUNDING * abs(exact) else None

    return _arms(comparison.rows, said)


def _emulated(comparison: Comparison) -> dict[str, Any] | None:
    support = comparison.newest.support

    def said(row: Row) -> str | None:
        return f"({row.dtype})" if support.get(row.dtype) == "emulated" and not row.emulates else None

    return _arms(comparison.rows, said)


def _emulated_target(comparison: Comparison) -> dict[str, Any] | None:
    return _arms(comparison.rows, lambda row: f"({row.emulates})" if row.emulates else None)


def _several(values: Iterable[str | None]) -> dict[str, Any] | None:
    counts = Counter(value or "unknown" for value in values)
    told = [f"{value} ({n} run{'s' if n > 1 else ''})" for value, n in counts.items()]
    return {"which": ", ".join(told)} if len(told) > 1 else None


def _mixed_versions(comparison: Comparison) -> dict[str, Any] | None:
    kinds = [run.versions for run in comparison.runs]
    keys = sorted({key for kind in kinds for key in kind})
    found = (_several(f"{key} {kind.get(key) or 'unknown'}" for kind in kinds) for key in keys)
    told = [one["which"] for one in found if one]
    return {"which": "; ".join(told)} if told else None


def _mixed_code(comparison: Comparison) -> dict[str, Any] | None:
    def said(git: dict[str, Any]) -> str:
        return f"{str(git.get('sha') or 'unknown')[:8]}{' with uncommitted changes' if git.get('dirty') else ''}"

    return _several(said(run.git) for run in comparison.runs)


def _several_machines(comparison: Comparison) -> dict[str, Any] | None:
    return _several(run.host for run in comparison.runs)


def _superseded(comparison: Comparison) -> dict[str, Any] | None:
    older = [run.folder for row in comparison.rows for run in row.superseded]
    more = f" and {len(older) - 3} more" if len(older) > 3 else ""
    return {"folders": ", ".join(older[:3]) + more} if older else None


WARNINGS = (
    Rule(
        "timed_in_turn",
        "{arms} timed one after the other and not in alternation: on a machine that drifts or is shared, the speed "
        "ratios are a hint and no measurement.",
        _in_turn,
    ),
    Rule(
        "benchmark_not_used",
        "A newer benchmark is not used: in it the reference arm timed against itself left 1 out ({floors}).",
        _benchmark_not_used,
    ),
    Rule("benchmark_versions", "The benchmark was made with other versions: {which}.", _benchmark_versions),
    Rule(
        "no_reference",
        "The reference arm {reference} has no completed run here, so there are no ratios and differences: run "
        "it{other}.",
        _no_reference,
    ),
    Rule("one_seed", "One completed run only, so no spread: {arms}. Chance cannot be told from effect.", _one_seed),
    Rule(
        "few_pairs",
        "So few pairs of seeds decide nothing on the loss: {arms}. Where no difference is detected, the arms are not "
        "shown to be the same; a verdict takes {enough} pairs at least.",
        _few_pairs,
    ),
    Rule(
        "not_completed",
        "Not every run completed: {arms}. Times, memory and losses are of completed runs alone, which flatters the "
        "arm.",
        _not_completed,
    ),
    Rule(
        "unequal_seeds",
        "The arms' seeds differ: {seeds}. Ratios and differences are over shared seeds, the other figures are not.",
        _unequal_seeds,
    ),
    Rule(
        "unequal_start",
        "Runs of one seed began with other weights, or saw other batches, than the reference arm's: {arms}. Their "
        "difference is not the precision's alone.",
        _unequal_start,
    ),
    Rule(
        "unreadable_files",
        "Files of the data could not be read, and were left out or replaced by others: {arms} a run.",
        _unreadable,
    ),
    Rule(
        "skipped_steps",
        "Steps were skipped because the gradient was not finite: {arms}. Those runs had fewer updates.",
        _where("skipped_steps", "{0.mean:.3g} a run", lambda skips: skips.high > 0),
    ),
    Rule(
        "evaluation_rounds",
        "On the same weights the validation loss differs by more than 0.5 % between the arm's precision and float32: "
        "{arms}. That is rounding in evaluation, not damage from training.",
        _evaluation_rounds,
    ),
    Rule(
        "emulated",
        "This machine has no arithmetic units for what these arms compute in, and emulates it: {arms}. That says "
        "nothing of machines that have them.",
        _emulated,
    ),
    Rule(
        "emulated_target",
        "The arithmetic of another device was emulated: {arms}. The loss may be compared; the times and memory of such "
        "runs say nothing about that device, and are left out.",
        _emulated_target,
    ),
    Rule(
        "few_steps",
        "The step time is the median of few measured steps: {arms}.",
        _where("measured_steps", "{0.low:.0f}", lambda steps: steps.low < MEASURED_STEPS),
    ),
    Rule(
        "waiting_for_data",
        "Steps waited for data, which no precision makes faster: {arms} of the time. Try more trainer.workers.",
        _where("data_wait_share", "{0.median:.0%}", lambda share: share.median > WAITING),
    ),
    Rule(
        "unsteady",
        "Step times differ by more than 10 % from run to run: {arms}. The machine was unsteady.",
        _where("step_ms", "{0.low:.3g} to {0.high:.3g} ms", lambda ms: ms.high - ms.low > UNSTEADY * ms.median),
    ),
    Rule("mixed_versions", "The runs were made with different versions: {which}.", _mixed_versions),
    Rule("mixed_code", "The runs were made with different code: {which}.", _mixed_code),
    Rule(
        "several_machines",
        "The runs are of different machines of one kind, which may differ by several per cent: {which}.",
        _several_machines,
    ),
    Rule(
        "superseded",
        "Completed runs that do not count, since a newer one has their arm and seed: {folders}.",
        _superseded,
    ),
)


def _floor(benchmark: Benchmark) -> dict[str, Any] | None:
    told = [f"{kind_of_step(*kind)} {floor}" for kind, floor in benchmark.untrusted.items()]
    return {"floors": ", ".join(told)} if told else None


def _skipped_in_blocks(benchmark: Benchmark) -> dict[str, Any] | None:
    skipped = {arm: one["skipped_steps"] for arm, one in benchmark["arms"].items() if one["skipped_steps"]}
    return {"arms": ", ".join(f"{arm} {steps}" for arm, steps in skipped.items())} if skipped else None


def _unsettled(benchmark: Benchmark) -> dict[str, Any] | None:
    capped, sittings = benchmark["warm_up_capped"], benchmark["sittings"]
    return {"capped": capped, "sittings": sittings} if capped > sittings / 2 else None


def _disturbed(benchmark: Benchmark) -> dict[str, Any] | None:
    told = benchmark.disturbances()
    return {"how": " ".join(told)} if told else None


OF_A_BENCHMARK = (
    Rule(
        "benchmark_floor",
        "No verdict on such steps: the reference arm timed against itself left 1 out ({floors}). Something on this "
        "machine favours one place over another; run the benchmark again.",
        _floor,
    ),
    Rule(
        "benchmark_skipped",
        "Steps were skipped in timed blocks, and a skipped step may be cheaper: {arms}.",
        _skipped_in_blocks,
    ),
    Rule(
        "benchmark_unsettled",
        "In {capped} of {sittings} sittings the step time had not settled when the warm-up ended.",
        _unsettled,
    ),
    Rule(
        "benchmark_few_sittings",
        "Only {sittings} sittings fitted into the time of the benchmark: its intervals are rough.",
        lambda benchmark: {"sittings": benchmark["sittings"]} if benchmark["sittings"] < FEW_SITTINGS else None,
    ),
    Rule("benchmark_disturbed", "While arms were timed: {how}", _disturbed),
)
