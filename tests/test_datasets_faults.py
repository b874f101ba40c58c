"""Data that cannot be read: files, downloads, a user's dataset, a data worker. Each fault is one sentence."""

import errno
import io
import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchvision import datasets as library

from precision_lab import datasets, image_files, loading, run
from precision_lab.batches import TrainBatches, eval_batches
from precision_lab.config import compose
from precision_lab.errors import InputError
from precision_lab.loading import WorkerDied
from precision_lab.open_sets import TORCHVISION_FILES, check


def unmoved(batch):
    return batch


def picture(suffix: str = "PNG", size: tuple[int, int] = (40, 30)) -> bytes:
    """A noisy image, so that half of its bytes are not yet all of it."""
    file = io.BytesIO()
    Image.frombytes("RGB", size, os.urandom(3 * size[0] * size[1])).save(file, suffix)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two classes of ten images each, the shade of image i is 10 i."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.new("RGB", (8, 8), (10 * i,) * 3).save(tmp_path / name / f"{i}.png")
    return tmp_path


def read(root: Path, on_unreadable: str = "fail", val_fraction: float = 0.3) -> datasets.Data:
    return datasets.image_folder(str(root), None, 8, val_fraction, on_unreadable)


def all_samples(data: datasets.Data) -> list:
    return [split[i] for split in (data.train, data.val) for i in range(len(split))]


def is_one_sentence(text: str) -> bool:
    """Without a line break, a stack, a bare type name or two stops in a row; a second one may advise."""
    return text.endswith(".") and not re.search(r"\n|Traceback|<_io|\.\.|None", text)


# ---- image files: known at construction -----------------------------------------------------------


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside.png").write_bytes(picture())


def a_broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.png")


def a_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


NO_IMAGE = {
    emptied: "empty",
    a_folder: "not a file",
    a_pipe: "not a file",
    a_broken_link: "No such file or directory",
    a_link_to_itself: "Too many levels of symbolic links",
}


@pytest.mark.parametrize("damage", NO_IMAGE)
def test_what_is_no_file_with_content_is_named_before_anything_is_decoded(folder, damage):
    damage(folder / "cat" / "4.png")
    with pytest.raises(InputError) as raised:
        read(folder)
    path = re.escape(str(folder / "cat" / "4.png"))
    assert re.fullmatch(rf"{path} is no image \({NO_IMAGE[damage]}\)\. Mend .*on_unreadable=skip .*", str(raised.value))
    assert is_one_sentence(str(raised.value))


def test_the_first_of_several_is_named_and_all_are_counted(folder):
    for name in ("cat/3.png", "dog/1.png", "dog/7.png"):
        emptied(folder / name)
    with pytest.raises(
        InputError, match=r"cat/3\.png is no image \(empty\), and 2 more of 20 under .* cannot be read\."
    ):
        read(folder)


@pytest.mark.parametrize("damage", NO_IMAGE)
def test_skipped_it_is_as_if_it_were_not_there(folder, damage):
    damage(folder / "cat" / "4.png")
    skipped = read(folder, "skip")
    assert skipped.unreadable() == [str(folder / "cat" / "4.png")]
    os.rename(folder / "cat" / "4.png", folder / "cat" / "4.txt")
    removed = read(folder)
    assert removed.unreadable() == []
    if damage is not a_folder:  # of another name it is one that is looked into
        assert skipped.hash == removed.hash
        for split, same in ((skipped.train, removed.train), (skipped.val, removed.val)):
            assert split.images == same.images


