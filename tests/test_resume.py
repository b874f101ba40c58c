"""Runs that are stopped or killed and started again: they go on, come out as if nothing had been, or say why not."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch._dynamo  # an optimizer loads it, which would take each of the processes below two seconds

from precision_lab import checkpoint, folders
from precision_lab import run as run_module
from precision_lab.config import compose
from precision_lab.errors import InputError
from precision_lab.resume import go_on
from precision_lab.sweep.lead import lead
from precision_lab.torture import compared, differences
from precision_lab.trainer import Trainer
from test_checkpoint import Writes
from test_sweep import OWN, command, jobs_in, records
from typed_scripts import module
from typed_scripts import run as script

MLP = ("model=mlp", "model.hidden=[16]", "dataset=digits")
WORDS = ["precision=fp16", "precision.init_scale=1e7"]
WORDS += ["precision.growth_interval=2", "trainer.steps=8", "trainer.batch_size=16", "trainer.log_every=2"]
WORDS += ["trainer.eval_every=5", "trainer.checkpoint_every=3", "probe.memory=false", "meter.warmup_steps=1"]
WORDS += ["device=cpu", "device.threads=1", "name=night"]
LOG_POINTS = [2, 4, 5, 6, 8]


@dataclass
class Attempt:
    code: int
    said: str
    outputs: Path
    folder: Path | None  # that it wrote in

    @property
    def status(self) -> str:
        return folders.read_json(self.folder / "status.json").get("status")

    @property
    def result(self) -> dict:
        return json.loads((self.folder / "result.json").read_text())

    @property
    def steps(self) -> list[int]:
        return [json.loads(line)["train/step"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def attempt(
    outputs: Path,
    *words: str,
    sweep: bool = False,
    before: Callable[[], None] = lambda: None,
    network: tuple[str, ...] = MLP,
) -> Attempt:
    """A run in a forked process, which may be killed; `before` is called in there."""
    asked = compose([*network, *WORDS, f"paths.outputs={outputs}", *words])
    said = outputs.with_name(f"{outputs.name}.said")
    with said.open("w") as out, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which a fork leaves behind
        process = os.fork()
        if not process:
            code = 70
            try:
                for stream in (1, 2):
                    os.dup2(out.fileno(), stream)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                before()
                code = run_module.run(asked, sweep)
            except InputError as error:
                print(error)
                code = 2
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(process, 0)
    runs = [*outputs.glob("runs/*/*"), *outputs.glob("sweeps/night/*")]
    newest = max(runs, key=lambda path: path.stat().st_ctime, default=None)
    return Attempt(os.waitstatus_to_exitcode(status), said.read_text(), outputs, newest)


def at_step(number: int, which: signal.Signals) -> Callable[[], None]:
    """The process sends itself a signal at the end of its n-th step."""

    def patch():
        step, taken = Trainer.step, 0

        def counted(trainer, batches):
            nonlocal taken
            step(trainer, batches)
            taken += 1
            if taken == number:
                os.kill(os.getpid(), which)

        Trainer.step = counted

    return patch


def killed(outputs: Path, *words: str, step: int = 7, **more) -> Attempt:
    done = attempt(outputs, *words, before=at_step(step, signal.SIGKILL), **more)
    assert (done.code, done.status) == (-signal.SIGKILL, "running")
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run that nothing happens to."""
    done = attempt(tmp_path_factory.mktemp("alone") / "outputs", sweep=True)
    assert done.code == 0, done.said
    assert done.steps == LOG_POINTS
    assert done.result["applied_steps"] < 8
    return done


# --- the same command --------------------------------------------------------------------------


@pytest.mark.parametrize("sweep", [False, True])
def test_a_killed_run_goes_on_in_its_own_folder_by_the_same_command(tmp_path, alone, sweep):
    outputs = tmp_path / "outputs"
    first = killed(outputs, sweep=sweep)
    second = attempt(outputs, sweep=sweep)
    assert second.code == 0, second.said
    assert "goes on after step 6, from its checkpoint" in second.said
    assert second.folder == first.folder
    assert (second.status, second.steps) == ("completed", LOG_POINTS)
    assert second.result["resumed_at"] == [6]
    assert not (second.folder / "attempts").exists()
    assert compared(alone.folder, second.folder) == []
    log = (second.folder / "train.log").read_text()
    assert log.count("-> ") == 2  # both attempts
    third = attempt(outputs, sweep=sweep)
    assert third.code == 0
    if sweep:
        assert ": completed before -> " in third.said
    assert third.folder == first.folder if sweep else third.folder != first.folder


