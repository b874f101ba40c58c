"""Can a diagnosis be believed? Run it on nets with one planted fault each, and on healthy ones.

    python scripts/zoo.py [NAME ...]

Prints each net with what was named first, how well the cure heals it and the passes that took; then how many faults
were caught and missed, and how many false alarms there were. Exit code 0 if nothing was missed and there was no false
alarm, else 1. The nets are those of tests/zoo.
"""

import importlib
import sys
from typing import Any

from precision_lab.config import ROOT, load_precision
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.errors import InputError

SEEDS = (0, 1, 2)  # of each healthy net


def main(names: list[str]) -> int:
    if not (ROOT / "tests" / "zoo").is_dir():
        raise InputError(f"{ROOT / 'tests' / 'zoo'} is not there; the zoo comes with the repository.")
    sys.path.insert(0, str(ROOT / "tests"))
    zoo: Any = importlib.import_module("zoo")
    if unknown := [name for name in names if name not in {**zoo.FAULTY, **zoo.HEALTHY}]:
        raise InputError(f"{unknown[0]} is not in the zoo, which has {', '.join([*zoo.FAULTY, *zoo.HEALTHY])}.")
    faulty = [case for name, case in zoo.FAULTY.items() if not names or name in names]
    healthy = [case for name, case in zoo.HEALTHY.items() if not names or name in names]
    missed = [case.name for case in faulty if not _caught(case)]
    alarms = [f"{case.name} (seed {seed})" for case in healthy for seed in SEEDS if not _let_pass(case, seed)]
    print(f"\n{len(faulty) - len(missed)} of {len(faulty)} faults caught, {len(missed)} missed", *missed)
    print(f"{len(alarms)} false alarms in {len(healthy) * len(SEEDS)} examinations of healthy nets", *alarms)
    return 1 if missed or alarms else 0


def _caught(case: Any) -> bool:
    """Whether the culprit was named first, and the cure restores the gradient."""
    from precision_lab.diagnosis.attribution import RESTORED_DB

    found = _examined(case, case.build(0))
    healed = found.excess(found.healed)
    if case.cure == "mended":
        again = _examined(case, case.mended(0))
        again.patient.refine_floor()
        healed = again.excess(again.plain) if again.healthy else None
    caught = found.culprits[:1] and found.culprits[0] in case.culprit and healed is not None and healed < RESTORED_DB
    named = found.culprits[0] if found.culprits else "nothing"
    cured = "not healed" if healed is None else f"{healed:+.1f} dB {'mended' if case.cure == 'mended' else 'cured'}"
    passes = f"{found.patient.passes} passes" if found.patient else ""
    print(
        f"{'caught' if caught else 'MISSED':7} {case.name:26} {case.source:18} {named:28} {cured:17} {passes}",
        flush=True,
    )
    return bool(caught)


def _let_pass(case: Any, seed: int) -> bool:
    found = _examined(case, case.build(seed), seed)
    excess = found.excess(found.plain)
    said = "healthy" if found.healthy else f"ALARM   {', '.join(found.culprits)}"
    print(f"{said:7} {case.name:26} seed {seed:<13} {'':28} {excess:+.1f} dB", flush=True)
    return found.healthy


def _examined(case: Any, model: Any, seed: int = 0) -> Any:
    from precision_lab.diagnosis.examine import examine

    return examine(model, case.task, case.batch(seed), load_precision(case.precision), case.target, case.optimizer)


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
