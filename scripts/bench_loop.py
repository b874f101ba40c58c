"""What the training loop costs: ratio of its step time to a hand-written loop's, in alternation.

    python scripts/bench_loop.py [pairs=120]

Both train the same MLP from equal weights on equal batches with the same fused optimizer, one
thread. The hand-written loop runs in blocks between blocks of ours, from inside the iterator that
hands out our batches, so that `Trainer.train` runs whole and a drift of the machine hits both.
A ratio is exp(median over pairs of log(ours / by hand)), see `precision_lab.ratios`.
Both loops are built anew ten times, since where a model lies in memory moves its step time too.
"""

import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from precision_lab.config import compose
from precision_lab.entry import exit_code
from precision_lab.errors import InputError
from precision_lab.meter import Meter
from precision_lab.models import MLP
from precision_lab.optim import build_optimizer
from precision_lab.precision import Policy
from precision_lab.ratios import ratio_of
from precision_lab.recorder import Recorder
from precision_lab.task import Classification
from precision_lab.trainer import Trainer

BATCH, IMAGE_SIZE, CLASSES = 64, 16, 10
ROUNDS = 10
DEVICE = torch.device("cpu")


def build(precision: str, width: int) -> tuple:
    asked = compose([f"precision={precision}", "scheduler=constant"])
    torch.manual_seed(0)
    model = MLP(num_classes=CLASSES, channels=1, image_size=IMAGE_SIZE, hidden=[width, width])
    return asked, Policy(asked.precision, DEVICE), model, build_optimizer(asked.optimizer, model)


def by_hand(precision: str, width: int, batches: list, clip: bool) -> Callable[[int], None]:
    """The loop as one would write it down for this one arm."""
    asked, policy, model, optimizer = build(precision, width)
    max_norm, dtype = asked.trainer.grad_clip, policy.autocast_dtype
    model.train()

    def step_fp32(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    def step_autocast(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return F.cross_entropy(model(images), labels)

    loss_of = step_autocast if dtype else step_fp32

    def run(steps: int) -> None:
        for i in range(steps):
            optimizer.zero_grad()
            loss_of(*batches[i % len(batches)]).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()

    return run


def measure(precision: str, width: int, block: int, log_every: int, pairs: int, clip: bool) -> list[list[tuple]]:
    """(ours, by hand) seconds of `pairs` pairs of blocks of `block` steps by round, order alternating."""
    return [_round(precision, width, block, log_every, pairs // ROUNDS, clip) for _ in range(ROUNDS)]


def _round(precision: str, width: int, block: int, log_every: int, pairs: int, clip: bool) -> list[tuple]:
    batches = make_batches()
    hand = by_hand(precision, width, batches, clip)
    asked, policy, model, optimizer = build(precision, width)
    blocks = pairs + 2
    total = block * blocks + 1  # a block's time is known when the batch after it is asked for
    plan = replace(asked.trainer, steps=total, batch_size=BATCH, log_every=log_every)
    trainer = Trainer(plan, policy, Classification(), model, optimizer, lambda step, total: 1.0)
    times: list[tuple] = []

    def alternating() -> Iterator:
        for pair in range(blocks + 1):
            before = timed(hand, block) if pair % 2 else None
            start = time.perf_counter()
            yield from (batches[i % len(batches)] for i in range(block))
            ours = time.perf_counter() - start
            times.append((ours, before or timed(hand, block)))

    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), [])
        trainer.train(alternating(), Meter(DEVICE, 0), total, lambda done, figures: recorder.log(done.step, figures))
    return times[2:]  # the first pairs allocate, import and warm up


def timed(run: Callable[[int], None], steps: int) -> float:
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start


def make_batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shape = (BATCH, 1, IMAGE_SIZE, IMAGE_SIZE)
    return [(torch.randn(shape, generator=draw), torch.randint(CLASSES, (BATCH,), generator=draw)) for _ in range(8)]


def width_for(milliseconds: float) -> int:
    """The hidden width at which a float32 step by hand takes about this long here."""
    for width in range(128, 2048, 32):
        run = by_hand("fp32", width, make_batches(), clip=True)
        run(5)
        if min(timed(run, 5) for _ in range(5)) / 5 * 1e3 >= milliseconds:
            return width
    return 2048


def pairs_in(words: list[str]) -> int:
    given = " ".join(words) or "pairs=120"
    match = re.fullmatch(r"pairs=(\d+)", given)
    if not match or int(match.group(1)) < ROUNDS:
        raise InputError(f"{given} is not valid; write pairs=N with N at least {ROUNDS}, one pair a round.")
    return int(match.group(1))


def main(words: list[str]) -> int:
    pairs = pairs_in(words)
    torch.set_num_threads(1)
    width = width_for(2.0)
    default = compose([]).trainer.log_every
    print(f"MLP {IMAGE_SIZE * IMAGE_SIZE}-{width}-{width}-{CLASSES}, batch {BATCH}, one thread, {pairs} pairs")
    cases = [
        ("by a loop that clips, logging off", 5, 10**9, True),
        (f"by a loop that clips, logging every {default} steps", default, default, True),
        ("by a loop without clipping, logging off", 5, 10**9, False),
    ]
    for precision in ("fp32", "bf16"):
        for words, block, log_every, clip in cases:
            rounds = measure(precision, width, block, log_every, pairs, clip)
            ratio = ratio_of([[math.log(ours / hand) for ours, hand in times] for times in rounds])
            hand_ms = statistics.median(hand for times in rounds for _, hand in times) / block * 1e3
            print(f"{precision} {words}: ratio {ratio} of {hand_ms:.2f} ms a step", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