@pytest.mark.parametrize(("which", "code", "words"), [("SIGTERM", 143, "SIGTERM"), ("SIGINT", 130, "Ctrl-C")])
def test_a_stopped_run_keeps_the_step_it_was_at(tmp_path, alone, which, code, words):
    outputs = tmp_path / "outputs"
    first = attempt(outputs, before=at_step(5, getattr(signal, which)))
    assert (first.code, first.status) == (code, "interrupted")
    assert (first.result["reason"], first.result["step"], first.result["hashes"]["data"] != "") == (words, 5, True)
    assert [checkpoint.step_of(path) for path in checkpoint.written_in(first.folder)] == [5, 3]
    second = attempt(outputs)
    assert (second.code, second.result["resumed_at"], second.folder) == (0, [5], first.folder)
    assert second.steps == LOG_POINTS
    assert compared(alone.folder, second.folder) == []


@pytest.mark.parametrize("rounds", [1, 2], ids=["in_the_arm_s_precision", "in_float32"])
@pytest.mark.parametrize("precision", ["fp16", "bf16_pure"])
def test_a_run_that_is_stopped_in_an_evaluation_takes_it_again(tmp_path, precision, rounds):
    words = [f"precision={precision}"]

    def patch():
        evaluate = run_module.evaluate

        def told_to_stop(policy, task, model, batches):
            begun = []

            def stopping():
                begun.append(1)
                left = batches()
                yield next(left)
                if len(begun) == rounds:
                    os.kill(os.getpid(), signal.SIGTERM)
                    yield next(left)
                    raise AssertionError("went on")
                yield from left

            return evaluate(policy, task, model, stopping)

        run_module.evaluate = told_to_stop

    undisturbed = attempt(tmp_path / "alone", *words)
    first = attempt(tmp_path / "outputs", *words, before=patch)
    assert (first.code, first.status, first.result["step"]) == (143, "interrupted", 5)
    assert first.steps == [2, 4]  # the log point of step 5 is not complete
    assert [checkpoint.step_of(path) for path in checkpoint.written_in(first.folder)] == [5, 3]
    again = attempt(tmp_path / "outputs", *words, before=patch)  # and again
    assert (again.code, again.status, again.steps) == (143, "interrupted", [2, 4])
    second = attempt(tmp_path / "outputs", *words)
    assert (second.code, second.result["resumed_at"], second.steps) == (0, [5, 5], LOG_POINTS)
    assert second.result["curve"]["step"] == [5, 8]
    assert compared(undisturbed.folder, second.folder) == []


def test_sigusr1_asks_for_a_checkpoint_and_stops_nothing(tmp_path, alone):
    words = ["trainer.checkpoint_every=null", "trainer.checkpoint_minutes=null"]
    done = attempt(tmp_path / "outputs", *words, before=at_step(7, signal.SIGUSR1))
    assert (done.code, done.status) == (0, "completed")
    assert [checkpoint.step_of(path) for path in checkpoint.written_in(done.folder)] == [7]
    assert done.steps == LOG_POINTS
    assert done.result["hashes"] == alone.result["hashes"]


def test_without_a_checkpoint_a_single_run_begins_anew_elsewhere_and_a_job_in_its_folder(tmp_path, alone):
    single = killed(tmp_path / "single", step=2)
    again = attempt(tmp_path / "single")
    assert (again.code, again.result["resumed_at"]) == (0, [])
    assert again.folder != single.folder
    job = killed(tmp_path / "job", step=2, sweep=True)
    again = attempt(tmp_path / "job", sweep=True)
    assert (again.code, again.result["resumed_at"], again.folder) == (0, [], job.folder)
    assert "starting over (what was there is kept under attempts/): " in again.said
    assert compared(alone.folder, again.folder) == []


def test_never_makes_a_new_folder_and_leaves_the_old_one(tmp_path):
    first = killed(tmp_path / "outputs")
    before = contents(first.folder)
    second = attempt(tmp_path / "outputs", "trainer.resume=never")
    assert (second.code, second.result["resumed_at"]) == (0, [])
    assert second.folder != first.folder
    assert contents(first.folder) == before


def test_in_a_sweep_never_and_rerun_all_start_over_and_keep_what_was_there(tmp_path, alone):
    for number, word in enumerate(("trainer.resume=never", "rerun=all"), 1):
        first = killed(tmp_path / "outputs", f"seed={number}", sweep=True)
        before = contents(first.folder / "checkpoints")
        second = attempt(tmp_path / "outputs", f"seed={number}", word, sweep=True)
        assert (second.code, second.result["resumed_at"], second.folder) == (0, [], first.folder)
        assert contents(first.folder / "attempts" / "1" / "checkpoints") == before
        assert second.steps == LOG_POINTS


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_is_being_run_is_left_alone(tmp_path):
    first = killed(tmp_path / "outputs")
    held = folders.open_log(first.folder)
    folders._lock(held)  # this process is not the one that will ask
    try:
        second = attempt(tmp_path / "outputs")
        named = attempt(tmp_path / "outputs", f"trainer.resume={first.folder}")
    finally:
        held.close()
    assert second.code == 0
    assert second.folder != first.folder
    assert (named.code, named.said) == (2, f"trainer.resume={first.folder}: another process is running it.\n")