def test_a_folder_that_cannot_be_listed_is_unreadable(folder, monkeypatch):
    (folder / "cat" / "more").mkdir()
    listed = os.scandir

    def scandir(path):
        if str(path).endswith("more"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(image_files.os, "scandir", scandir)
    with pytest.raises(InputError, match=r"cat/more is no image \(Permission denied\)\. "):
        read(folder)
    assert read(folder, "skip").unreadable() == [str(folder / "cat" / "more")]
    monkeypatch.setattr(image_files.os, "scandir", lambda path: scandir("more"))
    with pytest.raises(InputError, match=r"^dataset.root=.* cannot be listed \(Permission denied\)\.$"):
        read(folder, "skip")


def test_a_link_that_leads_back_is_not_followed(folder):
    before = read(folder)
    (folder / "cat" / "up").symlink_to(folder)
    (folder / "cat" / "here").symlink_to(folder / "cat")
    assert read(folder).hash == before.hash


@pytest.mark.parametrize("choice", ["fail", "skip"])
def test_a_folder_without_classes_or_a_class_without_images(tmp_path, choice):
    with pytest.raises(InputError, match=r"is not in the layout root/<class>/<image>: it has no class folder\.$"):
        read(tmp_path, choice)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("a cat")
    with pytest.raises(
        InputError, match=r"<image>: the class folder cat has no readable file named \.jpg, .*\.webp\.$"
    ):
        read(tmp_path, choice)


def test_a_class_of_empty_files_is_not_skipped(folder):
    for path in (folder / "dog").iterdir():
        emptied(path)
    with pytest.raises(InputError, match=r"the class folder dog has no readable file named"):
        read(folder, "skip")


# ---- image files: known once they are decoded -----------------------------------------------------

PNG, JPEG = picture("PNG"), picture("JPEG")
UNDECODABLE = {
    "text": b"no image at all",
    "one byte": b"\x89",
    "zeros": bytes(1000),
    "PNG cut in its header": PNG[:20],
    "PNG cut in half": PNG[: len(PNG) // 2],
    "JPEG cut in half": JPEG[: len(JPEG) // 2],
    "PNG with damaged pixels": PNG[:200] + b"damage" + PNG[206:],
    "PNG with a damaged chunk": PNG[:12] + b"XXXX" + PNG[16:],
    "GIF cut": b"GIF89a\x08\x00\x08\x00",
    "BMP of no size": b"BM" + bytes(60),
    "PPM without pixels": b"P6 0 5 255\n",
    "PPM of letters": b"P3 2 2 255\nred green",
    "TIFF of nothing": b"II*\x00\xff\xff\xff\xff",
    "WebP cut": b"RIFF\x10\x00\x00\x00WEBPVP8 ",
    "a bomb": b"P5 100000 100000 255\n" + bytes(10),
}


def undecodable(data: datasets.Data) -> str:
    """The sentence on the one file of `data` that cannot be decoded."""
    with pytest.raises(InputError) as raised:
        all_samples(data)
    return str(raised.value)


@pytest.mark.parametrize("name", UNDECODABLE)
def test_what_cannot_be_decoded_is_named(folder, name):
    bad = folder / "dog" / "5.png"
    bad.write_bytes(UNDECODABLE[name])
    text = undecodable(read(folder))
    assert text.startswith(f"{bad} cannot be read as an image (")
    assert text.endswith(
        "). Mend or remove what cannot be read, or set dataset.on_unreadable=skip to train without it."
    )
    assert is_one_sentence(text)
    assert text.count(str(bad)) == 1


@pytest.mark.parametrize("name", UNDECODABLE)
def test_skipped_it_is_replaced_by_the_next_of_its_split(folder, name):
    whole = read(folder)
    bad = len(whole.train) // 2
    Path(whole.train.images[bad].path).write_bytes(UNDECODABLE[name])
    data = read(folder, "skip")
    assert data.unreadable() == []  # it takes a decoder to know
    image, label = data.train[bad]
    following = whole.train[(bad + 1) % len(whole.train)]
    assert torch.equal(image, following[0])
    assert label == following[1]
    assert data.unreadable() == [whole.train.images[bad].path]
    assert len(all_samples(data)) == 20


def refused_by_the_system(monkeypatch, number: int) -> None:
    def refuse(path, mode):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(image_files, "open", refuse, raising=False)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.EISDIR])
def test_a_file_that_may_not_be_opened_is_unreadable(folder, monkeypatch, number):
    fails, skips = read(folder), read(folder, "skip")
    refused_by_the_system(monkeypatch, number)
    with pytest.raises(InputError, match=rf"png cannot be read as an image \({os.strerror(number)}\)\. Mend"):
        fails.train[0]
    with pytest.raises(
        InputError, match=r"^None of the \d+ images of a split can be read; the first is .*/cat/\d\.png\.$"
    ):
        skips.train[0]
    assert len(skips.unreadable()) == len(skips.train)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT])
