"""Samples through torch's DataLoader, in this process or in data workers; what goes wrong there is raised here.

A dataset's exception arrives with its own type and words, wherever it was raised. A worker that dies is told by the
read that waits for it: torch's own handler of SIGCHLD would raise wherever the run happens to be.
"""

import os
import pickle
import signal
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import active_children, connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from precision_lab.seeds import PrivateRandomness, derive

SETTLING_S = 1.0  # a worker's connections break before its end is known


class WorkerDied(RuntimeError):
    """A data worker ended before its work: the text is a sentence for the reader."""


def load(dataset: Dataset, numbered: Iterable[list[int]], seed: int, workers: int, pin: bool) -> Iterator[Any]:
    """A batch on the CPU for each [its number, its samples' indices...], in order.

    Random augmentations follow (seed, number) alone. Raises WorkerDied, or what the dataset raises.
    """
    loader = DataLoader(
        _SeededBatches(dataset, seed),
        batch_sampler=numbered,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator().manual_seed(seed),  # else it draws its seed from the global generator
        pin_memory=pin,  # would start a CUDA context, which a run on the CPU has no use for
    )
    for batch in _from_workers(loader) if workers else loader:
        if isinstance(batch, _Raised):
            raise batch.error
        yield batch


def _from_workers(loader: DataLoader) -> Iterator[Any]:
    others, handler = set(active_children()), signal.getsignal(signal.SIGCHLD)
    try:
        batches = iter(loader)
    except OSError as error:  # no memory, or too many processes
        raise WorkerDied(
            f"A data worker could not be started ({error.strerror}): set fewer trainer.workers."
        ) from error
    finally:
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
    workers = [child for child in active_children() if child not in others]
    try:
        yield from batches
    except Exception as error:  # a broken connection, a time-out, or torch's word for a death
        connection.wait([worker.sentinel for worker in workers], SETTLING_S)
        dead = [worker for worker in workers if worker.exitcode is not None]
        for worker in workers:  # one that died holding a lock would keep the others for ever
            worker.terminate()
        if not dead:
            raise
        raise WorkerDied(_last_words(dead[0])) from error


def _last_words(worker: BaseProcess) -> str:
    if worker.exitcode >= 0:
        return (
            f"A data worker (process {worker.pid}) exited with code {worker.exitcode} before its work was done; "
            "trainer.workers=0 shows where in the dataset's code."
        )
    name = {number.value: number.name for number in signal.Signals}.get(-worker.exitcode, f"signal {-worker.exitcode}")
    cause = {
        "SIGKILL": "perhaps for want of memory: set fewer trainer.workers",
        "SIGBUS": "perhaps for want of shared memory (/dev/shm): set fewer trainer.workers",
    }.get(name, "perhaps by a fault in a library of the dataset's: trainer.workers=0 shows where")
    return f"A data worker (process {worker.pid}) was ended by {name}, {cause}."


class _SeededBatches(Dataset):
    """Batches drawn under a random stream of their own, however many workers share them.

    So a random augmentation gives the same batch in every arm, and shifts no dropout mask.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, numbered: list[int]) -> Any:
        number, *indices = numbered
        try:
            with PrivateRandomness(derive(self._seed, f"batch {number}")):
                if hasattr(self._dataset, "__getitems__"):
                    samples = self._dataset.__getitems__(indices)
                else:
                    samples = [self._dataset[index] for index in indices]
            return default_collate(samples)
        except (Exception, SystemExit) as error:
            return _Raised(error)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Raised:
    """An exception on its way to the run. From a worker it comes with the traceback as its cause's text."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple:
        text = "".join(traceback.format_exception(self.error))
        try:
            packed = pickle.dumps(self.error)
            copy = pickle.loads(packed)
            same = (type(copy), str(copy)) == (type(self.error), str(self.error))
        except Exception:  # one that takes other arguments than it keeps
            same = False
        if not same:
            packed = pickle.dumps(RuntimeError(f"{type(self.error).__name__}: {self.error}"))
        return _unpacked, (packed, text)


def _unpacked(packed: bytes, text: str) -> _Raised:
    error = pickle.loads(packed)
    error.__cause__ = _InWorker(f"\n{text}")
    return _Raised(error)


class _InWorker(Exception):
    """The traceback of an exception in a data worker, as text."""


def _leave_signals_to_the_run(worker: int) -> None:
    """A worker has no result to save: the run ends it, and a signal to the run's group does not reach it."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the run's handler, which it inherited
    os.setpgrp()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