def test_a_run_that_ends_while_another_looks_for_one_is_not_gone_on_with(tmp_path, monkeypatch):
    first = killed(tmp_path / "outputs")
    asked = compose([*MLP, *WORDS, f"paths.outputs={tmp_path / 'outputs'}"])
    claimed = folders.hold

    def too_late(folder):
        (folder / "status.json").write_text('{"status": "completed"}')
        return claimed(folder)

    with monkeypatch.context() as patched:
        patched.setattr(folders, "hold", too_late)
        claim = folders.claim_single(asked, "cpu")
    claim.log.close()
    assert claim.folder != first.folder


# --- a kill at any moment ----------------------------------------------------------------------


def at_operation(number: int, outputs: Path) -> Callable[[], None]:
    """The process kills itself before the n-th thing that it does to a file below `outputs`."""
    events, done = {"open": 0, "os.rename": 0, "os.remove": 0, "os.mkdir": 0, "os.truncate": 0}, 0

    def hook(event, arguments):
        nonlocal done
        if event not in events or not str(arguments[0]).startswith(str(outputs)):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        done += 1
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(hook)


def started(which: str, outputs: Path) -> tuple[str, ...]:
    """What there is before the attempt that is killed; and the words of that and the next one."""
    if which == "goes_on":
        killed(outputs, sweep=True)
    elif which == "starts_over":  # from a checkpoint that is not to be used
        killed(outputs, sweep=True)
        return ("trainer.resume=never",)
    elif which == "runs_again":
        assert attempt(outputs, sweep=True).code == 0
        return ("rerun=all",)
    return ()


def killed_at_each_operation(which: str, folder: Path, alone: Attempt, numbers: range) -> int:
    """Returns how many of them killed."""
    began = folder / "began" / "outputs"
    began.parent.mkdir()
    words = started(which, began)
    for count, number in enumerate(numbers):
        outputs = folder / "outputs"
        shutil.rmtree(outputs, ignore_errors=True)
        if began.exists():
            shutil.copytree(began, outputs)
        kept = {path.read_bytes() for path in outputs.rglob("checkpoints/*.pt")} if which != "goes_on" else set()
        first = attempt(outputs, *words, sweep=True, before=at_operation(number, outputs))
        if first.code != -signal.SIGKILL:
            assert first.code == 0, first.said
            return count
        second = attempt(outputs, *(words if which == "starts_over" else ()), sweep=True)
        where = f"killed before operation {number}"
        assert second.code == 0, f"{where}: {second.said}"
        found = compared(alone.folder, second.folder)
        if ": completed before -> " in second.said:  # killed after all was done, but for what W&B's copy came to
            found = [difference for difference in found if not difference.startswith("left behind: ")]
        assert found == [], where
        assert second.steps == LOG_POINTS, where
        assert kept <= {path.read_bytes() for path in outputs.rglob("*.pt")}, where
        if which == "goes_on":
            assert second.result["resumed_at"], where
            assert not (second.folder / "attempts").exists(), where
    raise AssertionError(f"more than {numbers[-1]} operations")


WAYS = ["begins", "goes_on", "starts_over", "runs_again"]


@pytest.mark.parametrize("which", WAYS)
def test_a_kill_before_some_of_its_file_operations_loses_nothing(tmp_path, alone, which):
    assert killed_at_each_operation(which, tmp_path, alone, range(3 + WAYS.index(which), 200, 14)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("which", WAYS)
def test_a_kill_before_any_of_its_file_operations_loses_nothing(tmp_path, alone, which):
    assert killed_at_each_operation(which, tmp_path, alone, range(1, 200)) >= 20


def test_metrics_that_were_cut_anywhere_after_the_checkpoint_are_made_whole(tmp_path, alone):
    """As a kill in the middle of a line, or a disk that lost the last of it, leaves them."""
    first = killed(tmp_path / "first", step=6, sweep=True)
    position = checkpoint.read(checkpoint.written_in(first.folder)[0])["position"]["metrics_bytes"]
    whole = (first.folder / "metrics.jsonl").read_bytes()
    for number, length in enumerate([position, position + 1, position + 300, len(whole) - 1]):
        outputs = tmp_path / str(number)
        shutil.copytree(first.outputs, outputs)
        (metrics,) = outputs.glob("sweeps/night/*/metrics.jsonl")
        metrics.write_bytes(whole[:length])
        second = attempt(outputs, sweep=True)
        assert second.result["resumed_at"] == [3]
        assert compared(alone.folder, second.folder) == []


# --- checkpoints that cannot be used -----------------------------------------------------------


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content) // 2 + 100):  # more than what pads the archive
        content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "goes_on_after"),
    [
        (lambda newest, before: damage(newest), [3]),
        (lambda newest, before: newest.write_bytes(b""), [3]),
        (lambda newest, before: newest.write_bytes(newest.read_bytes()[:5000]), [3]),
        (lambda newest, before: (newest.unlink(), newest.mkdir()), [3]),
        (lambda newest, before: (damage(newest), damage(before)), []),
        (lambda newest, before: (newest.parents[1] / "metrics.jsonl").write_text('{"train/step": 2}\n'), []),
        (lambda newest, before: (newest.parents[1] / "metrics.jsonl").unlink(), []),
    ],
    ids=["flipped", "emptied", "cut", "a_folder", "both_flipped", "metrics_cut", "no_metrics"],
)
def test_what_is_damaged_is_passed_over_and_nothing_of_it_is_taken(tmp_path, alone, spoil, goes_on_after):
    first = killed(tmp_path / "outputs", sweep=True)
    newest, before = checkpoint.written_in(first.folder)
    assert (checkpoint.step_of(newest), checkpoint.step_of(before)) == (6, 3)
    spoil(newest, before)
    second = attempt(tmp_path / "outputs", sweep=True)
    assert (second.code, second.result["resumed_at"]) == (0, goes_on_after)
    assert compared(alone.folder, second.folder) == []
    if not goes_on_after:
        assert "starting over (what was there is kept under attempts/): " in second.said
        assert "is damaged and cannot be read." in second.said or "metrics.jsonl has lost lines" in second.said
        assert (second.folder / "attempts" / "1" / "checkpoints").is_dir()


