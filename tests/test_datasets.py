"""Datasets: what a split holds, the order of batches, hashes, and the sentences they refuse with."""

import ast
import importlib
import inspect
import random
import re
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import Dataset, Subset

from precision_lab import datasets
from precision_lab.batches import TrainBatches, eval_batches, place_on
from precision_lab.datasets import Data, TensorSamples, as_data
from precision_lab.errors import InputError
from precision_lab.hashing import content_hash
from precision_lab.open_sets import TORCHVISION_FILES

CONF = Path(__file__).parents[1] / "conf"


def unmoved(batch):
    return batch


def numbered(length: int) -> TensorSamples:
    """Samples that tell their own index: ([2i, 2i + 1], i)."""
    return TensorSamples(torch.arange(2 * length).reshape(length, 2).float(), torch.arange(length))


class OneByOne(Dataset):
    """A map-style dataset that is not ours, so that batches go through torch's DataLoader."""

    def __init__(self, samples: TensorSamples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        return self.samples[index]


class Augmented(OneByOne):
    """Draws from all three global streams, as augmentations do."""

    def __getitem__(self, index: int):
        return torch.rand(1) + random.random() + np.random.random()


def indices_of(batches: TrainBatches, count: int) -> list[list[int]]:
    return [next(batches)[1].tolist() for _ in range(count)]


def random_states() -> tuple:
    _, keys, *position = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), position


# ---- builders -----------------------------------------------------------------------------------


def test_digits_are_the_real_ones_in_one_fixed_split():
    torch.manual_seed(1)
    data = datasets.digits(channels=None, image_size=None, train_fraction=0.8)
    torch.manual_seed(2)
    assert datasets.digits(channels=None, image_size=None, train_fraction=0.8).hash == data.hash
    assert data.facts == {"num_classes": 10, "channels": 1, "image_size": 8}
    assert (len(data.train), len(data.val)) == (1438, 359)
    labels = torch.cat([data.train.tensors[1], data.val.tensors[1]])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    images = data.train.tensors[0]
    torch.testing.assert_close(images.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std(), torch.tensor(1.0))


def test_digits_do_not_import_scikit_learn():
    datasets.digits(None, None, 0.8)
    assert "sklearn" not in sys.modules


def test_digits_split_is_disjoint_and_covering():
    data = datasets.digits(None, None, 0.5)
    both = torch.cat([data.train.tensors[0], data.val.tensors[0]]).flatten(1)
    assert len(both.unique(dim=0)) == len(both) == 1797  # no two digits are equal


def test_digits_resized_and_repeated():
    data = datasets.digits(channels=3, image_size=12, train_fraction=0.8)
    image, label = data.train[0]
    assert image.shape == (3, 12, 12)
    assert label.dtype == torch.int64
    assert torch.equal(image[0], image[2])
    assert data.facts == {"num_classes": 10, "channels": 3, "image_size": 12}
    assert data.hash != datasets.digits(3, 16, 0.8).hash


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(datasets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install scikit-learn, or choose dataset=synthetic_images\.$"):
        datasets.digits(None, None, 0.8)


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"^At dataset.image_size=100000 the images need \d+ GiB, more"):
        datasets.digits(1, 100_000, 0.8)
    with pytest.raises(InputError, match=r"^dataset.channels=2 is not possible; valid are 1 and 3\.$"):
        datasets.digits(2, 8, 0.8)


def test_images_of_a_machine_that_does_not_tell_its_memory_are_read(monkeypatch):
    monkeypatch.setattr(datasets, "total_memory", lambda: 0)
    assert len(datasets.digits(None, None, 0.8).train) == 1438


def fake_cifar(root, train: bool, download: bool) -> SimpleNamespace:
    count = 20 if train else 10
    pixels = np.random.RandomState(count).randint(0, 256, (count, 32, 32, 3)).astype(np.uint8)
    return SimpleNamespace(data=pixels, targets=[i % 10 for i in range(count)], classes=list("0123456789"))