def test_a_fault_of_the_machine_skips_no_file(folder, monkeypatch, number):
    """Another arm could read it, and the two would not see the same data."""
    data = read(folder, "skip")
    refused_by_the_system(monkeypatch, number)
    with pytest.raises(InputError, match=rf"/cat/\d\.png could not be read \({os.strerror(number)}\)\.$"):
        data.train[0]
    assert data.unreadable() == []


def test_no_memory_for_an_image_is_no_fault_of_the_image(folder, monkeypatch):
    def fill(path):
        raise MemoryError

    data = read(folder, "skip")
    monkeypatch.setattr(image_files, "_decoded", fill)
    with pytest.raises(MemoryError):
        data.train[0]


def epochs(data: datasets.Data, workers: int) -> list[torch.Tensor]:
    batches = TrainBatches(data.train, 4, 0, unmoved, workers)
    shown = [torch.cat([images[:, 0, 0, 0], labels]) for images, labels in (next(batches) for _ in range(6))]
    return shown + [labels for (_, labels), _ in eval_batches(data.val, 4, unmoved, workers)]


def test_every_number_of_workers_skips_the_same_and_counts_it_once(folder):
    for i in (2, 3, 8):
        for name in ("cat", "dog"):
            (folder / name / f"{i}.png").write_bytes(UNDECODABLE["text"])
    emptied(folder / "cat" / "0.png")
    seen, named = [], []
    for workers in (0, 1, 2):
        data = read(folder, "skip")
        seen.append(torch.cat(epochs(data, workers)))
        epochs(data, workers)
        named.append(data.unreadable())
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert named[0] == named[1] == named[2]
    assert len(named[0]) == len(set(named[0])) == 7


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_worker_the_sentence_is_the_same(folder, workers):
    for path in (folder / "cat").iterdir():
        path.write_bytes(UNDECODABLE["text"])
    batches = TrainBatches(read(folder).train, 10, 0, unmoved, workers)
    with pytest.raises(InputError) as raised:
        [next(batches) for _ in range(3)]
    assert re.fullmatch(
        r"/\S+\.png cannot be read as an image \(in no format that Pillow knows\)\..*", str(raised.value)
    )


# ---- words of the config -----------------------------------------------------------------------------


def refusal(dataset: dict) -> str:
    nodes = {name: {"_target_": "a.b"} for name in ("model", "task", "scheduler")}
    with pytest.raises(InputError) as raised:
        check(nodes | {"optimizer": {"_target_": "a.b", "lr": 1.0}, "dataset": dataset})
    return str(raised.value)


def folder_node(**changes) -> dict:
    return {"_target_": "precision_lab.datasets.image_folder", "root": "/", **changes}


@pytest.mark.parametrize("choice", ["ignore", "", None, True, ["skip"]])
def test_an_unknown_choice_is_refused(choice):
    text = refusal(folder_node(on_unreadable=choice))
    assert text == f"dataset.on_unreadable={choice} is unknown; valid are fail and skip."


