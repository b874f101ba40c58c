"""Golden losses: 20 steps of two tiny tasks in three precisions, as they were when somebody last looked at them.

    python tests/test_golden.py --write      (the only way the files change; read the diff before you commit it)

A file's header names what the digits depend on. Where torch's version and the CPU's capability are the
header's, losses must be equal in every digit; elsewhere fp32 within 1e-5 and the others within 5e-3.
Which of the two was compared is printed with the test's result.
"""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch

from precision_lab import hardware, run
from precision_lab.config import compose

FOLDER = Path(__file__).parent / "golden" / "losses"
TASKS = {
    "mlp": "model=mlp model.hidden=[32] dataset=digits trainer.batch_size=16",
    "gpt": "model=gpt model.layers=1 model.heads=2 model.width=32 model.context=16 dataset=synthetic_tokens "
    "dataset.samples=200 trainer.batch_size=8",
}
PRECISIONS = ("fp32", "bf16", "fp16")
COMMON = "trainer.steps=20 trainer.log_every=1 seed=0 device=cpu device.threads=1"
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3}
STEPS = 20


def command(task: str, precision: str) -> str:
    return f"precision={precision} {TASKS[task]} {COMMON}"


def header(task: str, precision: str) -> dict[str, str]:
    """What the digits depend on, and the command that prints them into metrics.jsonl."""
    cpu = hardware.fingerprint(torch.device("cpu"))
    vendor = cpu["model"].split()[0]  # MKL takes other paths on another vendor's CPU of equal capability
    return {
        "torch": torch.__version__.split("+")[0],
        "cpu": f"{vendor} {torch.backends.cpu.get_cpu_capability()} {cpu['capability']}",
        "threads": "1",
        "command": f"python train.py {command(task, precision)}",
    }


def losses(task: str, precision: str, outputs: Path) -> list[float]:
    """The loss of each step, as a run of the whole program records it."""
    bookkeeping = [f"paths.outputs={outputs}", "wandb.mode=disabled", "probe.memory=false"]
    assert run.run(compose([*command(task, precision).split(), *bookkeeping])) == 0
    (file,) = outputs.rglob("metrics.jsonl")
    return [json.loads(line)["train/loss"] for line in file.read_text().splitlines()]


def block(facts: dict[str, str], values: list[float]) -> str:
    lines = [f"# {key}: {value}" for key, value in facts.items()]
    return "\n".join([*lines, *(f"{step} {value!r}" for step, value in enumerate(values, 1))]) + "\n"


def read(path: Path) -> tuple[dict[str, str], list[float]]:
    lines = path.read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [int(step) for step, _ in rows] == list(range(1, STEPS + 1))
    return facts, [float(value) for _, value in rows]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("task", sorted(TASKS))
def test_losses_are_the_golden_ones(task, precision, tmp_path, capsys, record_property):
    wanted, golden = read(FOLDER / f"{task}_{precision}.txt")
    here = header(task, precision)
    assert wanted["command"] == here["command"], "the file is of another command: write it anew"
    found = losses(task, precision, tmp_path)
    capsys.readouterr()

    exact = wanted == here
    tolerance = TOLERANCE[precision]
    how = (
        "exactly"
        if exact
        else f"loosely (rel {tolerance:g}), for the header differs: "
        + ", ".join(f"{key} {wanted[key]} there, {here[key]} here" for key in here if wanted[key] != here[key])
    )
    record_property("compared", how)
    same = found == golden if exact else found == pytest.approx(golden, rel=tolerance)
    if not same:
        pytest.fail(f"{task} in {precision} was compared {how}, and differs. Now it is:\n{block(here, found)}")


def test_the_golden_losses_tell_precisions_and_steps_apart():
    files = sorted(FOLDER.glob("*.txt"))
    assert [file.stem for file in files] == sorted(f"{t}_{p}" for t in TASKS for p in PRECISIONS)
    found = {file.stem: read(file)[1] for file in files}
    for task in TASKS:
        arms = [found[f"{task}_{precision}"] for precision in PRECISIONS]
        assert len({tuple(arm) for arm in arms}) == 3
        assert all(len(set(arm)) == STEPS for arm in arms)
        assert all(arm == pytest.approx(arms[0], rel=5e-3) for arm in arms)  # close enough for the loose comparison
        # and the loose comparison would see a run that is off by a step
        assert arms[0][1:] != pytest.approx(arms[0][:-1], rel=TOLERANCE["bf16"])


def write() -> None:
    import tempfile

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for task in sorted(TASKS):
        for precision in PRECISIONS:
            with tempfile.TemporaryDirectory() as folder:
                values = losses(task, precision, Path(folder))
            path = FOLDER / f"{task}_{precision}.txt"
            path.write_text(block(header(task, precision), values))
            print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_golden.py --write")
    write()
