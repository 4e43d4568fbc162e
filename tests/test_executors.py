"""Studies on Ray and SLURM give the records of one on this machine, also after workers and jobs were killed."""

import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import uuid
from pathlib import Path

import pytest
from console import finish, refused, sngm, until
from runs import assert_same_end
from test_study import cells_of, linux, living, results
from waiting import PATIENCE, launch, wait_for

from sngm.errors import UsageError
from sngm.options import Cluster, Execution
from sngm.study import executors
from sngm.study.executors import on_ray, on_slurm
from sngm.training.run_folder import differences

STUDY = "compare --methods msgd,sngm --batches 64,128 --lrs 0.03,0.1,0.3 --epochs 2 --seeds 2 --set width=2"
# the command line, with submitit's executor for this machine in place of SLURM's
MAIN = """
import functools

from sngm.cli import main
from sngm.study import executors
from sngm.training.run_folder import differences
from sngm.study.executors import on_slurm

executors.check_usable = lambda name: None
on_slurm.OnSlurm = functools.partial(on_slurm.OnSlurm, kind="local")
if __name__ == "__main__":
    main()
"""
WORKERS = {"local": "multiprocessing", "ray": "ray::make_elsewhere", "slurm": "submitit.core._submit"}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SNGM_COMMIT", "feedbee")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # the paths of Ray's sockets must be short
    (tmp_path / "main.py").write_text(MAIN)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--executor nosuch", ["--executor", "local, ray, slurm", "nosuch"]),
        ("--executor ray --jobs 2", ["--jobs", "ray"]),
        ("--cpus 0", ["--cpus", "0"]),
        ("--gpus -1", ["--gpus", "-1"]),
        ("--slurm-time 0", ["--slurm-time", "0"]),
        ("--slurm-options account", ["--slurm-options", "name=value", "account"]),
        ("--track nosuch", ["--track", "nosuch"]),
        ("--gpus 1", ["--gpus is for runs on a cluster", "--executor ray or slurm"]),
        ("--slurm-partition gpu", ["--executor slurm"]),
        ("--executor ray --slurm-time 5", ["--executor slurm"]),
    ],
)
def test_options_of_a_cluster_are_checked_before_anything_is_run(options, words, tmp_path):
    refused(sngm(f"compare {options}"), *words)
    assert not (tmp_path / "runs").exists()


def test_an_executor_that_is_not_installed_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: None)
    for name, more in itertools.product(("ray", "slurm"), ("", " --dry-run")):
        refused(sngm(f"compare --methods sngm --batches 128 --executor {name}{more}"), f"pip install 'sngm[{name}]'")
    assert not Path("runs").exists()
    assert [(name, usable) for name, usable, _ in executors.executors_usable()] == [
        ("local", True), ("ray", False), ("slurm", False),
    ]  # fmt: skip


def test_a_machine_without_slurm_says_so(monkeypatch):
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", "")
    assert executors.executors_usable()[2] == (
        "slurm",
        False,
        "there is no srun here; use a login node of a SLURM cluster",
    )
    with pytest.raises(UsageError, match="login node"):
        executors.check_usable("slurm")


def test_a_ray_address_where_nothing_listens_is_refused_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"no Ray cluster answers at {address}"):
            on_ray._check_address(address)
    for other in (None, "auto", "local", "ray://127.0.0.1:10001"):
        on_ray._check_address(other)


def test_a_job_that_sbatch_refuses_is_an_error_in_one_line(tmp_path):
    pytest.importorskip("submitit")
    executor = on_slurm.OnSlurm(Cluster(executor="slurm"), tmp_path, None, "sngm compare", kind="local")

    def refuse(*_):
        raise executor.failed("sbatch: error: invalid partition specified: nope")

    executor.executor.submit = refuse
    with pytest.raises(UsageError, match="SLURM refused the job: sbatch: error: invalid partition"):
        executor.submit()
    executor.shutdown()


@pytest.mark.parametrize("stuck", [False, True])
def test_shutdown_waits_a_bounded_time_until_stopped_jobs_have_ended(stuck, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(on_slurm, "PAUSE", 0.01)
    monkeypatch.setattr(on_slurm, "PATIENCE", 0.1)
    executor = on_slurm.OnSlurm(Cluster(executor="slurm"), tmp_path, None, "sngm compare", kind="local")

    class Job:
        cancelled, checks = False, 0

        def cancel(self, check):
            self.cancelled = True

        def done(self, force_check=False):
            self.checks += force_check
            return self.cancelled and self.checks >= 3 and not stuck

    job = Job()
    executor.executor.submit = lambda *_: job
    executor.submit()
    executor.stop()
    assert not job.done()
    executor.shutdown()
    assert job.checks > 3 if stuck else job.done()


def test_runs_of_a_cluster_use_its_gpus_and_not_those_of_this_machine():
    on_gpus, on_cpus = Cluster(executor="slurm", gpus=1), Cluster(executor="ray")
    assert (on_gpus.there(Execution()).device, on_cpus.there(Execution()).device) == ("cuda", "cpu")
    assert on_gpus.here(Execution(device="cuda", step="captured")) == Execution(device="cpu")
    assert Cluster().there(Execution()) == Execution()


# ---------------------------------------------------------------- Ray and submitit


def start(executor: str, folder: str, mark: str = "SNGM_TEST", study: str = STUDY):
    place = ["--jobs", "2"] if executor == "local" else ["--executor", executor]
    words = [sys.executable, "main.py", *study.split(), *place, "--out", folder]
    return launch(words, env={**os.environ, mark: "1", "RAY_ADDRESS": ""})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies") / "local"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNGM_COMMIT", "feedbee")
        assert sngm(f"{STUDY} --jobs 2 --out {folder}").code == 0
    return without_times(folder), cells_of(folder)


