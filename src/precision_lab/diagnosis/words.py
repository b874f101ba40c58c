"""What a diagnosis says, in sentences, tables and Markdown. Reads the dictionary that `diagnose` returns; no torch."""

import io
import math
import shlex
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

_ROWS = 8  # operations shown by their own error
_LITTLE_DB = 10  # below that a gradient says next to nothing
_FLUSHED = "gradients that are too small for float16 are flushed to zero"
_OF_SETTINGS = {
    "precision.init_scale": f"{_FLUSHED}, and a larger loss scale saves them",
    "precision.grad_scaling": f"{_FLUSHED}, and a loss scale saves them",
    "precision.min_scale": "gradients overflow in float16 under every loss scale that the arm allows",
    "precision.param_dtype": "weights in low precision do not take up changes that are small beside them",
}


def answer(told: dict[str, Any]) -> list[str]:
    """Three sentences: what was found, who is to blame, and what to do."""
    return [_what(told), _who(told), _remedy(told)]


def command(told: dict[str, Any], words: list[str]) -> str | None:
    """The training command with the cure, from the words that the diagnosis was asked with."""
    if not told["cure"]:
        return None
    own = ("target=", "checkpoint=", "steps=", "budget_s=")
    changed = [word.partition("=")[0] for word in told["cure"]["overrides"]]
    kept = [word for word in words if not word.startswith(own) and word.lstrip("+").partition("=")[0] not in changed]
    start = f"trainer.init_from={told['checkpoint']}" if told["checkpoint"] else None
    named = f"precision={told['config']['precision']['name']}"  # auto takes no other settings
    kept = [named if word == "precision=auto" else word for word in kept]
    return " ".join(
        ["python train.py", *map(shlex.quote, [*kept, *told["cure"]["overrides"], *([start] if start else [])])]
    )


def _what(told: dict[str, Any]) -> str:
    figures, who = told["figures"], f"{told['arm']} on {told['target']}"
    if figures is None:
        return f"{who} cannot train: no parameter receives a gradient, in float32 either."
    if figures["raised"]:
        where = ""
        if figures["raised_in"]:
            module, op = figures["raised_in"]
            where = f", in {module or 'the loss or the model itself'}" + (f", at {op}" if op else "")
        return f"{who} raises where float32 does not{where}: {figures['raised'].rstrip('.')}."
    short = f"its gradient has {_db(figures['sqnr_db'])} SQNR against float32's, where {figures['dtype']} alone allows "
    short += f"{_db(figures['bound_db'])} on this step"
    if told["healthy"] and figures["bound_db"] < _LITTLE_DB:
        return (
            f"Little can be told of {who}: {short}, which leaves next to nothing of a gradient. Diagnose a trained "
            "checkpoint."
        )
    if told["healthy"]:
        return f"{who} does this step no harm: {short}; more than 10 dB below that would be a finding."
    if certain := [cause["where"] for cause in told["causes"] if cause["certain"]]:
        return f"{who} does not train {', '.join(certain)} as it stands. With all parameters in float32 {short}."
    if figures["nonfinite"]:
        others = len(figures["nonfinite"]) - 1
        beside = f" and of {others} other module{'s' * (others > 1)}" if others else ""
        first = figures["nonfinite"][0] or "the model"
        return f"{who} overflows: outputs of {first}{beside} are not finite where float32's are."
    if figures["without_gradient"]:
        return f"{who} loses the gradient of {len(figures['without_gradient'])} parameters, which float32 has."
    if updates := told["updates"]:
        return (
            f"{who} loses {updates['lost']:.1%} of the weights' updates: what reaches the weights has "
            f"{_db(updates['sqnr'])} SQNR against float32's, and {_db(updates['sqnr_master'])} if they were in float32."
        )
    if figures["excess_db"] <= 10:
        return f"{who} hurts in one place: {short}, and that is so low because of one module."
    return f"{who} hurts: {short}."


def _who(told: dict[str, Any]) -> str:
    if told["healthy"]:
        worst = next(iter(told["local"]), None)
        if not worst:
            return "No module and no operation stands out."
        return (
            f"The largest error that an operation makes by itself is that of {_place(worst)}: {_db(worst['sqnr_db'])}."
        )
    if not told["culprits"]:
        return "Nothing could be named: no part of the net explains it."
    first = told["culprits"][0]
    seen = next((one["says"].rstrip(".") for one in told["causes"] if one["where"] == first["name"]), None)
    measured = None if _raised(told) else _reason(first)
    reason = _OF_SETTINGS.get(first["name"]) or measured or seen or (_raises(told, first) if _raised(told) else None)
    name = first["name"] or "the model itself"
    return f"To blame is {name}: {reason}." if reason else f"To blame is {name}."


def _raised(told: dict[str, Any]) -> bool:
    return bool(told["figures"] and told["figures"]["raised"])


def _raises(told: dict[str, Any], first: dict[str, Any]) -> str | None:
    module, op = told["figures"]["raised_in"] or ("", "")
    if first["name"] == op:
        return "it raises"
    return f"{op} raises in it" if op and module == first["name"] else None


def _reason(row: dict[str, Any]) -> str | None:
    if "op" not in row:
        return None
    op = f"{row['op']} in its {row['phase']}" if row["module"] == row["name"] else f"{_place(row)}"
    if row["nonfinite"]:
        return f"{op} loses {row['nonfinite']:,} values to infinity or NaN on inputs that float32 computed"
    return f"{op} has {_db(row['sqnr_db'])} SQNR by itself, on inputs that float32 computed"


