"""Test configuration: one thread per test unless it needs more, fixed random seeds, no leftover processes."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import torch
from waiting import end_all

collect_ignore = ["campaign", "integrations"]  # separate programs, which test_campaign.py and test_integrations.py run

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # for criteo_synthetic

# For small tensors, starting a second thread takes longer than the work; other tests use the other cores.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark nightly tests as slow, so that `-m "not slow"` leaves them out."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)


def pytest_make_parametrize_id(val):
    """Name a parametrised dtype as torch does."""
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


@pytest.fixture(autouse=True)
def same_numbers_each_time():
    """Make random numbers and settings of torch independent of the tests that ran before."""
    torch.manual_seed(0)
    torch.backends.mkldnn.enabled = True  # torch turns it off after a failed bfloat16 product, as on many CPUs


@pytest.fixture(autouse=True)
def nothing_left_running():
    """End all processes that a test has started."""
    yield
    end_all()


@pytest.fixture(scope="module")
def in_one_process():
    """Train the runs of a module's studies in a thread of this process: worker processes take seconds to start."""
    from sngm.study import launch
    from sngm.study.executors.local import InThread

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "open_local", lambda task, jobs, on_gpu: InThread())
        yield


@pytest.fixture
def every_core():
    """Use all threads, for tests of parallel code."""
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)
