"""The verdict on one kind of hardware in words: which precision to train with, why, and what to run next.

An arm is recommended if no run of it diverged or ran out of memory, its loss is equivalent or better, and it is
faster, or as fast and saves a tenth of the peak memory. An emulated arm never is. Speed is judged by arms that were
timed in alternation, and by nothing else. What is not shown is said to be missing, with the command that shows it.
"""

import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from precision_lab.arms import arm_text, group_of, key_of
from precision_lab.report.compare import Comparison, Row
from precision_lab.report.loss import MORE_SEEDS, PAIRS_FOR_A_VERDICT, Loss, losses_of
from precision_lab.report.reading import SHORT_STEP_MS, difference, horizon, joined, loss_words, machine, ratio

SAVES = 0.9  # share of the reference arm's peak memory from which on less is worth a change
BUDGET_S = 60  # of a first benchmark
_LONGEST_S = 3600
_BY_UNITS = {"tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}  # dtype -> the arm that computes in it
_OWN = ("precision", "seed", "check", "rerun")  # of one run or one call, and not of the experiment
_ENDS = {"diverged": "diverged", "out_of_memory": "ran out of memory"}


@dataclass(frozen=True)
class Verdict:
    """For a reader who has not seen the tables."""

    headline: str
    sentences: list[str]
    command: str  # to run next


@dataclass(frozen=True)
class _Judged:
    """One arm beside the reference arm."""

    row: Row
    loss: Loss | None
    state: str  # use | no | and what is missing: untimed | unresolved | seeds | runs
    why: str  # what the arm does

    @property
    def sentence(self) -> str:
        return f"{self.row.arm} {self.why}."


def verdict_of(comparison: Comparison) -> Verdict:
    """What to train with on this comparison's hardware. Every comparison has a verdict of its own."""
    candidates = [row for row in comparison.others if row.arm != comparison.reference_name and not row.perturbed]
    if not comparison.reference:
        return _without_reference(comparison, candidates)
    if not candidates:
        return _alone(comparison)
    judged = [_judge(comparison, row) for row in candidates]
    good = sorted((one for one in judged if one.state == "use"), key=_worth)
    if good:
        return _use(comparison, good[0], judged)
    if all(one.state == "no" for one in judged):
        return _stay(comparison, judged)
    return _open(comparison, judged)


# --- one arm -------------------------------------------------------------------------------------------------------


def _judge(comparison: Comparison, row: Row) -> _Judged:
    loss = losses_of(comparison).get(row.arm)
    word = row.timing.felt.word if row.timing else "untimed"
    gains, about_loss = _gains(comparison, row), _about_loss(comparison, loss)
    ends = [
        f"{said} in {row.statuses[end]} of {row.statuses.total()} runs"
        for end, said in _ENDS.items()
        if row.statuses[end]
    ]
    if ends:
        return _Judged(row, loss, "no", joined(ends))
    if word == "slower":
        return _Judged(row, loss, "no", gains)
    if row.emulates:
        return _Judged(row, loss, "no", f"is emulated, so nothing is known of its speed and memory; {about_loss}")
    if not row.counted:
        told = ", ".join(f"{n} {status}" for status, n in row.statuses.items())
        return _Judged(row, loss, "runs", f"has no completed run here ({told})")
    if loss and loss.word == "worse":
        return _Judged(row, loss, "no", f"{gains}{', but' if word == 'faster' else ';'} {about_loss}")
    if word == "no practical difference" and not _saves(row):
        return _Judged(row, loss, "no", gains)
    missing = {"untimed": "untimed", "not resolved": "unresolved"}.get(word)
    if not missing and loss and loss.word != "undecided":
        return _Judged(row, loss, "use", gains)
    return _Judged(row, loss, missing or "seeds", f"{gains}; {about_loss}")


def _worth(one: _Judged) -> tuple[float, float]:
    """The fastest first, then the one that takes the least memory."""
    peak = one.row.against.get("peak_ratio")
    return -one.row.timing.felt.value, peak.mean if peak else 1.0


def _saves(row: Row) -> bool:
    return "peak_ratio" in row.against and row.against["peak_ratio"].mean <= SAVES


def _gains(comparison: Comparison, row: Row) -> str:
    speed, since, memory = _speed(comparison, row), _slow_since(comparison, row), _memory(row)
    return f"{speed}{since}{f', and {memory}' if memory and since else f' and {memory}' if memory else ''}"


def _speed(comparison: Comparison, row: Row) -> str:
    if not row.timing:
        return f"was not timed in alternation with {comparison.reference_name}"
    known = row.timing.felt
    value = f"{ratio(known.value)} [{ratio(known.low)}, {ratio(known.high)}]"
    alone, share = row.timing.ratio, row.timing.data_share
    if alone.word == "faster" != known.word and share:
        value += f", where computing alone is {ratio(alone.value)} times as fast and data takes {share:.0%} of a step"
    return {
        "faster": f"is faster here ({value} times the speed of {comparison.reference_name})",
        "slower": f"is slower here ({value} times the speed of {comparison.reference_name})",
        "no practical difference": f"makes no practical difference to speed ({value})",
        "not resolved": f"has a speed that is not resolved ({value} in {known.pairs} pairs, where about "
        f"{known.pairs_needed} would tell)",
    }[known.word]


def _slow_since(comparison: Comparison, row: Row) -> str:
    if not row.timing or row.timing.felt.word != "slower" or row.dtype == comparison.reference.dtype:
        return ""
    if comparison.newest.support.get(row.dtype) == "emulated":
        return f", since this machine has no {row.dtype} units and emulates them"
    step = comparison.reference.figures.get("step_ms")
    if step and step.median < SHORT_STEP_MS:
        return f", perhaps since in a step of {step.median:.2g} ms casts and dispatch cost more than the units save"
    return ""


def _memory(row: Row) -> str:
    known = row.against.get("peak_ratio")
    if not known:
        return ""
    share = f"{100 * abs(1 - known.mean):.0f} %"
    if _saves(row):
        return f"takes {share} less peak memory"
    if known.mean > 2 - SAVES:
        return f"takes {share} more peak memory"
    phases = {run.memory["phase"] for run in row.counted if run.memory}
    since = ", since the peak sits in the optimizer's step" if phases == {"optimizer"} else ""
    return f"saves {'no' if known.mean > 0.99 else 'hardly any'} peak memory{since}"


def _about_loss(comparison: Comparison, loss: Loss | None) -> str:
    if not loss:
        return f"no seed has a completed run of it and of {comparison.reference_name}"
    if loss.word in ("worse", "better"):
        return f"its validation loss is {loss.word} by {difference(abs(loss.mean)).lstrip('+')}"
    return f"its validation loss is {loss_words(loss)}"


# --- the verdicts --------------------------------------------------------------------------------------------------


def _use(comparison: Comparison, best: _Judged, judged: list[_Judged]) -> Verdict:
    on = f"On this {machine(comparison.fingerprint)} {best.sentence}"
    loss = f"After {horizon(comparison.config)} {_about_loss(comparison, best.loss)}"
    sentences = [on, f"{loss}; what a much longer run does is not shown.", *_rest(judged, [best])]
    return Verdict(f"Use {best.row.arm} here.", sentences, _train(comparison, best.row))


def _stay(comparison: Comparison, judged: list[_Judged]) -> Verdict:
    base = comparison.reference
    sentences = [one.sentence for one in judged[:2]] + _rest(judged, judged[:2])
    since = _slow_since(comparison, judged[0].row)  # said once: of a short step it is the same for all
    if since:
        sentences[1:] = [sentence.replace(f"{since},", "").replace(since, "") for sentence in sentences[1:]]
    sentences[0] = f"On this {machine(comparison.fingerprint)} {sentences[0]}"
    hurt = [one for one in judged if one.row.statuses["diverged"] or (one.loss and one.loss.word == "worse")]
    if hurt:
        arms = joined([one.row.arm for one in hurt])
        sentences.append(f"Where the range or rounding of {arms} hurts can be found: see docs/mixed-precision.md.")
    headline, bf16 = f"Stay with {base.arm} here.", _BY_UNITS["bfloat16"]
    untried = all(one.row.dtype != "bfloat16" for one in judged)
    if (
        untried
        and any(one.row.statuses["diverged"] for one in judged)
        and comparison.newest.support.get("bfloat16") == "native"
    ):
        sentences.append(f"Try {bf16}, which has the range of float32 and which this machine has units for.")
        seeds = _seeds(comparison, [], PAIRS_FOR_A_VERDICT)
        return Verdict(headline, sentences, _sweep(comparison, [base], seeds, [bf16]))
    return Verdict(headline, sentences, _train(comparison, base))


def _open(comparison: Comparison, judged: list[_Judged]) -> Verdict:
    waiting = [one for one in judged if one.state != "no"]
    waiting.sort(key=lambda one: ("seeds", "unresolved", "untimed", "runs").index(one.state))
    promising = [one.row.arm for one in waiting if one.state == "seeds"]
    said = f": {joined(promising)} {'is' if len(promising) == 1 else 'are'} promising" if promising else ""
    sentences = [one.sentence for one in waiting[:2]] + _rest(judged, waiting[:2])
    untimed = [one.row for one in waiting if one.state in ("unresolved", "untimed")]
    texts = _texts(comparison)
    named = [row for row in untimed if {row.arm, comparison.reference.arm} <= texts.keys()]
    unnamed = [row.arm for row in untimed if row not in named]
    if unnamed:
        why = "it, or its name means" if len(unnamed) == 1 else "them, or their names mean"
        sentences.append(f"The command leaves {joined(unnamed)} out: arms= cannot name {why} other settings by now.")
    trained = [one for one in waiting if one.row not in untimed]
    if named:
        command = _benchmark(comparison, named, texts)
    elif trained:
        rows = [comparison.reference, *(one.row for one in trained)]
        more = [_more(one.loss) for one in trained]
        command = _sweep(comparison, rows, _seeds(comparison, rows, max(more)))
        if max(more) > MORE_SEEDS:
            sentences.append("So many seeds cost more than they tell; a longer run may settle it.")
    else:
        command = _train(comparison, comparison.reference)
    return Verdict(f"No verdict yet on this hardware{said}.", sentences, command)


def _rest(judged: list[_Judged], told: list[_Judged]) -> list[str]:
    """One sentence on the arms of which nothing was said yet."""
    parts = [f"{one.row.arm} {one.why}" for one in judged if one not in told]
    return [f"Of the others, {'; '.join(parts)}."] if parts else []


def _alone(comparison: Comparison) -> Verdict:
    base, support = comparison.reference, comparison.newest.support
    arms = [arm for dtype, arm in _BY_UNITS.items() if support.get(dtype) == "native" and arm != base.arm]
    others = arms or [arm for arm in _BY_UNITS.values() if arm == "bf16" != base.arm] or ["fp32"]
    why = "which this machine has units for" if arms else "though this machine has no units for it"
    sentences = [
        f"{base.arm} alone was trained here, so there is nothing to compare it with.",
        f"Train {joined(others)} beside it, {why if others != ['fp32'] else 'the usual reference'}.",
    ]
    seeds = _seeds(comparison, [], PAIRS_FOR_A_VERDICT)
    return Verdict(_NONE, sentences, _sweep(comparison, [base], seeds, others))


_NONE = "No verdict yet on this hardware."


def _without_reference(comparison: Comparison, candidates: list[Row]) -> Verdict:
    name = comparison.reference_name
    tried = next((row for row in comparison.rows if row.arm == name), None)
    sound = [row for row in candidates if row.counted and not any(row.statuses[end] for end in _ENDS)]
    fits = [row for row in sound if not row.emulates]
    if tried and tried.statuses["out_of_memory"] and fits:
        best = min(fits, key=lambda row: row.figures["step_ms"].median if "step_ms" in row.figures else math.inf)
        runs = f"{len(best.counted)} run{'s' if len(best.counted) > 1 else ''}"
        sentences = [
            f"{name} ran out of memory on this {machine(comparison.fingerprint)}, and {best.arm} completed {runs}.",
            f"There is no loss of {name} to compare with, so whether {best.arm} trains as well is not shown here; a "
            "smaller batch would let both run.",
        ]
        return Verdict(f"Use {best.arm} here, since {name} does not fit.", sentences, _train(comparison, best))
    sentences = [f"{name}, the reference arm, has no completed run here, so nothing can be compared with it."]
    if tried and (ends := [said for end, said in _ENDS.items() if tried.statuses[end]]):
        sentences = [
            f"{name}, the reference arm, {joined(ends)} itself, so the precision is not what is wrong: try a "
            "smaller learning rate or batch."
        ]
    seeds = sorted({run.seed for row in candidates for run in row.counted}) or [0]
    if fits := _batch_that_fits(tried):
        told = f"{name}, the reference arm, ran out of memory. With a batch that it fits all arms can be compared."
        return Verdict(_NONE, [told], _sweep(comparison, comparison.rows, seeds, changes=fits))
    return Verdict(_NONE, sentences, _sweep(comparison, [tried] if tried else [], seeds, [] if tried else [name]))


def _batch_that_fits(row: Row | None) -> list[str]:
    """The words by which the runs of an arm that ran out of memory say that a step fits; none if they don't."""
    lost = [run for run in row.runs if run.status == "out_of_memory"] if row else []
    return re.findall(r"trainer\.(?:batch_size|accumulation)=\d+", lost[-1].reason) if lost else []


# --- the command ---------------------------------------------------------------------------------------------------


def _more(loss: Loss | None) -> int:
    """How many more seeds decide it, or one more than the largest number that is told."""
    if not loss:
        return PAIRS_FOR_A_VERDICT
    return MORE_SEEDS + 1 if loss.more_seeds is None else loss.more_seeds


def _seeds(comparison: Comparison, rows: list[Row], more: int) -> list[int]:
    """The next seeds that not all of these arms have completed; at most MORE_SEEDS."""
    done = [{run.seed for run in row.counted} for row in rows]
    paired = set.intersection(*done) if done else set()
    fresh = (seed for seed in range(len(paired) + MORE_SEEDS + 1) if seed not in paired)
    return [seed for seed, _ in zip(fresh, range(min(more, MORE_SEEDS)), strict=False)]


def experiment_overrides(comparison: Comparison) -> list[str]:
    """The overrides that make the experiment, of the newest run."""
    return [word for word in comparison.newest.overrides if group_of(word) not in _OWN]


def _changes(row: Row) -> list[str]:
    """The overrides that change an arm, beside its name."""
    return [word for word in row.runs[-1].overrides if key_of(word).startswith("precision.")]


def _texts(comparison: Comparison) -> dict[str, str]:
    """Label -> what the benchmark takes for that arm; without those that no text names.

    Of arms with one text, by a YAML changed between, it names the newest.
    """
    made = {}
    for row in sorted(comparison.rows, key=lambda row: row.runs[-1].finished):
        text = arm_text(row.settings["name"], _changes(row))
        made[text] = row.arm
    return {arm: text for text, arm in made.items() if text}


def _train(comparison: Comparison, row: Row) -> str:
    return command_line(
        "train.py", [*experiment_overrides(comparison), f"precision={row.settings['name']}", *_changes(row)]
    )


def _sweep(
    comparison: Comparison,
    rows: list[Row],
    seeds: list[int],
    names: Iterable[str] = (),
    changes: Iterable[str] = (),
) -> str:
    """One sweep of the plain arms and one of each that has changes, joined by &&; `changes` are of the experiment."""
    consecutive = len(seeds) > 10 and seeds == list(range(seeds[0], seeds[-1] + 1))
    chosen = f"range({seeds[0]},{seeds[-1] + 1})" if consecutive else ",".join(map(str, seeds))
    plain = [row.settings["name"] for row in rows if not _changes(row)] + list(names)
    arms = [[f"precision={','.join(dict.fromkeys(plain))}"]] if plain else []
    arms += [[f"precision={row.settings['name']}", *_changes(row)] for row in rows if _changes(row)]
    again = ["rerun=failed"] if any(row.statuses["failed"] for row in rows) else []  # else they count as finished
    changed = {key_of(word) for word in changes}
    experiment = [word for word in experiment_overrides(comparison) if key_of(word) not in changed] + list(changes)
    lines = [command_line("train.py", ["-m", *experiment, *words, f"seed={chosen}", *again]) for words in arms]
    return " && ".join(dict.fromkeys(lines))


def _benchmark(comparison: Comparison, rows: list[Row], texts: dict[str, str]) -> str:
    """Long enough for the arms that are not resolved yet."""
    ratios = [row.timing.felt for row in rows if row.timing]
    longer = max((one.pairs_needed / one.pairs for one in ratios), default=1.0)
    last = comparison.benchmark["settings"]["budget_s"] if ratios and comparison.benchmark else BUDGET_S
    budget = min(_LONGEST_S, math.ceil(longer) * math.ceil(last))
    name = comparison.reference.runs[-1].arm  # without what tells it from others of its name
    arms = f"arms=[{','.join(texts[row.arm] for row in [comparison.reference, *rows])}]"
    own = [] if name == "fp32" else [f"reference={name}"]
    return command_line("scripts/benchmark.py", [*experiment_overrides(comparison), arms, *own, f"budget_s={budget}"])


def command_line(script: str, words: list[str]) -> str:
    """The words as one types them."""
    return shlex.join(["python", script, *words])