def test_one_that_would_run_code_is_not_run(tmp_path, alone):
    first = killed(tmp_path / "outputs", sweep=True)
    for path in checkpoint.written_in(first.folder):
        torch.save(checkpoint.read(path) | {"more": Writes(tmp_path / "mark")}, path)
    second = attempt(tmp_path / "outputs", sweep=True)
    assert (second.code, second.result["resumed_at"]) == (0, [])
    assert "holds more than tensors and plain values, and was not read: it could run any code." in second.said
    assert not (tmp_path / "mark").exists()
    assert compared(alone.folder, second.folder) == []


OTHER = {
    "code": ("it was begun with other code (precision_lab is ", {"code": {"precision_lab": "0123abcd"}}),
    "hardware": ("it was begun on other hardware (threads is ", {"fingerprint": {"threads": 7}}),
    "torch": ("it was begun with torch 2.", {"versions": {"torch": "2.99.0"}}),
    "torch_major": ("was written by torch ", {"versions": {"torch": "3.0.0"}}),
}


def elsewhere(changed: dict) -> Callable[[], None]:
    """The environment is another one in the process that this is called in."""

    def patch():
        environment_of, code_of = run_module.environment_of, run_module.code_of

        def other(device):
            made = environment_of(device)
            return {key: {**made[key], **changed.get(key, {})} if key in changed else made[key] for key in made}

        run_module.environment_of = other
        run_module.code_of = lambda asked: {**code_of(asked), **changed.get("code", {})}

    return patch


def at(path: str, value) -> Callable[[dict], None]:
    """Changes a state: `trainer.done` becomes the value."""

    def change(state: dict) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            state = state[parent]
        state[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        at("trainer.progress", {"step": "x"}),
        at("trainer.progress.spikes", {}),
        at("trainer.optimizer.param_groups", []),
        at("trainer.scaler", {"scale": "large"}),
        at("trainer.window", [[], []]),
        at("trainer.guarded", "all"),
        at("trainer.done", 10**9),
        at("trainer.done", -6),
        at("trainer.model.parameters", {"a": 1}),
        at("trainer.model.buffers", {"a": 1}),
        at("generators.torch", [1, 2]),
        at("generators.python", [3]),
        at("batches.handed_out", "many"),
        at("batches.hash", 7),
        at("meter", {"a": 1}),
        at("findings.final", 3),
        at("findings.curve", {"a": 1}),
        at("position.metrics_bytes", -5),
        at("position.elapsed_s", "long"),
        at("about", {"torch": 3}),
        at("about.config", []),
    ],
    ids=lambda change: "-".join(str(cell.cell_contents)[:30] for cell in change.__closure__),
)
def test_values_that_can_be_no_state_are_passed_over_or_the_run_starts_over(tmp_path, alone, change):
    first = killed(tmp_path / "outputs", sweep=True)
    for path in checkpoint.written_in(first.folder):
        state = checkpoint.read(path)
        change(state)
        torch.save(state, path)
    before = contents(first.folder)
    named = attempt(tmp_path / "outputs", f"trainer.resume={first.folder}")
    assert (named.code, "Traceback" in named.said) == (2, False), named.said
    assert contents(first.folder) | {"train.log": b""} == before | {"train.log": b""}
    second = attempt(tmp_path / "outputs", sweep=True)
    assert (second.code, second.result["resumed_at"]) == (0, []), second.said
    assert "starting over (what was there is kept under attempts/): " in second.said
    assert compared(alone.folder, second.folder) == []


