"""A run records its data: with other data it neither resumes nor counts as finished."""

import pytest
from console import refused, sngm
from test_image_tasks import write_cifar

from sngm.tasks import Tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not hold the official records"),
    pytest.mark.usefixtures("in_one_process"),
]
LINE = "train cifar10-convnet --device cpu --method sngm --lr 0.05 --batch 16 --workers 4 --epochs 1"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path / "some", 10)
    write_cifar(tmp_path / "others", 10, count=32)


def test_a_finished_run_is_not_the_result_of_other_data():
    assert sngm(f"{LINE} --data-dir some --out run").code == 0
    assert sngm(f"{LINE} --data-dir some --out run").code == 0
    found = sngm(f"{LINE} --data-dir others --out run")
    assert found.code == 2
    assert "run holds a run on other data; name another folder with --out" in found.err
    assert "training.samples: 80 there, 160 here" in found.err
    assert sngm(f"{LINE} --data-dir nowhere --out run").code == 0  # a finished run does not need its data


def test_data_of_the_same_size_are_told_apart_too(tmp_path):
    assert sngm(f"{LINE} --data-dir some --out run").code == 0
    batch = tmp_path / "some" / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = bytearray(batch.read_bytes())
    content[5000] ^= 255
    batch.write_bytes(content)
    found = sngm(f"{LINE} --data-dir some --out run")
    assert found.code == 2
    assert "training.fingerprint" in found.err


@pytest.mark.filterwarnings("default:.*trained on different data")
def test_an_evaluation_on_other_data_says_so():
    assert sngm(f"{LINE} --data-dir some --out run").code == 0
    found = sngm("eval run --data-dir others --device cpu")
    assert found.code == 0
    assert "this run was trained on different data" in found.err
    assert "test.samples: 16 there, 32 here" in found.err


def test_a_study_does_not_take_runs_on_other_data():
    line = "compare cifar10-convnet --methods sngm --batches 16 --lrs 0.1 --seeds 1 --epochs 1 --device cpu --out study"
    assert sngm(f"{line} --data-dir some").code == 0
    found = sngm(f"{line} --data-dir others")
    assert found.code == 2
    assert "on other data" in found.err


def test_one_rate_needs_no_samples_to_choose_by():
    line = "compare cifar10-convnet --methods sngm --batches 80 --seeds 1 --epochs 1 --device cpu --data-dir some"
    assert sngm(f"{line} --lrs 0.1 --dry-run").code == 0
    refused(sngm(f"{line} --lrs 0.1,0.2 --dry-run"), "the 72 samples to train on, the rest being held out")


def test_batchnorm_over_one_sample_is_refused():
    found = sngm("train cifar10-resnet20 --lr 0.1 --batch 8 --device cpu --data-dir some")
    refused(found, "BatchNorm over a single sample", "--workers")


def test_fingerprints_are_of_the_values():
    import torch

    samples = Tensors(torch.arange(1000).reshape(500, 2), torch.zeros(500, dtype=torch.bfloat16))
    assert samples.fingerprint() == samples.to("cpu").fingerprint()
    assert samples.fingerprint() != Tensors(torch.arange(1000).reshape(500, 2), torch.ones(500)).fingerprint()
    changed = torch.arange(1000).reshape(500, 2)
    changed[-1] = 0
    assert samples.fingerprint() != Tensors(changed, torch.zeros(500, dtype=torch.bfloat16)).fingerprint()


def test_fingerprints_of_data_in_committed_results_stay_as_they_are():
    import torch

    for rows, known in ((1001, "da02c397664f"), (50_000, "38ae6600054f")):
        assert Tensors(torch.arange(rows)).fingerprint() == known
