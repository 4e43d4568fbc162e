"""Test configuration: one thread per test unless it needs more, fixed random seeds, no leftover processes."""

import os
import sys
from pathlib import Path

import pytest
import torch
from waiting import end_all

collect_ignore = ["campaign"]  # a separate program, which test_campaign.py runs

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # for criteo_synthetic

# For small tensors, starting a second thread takes longer than the work; other tests use the other cores.
torch.set_num_threads(1)


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


@pytest.fixture
def every_core():
    """Use all threads, for tests of parallel code."""
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)