def test_torchvision_dataset_in_memory(monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR10", fake_cifar)
    data = datasets.torchvision_dataset("CIFAR10", "unused", False, channels=1, image_size=8)
    assert data.facts == {"num_classes": 10, "channels": 1, "image_size": 8}
    assert data.train.tensors[0].shape == (20, 1, 8, 8)
    assert data.val.tensors[1].tolist() == list(range(10))
    colour = datasets.torchvision_dataset("CIFAR10", "unused", False, None, None).train.tensors[0]
    assert colour.shape == (20, 3, 32, 32)
    torch.testing.assert_close(colour.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)


def test_torchvision_dataset_refusals(tmp_path):
    for name in TORCHVISION_FILES:
        with pytest.raises(
            InputError,
            match=rf"^dataset.name={name} has no files in .*download=true .*or point dataset\.root",
        ):
            datasets.torchvision_dataset(name, str(tmp_path), False, None, None)


def draw_images(root: Path, per_class: int, classes: tuple[str, ...] = ("cat", "dog")) -> None:
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            Image.new("RGB", (10 + i, 8), (255 * label, 0, 0)).save(root / name / f"{i}.png")


def test_image_folder_splits_by_name(tmp_path):
    draw_images(tmp_path, per_class=10)
    data = datasets.image_folder(str(tmp_path), channels=None, image_size=6, val_fraction=0.3)
    assert data.facts == {"num_classes": 2, "channels": 3, "image_size": 6}
    names = [{image.path for image in split.images} for split in (data.train, data.val)]
    assert len(names[0] | names[1]) == len(names[0]) + len(names[1]) == 20
    image, label = data.train[0]
    assert image.shape == (3, 6, 6)
    assert label == 0
    assert image.min() == image.max() == -1  # black
    red = data.train[len(data.train) - 1][0]
    torch.testing.assert_close(red.mean(dim=(1, 2)), torch.tensor([1.0, -1.0, -1.0]))

    Image.new("RGB", (8, 8)).save(tmp_path / "cat" / "00.png")
    more = datasets.image_folder(str(tmp_path), None, 6, 0.3)
    assert names[1] <= {image.path for image in more.val.images}  # adding a file moves no other
    assert more.hash != data.hash


def test_image_folder_with_train_and_val(tmp_path):
    draw_images(tmp_path / "train", per_class=3)
    draw_images(tmp_path / "val", per_class=1)
    data = datasets.image_folder(str(tmp_path), channels=1, image_size=4, val_fraction=0.5)
    assert (len(data.train), len(data.val)) == (6, 2)
    assert data.val[0][0].shape == (1, 4, 4)


def test_image_folder_refusals(tmp_path):
    with pytest.raises(InputError, match=r"set e.g. dataset.image_size=64\.$"):
        datasets.image_folder(str(tmp_path), None, None, 0.1)
    with pytest.raises(InputError, match=r"is not in the layout root/<class>/<image>: "):
        datasets.image_folder(str(tmp_path), None, 8, 0.1)
    draw_images(tmp_path, per_class=1)
    with pytest.raises(InputError, match=r"has too few images \(2\) for dataset.val_fraction=0.001: one split"):
        datasets.image_folder(str(tmp_path), None, 8, 0.001)
    draw_images(tmp_path / "train", per_class=1)
    draw_images(tmp_path / "val", per_class=1, classes=("cat", "fox"))
    with pytest.raises(InputError, match=r"train and .*val must hold the same class folders\.$"):
        datasets.image_folder(str(tmp_path), None, 8, 0.1)


def test_synthetic_images_keep_to_their_own_seed():
    def build(seed):
        return datasets.synthetic_images(50, None, 8, num_classes=3, noise=4.0, seed=seed)

    torch.manual_seed(1)
    data = build(0)
    torch.manual_seed(2)
    assert build(0).hash == data.hash != build(1).hash
    assert data.facts == {"num_classes": 3, "channels": 3, "image_size": 8}
    assert (len(data.train), len(data.val)) == (40, 10)
    assert data.train.tensors[0].std().item() == pytest.approx(1, rel=0.1)


def test_synthetic_images_without_noise_are_their_class():
    images, labels = datasets.synthetic_images(40, 1, 8, num_classes=3, noise=0.0, seed=0).train.tensors
    prototypes = {label: images[labels == label].unique(dim=0) for label in range(3)}
    assert [len(p) for p in prototypes.values()] == [1, 1, 1]


def test_synthetic_tokens_have_four_successors():
    data = datasets.synthetic_tokens(samples=400, vocab_size=16, context=32, seed=0)
    tokens = torch.cat([data.train.tensors[0], data.val.tensors[0]])
    assert tokens.shape == (400, 33)
    pairs = torch.stack([tokens[:, :-1].flatten(), tokens[:, 1:].flatten()]).unique(dim=1)
    assert pairs[0].bincount().tolist() == [4] * 16
    assert data.facts == {"vocab_size": 16, "context": 32}


def test_synthetic_refusals():
    with pytest.raises(InputError, match=r"^dataset.samples=4 is too few: at least 5\.$"):
        datasets.synthetic_images(4, None, None, 10, 1.0, 0)
    with pytest.raises(InputError, match=r"^dataset.samples=9 and dataset.vocab_size=1 must be at least 5 and 2"):
        datasets.synthetic_tokens(9, 1, 8, 0)
    with pytest.raises(InputError, match=r"^dataset.context is null and the model has none: set dataset.cont"):
        datasets.synthetic_tokens(9, 4, None, 0)


def test_text_file_windows(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    data = datasets.text_file(str(path), context=4, val_fraction=0.25)
    assert data.facts == {"vocab_size": 256, "context": 4}
    assert data.train[0].dtype == torch.int64
    assert data.train[0].tolist() == [0, 1, 2, 3, 4]
    assert data.train[1].tolist() == [4, 5, 6, 7, 8]
    assert data.train[len(data.train) - 1].tolist() == [68, 69, 70, 71, 72]  # a rest of two bytes is left
    predicted = torch.stack([data.val[i][1:] for i in range(len(data.val))])
    assert predicted.flatten().tolist() == list(range(76, 100))


def test_places_that_are_numbers_are_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("5").write_bytes(bytes(100))
    assert len(datasets.text_file(5, context=4, val_fraction=0.25).train) == 18
    draw_images(Path("7"), per_class=10)
    assert len(datasets.image_folder(7, None, 8, 0.3).val) > 0


def test_text_file_hash_follows_every_byte(tmp_path):
    path = tmp_path / "text"
    hashes = set()
    for changed in (None, 0, 80):
        content = bytearray(100)
        if changed is not None:
            content[changed] = 1
        path.write_bytes(content)
        hashes.add(datasets.text_file(str(path), 4, 0.25).hash)
    assert len(hashes) == 3
    assert all(len(h) == 16 and int(h, 16) >= 0 for h in hashes)


def test_text_file_refusals(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"short")
    with pytest.raises(InputError, match=r"short leaves 4 training and 1 validation bytes, but a sample has 5: "):
        datasets.text_file(str(path), 4, 0.2)
    with pytest.raises(InputError, match=r"^dataset.val_fraction=1.0 must lie between 0 and 1, both excluded\.$"):
        datasets.text_file(str(path), 4, 1.0)


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A small standard library: 40 files of 10 equal letters each, and files that must not be read."""
    monkeypatch.setattr(datasets.sysconfig, "get_path", lambda name: str(tmp_path))
    for i in range(40):
        path = tmp_path / ("package" if i % 2 else ".") / f"m{i:02}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([100 + i]) * 10)
    for name in ("test/a.py", "package/tests/a.py", "site-packages/a.py", "notes.txt", "_sysconfigdata_x.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"!" * 10)
    return tmp_path


def values(split: TensorSamples) -> set[int]:
    return set(split[torch.arange(len(split))].flatten().tolist())


def test_stdlib_text_splits_by_file(library):
    data = datasets.stdlib_text(context=4, max_bytes=10_000, val_fraction=0.3)
    train, val = values(data.train), values(data.val)
    assert train | val == set(range(100, 140))  # all files, and no test or text file
    assert not train & val
    assert 3 <= len(val) <= 25


def test_stdlib_text_is_capped(library):
    data = datasets.stdlib_text(context=4, max_bytes=50, val_fraction=0.3)
    assert (len(data.train), len(data.val)) == (8, 3)  # of 35 and 15 bytes, four predicted in each window
    with pytest.raises(InputError, match=r"^dataset.max_bytes=12 leaves 8 training and 4 validation bytes"):
        datasets.stdlib_text(context=4, max_bytes=12, val_fraction=0.3)


def test_stdlib_text_of_this_python_is_python():
    data = datasets.stdlib_text(context=63, max_bytes=20_000, val_fraction=0.1)
    assert bytes(data.train.tensors[0][:, 1:].flatten().tolist()).count(b"def ") > 10


# ---- data of others -----------------------------------------------------------------------------


def test_as_data_takes_pairs_and_objects():
    train, val = numbered(8), numbered(4)
    data = Data(train, val, {}, "0" * 16)
    assert as_data(data) is data
    pair = as_data((train, val))
    assert (pair.train, pair.val, pair.facts) == (train, val, {})
    told = as_data(SimpleNamespace(train=train, val=val, facts={"num_classes": 8}))
    assert told.facts == {"num_classes": 8}
    named = as_data(namedtuple("Splits", "train val")(train, val))
    assert pair.hash == told.hash == named.hash


def test_as_data_hash_follows_values_and_lengths():
    base = as_data((numbered(8), numbered(4))).hash
    changed = numbered(8)
    changed.tensors[0][7, 1] += 1
    assert as_data((changed, numbered(4))).hash != base
    assert as_data((numbered(8), numbered(5))).hash != base
    assert as_data((numbered(8), numbered(4))).hash == base


def test_as_data_reads_at_most_256_samples_a_split():
    class Counting(OneByOne):
        read: list[int] = []

        def __getitem__(self, index):
            self.read.append(index)
            return self.samples[index]

    as_data((Counting(numbered(1000)), numbered(1)))
    assert len(Counting.read) == len(set(Counting.read)) == 256
    assert (min(Counting.read), max(Counting.read)) == (0, 999)


def test_as_data_of_random_augmentations_is_repeatable():
    pair = Augmented(numbered(8)), Augmented(numbered(4))
    before = random_states()
    first = as_data(pair).hash
    assert random_states() == before
    torch.rand(1), random.random(), np.random.random()
    assert as_data(pair).hash == first


@pytest.mark.parametrize(
    "value", [None, 3, (numbered(2),), (numbered(2), iter([])), (numbered(2), []), torch.nn.Linear(1, 1)]
)
def test_as_data_refuses_anything_else(value):
    with pytest.raises(InputError, match=r"^dataset._target_ returned \w+; it must return a pair \(train, val\)"):
        as_data(value)


def test_as_data_refuses_facts_that_are_no_mapping():
    with pytest.raises(InputError, match=r"^The facts that dataset._target_ returned are int; they must be a map"):
        as_data(SimpleNamespace(train=numbered(2), val=numbered(2), facts=3))


# ---- batches ------------------------------------------------------------------------------------


def test_tensor_samples():
    samples = numbered(4)
    assert samples[1][0].tolist() == [2, 3]
    assert samples[torch.tensor([2, 0])][1].tolist() == [2, 0]
    assert [label.item() for _, label in samples.__getitems__([3, 1])] == [3, 1]
    assert TensorSamples(torch.arange(4)).__getitems__([3, 1]) == [3, 1]
    with pytest.raises(IndexError):
        samples[4]
    with pytest.raises(ValueError, match=r"unequal length: \[2, 3\]"):
        TensorSamples(torch.zeros(2), torch.zeros(3))


def test_an_epoch_is_a_permutation_without_its_incomplete_batch():
    batches = TrainBatches(numbered(10), 3, seed=0, place=unmoved)
    first, second = indices_of(batches, 3), indices_of(batches, 3)
    for epoch in (first, second):
        assert len(set(sum(epoch, []))) == 9
    assert first != second


def test_the_order_follows_the_seed():
    def order(seed):
        return indices_of(TrainBatches(numbered(10), 3, seed, unmoved), 5)

    torch.manual_seed(1)
    first = order(0)
    torch.manual_seed(2)
    assert order(0) == first
    assert order(1) != first


def test_order_hash_is_the_same_however_the_data_are_loaded():
    ways = [
        TrainBatches(numbered(40), 4, 0, unmoved),
        TrainBatches(numbered(40), 4, 0, unmoved, workers=2),
        TrainBatches(OneByOne(numbered(40)), 4, 0, unmoved),
        TrainBatches(Subset(numbered(40), range(40)), 4, 0, unmoved),
    ]
    orders = [indices_of(batches, 12) for batches in ways]
    assert orders == [orders[0]] * 4
    assert len({batches.order_hash() for batches in ways}) == 1


def test_order_hash_covers_what_was_handed_out():
    batches, again = (TrainBatches(numbered(40), 4, 0, unmoved) for _ in range(2))
    seen = [batches.order_hash()]
    for _ in range(3):
        next(batches)
        seen.append(batches.order_hash())
    assert len(set(seen)) == 4
    assert all(len(h) == 16 for h in seen)
    indices_of(again, 3)
    assert again.order_hash() == seen[-1]


def test_order_hash_covers_the_first_batch_before_it_is_placed():
    other = numbered(40)
    other.tensors[0].add_(1)
    hashes = []
    for samples, place in ((numbered(40), unmoved), (numbered(40), lambda batch: None), (other, unmoved)):
        batches = TrainBatches(samples, 4, 0, place)
        next(batches)
        hashes.append(batches.order_hash())
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [numbered(9), OneByOne(numbered(9)), Augmented(numbered(9))])
def test_batches_leave_the_global_random_streams_alone(dataset, workers):
    before = random_states()
    batches = TrainBatches(dataset, 4, 0, unmoved, workers)
    for _ in range(5):
        next(batches)
    list(eval_batches(dataset, 4, unmoved, workers))
    assert random_states() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentations_follow_the_seed(workers):
    def first_epoch(seed):
        batches = TrainBatches(Augmented(numbered(8)), 4, seed, unmoved, workers)
        return torch.cat([next(batches), next(batches)]).flatten().tolist()

    drawn = first_epoch(0)
    torch.rand(1), random.random(), np.random.random()
    assert first_epoch(0) == drawn
    assert first_epoch(1) != drawn
    assert len(set(drawn)) == 8


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [numbered(10), OneByOne(numbered(10))])
def test_every_validation_sample_once_and_in_order(dataset, workers):
    batches = list(eval_batches(dataset, 4, unmoved, workers))
    assert [count for _, count in batches] == [4, 4, 2]
    assert torch.cat([labels for (_, labels), _ in batches]).tolist() == list(range(10))


def test_a_batch_is_a_copy():
    samples = numbered(4)
    (images, _), _ = next(eval_batches(samples, 4, unmoved))
    images.zero_()
    assert samples[3][0].tolist() == [6, 7]


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(InputError, match=r"^trainer.batch_size=5 is larger than the training set: choose at most 4\.$"):
        TrainBatches(numbered(4), 5, 0, unmoved)


def test_place_on_moves_nested_batches():
    Pair = namedtuple("Pair", "a b")
    batch = {
        "x": torch.zeros(2, 3, 4, 4),
        "rest": [torch.zeros(2), (torch.ones(1), "text")],
        "p": Pair(1, None),
    }
    placed = place_on("meta", channels_last=True)(batch)
    assert placed["x"].device.type == "meta"
    assert placed["rest"][0].is_meta
    assert placed["rest"][1][0].is_meta
    assert placed["rest"][1][1] == "text"
    assert placed["p"] == Pair(1, None)


@pytest.mark.parametrize("channels_last", [False, True])
def test_place_on_memory_format(channels_last):
    image, label = place_on("cpu", channels_last)((torch.zeros(2, 3, 4, 4), torch.zeros(2)))
    assert image.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert label.is_contiguous()


# ---- conf/ --------------------------------------------------------------------------------------

CONF_FILES = sorted([*CONF.glob("model/*.yaml"), *CONF.glob("dataset/*.yaml")])


def test_all_configs_are_found():
    assert len(CONF_FILES) == 9 + 10


def read_config(path: Path) -> dict:
    node = yaml.safe_load(path.read_text())
    defaults = node.pop("defaults", [])
    for base in defaults:
        if isinstance(base, str) and base != "_self_":
            node = read_config(path.with_name(f"{base}.yaml")) | node
    return node


@pytest.mark.parametrize("path", CONF_FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_config_shows_every_argument_and_no_other(path):
    node = read_config(path)
    target, kind = node.pop("_target_"), node.pop("kind")
    if path.stem == "custom":
        assert (target, kind, node) == (None, None, {})
        return
    assert kind in ("images", "tokens")
    module, _, name = target.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
    assert set(node) == {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}


def test_torchvision_is_imported_only_where_it_is_used():
    for name in ("models", "datasets", "torchvision_files", "image_files"):
        tree = ast.parse((CONF.parent / f"src/precision_lab/{name}.py").read_text())
        top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        assert top
        assert not any(re.search(r"(import|from) torchvision\b", ast.unparse(n)) for n in top)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_augmentation_draws_the_same_in_every_number_of_workers(workers):
    drawn = [
        torch.stack([next(batches) for _ in range(5)])
        for batches in (TrainBatches(Augmented(numbered(12)), 4, 3, unmoved, n) for n in (0, workers))
    ]
    assert torch.equal(*drawn)
    assert len(drawn[0].unique()) == drawn[0].numel()  # no two samples share a draw


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_hashed_by_its_entries():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    coo, csr = dense.to_sparse(), dense.to_sparse_csr()
    huge = torch.sparse_coo_tensor(coo.indices(), coo.values(), (2**30, 2**30))  # 4 EiB if it were dense
    assert content_hash(coo) == content_hash(csr) == content_hash(dense.to_sparse())
    assert len({content_hash(one) for one in (coo, 2 * coo, dense.T.to_sparse(), coo.double(), huge)}) == 5


def test_a_tensor_of_odd_strides_is_hashed():
    column = torch.arange(15).reshape(5, 3)[:1, 0]  # one element: contiguous, and its stride is 3
    assert content_hash(column) == content_hash(torch.tensor([0]))
