"""How tests run: side by side, each on one thread unless it is about large tensors, with the same random numbers."""

import os
import sys
from pathlib import Path

import pytest
import torch
from waiting import end_all

collect_ignore = ["campaign"]  # a program of its own, which test_campaign.py runs

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # for criteo_synthetic

# Waking a second thread for small tensors takes longer than the work; the cores are for other tests meanwhile.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_numbers_each_time():
    """What a test draws and computes does not depend on which tests its process has run before."""
    torch.manual_seed(0)
    torch.backends.mkldnn.enabled = True  # torch does without once products in bfloat16 failed, as on many CPUs


@pytest.fixture(autouse=True)
def nothing_left_running():
    """What a test has started ends with it."""
    yield
    end_all()


@pytest.fixture
def every_core():
    """All threads, for tests of what is done in parallel."""
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)