@pytest.mark.parametrize("what", OTHER)
def test_where_anything_is_other_a_run_starts_over_by_itself_and_says_so(tmp_path, what):
    sentence, changed = OTHER[what]
    first = killed(tmp_path / "outputs")
    before = contents(first.folder)
    second = attempt(tmp_path / "outputs", before=elsewhere(changed))
    assert (second.code, second.result["resumed_at"], second.folder) == (0, [], first.folder)
    del before["train.log"]  # which goes on
    assert contents(first.folder / "attempts" / "1") == before
    said = re.search(r"^starting over \(what was there is kept under attempts/\): (.*)$", second.said, re.MULTILINE)
    assert sentence in said.group(1)
    assert second.steps == LOG_POINTS


@pytest.mark.parametrize("what", OTHER)
def test_where_the_user_names_it_a_run_goes_on_elsewhere_and_says_so_but_for_another_major_torch(tmp_path, what):
    sentence, changed = OTHER[what]
    first = killed(tmp_path / "outputs")
    before = contents(first.folder)
    second = attempt(tmp_path / "outputs", f"trainer.resume={first.folder}", before=elsewhere(changed))
    if what == "torch_major":
        assert second.code == 2
        assert re.search(rf"step_00000006.pt {sentence}2\S+, and this is torch 3.0.0.", second.said)
        assert contents(first.folder) == before
    else:
        assert (second.code, second.result["resumed_at"], second.folder) == (0, [6], first.folder)
        assert re.search(
            rf"^goes on all the same: \S+step_00000006.pt: {re.escape(sentence)}", second.said, re.MULTILINE
        )


def test_other_data_are_not_gone_on_with_by_itself_nor_by_name(tmp_path):
    text = tmp_path / "text.txt"
    network = ("model=gpt", "model.layers=1", "model.width=16", "model.heads=2", "model.context=8")
    network += ("dataset=text_file", f"dataset.path={text}")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    first = killed(tmp_path / "outputs", network=network)
    before = contents(first.folder)
    text.write_text("pack my box with five dozen liquor jugs now. " * 60)
    named = attempt(tmp_path / "outputs", f"trainer.resume={first.folder}", network=network)
    assert named.code == 2
    assert re.search(r"step_00000006.pt was written with other data \(hash \w+, now \w+\)\.", named.said)
    assert contents(first.folder) == before
    second = attempt(tmp_path / "outputs", network=network)
    assert (second.code, second.result["resumed_at"]) == (0, [])
    assert "was written with other data" in second.said


def test_a_state_that_is_refused_half_way_leaves_nothing_in_the_run_that_starts_over(tmp_path, alone):
    def refusing():
        def load_state(trainer, state):
            trainer.model.layers[0][0].weight.data.fill_(1.0)
            trainer.done = 6
            raise InputError("The rest is lacking.")

        Trainer.load_state = load_state

    first = killed(tmp_path / "outputs", sweep=True)
    second = attempt(tmp_path / "outputs", sweep=True, before=refusing)
    assert (second.code, second.result["resumed_at"], second.folder) == (0, [], first.folder), second.said
    said = r"starting over \(what was there is kept under attempts/\): \S+_00000006.pt cannot be loaded: The rest is l"
    assert re.search(said, second.said)
    assert compared(alone.folder, second.folder) == []


def test_one_that_cannot_be_loaded_is_passed_over_for_the_one_before(tmp_path, alone):
    first = killed(tmp_path / "outputs", sweep=True)
    newest = checkpoint.written_in(first.folder)[0]
    state = checkpoint.read(newest)
    state["trainer"]["optimizer"]["param_groups"] = []
    torch.save(state, newest)
    second = attempt(tmp_path / "outputs", sweep=True)
    assert (second.code, second.result["resumed_at"]) == (0, [3])
    assert f"passed over: {newest} cannot be loaded: ValueError: loaded state dict has a different" in second.said
    assert compared(alone.folder, second.folder) == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), OSError(5, "Input/output error")])
def test_what_is_no_fault_of_the_checkpoint_leaves_all_to_the_next_attempt(tmp_path, alone, error):
    def refusing():
        def load_state(trainer, state):
            raise error

        Trainer.load_state = load_state

    first = killed(tmp_path / "outputs", sweep=True)
    before = contents(first.folder)
    second = attempt(tmp_path / "outputs", sweep=True, before=refusing)
    assert (second.code, "not gone on with: " in second.said) == (1, True)
    assert contents(first.folder) | {"train.log": b""} == before | {"train.log": b""}
    third = attempt(tmp_path / "outputs", sweep=True)
    assert (third.code, third.result["resumed_at"]) == (0, [6])
    assert compared(alone.folder, third.folder) == []


