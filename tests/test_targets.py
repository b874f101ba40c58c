"""Open sets: what `_target_` finds, how it is called, and one clean sentence when it is wrong."""

import sys

import pytest

from precision_lab.errors import InputError
from precision_lab.targets import bind, instantiate, locate

OWN = """
def schedule(step, total_steps, factor): return factor * step / total_steps
class Task:
    def __init__(self, weight): self.weight = weight
    def __call__(self, model, batch): return self.weight * batch, {}
class Broken:
    def __init__(self): raise RuntimeError("no file")
class Leaves:
    def __init__(self): raise SystemExit(0)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_targets.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_targets", None)


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("nowhere_at_all.Net", "No module named 'nowhere_at_all'"),
        ("torch.nn.Nope", "module 'torch.nn' has no attribute 'Nope'"),
        ("own_broken.Net", "division by zero"),
    ],
)
def test_a_target_that_is_not_there_is_one_sentence_and_nothing_else(own, capfd, target, cause):
    with pytest.raises(InputError) as refused:
        locate("model", {"_target_": target})
    assert str(refused.value) == (
        f"model._target_={target} cannot be loaded ({cause}). "
        "Name an importable class or function; for a file of your own set PYTHONPATH to its folder."
    )
    assert capfd.readouterr() == ("", "")


def test_a_function_is_bound_and_a_class_is_built(own):
    schedule = bind("scheduler", {"_target_": "own_targets.schedule", "factor": 3.0})
    assert schedule(1, 2) == 1.5
    task = bind("task", {"_target_": "own_targets.Task", "kind": "images", "weight": 2})
    assert task(None, 21) == (42, {})


def test_nested_targets_are_built_first():
    built = instantiate("model", {"_target_": "builtins.dict", "kind": None, "inner": {"_target_": "builtins.list"}})
    assert built == {"inner": []}


def test_a_wrong_argument_names_the_target():
    with pytest.raises(InputError, match=r"^model: torch\.nn\.Linear refused its arguments: .*widht'\.$"):
        instantiate("model", {"_target_": "torch.nn.Linear", "widht": 3})


def test_what_a_constructor_raises_is_told_with_its_place(own):
    sentence = r"^model: own_targets\.Broken raised RuntimeError: no file \(.*own_targets\.py, line 7\)\.$"
    with pytest.raises(InputError, match=sentence):
        instantiate("model", {"_target_": "own_targets.Broken"})


def test_what_cannot_be_called_is_refused():
    with pytest.raises(InputError, match=r"^task\._target_=math\.pi is float, not a function or class\.$"):
        bind("task", {"_target_": "math.pi"})


def test_a_class_whose_objects_cannot_be_called_is_refused():
    with pytest.raises(InputError, match=r"^task\._target_=builtins\.dict is a class without __call__; give it one\.$"):
        bind("task", {"_target_": "builtins.dict"})


def test_a_target_that_exits_is_wrong_input_and_not_the_end_of_the_run(own, tmp_path):
    (tmp_path / "own_exit.py").write_text("raise SystemExit(0)")
    with pytest.raises(InputError, match=r"^model\._target_=own_exit\.Net cannot be loaded \(0\)"):
        locate("model", {"_target_": "own_exit.Net"})
    with pytest.raises(InputError, match=r"^model: own_targets\.Leaves called sys\.exit\(0\)\.$"):
        instantiate("model", {"_target_": "own_targets.Leaves"})