def _remedy(told: dict[str, Any]) -> str:
    if told["healthy"]:
        return "Nothing has to be kept in float32."
    cure = told["cure"]
    if not cure:
        remedies = dict.fromkeys(cause["remedy"] for cause in told["causes"] if cause["certain"])
        return " ".join(remedies) or "Nothing kept in float32 heals it; train this model in a wider precision."
    kept = " ".join(cure["overrides"])
    text = f"With {kept} the gradient is {_excess(cure['excess_db'])}"
    proof = told["proof"]
    if proof:
        losses = {one["arm"]: one["loss"] for one in proof["trained"]}
        (_, fp32), *others = losses.items()
        said = [
            f"{loss:.4g} with it" if i == len(others) - 1 else f"{loss:.4g} without"
            for i, (_, loss) in enumerate(others)
        ]
        text += (
            f", and the loss after {proof['steps']} steps {' and '.join(reversed(said))}, where float32 has {fp32:.4g}"
        )
    return f"{text}."


def _excess(excess: float) -> str:
    return (
        "no worse than the number format allows" if excess <= 0 else f"within {_db(excess)} of what the format allows"
    )


def _place(row: dict[str, Any]) -> str:
    return f"{row['op']} in {row['module'] or 'the loss or the model itself'}, {row['phase']}"


def _db(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.1f} dB" if math.isfinite(value) else "no error" if value > 0 else "no finite"


def lines(told: dict[str, Any], words: list[str], width: int) -> str:
    """The whole diagnosis as plain text of at most `width` columns."""
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, markup=False, emoji=False, highlight=False)
    for sentence in answer(told):
        console.print(sentence)
    if found := command(told, words):
        console.print(f"\n{found}", soft_wrap=True)
    for title, table in _tables(told):
        console.print(f"\n{title}")
        console.print(table)
    for line in _notes(told):
        console.print(f"\n{line}")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def markdown(told: dict[str, Any], words: list[str]) -> str:
    """The same as a page of Markdown."""
    parts = [f"# {told['arm']} on {told['target']}", *answer(told)]
    if found := command(told, words):
        parts.append(f"```bash\n{found}\n```")
    for title, columns, rows in _cells(told):
        head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
        parts.append(f"## {title}\n\n{head}\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join([*parts, *_notes(told)]) + "\n"


def _tables(told: dict[str, Any]) -> Iterable[tuple[str, Table]]:
    for title, columns, rows in _cells(told):
        table = Table(box=None, pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        yield title, table


def _cells(told: dict[str, Any]) -> Iterable[tuple[str, list[str], list[list[str]]]]:
    if told["local"]:
        rows = [
            [
                one["module"] or "-",
                one["op"],
                one["phase"],
                _db(one["sqnr_db"]),
                f"{one['nonfinite']:,}",
                f"{one['amax']:.3g}",
            ]
            for one in told["local"][:_ROWS]
        ]
        columns = ["module", "operation", "phase", "SQNR", "lost values", "largest"]
        yield "Worst by themselves, each on inputs that float32 computed", columns, rows
    if told["tried"]:
        rows = [
            [_short(one["kept"]), _db(one["excess_db"]) if one["excess_db"] < math.inf else "not finite"]
            for one in told["tried"]
        ]
        yield "Kept in float32, and how far below what the format allows", ["kept", "excess"], rows
    if told["causes"]:
        rows = [[one["where"] or "-", one["says"], one["remedy"]] for one in told["causes"]]
        yield "Seen beside", ["where", "what", "remedy"], rows
    if told["proof"]:
        times = told["proof"]["times"] or {}
        rows = [
            [
                one["arm"],
                f"{one['loss']:.5g}",
                str(one["skipped"]),
                f"{one['saved_activations_mib'] + one['saved_weight_casts_mib']:.4g}",
                _ratio(times.get(one["arm"])),
            ]
            for one in told["proof"]["trained"]
        ]
        yield (
            f"Trained for {told['proof']['steps']} steps",
            ["arm", "loss", "skipped", "saved MiB", "speed ratio"],
            rows,
        )


def _ratio(ratio: dict[str, Any] | None) -> str:
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else "-"


def _short(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _notes(told: dict[str, Any]) -> Iterable[str]:
    figures, proof = told["figures"], told["proof"]
    if figures:
        units = f" for {figures['units']} modules and operations that can be kept" if figures["units"] else ""
        yield f"{figures['passes']} passes{units}; loss scale {figures['loss_scale']:g}."
        if told["updates"]:
            yield f"One step changes nothing in {told['updates']['lost']:.1%} of the weights that it should change."
        if math.isfinite(figures["noise_db"]):
            yield (
                "This model gives another gradient each time: of two float32 passes one has "
                f"{figures['noise_db']:.1f} dB SQNR against the other, and no arm is asked for more."
            )
    if told["emulated"]:
        here = f" To train so on this machine, add precision.emulate={told['target']}." if told["cure"] else ""
        yield f"Emulated on a CPU: the autocast policy of {told['target']} and its rounding, not its kernels.{here}"
    if proof and proof["not_timed"]:
        arms = f"arms=[fp32,{told['arm']},{told['cure']['arm']}]"
        there = f"python scripts/benchmark.py {shlex.quote(arms)}"
        yield f"Not timed, since {proof['not_timed']}. There: {there}, with the other settings."