def test_starting_over_lets_go_of_what_was_built_before(tmp_path):
    """What a single run has built before its folder was known, and the state that was loaded into it."""

    def watched():
        built, build = [], run_module.build
        step = Trainer.step

        def noted(resolved):
            parts = build(resolved)
            built.append(weakref.ref(parts[1].model))
            return parts

        def counted(trainer, batches):
            print("models alive:", sum(one() is not None for one in built), "of", len(built))
            step(trainer, batches)

        def load_state(trainer, state):
            raise InputError("The rest is lacking.")

        run_module.build, Trainer.step, Trainer.load_state = noted, counted, load_state

    killed(tmp_path / "outputs")
    second = attempt(tmp_path / "outputs", before=watched)
    assert second.code == 0, second.said
    assert "models alive: 1 of 3" in second.said  # two checkpoints were tried
    assert "models alive: 2" not in second.said


def test_an_attempt_that_fails_before_it_goes_on_leaves_what_there_is_to_the_next(tmp_path, alone):
    def broken():
        def build(resolved):
            raise ConnectionError("the data's server is away")

        run_module.build = build

    first = killed(tmp_path / "outputs", sweep=True)
    before = contents(first.folder)
    second = attempt(tmp_path / "outputs", sweep=True, before=broken)
    assert second.code == 1
    assert "not gone on with: ConnectionError: the data's server is away\n" in second.said
    assert {**contents(first.folder), "train.log": b""} == {**before, "train.log": b""}
    third = attempt(tmp_path / "outputs", sweep=True)
    assert (third.code, third.result["resumed_at"]) == (0, [6])
    assert compared(alone.folder, third.folder) == []


# --- trainer.resume=PATH -----------------------------------------------------------------------


def test_a_metric_that_no_task_declares_is_in_the_result_of_a_run_that_went_on(tmp_path):
    words = ["model=custom", "model._target_=own_code.mine.Line", "dataset=custom"]
    words += ["dataset._target_=own_code.mine.line_data", "task=custom", "task._target_=test_resume.with_error"]
    words += ["trainer.batch_size=8"]
    first = killed(tmp_path / "outputs", *words, network=(), step=7)
    again = attempt(tmp_path / "outputs", *words, network=(), before=at_step(1, signal.SIGTERM))
    assert (again.code, again.status) == (143, "interrupted"), again.said
    assert again.result["summary"]["final/val_error"] > 0  # of the evaluation before the kill
    second = attempt(tmp_path / "outputs", *words, network=())
    assert (second.code, second.folder, second.result["resumed_at"]) == (0, first.folder, [6, 7])


def with_error(model, batch):
    x, y = batch
    error = model(x).float() - y
    return error.square().mean(), {"error": error.abs().mean()}


def test_a_folder_and_a_checkpoint_in_it_can_be_named(tmp_path, alone):
    outputs = tmp_path / "outputs"
    first = killed(outputs)
    newer = killed(outputs, "trainer.resume=never", step=4)  # which the same command would go on with
    before = contents(newer.folder)
    assert newer.folder != first.folder
    named = attempt(outputs, f"trainer.resume={first.folder}")
    assert (named.code, named.folder, named.result["resumed_at"]) == (0, first.folder, [6])
    assert compared(alone.folder, first.folder) == []
    assert contents(newer.folder) == before
    second = killed(tmp_path / "second")
    older = checkpoint.written_in(second.folder)[-1]
    named = attempt(tmp_path / "second", f"trainer.resume={older}")
    assert (named.code, named.folder, named.result["resumed_at"]) == (0, second.folder, [3])
    assert compared(alone.folder, second.folder) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["precision=bf16"], "is of another run, of fp16[init_scale=10000000.0,growth_interval=2]: precision.name is"),
        (["precision.init_scale=2e7"], "precision.init_scale is 10000000.0, here 20000000.0. trainer.init_from takes"),
        (["model.hidden=[17]"], "model.hidden is [16], here [17]. trainer.init_from takes its weights alone."),
        (["seed=5"], "seed is 0, here 5."),
        (["trainer.steps=9", "optimizer.lr=1"], "optimizer.lr is 0.001, here 1; trainer.steps is 8, here 9."),
    ],
)  # fmt: skip
def test_a_named_checkpoint_of_another_run_is_refused_with_the_difference_and_left_as_it_was(tmp_path, words, sentence):
    first = killed(tmp_path / "outputs")
    before = contents(first.folder)
    named = attempt(tmp_path / "outputs", *words, f"trainer.resume={first.folder}")
    assert (named.code, sentence in named.said) == (2, True), named.said
    assert contents(first.folder) == before
    again = attempt(tmp_path / "outputs")  # which the refused one did not spoil
    assert (again.code, again.result["resumed_at"], again.folder) == (0, [6], first.folder)


def test_what_is_no_run_or_has_ended_is_refused(tmp_path, alone):
    done = attempt(tmp_path / "outputs", f"trainer.resume={alone.folder}")
    assert (done.code, done.said) == (
        2, f"trainer.resume={alone.folder}: that run has ended (completed), there is nothing to go on with.\n"
    )  # fmt: skip
    stray = tmp_path / "stray.pt"
    stray.write_bytes(b"")
    for path, hint in (
        (tmp_path, "a run's folder"),
        (stray, "a checkpoint in a run's folder; trainer.init_from takes the weights"),
    ):
        done = attempt(tmp_path / "outputs", f"trainer.resume={path}")
        assert done.code == 2
        assert f"trainer.resume={path} is not {hint}" in done.said
    assert not (tmp_path / "outputs").exists()


