"""The input of a sweep's jobs, tried before the first one starts: classes located, data and models built on the CPU.

In processes forked from the one that asks the machine, so that a crash in a user's code takes nothing along, and torch
is loaded once. Says of each job what is wrong with its input; what a user's own code raises, and what takes too long,
is left to the job itself. Refuses to know folders, and trains nothing.
"""

import copy
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from precision_lab.config import Config, as_values
from precision_lab.errors import InputError, OwnCodeFailed

LIMIT_S = 120.0  # to read data, or for a job on it; one that takes longer finds out for itself


def wrong_input(jobs: list[Config]) -> list[str]:
    """For each job, its arm resolved, what is wrong with its input in a sentence; empty where nothing was found.

    Jobs that differ in nothing but their seed share an answer, and those with the same data read it once.
    """
    kinds: dict[str, list[int]] = {}
    for number, asked in enumerate(jobs):
        kinds.setdefault(_key(as_values(replace(asked, seed=0))), []).append(number)
    by_data: dict[str, list[list[int]]] = {}
    for alike in kinds.values():
        asked = jobs[alike[0]]
        facts = {key: asked.model.get(key) for key, value in asked.dataset.items() if value is None}
        by_data.setdefault(_key([asked.dataset, facts]), []).append(alike)
    found = [""] * len(jobs)
    for group in by_data.values():
        sentences = _tried([jobs[alike[0]] for alike in group])
        for alike, sentence in zip(group, sentences, strict=True):
            for number in alike:
                found[number] = sentence
    return found


def _key(values: Any) -> str:
    return json.dumps(values, sort_keys=True, default=str)


def _tried(jobs: list[Config]) -> list[str]:
    """What is wrong with each of some jobs of the same data; after a crash another process takes up the rest."""
    found: list[str] = []
    while len(found) < len(jobs):
        answers = list(_answers_of_a_process(jobs[len(found) :]))
        if not answers:  # not even the data could be read in time, or without a crash
            return found + [""] * (len(jobs) - len(found))
        found += answers[1:]
        if len(found) < len(jobs):
            found.append("")  # the one that crashed or took too long
    return found


def _answers_of_a_process(jobs: list[Config]) -> Iterator[str]:
    """A word once the data is read, then an answer for each job: as many as come in time."""
    answers, out = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        _answer_and_end(jobs, out)
    out.close()
    try:
        for _ in (None, *jobs):
            if not answers.poll(LIMIT_S):
                return
            yield answers.recv()
    except EOFError:
        return
    finally:
        answers.close()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _answer_and_end(jobs: list[Config], out: Connection) -> None:
    try:
        os.dup2(2, 1)  # whatever is printed here is no part of the survey's answer
        _answer(jobs, out)
    finally:
        os._exit(0)  # what this process inherited is its parent's to close


def _answer(jobs: list[Config], out: Connection) -> None:
    import torch

    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    built: dict[str, Any] = {}
    wrong = _sentence(_read, jobs[0], built)
    out.send("read")
    for asked in jobs:
        out.send(_sentence(_build, asked, built) if "data" in built else wrong)


def _sentence(action: Callable[[Config, dict[str, Any]], None], asked: Config, built: dict[str, Any]) -> str:
    """What the action says of the input; empty if nothing, or if it is for the job itself to say."""
    try:
        action(asked, built)
    except InputError as error:
        return "" if isinstance(error, OwnCodeFailed) else str(error)
    except (Exception, SystemExit):
        pass
    return ""


def _read(asked: Config, built: dict[str, Any]) -> None:
    from precision_lab import assemble, targets

    targets.locate("dataset", asked.dataset)
    built["data"] = assemble.build_data(assemble.dataset_of(asked))


def _build(asked: Config, built: dict[str, Any]) -> None:
    """All that can refuse an input without a device and without an optimizer, whose making loads a compiler."""
    import torch

    from precision_lab import assemble, targets
    from precision_lab.batches import TrainBatches
    from precision_lab.optim import check_schedule
    from precision_lab.precision import Policy

    assemble.locate_all(asked)
    samples, plan = built["data"].train, asked.trainer
    steps = assemble.total_steps(plan, len(samples))
    TrainBatches(samples, plan.batch_size, asked.seed, lambda batch: batch)
    model = _key(asked.model)
    if built.get("named") != model:
        built["model"] = assemble.build_model(asked, built["data"])
        built["named"] = model
    targets.bind("task", asked.task)
    check_schedule(targets.bind("scheduler", asked.scheduler), steps)
    Policy(asked.precision, torch.device("cpu")).prepare(copy.deepcopy(built["model"]))
