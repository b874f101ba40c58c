"""conf/wandb_sweep: what W&B's agents would start, word for word, is what was meant."""

import itertools
import math
import random

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from precision_lab.config import CONF, ROOT, compose
from precision_lab.recorder import METRICS

FILES = sorted(path.stem for path in (CONF / "wandb_sweep").glob("*.yaml"))
KNOWN = {"program", "project", "method", "metric", "parameters", "command", "run_cap"}


def stated(name):
    return yaml.safe_load((CONF / "wandb_sweep" / f"{name}.yaml").read_text())


def asked_by(search, values):
    """What a run is asked for when an agent gives it these values."""
    before = search["command"][: search["command"].index("${args_no_hyphens}")]
    assert before[:3] == ["${env}", "${interpreter}", "${program}"]
    words = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    return compose([*before[3:], *words["args_no_hyphens"]])


def got(asked):
    return {"precision": asked.precision.name, "seed": asked.seed, "optimizer.lr": asked.optimizer["lr"]}


def drawn(parameters, draw):
    """One value of each, as the file's distribution has it."""
    values = {}
    for key, choice in parameters.items():
        if "distribution" in choice:
            assert choice["distribution"] == "log_uniform_values"
            ends = math.log(choice["min"]), math.log(choice["max"])
            values[key] = math.exp(draw.uniform(*ends))
        else:
            values[key] = draw.choice(choice.get("values") or [choice["value"]])
    return values


def test_there_is_a_grid_a_random_and_a_bayesian_search():
    assert {name: stated(name)["method"] for name in FILES} == {"grid": "grid", "random": "random", "bayes": "bayes"}


@pytest.mark.parametrize("name", FILES)
def test_a_search_is_one_that_w_and_b_and_the_repository_know(name):
    search = stated(name)
    assert set(search) <= KNOWN
    assert (ROOT / search["program"]).is_file()
    assert search["metric"]["goal"] == "minimize"
    assert METRICS[search["metric"]["name"].removeprefix("final/").replace("_", "/", 1)].better == "lower"
    assert name == "grid" or search["run_cap"] > 0  # else it has no end
    for key, choice in search["parameters"].items():
        assert set(choice) in ({"values"}, {"value"}, {"distribution", "min", "max"}), key


def test_every_combination_of_the_grid_composes():
    search = stated("grid")
    keys = list(search["parameters"])
    found = []
    for values in itertools.product(*(search["parameters"][key]["values"] for key in keys)):
        given = dict(zip(keys, values, strict=True))
        asked = asked_by(search, given)
        assert {key: got(asked)[key] for key in keys} == given
        assert asked.wandb.mode.name == "online"
        found.append((asked.precision.name, asked.seed))
    assert len(set(found)) == len(found) == 9


@pytest.mark.parametrize("name", ["random", "bayes"])
def test_a_sample_of_a_search_composes(name):
    search, draw = stated(name), random.Random(0)
    samples = [drawn(search["parameters"], draw) for _ in range(12)]
    rate = search["parameters"]["optimizer.lr"]
    samples += [samples[0] | {"optimizer.lr": end} for end in (rate["min"], rate["max"])]
    for values in samples:
        asked = asked_by(search, values)
        assert got(asked) == values
        assert asked.wandb.mode.name == "online"
    assert {values["precision"] for values in samples} == {"fp32", "bf16", "fp16"}