# --- what a checkpoint is of -------------------------------------------------------------------


def test_a_file_with_parts_missing_is_no_checkpoint_of_a_run(tmp_path, alone):
    (path, *_) = checkpoint.written_in(alone.folder)
    state = checkpoint.read(path)
    now = state["about"]

    def found_in(*paths):
        state, _, passed_over = go_on(alone.folder, now, list(paths), lambda state: None, lambda: None)
        return state, passed_over

    assert found_in(path)[0]["trainer"]["done"] == 8
    for change in ({"about": None}, {"about": {}}, {"position": {}}, {"findings": [1]}):
        spoiled = tmp_path / "step_00000001.pt"
        torch.save(state | change, spoiled)
        with pytest.raises(InputError, match=rf"^{re.escape(str(spoiled))} lacks "):
            found_in(spoiled)
        found, passed_over = found_in(spoiled, path)
        assert str(spoiled) in passed_over[0]
        assert list(differences(found, state, "found")) == []


def test_a_state_that_is_not_plain_is_one_warning_and_the_run_goes_on(tmp_path):
    def odd():
        state = Trainer.state
        Trainer.state = lambda trainer: state(trainer) | {"odd": object()}

    done = attempt(tmp_path / "outputs", before=odd)
    assert (done.code, done.status, done.steps) == (0, "completed", LOG_POINTS)
    assert done.said.count("no checkpoint can be written: trainer.odd is of type object") == 1
    assert checkpoint.written_in(done.folder) == []


# --- trainer.init_from -------------------------------------------------------------------------


