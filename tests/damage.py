"""What can happen to a run's folder: each damage with its name, done to a copy of a real one. From a seed.

`REDONE` are the damages after which a file is as good as gone: what is left of the run may go on or start over.
"""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = b"[" * 100_000 + b"]" * 100_000
OBJECTS = ("status.json", "result.json", "environment.json")
FILES = (*OBJECTS, "config.yaml", "metrics.jsonl", "train.log", "checkpoints/NEWEST")


def _bytes(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Path, random.Random], None]:
    return lambda path, generator: path.write_bytes(change(path.read_bytes(), generator)) and None


def _replaced(make: Callable[[Path], None]) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, generator: random.Random) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return damage


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # an address may have 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def _flipped(content: bytes, generator: random.Random) -> bytes:
    where = generator.randrange(len(content))
    return content[:where] + bytes([content[where] ^ 1 << generator.randrange(8)]) + content[where + 1 :]


ANY_FILE = {
    "cut in the middle": _bytes(lambda content, generator: content[: generator.randrange(1, len(content))]),
    "empty": _replaced(lambda path: path.touch()),
    "one bit flipped": _bytes(_flipped),
    "random bytes": _bytes(lambda content, generator: generator.randbytes(3000)),
    "no UTF-8": _bytes(lambda content, generator: b"\xff\xfe\x80" + content),
    "zeros": _bytes(lambda content, generator: bytes(len(content))),
    "of another program": _bytes(lambda content, generator: b'<?xml version="1.0"?>\n<run status="completed"/>\n'),
    "a folder": _replaced(lambda path: path.mkdir()),
    "gone": _replaced(lambda path: None),
    "a link to nowhere": _replaced(lambda path: path.symlink_to("/nowhere/at/all")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "a link to the folder above": _replaced(lambda path: path.symlink_to("..")),
    "a pipe": _replaced(os.mkfifo),
    "a socket": _replaced(_socket),
    "a device": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "nested too deeply": _bytes(lambda content, generator: DEEP),
}


def _in_json(change: Callable[[dict[str, Any], random.Random], Any]) -> Callable[[Path, random.Random], None]:
    """A change of what the file's object holds, or each line's."""

    def damage(path: Path, generator: random.Random) -> None:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("\n".join(json.dumps(change(json.loads(line), generator)) for line in lines) + "\n")

    return damage


def _other(value: Any, generator: random.Random) -> Any:
    """A value of another type."""
    kinds = (None, True, -1, 1e308, "text", "", [], [None], {}, {"a": {"b": []}}, 10**400)
    return generator.choice([one for one in kinds if type(one) is not type(value)])


def _one_of(values: dict[str, Any], generator: random.Random, depth: int = 0) -> dict[str, Any]:
    """One value, at whatever depth, by one of another type."""
    key = generator.choice(sorted(values))
    inner = values[key]
    deeper = isinstance(inner, dict) and inner and generator.random() < 0.7
    return values | {key: _one_of(inner, generator, depth + 1) if deeper else _other(inner, generator)}


def _each(values: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(values, dict):
        return {key: _each(value, change) for key, value in values.items()}
    if isinstance(values, list):
        return [_each(value, change) for value in values]
    return change(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


JSON_FILE = {
    "a list": _in_json(lambda values, generator: [values]),
    "null": _in_json(lambda values, generator: None),
    "a number": _in_json(lambda values, generator: 5),
    "nothing in it": _in_json(lambda values, generator: {}),
    "numbers as text": _in_json(lambda v, g: _each(v, lambda one: str(one) if _is_number(one) else one)),
    "texts as numbers": _in_json(lambda v, g: _each(v, lambda one: 7 if isinstance(one, str) else one)),
    "nulls": _in_json(lambda v, g: _each(v, lambda one: None)),
    "NaN": _in_json(lambda v, g: _each(v, lambda one: float("nan") if _is_number(one) else one)),
    "Infinity": _in_json(lambda v, g: _each(v, lambda one: float("inf") if _is_number(one) else one)),
    "huge numbers": _in_json(lambda v, g: _each(v, lambda one: 10**400 if _is_number(one) else one)),
    "negative numbers": _in_json(lambda v, g: _each(v, lambda one: -one if _is_number(one) else one)),
    "huge floats": _bytes(lambda content, generator: content.replace(b": 0", b": 1e999").replace(b": 1", b": 1e999")),
    "lists": _in_json(lambda v, g: _each(v, lambda one: [one])),
    "newlines and escapes": _in_json(lambda v, g: _each(v, lambda t: f"\x1b[2J{t}\n\r" if isinstance(t, str) else t)),
    "half characters": _in_json(lambda v, g: _each(v, lambda t: f"\udcff{t}" if isinstance(t, str) else t)),
    **{f"one value of another type ({n})": _in_json(_one_of) for n in range(6)},
}
YAML_FILE = {
    "no mapping": _bytes(lambda content, generator: b"- a\n- b\n"),
    "a tag that runs code": _bytes(lambda content, generator: b"!!python/object/apply:os.system ['touch /tmp/ran']\n"),
    "open brackets": _bytes(lambda content, generator: content + b"{[\n"),
    "unknown keys": _bytes(lambda content, generator: content + b"nope: 1\n"),
    "an anchor that doubles": _bytes(
        lambda content, generator: (
            b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
            + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9))
        )
    ),
}


def _newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*.pt"), default=folder / "checkpoints" / "step_00000001.pt")


def _all_files(folder: Path, change: Callable[[Path, random.Random], None], generator: random.Random) -> None:
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        change(path, generator)


def damages() -> dict[str, Callable[[Path], None]]:
    """name -> what does it to a run's folder. Of a run without checkpoints those of checkpoints do nothing."""
    made: dict[str, Callable[[Path], None]] = {}

    def add(name: str, file: str, change: Callable[[Path, random.Random], None]) -> None:
        def damage(folder: Path) -> None:
            path = folder / file if file != "checkpoints/NEWEST" else _newest(folder)
            if path.exists():
                change(path, random.Random(name))

        made[name] = damage

    for file in FILES:
        more = JSON_FILE if ".json" in file else YAML_FILE if file.endswith(".yaml") else {}
        for what, change in (ANY_FILE | more).items():
            add(f"{file}: {what}", file, change)
    for what in ("empty", "a link to nowhere", "a link to itself", "a link to the folder above", "a pipe"):
        add(f"checkpoints: {what}", "checkpoints", ANY_FILE[what])
    for what in (
        "cut in the middle",
        "empty",
        "random bytes",
        "no UTF-8",
        "a folder",
        "a link to itself",
        "gone",
        "a pipe",
    ):
        made[f"all files: {what}"] = lambda folder, what=what: _all_files(folder, ANY_FILE[what], random.Random(what))
    made["strange neighbours"] = _strange_neighbours
    made["a loop of links"] = lambda folder: (folder / "attempts").symlink_to(folder, target_is_directory=True)
    return made


def _strange_neighbours(folder: Path) -> None:
    for name in ("a\nb", "\x1b[31m", "-rf", "ü" * 100, "checkpoints\n", " ", "result.json.tmp", ".status.json.99"):
        (folder / name).write_text("foreign")
    (folder / "attempts").write_text("no folder")
    if (folder / "checkpoints").is_dir():
        for name in ("step_.pt", "step_x.pt", "step_99999999999999999999.pt", "step_00000009.pt.left", "step_-1.pt"):
            (folder / "checkpoints" / name).write_text("foreign")
        (folder / "checkpoints" / "step_00000777.pt").mkdir()


def chosen(count: int, seed: int) -> list[str]:
    """Names of so many damages, spread over what there is."""
    names = sorted(damages())
    random.Random(seed).shuffle(names)
    return names[:count]