def without_times(folder: str | Path) -> dict:
    """Return the records without what depends on time and on the command line."""
    found = {}
    for path in Path(folder).glob("runs/*/run.json"):
        record = json.loads(path.read_text())
        for key in ("started", "timing", "command", "digest", "made_before"):
            record.pop(key, None)
        found[path.parent.name] = record
    return found


def assert_same_study(folder: str | Path, undisturbed: tuple[dict, list]) -> None:
    records, cells = undisturbed
    found = without_times(folder)
    assert found.keys() == records.keys()
    assert [line for name in found for line in differences(found[name], records[name])] == []
    assert cells_of(folder) == cells


@pytest.mark.nightly
@pytest.mark.parametrize("executor", ["ray", "slurm"])
def test_every_executor_makes_the_same_records(executor, undisturbed):
    pytest.importorskip(executors.PACKAGES[executor])
    shown = finish(start(executor, "study"), 4 * PATIENCE)  # submitit starts all jobs at once
    assert shown.code == 0, shown.err
    assert_same_study("study", undisturbed)
    assert len(list(Path("study").glob("runs/*/log.txt"))) == len(undisturbed[0])
    assert len(undisturbed[0]) >= 20


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@linux
@pytest.mark.nightly
@pytest.mark.parametrize("executor", ["local", "ray", "slurm"])
def test_a_study_killed_at_ten_random_moments_ends_the_same(executor, undisturbed):
    if executor != "local":
        pytest.importorskip(executors.PACKAGES[executor])
    chance, kills, mark = random.Random(0), 0, f"SNGM_TEST_{uuid.uuid4().hex}"
    longest = {"local": 4.0, "ray": 10.0, "slurm": 15.0}[executor]
    while kills < 10:  # a study that ends before is followed by another
        code = None
        while code != 0:
            process = start(executor, "study", mark)
            while process.poll() is None:
                until_then = time.monotonic() + chance.uniform(1.0, longest)
                wait_for(lambda end=until_then, p=process: p.poll() is not None or time.monotonic() > end)
                if process.poll() is None and kills < 10:
                    workers = [pid for pid in living(mark) if WORKERS[executor] in named(pid)]
                    os.kill(
                        chance.choice(workers if workers and chance.random() < 0.6 else [process.pid]), signal.SIGKILL
                    )
                    kills += 1
            shown = finish(process)
            code = shown.code
            assert code in (0, 1, -signal.SIGKILL), shown.err
        assert_same_study("study", undisturbed)
        shutil.rmtree("study")


@linux
@pytest.mark.nightly
def test_a_preempted_job_is_requeued_and_goes_on_from_its_checkpoint():
    pytest.importorskip("submitit")
    study = "compare --methods sngm --batches 16 --lrs 0.3 --epochs 4 --seeds 2"
    assert sngm(f"{study} --jobs 2 --out undisturbed").code == 0
    mark = f"SNGM_TEST_{uuid.uuid4().hex}"
    process = start("slurm", "study", mark, study)
    until(process, lambda: len(begun()) == 2)
    for pid in [pid for pid in living(mark) if WORKERS["slurm"] in named(pid)]:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGUSR2)
    shown = finish(process)
    assert shown.code == 0, shown.err
    assert "Requeued job" in "".join(path.read_text() for path in Path("study/slurm").glob("*_log.*"))
    for folder in Path("study/runs").iterdir():
        assert_same_end(folder, Path("undisturbed/runs", folder.name))


def begun() -> list[Path]:
    """Return the metrics of runs that have finished an epoch."""
    return [path for path in Path("study").glob("runs/*/metrics.jsonl") if path.stat().st_size]


@linux
@pytest.mark.nightly
def test_an_interrupted_study_on_ray_stops_its_runs_and_resumes(undisturbed):
    pytest.importorskip("ray")
    mark = f"SNGM_TEST_{uuid.uuid4().hex}"
    process = start("ray", "study", mark)
    until(process, begun)
    os.kill(process.pid, signal.SIGINT)
    shown = finish(process)
    assert shown.code == 130, shown.err
    assert shown.err.strip().splitlines()[-1].endswith("the same command resumes")
    wait_for(lambda: not living(mark))
    assert {record["status"] for record in results("study").values()} <= {"finished", "interrupted"}
    assert finish(start("ray", "study", mark)).code == 0
    assert_same_study("study", undisturbed)


@pytest.mark.nightly
def test_a_dry_run_prints_the_script_for_sbatch(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text("#!/bin/sh\n")
    (tools / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    line = f"{STUDY} --executor slurm --gpus 1 --slurm-partition gpu --slurm-time 90 --slurm-options account=physics"
    shown = sngm(f"{line} --out {tmp_path}/study --dry-run")
    assert shown.code == 0, shown.err
    for option in (
        "partition=gpu",
        "time=90",
        "gpus-per-node=1",
        "cpus-per-task=1",
        "account=physics",
        "signal=USR2@90",
    ):
        assert f"#SBATCH --{option}" in shown.out
    assert f"submitit.core._submit {tmp_path}/study/slurm" in shown.out
    assert not (tmp_path / "study").exists()
    refused(sngm(f"{line} --gpus 0.5 --dry-run"), "--gpus", "whole number")
