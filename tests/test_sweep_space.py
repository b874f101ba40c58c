"""Free space before a sweep, on a disk that is made up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from precision_lab import config
from precision_lab.errors import InputError
from precision_lab.sizes import MIB
from precision_lab.sweep.plan import Job
from precision_lab.sweep.space import require_space


@pytest.fixture(scope="module")
def asked():
    return config.compose(["precision=fp32"])


def jobs(asked, folder, waiting, done=0):
    asked = replace(asked, paths=replace(asked.paths, outputs=str(folder)))
    return [Job([], "", asked, status=status) for status in ["waiting"] * waiting + ["completed"] * done]


@pytest.mark.parametrize(("waiting", "wanted"), [(1, 64), (64, 64), (65, 65), (1000, 1000)])
def test_a_mebibyte_a_job_and_64_at_least(asked, tmp_path, waiting, wanted):
    some = jobs(asked, tmp_path, waiting, done=500)
    require_space(some, lambda path: SimpleNamespace(free=wanted * MIB))
    with pytest.raises(InputError) as refused:
        require_space(some, lambda path: SimpleNamespace(free=wanted * MIB - MIB // 10))
    text = str(refused.value)
    assert f"{tmp_path} has {wanted - 0.1:.1f} MiB of free space" in text
    assert text.count(f"at least {wanted} MiB") == 1
    assert ("1 job to run wants" if waiting == 1 else f"{waiting} jobs to run want") in text


def test_a_folder_that_is_not_there_yet_lies_where_its_parent_does(asked, tmp_path):
    where = []
    require_space(
        jobs(asked, tmp_path / "a" / "b", 2), lambda path: where.append(path) or SimpleNamespace(free=64 * MIB)
    )
    assert where == [tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_each_disk_is_asked_for_its_own_jobs(asked, tmp_path):
    some = jobs(asked, tmp_path / "one", 60) + jobs(asked, tmp_path / "two", 70)
    require_space(some, lambda path: SimpleNamespace(free=70 * MIB))
    with pytest.raises(InputError, match="two has 69"):
        require_space(some, lambda path: SimpleNamespace(free=69 * MIB))


def test_where_nothing_is_to_run_no_space_is_wanted(asked, tmp_path):
    require_space(jobs(asked, tmp_path, 0, done=3), lambda path: pytest.fail("asked"))
