"""The shape of the code, read and not run: who imports whom, how long things get, what is said about them."""

import ast
from functools import cache
from pathlib import Path

import pytest

from precision_lab.config import ROOT

SRC = ROOT / "src" / "precision_lab"
FILES = sorted(SRC.rglob("*.py"))
ALL_FILES = [*FILES, ROOT / "train.py", *sorted((ROOT / "scripts").glob("*.py"))]
ALL_FILES += sorted((ROOT / "src" / "hydra_plugins").glob("*.py"))

# What must answer before torch is loaded, or in a process without it.
TORCH_FREE = ["config", "open_sets", "errors", "wording", "identity", "targets", "recorder", "terminal"]
TORCH_FREE += [
    "arm_schema",
    "settings",
    "logs",
    "folders",
    "stops",
    "redaction",
    "ratios",
    "losses",
    "processes",
    "sweep.plan",
    "sweep.view",
]
TORCH_FREE += ["report.read", "report.compare", "report.warnings", "report.reading", "report.render", "report.files"]
TORCH_FREE += ["report.sources"]
TORCH_FREE += ["report.stored", "report.loss", "report.verdict", "report.timed"]
TORCH_FREE += ["report.curves", "report.drawing", "report.charts", "report.page", "report.to_wandb"]
TORCH_FREE += ["probe.op_rows", "probe.op_tables"]
TORCH_FREE += ["tracking.mirror", "tracking.words", "tracking.of_folder", "tracking.of_benchmark", "columns"]
TORCH_FREE += ["tracking.runs", "tracking.inspector", "tracking.server", "tracking.patience"]
TORCH_FREE += ["probe.predictions", "arguments", "ranges", "report.memory", "code", "streams", "sizes", "findings"]
MAY_IMPORT = {
    "wandb": {"tracking.mirror", "tracking.server"},
    "wandb_workspaces": {"tracking.view"},
    "altair": {"report.drawing"},
    "vl_convert": {"report.drawing"},
    "jinja2": {"report.page"},
    "hydra": {"config", "targets"},
    "omegaconf": {"arm_schema", "config", "settings", "wording"},
}
# The one way that imports run: a module may import from those further right, never from those further left.
LAYERS = [
    {"sweep", "report", "largest_batch", "benchmark", "torture", "diagnosis"},
    {"processes"},
    {"entry"},
    {"run", "replay", "check", "fitting", "inspection", "op_maps"},
    {"assemble"},
    {"trainer"},
    {
        "precision",
        "task",
        "meter",
        "recorder",
        "probe",
        "emulation",
        "batches",
        "loading",
        "optim",
        "tracking",
        "terminal",
        "environment",
        "folders",
        "stops",
        "ratios",
        "columns",
        "losses",
        "findings",
        "checkpoint",
        "resume",
        "logs",
        "run_folder",
    },
    {
        "models",
        "lessons",
        "datasets",
        "hardware",
        "hashing",
        "nested",
        "seeds",
        "identity",
        "targets",
        "arms",
        "settings",
        "code",
    },
    {"image_files", "torchvision_files"},
    {"config", "arm_schema", "open_sets", "arguments", "ranges", "wording", "errors", "redaction", "streams", "sizes"},
]
BANNED_NAMES = ("util", "utils", "manager", "helpers", "common", "misc", "engine")
LINES_OF_A_FILE, LINES_OF_A_FUNCTION, DEPTH = 410, 60, 4


def name_of(path: Path) -> str:
    """`probe/memory.py` -> `probe.memory`."""
    if not path.is_relative_to(SRC):
        return path.relative_to(ROOT).as_posix()
    return path.relative_to(SRC).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


MODULES = {name_of(path): path for path in FILES if path.parent != SRC or path.stem != "__init__"}