def test_places_that_may_not_be_read_are_told_without_torch(tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text("words")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    nodes = {
        "root": folder_node(root=str(tmp_path)),
        "root ": {"_target_": "precision_lab.datasets.torchvision_dataset", "name": "MNIST", "root": str(tmp_path)},
        "path": {"_target_": "precision_lab.datasets.text_file", "path": str(text)},
    }
    for key, node in nodes.items():
        place = node.get("root") or node["path"]
        assert refusal(node) == f"dataset.{key.strip()}={place} cannot be read: permission denied."


def test_a_text_file_that_is_none(tmp_path, monkeypatch):
    target = "precision_lab.datasets.text_file"
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.touch()
    for path in (missing, tmp_path, "a\0b", "x" * 5000):
        assert refusal({"_target_": target, "path": path}) == f"dataset.path={path} is not a file; name a text file."
    assert refusal({"_target_": target, "path": empty}) == f"dataset.path={empty} is empty; name a text file."
    for path, words in ((missing, "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=rf"^dataset.path={path} cannot be read \({words}\)\.$"):
            datasets.text_file(str(path), 4, 0.2)
    with pytest.raises(InputError, match=rf"^dataset.path={empty} is empty; name a text file\.$"):
        datasets.text_file(str(empty), 4, 0.2)


# ---- torchvision -------------------------------------------------------------------------------------


def no_network(url, *_, **__):
    raise URLError(OSError(-3, "Temporary failure in name resolution"))


def refused(name: str, root: Path, download: bool) -> str:
    with pytest.raises(InputError) as raised:
        datasets.torchvision_dataset(name, str(root), download, None, None)
    assert is_one_sentence(str(raised.value))
    return str(raised.value)


MNIST_FILES = [name.removesuffix(".gz") for name, _ in library.MNIST.resources]
DAMAGED = {"emptied": b"", "cut": bytes.fromhex("00000803") + bytes(100), "foreign": b"<html>no such page</html>"}


def lay_out(name: str, root: Path, content: bytes) -> None:
    """All files that torchvision looks for, with this content."""
    first = root / TORCHVISION_FILES[name]
    first.parent.mkdir(parents=True, exist_ok=True)
    names = MNIST_FILES
    if name.startswith("CIFAR"):
        kind = getattr(library, name)
        names = [file for file, _ in [*kind.train_list, *kind.test_list]] + [kind.meta["filename"]]
    for file in names:
        (first.parent / file).write_bytes(content)


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("name", TORCHVISION_FILES)
def test_damaged_files_are_told_from_missing_ones(tmp_path, name, content):
    lay_out(name, tmp_path, DAMAGED[content])
    place = re.escape(str((tmp_path / TORCHVISION_FILES[name]).parent))
    assert re.fullmatch(
        rf"dataset\.name={name}: {place} is incomplete or damaged \(.+\)\. Delete it and set dataset\.download=true on "
        r"a machine with internet access\.",
        refused(name, tmp_path, download=False),
    )


@pytest.mark.parametrize("name", TORCHVISION_FILES)
def test_no_network_is_told_with_its_reason(tmp_path, monkeypatch, name):
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    text = refused(name, tmp_path, download=True)
    assert text.startswith(f"dataset.name={name} could not be downloaded to {tmp_path} (")
    assert "Temporary failure in name resolution" in text


@pytest.mark.parametrize("name", TORCHVISION_FILES)
def test_what_arrives_damaged_is_never_used(tmp_path, monkeypatch, name):
    monkeypatch.setattr(library.utils, "_get_redirect_url", lambda url, max_hops: url)
    monkeypatch.setattr(library.utils, "_urlretrieve", lambda url, path: Path(path).write_bytes(b"half of it"))
    text = refused(name, tmp_path, download=True)
    assert text.startswith(
        f"dataset.name={name} could not be downloaded to {tmp_path} (a file is missing, or its md5 sum is not the one "
    )


def test_a_damaged_archive_is_fetched_again(tmp_path, monkeypatch):
    fetched = []
    archive = tmp_path / library.CIFAR10.filename
    archive.write_bytes(b"half of it")
    monkeypatch.setattr(library.utils, "_get_redirect_url", lambda url, max_hops: url)
    monkeypatch.setattr(library.utils, "_urlretrieve", lambda url, path: fetched.append(path))
    refused("CIFAR10", tmp_path, download=True)
    assert fetched == [str(archive)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ECONNRESET])
@pytest.mark.parametrize("name", ["MNIST", "CIFAR10"])
def test_a_disk_that_takes_nothing_is_told(tmp_path, monkeypatch, name, number):
    def write(url, path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(library.utils, "_get_redirect_url", lambda url, max_hops: url)
    monkeypatch.setattr(library.utils, "_urlretrieve", write)
    expected = f"dataset.name={name} could not be downloaded to {tmp_path} ({os.strerror(number)}: {tmp_path})."
    assert refused(name, tmp_path, download=True) == expected


@pytest.mark.parametrize("name", ["MNIST", "CIFAR10"])
def test_a_root_that_is_a_file(tmp_path, name):
    root = tmp_path / "root"
    root.touch()
    text = refused(name, root, download=True)
    assert re.match(rf"dataset\.name={name} could not be downloaded to {root} \((File exists|Not a directory): ", text)


# ---- data workers ------------------------------------------------------------------------------------


class Faulty(Dataset):
    """Sample 3 does what it is told to."""

    def __init__(self, act) -> None:
        self.act = act

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            return self.act()
        return torch.tensor(index)


class TwoArguments(Exception):
    def __init__(self, place: str, count: int) -> None:
        super().__init__(f"{count} faults in {place}")


class Repeating(Exception):
    """Rebuilt from what it keeps, it would say its word twice."""

    def __init__(self, word: str) -> None:
        super().__init__(f"word {word}")


def raises(error: BaseException):
    def act():
        raise error

    return act


def read_all(act, workers: int) -> list:
    return list(eval_batches(Faulty(act), 2, unmoved, workers))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such label"),
        KeyError("mask"),
        MemoryError("1 TiB"),
        InputError("A sentence."),
        SystemExit("gone"),
    ],
)
def test_a_datasets_exception_keeps_type_and_words(error):
    told = []
    for workers in (0, 2):
        with pytest.raises(type(error)) as raised:
            read_all(raises(error), workers)
        told.append((type(raised.value), str(raised.value)))
    assert told[0] == told[1] == (type(error), str(error))
    assert "in act\n    raise error" in str(raised.value.__cause__)  # the worker's traceback, for train.log


@pytest.mark.parametrize(
    "error", [TwoArguments("the file", 3), Repeating("once"), type("Local", (OSError,), {})("here")]
)
def test_an_exception_that_cannot_travel_is_quoted(error):
    with pytest.raises(RuntimeError, match=f"^{type(error).__name__}: {error}$"):
        read_all(raises(error), workers=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_stacked_are_told_by_their_own_words(workers):
    with pytest.raises(RuntimeError, match=r"^stack expects each tensor to be equal size"):
        read_all(lambda: torch.zeros(2), workers)


@pytest.fixture
def impatient(monkeypatch):
    """torch looks every five seconds who is alive."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


def killed_by(number: int):
    return lambda: os.kill(os.getpid(), number) or time.sleep(60)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (killed_by(signal.SIGKILL), r"was ended by SIGKILL, perhaps for want of memory: set fewer trainer\.workers\."),
        (
            killed_by(signal.SIGBUS),
            r"was ended by SIGBUS, perhaps for want of shared memory \(/dev/shm\): set fewer tr.*",
        ),
        (
            killed_by(signal.SIGSEGV),
            r"was ended by SIGSEGV, perhaps by a fault in a library .*: trainer\.workers=0 shows.*",
        ),
        (killed_by(signal.SIGTERM), r"was ended by SIGTERM, perhaps .*"),
        (killed_by(signal.SIGRTMIN + 2), rf"was ended by signal {signal.SIGRTMIN + 2}, perhaps .*"),
        (lambda: os._exit(0), r"exited with code 0 before its work was done; trainer\.workers=0 shows where .*"),
        (lambda: os._exit(3), r"exited with code 3 before its work was done; trainer\.workers=0 shows where .*"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_workers_death_is_one_sentence(impatient, act, words, workers):
    with pytest.raises(WorkerDied) as raised:
        read_all(act, workers)
    assert re.fullmatch(rf"A data worker \(process \d+\) {words}", str(raised.value))
    assert is_one_sentence(str(raised.value))


def test_a_workers_death_is_told_where_the_batch_is_waited_for(impatient):
    """And not wherever the run is: amid a checkpoint, or the writing of its result."""
    handler = signal.getsignal(signal.SIGCHLD)
    dies, others = killed_by(signal.SIGKILL), multiprocessing.active_children()
    batches = eval_batches(Faulty(lambda: time.sleep(0.2) or dies()), 2, unmoved, 1)  # the first batch gets away
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) is handler
    (worker,) = (child for child in multiprocessing.active_children() if child not in others)
    worker.join(10)
    assert worker.exitcode == -signal.SIGKILL
    with pytest.raises(WorkerDied):
        next(batches)


def test_a_worker_that_cannot_be_started(monkeypatch):
    def fork(self):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("multiprocessing.popen_fork.Popen.__init__", lambda self, process: fork(self))
    with pytest.raises(
        WorkerDied, match=r"^A data worker could not be started \(Cannot allocate memory\): set fewer tr"
    ):
        read_all(lambda: torch.tensor(3), workers=2)


def test_what_is_no_death_is_told_as_it_is(monkeypatch):
    def broken(self):
        raise RuntimeError("Too many open files")

    monkeypatch.setattr(loading, "SETTLING_S", 0.0)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_next_data", broken)
    with pytest.raises(RuntimeError, match=r"^Too many open files$") as raised:
        read_all(lambda: torch.tensor(3), workers=1)
    assert type(raised.value) is RuntimeError


# ---- runs --------------------------------------------------------------------------------------------


@pytest.fixture
def started(folder, tmp_path_factory, monkeypatch):
    """Run on the folder's images, as a sweep's job: exit code, result.json and train.log."""
    outputs = tmp_path_factory.mktemp("outputs")
    words = ["precision=fp32", "device=cpu", "model=mlp", "model.hidden=[4]", "trainer.batch_size=4", "trainer.steps=6"]
    words += ["dataset=image_folder", f"dataset.root={folder}", "dataset.image_size=4", "dataset.val_fraction=0.3"]
    words += ["name=faults", f"paths.outputs={outputs}", "probe.memory=false", "wandb.mode=disabled"]

    def start(*more: str) -> tuple[int, dict, str]:
        monkeypatch.setattr(run, "_a_job_ran", False)
        code = run.run(compose([*words, *more]), sweep=True)
        (job,) = outputs.glob("sweeps/faults/mlp*")
        return code, json.loads((job / "result.json").read_text()), (job / "train.log").read_text()

    return start


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_tells_what_was_skipped(folder, started, workers):
    emptied(folder / "cat" / "4.png")
    for i in range(1, 7):
        for name in ("cat", "dog"):
            (folder / name / f"{i}.png").write_bytes(UNDECODABLE["text"])
    code, result, log = started("dataset.on_unreadable=skip", f"trainer.workers={workers}")
    assert (code, result["status"]) == (0, "completed")
    expected = [str(folder / "cat" / f"{i}.png") for i in range(1, 7)]
    expected += [str(folder / "dog" / f"{i}.png") for i in range(1, 5)]
    assert result["unreadable_files"] == {"count": 12, "first": expected}
    (told,) = (line for line in log.splitlines() if "cannot be read" in line)
    assert told.endswith(f"WARNING files that cannot be read, left out or replaced: 12 ({', '.join(expected)}, ...)")


def test_a_run_without_faults_tells_of_none(started):
    _, result, log = started("dataset.on_unreadable=skip")
    assert result["unreadable_files"] is None
    assert "cannot be read" not in log


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_ends_at_the_first_unless_told_to_skip(folder, started, workers):
    for path in (folder / "cat").iterdir():
        path.write_bytes(UNDECODABLE["text"])
    code, result, log = started(f"trainer.workers={workers}")
    assert (code, result["status"]) == (2, "failed")
    assert re.match(
        rf"{folder}/cat/\d\.png cannot be read as an image \(in no format .*skip to train", result["reason"]
    )
    assert "PIL.UnidentifiedImageError" in log  # the traceback, of the worker too


def test_what_was_skipped_before_a_run_was_stopped_is_still_told_after_it_went_on(folder, started, monkeypatch):
    decoded, calls = image_files._decoded, []
    whole = {path: path.read_bytes() for path in (folder / "dog").glob("[0-4].png")}

    def stopped(path):
        calls.append(path)
        if len(calls) == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return decoded(path)

    for path, content in whole.items():
        path.write_bytes(bytes(len(content)))
    monkeypatch.setattr(image_files, "_decoded", stopped)
    code, first, _ = started("dataset.on_unreadable=skip")
    assert (code, first["status"]) == (143, "interrupted")
    for path, content in whole.items():
        path.write_bytes(content)
    code, result, _ = started("dataset.on_unreadable=skip")
    assert (code, result["status"], len(result["resumed_at"])) == (0, "completed", 1)
    assert result["unreadable_files"] == first["unreadable_files"]
    assert set(first["unreadable_files"]["first"]) <= set(map(str, whole))


def test_a_run_that_lost_a_worker_says_so(started, impatient, monkeypatch):
    monkeypatch.setattr(image_files, "_decoded", lambda path: killed_by(signal.SIGKILL)())
    code, result, _ = started("trainer.workers=1")
    assert (code, result["status"]) == (1, "failed")
    assert re.fullmatch(
        r"A data worker \(process \d+\) was ended by SIGKILL, perhaps for want of memory: set fewer trainer\.workers\.",
        result["reason"],
    )
