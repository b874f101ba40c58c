"""One thread, no W&B, every process-wide switch put back; slow and gpu tests skipped with their reason."""

import signal

import pytest
import torch

from precision_lab.arm_schema import Float32Mode
from precision_lab.precision import release, set_float32


def pytest_configure(config):
    # A runner in the background may have these ignored, and so would every run that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config, items):
    asked = config.getoption("-m")
    for item in items:
        if "slow" in item.keywords and "slow" not in asked:
            item.add_marker(pytest.mark.skip(reason="slow: run it with `make test-slow`"))
        if "gpu" in item.keywords:
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="gpu: needs a CUDA device, and there is none here"))
            elif "gpu" not in asked:
                item.add_marker(pytest.mark.skip(reason="gpu: run it with `make test-gpu`"))


def pytest_terminal_summary(terminalreporter):
    """How strictly each golden file was compared: loosely on another machine than the one that wrote it."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "compared":
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: compared {value}")


@pytest.fixture(autouse=True)
def clean_process(monkeypatch):
    """A test that leaves a process-wide switch changed fails; those that may be changed are put back."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    release()  # an arm's autocast kernels, whose policy something may still hold
    set_float32(Float32Mode.ieee, Float32Mode.ieee)  # whatever arm the test ran


@pytest.fixture(scope="module")
def no_vega():
    """Pages without the script that draws: it is a megabyte, and takes seconds to put together."""
    from precision_lab.report import drawing  # its libraries are not on every machine that runs the GPU tests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "javascript", lambda: "/* Vega */")
        yield


@pytest.fixture(scope="module")
def of_fleet(no_vega, tmp_path_factory):
    """(the page of a fleet, its comparisons)"""
    from html_pages import fleet, written

    return written(fleet(tmp_path_factory.mktemp("fleet")))