def imports(path: Path, whole: bool = True) -> set[str]:
    """Dotted names that a file imports; `from a import b` gives a.b. Not `whole`: when it is loaded only."""
    nodes = ast.walk(tree(path)) if whole else iter(loaded_with(tree(path)))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def loaded_with(node: ast.AST):
    """All nodes that run when the module is loaded: not those inside functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from loaded_with(child)


def packages(path: Path, whole: bool = True) -> set[str]:
    return {name.partition(".")[0] for name in imports(path, whole)}


def internal(path: Path, whole: bool = True) -> set[str]:
    """Our own modules that a file imports."""
    ours = (name.removeprefix("precision_lab.") for name in imports(path, whole) if name.startswith("precision_lab."))
    return {best for name in ours if (best := known_prefix(name))}


def known_prefix(name: str) -> str:
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def reachable(start: str, whole: bool = True) -> set[str]:
    seen, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += internal(MODULES[name], whole)
    return seen


def test_the_walk_finds_the_package():
    assert len(FILES) >= 24
    assert {"config", "trainer", "probe.memory", "probe.ops"} <= set(MODULES)
    assert "torch" in packages(MODULES["trainer"])
    assert "precision" in internal(MODULES["trainer"])


# --- who imports whom ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", TORCH_FREE)
def test_no_torch_here_nor_in_what_is_imported_from_here(name):
    torch_users = {one for one in reachable(name) if packages(MODULES[one]) & {"torch", "torchvision"}}
    assert torch_users == set()


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_is_imported_where_the_table_says(package):
    assert {name for name, path in MODULES.items() if package in packages(path)} == MAY_IMPORT[package]


@pytest.mark.parametrize("name", sorted(MAY_IMPORT["wandb"]))
def test_wandb_is_imported_only_when_it_is_wanted(name):
    assert "wandb" not in packages(MODULES[name], whole=False)


@pytest.mark.parametrize("path", ALL_FILES[len(FILES) :], ids=lambda path: path.name)
def test_a_script_does_not_import_wandb(path):
    assert "wandb" not in packages(path)


def test_what_leads_a_sweep_loads_no_torch():
    """One process asks the machine, one runs each job: in both torch comes in when it is called."""
    loaded = set().union(*(reachable(name, whole=False) for name in MODULES if name.startswith("sweep.")))
    assert {
        name for name in loaded if packages(MODULES[name], whole=False) & {"torch", "torchvision", "wandb"}
    } == set()
    plugin = ROOT / "src" / "hydra_plugins" / "precision_lab_sweeps.py"
    assert internal(plugin, whole=False) == set()  # Hydra imports it at every start


def test_the_entrypoint_loads_no_torch():
    path = ROOT / "train.py"
    standard = {"os", "signal", "sys", "traceback"}
    assert packages(path, whole=False) <= standard | {"hydra", "omegaconf", "yaml", "precision_lab"}
    loaded = set().union(*(reachable(name, whole=False) for name in internal(path, whole=False)))
    assert {name for name in loaded if "torch" in packages(MODULES[name], whole=False)} == set()
    assert "run" in internal(path) - internal(path, whole=False)  # comes in when the input is known to be right


def test_imports_run_one_way():
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    placed = {name: level.get(name.partition(".")[0]) for name in MODULES}
    assert [name for name, where in placed.items() if where is None] == []
    for name, path in MODULES.items():
        for other in internal(path):
            same_package = name.partition(".")[0] == other.partition(".")[0]
            if placed[name] is not None and placed[other] is not None and not same_package:
                assert placed[other] >= placed[name], f"{name} imports {other}"


def test_no_circular_imports():
    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in sorted(internal(MODULES[name])):
                visit(other, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in MODULES:
        visit(name, ())
    assert done == set(MODULES)


# --- switches and calls that must not be used --------------------------------------------------------


@pytest.mark.parametrize("path", ALL_FILES, ids=name_of)
def test_no_old_switch_and_no_old_name(path):
    """`allow_tf32` raises once fp32_precision was used; torch.cuda.amp warns; is_bf16_supported must be told."""
    for node in ast.walk(tree(path)):
        assert getattr(node, "attr", None) not in ("allow_tf32", "set_float32_matmul_precision"), node.lineno
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("torch.cuda.amp", "torch.cpu.amp"), node.lineno
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value != "allow_tf32"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("is_bf16_supported"):
            assert "including_emulation=False" in ast.unparse(node)
    assert not any(name.startswith(("torch.cuda.amp", "torch.cpu.amp")) for name in imports(path))


@pytest.mark.parametrize("path", ALL_FILES, ids=name_of)
def test_autocast_and_scaler_are_always_told_the_device(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.autocast", "torch.amp.GradScaler"):
            assert node.args, f"line {node.lineno}"
            told = {keyword.arg for keyword in node.keywords}
            off = any(k.arg == "enabled" and ast.unparse(k.value) == "False" for k in node.keywords)
            assert off or "dtype" in told or "GradScaler" in ast.unparse(node.func), f"line {node.lineno}"


# --- size ------------------------------------------------------------------------------------------------


def functions(path: Path):
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def depth(node: ast.AST) -> int:
    """Deepest nesting of for, while, if, with, try and match; an elif is no deeper than its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue  # measured by itself
        opens = isinstance(child, ast.For | ast.While | ast.If | ast.With | ast.Try | ast.Match)
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (opens and not is_elif))
    return deepest


def test_depth_counts():
    assert depth(ast.parse("for x in y:\n  if x:\n    pass\n  elif y:\n    pass\n  elif z:\n    pass")) == 2
    assert (
        depth(
            ast.parse("def f():\n  with x:\n    while y:\n      try:\n        if z: pass\n      finally: pass").body[0]
        )
        == 4
    )


@pytest.mark.parametrize("path", ALL_FILES, ids=name_of)
def test_a_file_stays_readable(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_OF_A_FILE
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(path)}
    assert {name: lines for name, lines in long.items() if lines > LINES_OF_A_FUNCTION} == {}
    deep = {f.name: depth(f) for f in functions(path)}
    assert {name: levels for name, levels in deep.items() if levels > DEPTH} == {}


def test_no_file_is_named_for_nothing():
    for path in ALL_FILES:
        assert not set(path.stem.split("_")) & set(BANNED_NAMES), path
        assert path.parent.name not in BANNED_NAMES, path


# --- words --------------------------------------------------------------------------------------------------


def public(path: Path):
    """Functions and classes at the top of a module, and the methods of those classes, without a leading underscore."""
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and (
                    not method.name.startswith("_") or method.name == "__init__"
                ):
                    yield f"{node.name}.{method.name}", method


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_public_functions_are_annotated(path):
    for name, node in public(path):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [a for a in (node.args.vararg, node.args.kwarg) if a]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            assert bare == [], name
            assert node.returns is not None or name.endswith("__init__"), name


@pytest.mark.parametrize("path", [path for path in ALL_FILES if path.stat().st_size], ids=name_of)
def test_every_module_says_what_it_knows(path):
    assert len(ast.get_docstring(tree(path)) or "") > 40


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_public_functions_and_classes_are_described(path):
    silent = [name for name, node in public(path) if "." not in name and not ast.get_docstring(node)]
    assert silent == []