def test_a_run_begins_with_the_weights_of_another_and_with_nothing_else_of_it(tmp_path, alone):
    (path, *_) = checkpoint.written_in(alone.folder)
    words = ["precision=bf16", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "trainer.steps=1"]
    done = attempt(tmp_path / "outputs", *words, f"trainer.init_from={path}")
    assert done.code == 0, done.said
    assert done.result["resumed_at"] == []
    ends = [run.result["summary"]["final/val_loss_fp32"] for run in (alone, done)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    plain = attempt(tmp_path / "plain", *words)
    assert plain.result["hashes"]["initial_weights"] != done.result["hashes"]["initial_weights"]
    assert plain.result["experiment_signature"] != done.result["experiment_signature"]
    first = killed(tmp_path / "again", f"trainer.init_from={path}", "precision=bf16")
    again = attempt(tmp_path / "again", f"trainer.init_from={path}", "precision=bf16")
    assert (again.code, again.folder, again.result["resumed_at"]) == (0, first.folder, [6])


def test_weights_of_another_model_are_refused_before_there_is_a_folder(tmp_path, alone):
    (path, *_) = checkpoint.written_in(alone.folder)
    done = attempt(tmp_path / "outputs", "model.hidden=[17]", f"trainer.init_from={path}")
    assert done.code == 2
    assert f"trainer.init_from={path} is of another model: its layers.0.0.weight is [16, 64], here it is" in done.said
    assert not (tmp_path / "outputs").exists()


# --- as a person starts them -------------------------------------------------------------------

SPOILED = [*OWN, "model._target_=jobs.Spoiler", "precision=fp32", "trainer.steps=12", "trainer.checkpoint_every=4"]


def told(order: Path, how: str) -> list[str]:
    """Words for a run that sends itself a signal at its 7th step, once."""
    program = order.with_suffix(".sh")
    program.write_text(f"#!/bin/sh\nkill -s {how} $PPID\n")
    program.chmod(0o755)
    order.write_text(f"run {program}")
    return [*SPOILED, f"+model.order={order}", "+model.step=7"]


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(**command(folder, *words), capture_output=True, timeout=120)


def lines(folder: Path) -> list[int]:
    return [json.loads(line)["train/step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_process_that_is_told_to_stop_goes_on_by_the_same_words(tmp_path):
    words = told(tmp_path / "order", "TERM")
    first = typed(tmp_path, *words)
    assert (first.returncode, first.stderr) == (143, "")
    (folder,) = tmp_path.glob("outputs/runs/*/*")
    assert folders.read_json(folder / "status.json")["status"] == "interrupted"
    second = typed(tmp_path, *words)
    assert second.returncode == 0, second.stderr
    assert "goes on after step 7, from its checkpoint" in second.stdout
    assert [*tmp_path.glob("outputs/runs/*/*")] == [folder]
    assert lines(folder) == [2, 4, 6, 8, 10, 12]


def test_a_slow_step_is_finished_when_a_process_is_told_to_stop(tmp_path):
    words = [*OWN, "model._target_=jobs.Case", "+model.seconds=1.0", "precision=fp32", "trainer.steps=500"]
    process = subprocess.Popen(**command(tmp_path, *words, "trainer.log_every=1"), stdout=-1, stderr=subprocess.STDOUT)
    try:
        while not list(tmp_path.glob("outputs/runs/*/*/metrics.jsonl")) and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.3)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, said
    (folder,) = tmp_path.glob("outputs/runs/*/*")
    status = folders.read_json(folder / "status.json")
    assert (status["status"], status["reason"]) == ("interrupted", "SIGTERM")
    (path,) = checkpoint.written_in(folder)
    assert checkpoint.step_of(path) == status["step"] >= 1


def test_a_job_of_a_sweep_that_was_killed_goes_on(tmp_path):
    words = ["-m", *told(tmp_path / "order", "KILL")]
    first = typed(tmp_path, *words)
    assert first.returncode == 1, first.stdout
    second = typed(tmp_path, *words)
    assert second.returncode == 0, second.stdout + second.stderr
    (folder,) = jobs_in(tmp_path, "unnamed").values()
    result = folders.read_json(folder / "result.json")
    assert (result["status"], result["resumed_at"]) == ("completed", [4])
    assert list(tmp_path.rglob("attempts")) == []
    assert lines(folder) == [2, 4, 6, 8, 10, 12]


def test_a_sweep_takes_no_path_to_go_on_from(tmp_path):
    asked = compose([*MLP, *WORDS, f"trainer.resume={tmp_path}"])
    with pytest.raises(InputError, match=rf"^trainer.resume={tmp_path} names one run, and a sweep has several"):
        lead([(asked, [])], lambda folder, secrets: None)


@pytest.mark.slow
def test_the_mirror_of_a_run_that_went_on_holds_all_its_points(tmp_path):
    words = [*told(tmp_path / "order", "TERM"), "wandb.mode=offline"]
    assert [typed(tmp_path, *words).returncode for _ in range(2)] == [143, 0]
    (folder,) = tmp_path.glob("outputs/runs/*/*")
    (log,) = tmp_path.glob("outputs/wandb/offline-run-*/run-*.wandb")
    (first,) = folder.glob("attempts/wandb/offline-run-*/run-*.wandb")  # the attempt that was stopped, set aside
    assert records(first)[-1]["exit"]["exit_code"] == 1
    told_to_wandb = records(log)
    assert told_to_wandb[-1]["exit"]["exit_code"] == 0
    items = [record["history"]["item"] for record in told_to_wandb if record["type"] == "history"]
    points = [{key: value for key, value in item.items() if not key.startswith("_")} for item in items]
    assert points == [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [item["_timestamp"] for item in items] == [point["perf/unix_s"] for point in points]
    assert [point["train/step"] for point in points] == [2, 4, 6, 8, 10, 12]


# --- scripts/torture.py ------------------------------------------------------------------------


@pytest.mark.slow
def test_twelve_kills_lose_nothing():
    done = script("torture.py", "kills=12", "steps=60", limit_s=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    *cases, last = done.stdout.splitlines()
    assert len(cases) == 6
    assert all(re.match(r"\w+ \w+: 2 kills, \d inside a write.*: equal bit for bit$", line) for line in cases)
    assert [int(re.search(r"(\d+) steps skipped", line).group(1)) > 0 for line in sorted(cases)] == [
        "fp16" in line for line in sorted(cases)
    ]
    assert re.match(r"12 kills, \d+ of them inside a checkpoint's write, in \d+ s: nothing was lost$", last)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["kills=0"], "kills=0 is too small; it must be at least 1."),
        (["precision=fp32"], "precision=fp32 is no setting of this script; valid are kills, steps, seed and at_once."),
    ],
)
def test_settings_that_torture_does_not_have_are_refused(words, sentence):
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        module("torture.py").main(words)


def test_the_comparison_tells_what_differs(tmp_path, alone):
    other = tmp_path / "other"
    shutil.copytree(alone.folder, other)
    assert compared(alone.folder, other) == []
    (newest, *_) = checkpoint.written_in(other)
    state = checkpoint.read(newest)
    state["trainer"]["model"]["parameters"]["layers.0.0.weight"].data[3, 5].mul_(1 + 1e-7)
    torch.save(state, newest)
    recorded = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(recorded[:2] + recorded[1:]))
    result = json.loads((other / "result.json").read_text())
    result["hashes"]["batches"], result["summary"]["final/perf_step_ms_p50"] = "0" * 16, -1.0
    (other / "result.json").write_text(json.dumps(result))
    (other / ".status.json.17").write_text("{")
    found = compared(alone.folder, other)
    assert [difference.partition(":")[0] for difference in found] == [
        "left behind",
        "checkpoint trainer model parameters layers.0.0.weight",
        "metrics.jsonl",
        "result.json hashes batches",
    ]
