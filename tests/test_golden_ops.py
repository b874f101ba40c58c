"""Golden op maps: which dtype every operation of four small models takes on three targets, as somebody read them.

    python tests/test_golden_ops.py --write      (the only way the files change; read the diff before you commit it)

The lists of autocast change with torch, and so do kernels: a file is compared only on the minor version in its header.
"""

import sys
import warnings
from pathlib import Path

import pytest
import torch

from precision_lab.config import compose
from precision_lab.op_maps import predicted
from precision_lab.probe.op_tables import lines

FOLDER = Path(__file__).parent / "golden" / "ops"
IMAGES = "dataset=synthetic_images dataset.samples=20 dataset.channels=3 dataset.num_classes=10"
MODELS = {
    "mlp": "model=mlp model.hidden=[16,16] dataset=digits",
    "cnn": f"model=cnn model.widths=[8,16] {IMAGES} dataset.image_size=8",
    "gpt": "model=gpt model.layers=1 model.heads=2 model.width=32 model.context=16 model.dropout=0.1 "
    "dataset=synthetic_tokens dataset.samples=20 dataset.vocab_size=50",
    "resnet18": f"model=resnet18 model.image_size=32 {IMAGES} dataset.image_size=32",
}
PRECISIONS, TARGETS = ("bf16", "fp16"), ("cpu", "cuda", "mps")
COMMON = "trainer.batch_size=2 seed=0 device=cpu"
TORCH = ".".join(torch.__version__.split(".")[:2])
FILES = [(model, precision, target) for model in MODELS for precision in PRECISIONS for target in TARGETS]


def path_of(model: str, precision: str, target: str) -> Path:
    return FOLDER / f"{model}_{precision}_{target}.txt"


def text_of(model: str, precision: str, target: str) -> str:
    """The whole file, as it is now."""
    words = f"{MODELS[model]} {COMMON} precision={precision}"
    rows = predicted(compose(words.split()), target).rows
    header = f"# torch: {TORCH}\n# command: python scripts/inspect_ops.py {words} target={target} by=module\n"
    return header + lines(rows)


@pytest.mark.parametrize(("model", "precision", "target"), FILES)
def test_the_op_map_is_the_golden_one(model, precision, target):
    golden = path_of(model, precision, target).read_text()
    version = golden.splitlines()[0].removeprefix("# torch: ")
    if version != TORCH:
        pytest.skip(f"the file is of torch {version}, and this is {TORCH}: lists and kernels may differ")
    assert text_of(model, precision, target) == golden


def gives(model: str, precision: str, target: str, op: str) -> set[str]:
    """The dtypes that an operation gives in a golden file, over all modules and both phases."""
    rows = [line.split(maxsplit=3) for line in path_of(model, precision, target).read_text().splitlines()]
    found = {
        row[3].partition(" -> ")[2]
        for row in rows
        if len(row) == 4 and row[0] in ("forward", "backward") and row[2] == op
    }
    assert found, op
    return found


@pytest.mark.parametrize(("precision", "low"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_golden_maps_hold_what_is_known_of_the_targets(precision, low):
    """So that files written anew by mistake are not taken for right."""
    for target in TARGETS:
        for model, op in (
            ("mlp", "addmm"),
            ("mlp", "mm"),
            ("cnn", "convolution"),
            ("resnet18", "convolution_backward"),
        ):
            assert gives(model, precision, target, op) == {low}
        assert gives("gpt", precision, target, "native_layer_norm") == {"float32"}  # its input is float32 everywhere
        assert gives("gpt", precision, target, "_log_softmax") == {"float32"}
        # batch norm takes what comes in, but for mps, which alone has it on its list
        batch_norm = {"float32"} if target == "mps" else {f"{low}, float32"}
        assert gives("resnet18", precision, target, "native_batch_norm") == batch_norm
        assert gives("resnet18", precision, target, "add_") == ({"float32"} if target == "mps" else {low})


def test_every_file_is_one_of_these():
    assert sorted(FOLDER.glob("*")) == sorted(path_of(*one) for one in FILES)


def write() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for one in FILES:
        path_of(*one).write_text(text_of(*one))
        print(f"wrote {path_of(*one)}", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_golden_ops.py --write")
    write()
