"""Steps inside training frameworks equal those of one plain process, also after a resume; mistakes are errors.

The cases are programs in the folder integrations, which run with one process per rank. `make test-integrations` sets
up an environment with all these libraries.
"""

import functools
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import waiting

FOLDER = Path(__file__).parent / "integrations"
pytestmark = pytest.mark.nightly
FLOAT32, FLOAT64 = 1e-6, 1e-12
# library, number of ranks, arguments: the largest difference allowed for each case
EXACT = {
    ("accelerate", 2): dict.fromkeys(["steps", "resumed", "stepped_before", "clars_in_ddp"], FLOAT64),
    ("huggingface", 1): dict.fromkeys(["decay", "accumulated"], FLOAT32),
    ("huggingface", 2): dict.fromkeys(["sharded", "resumed"], FLOAT32),
    ("lightning", 2): dict.fromkeys(["ddp", "resumed", "sharded", "clars"], FLOAT64),
    ("torchtitan", 1): dict.fromkeys(["steps", "resumed"], FLOAT64),
    ("torchtitan", 2): {"pipeline": FLOAT64},
    **{
        ("deepspeed", 2, stage): dict.fromkeys(["steps", "decoupled", "offloaded", "clipped", "resumed"], FLOAT32)
        for stage in ("1", "2", "3")
    },
}


@functools.cache
def results(library: str, ranks: int, *arguments: str) -> dict:
    """Run a program of the folder integrations, and return what its cases returned."""
    module = {"huggingface": "transformers", "gpu": "accelerate"}.get(library, library)
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    usual = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
    words = [sys.executable, FOLDER / f"{library}_cases.py", *arguments]
    started = [
        waiting.launch(words, env={**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=waiting.PATIENCE) for process in started]
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    (line,) = [line for line in outputs[0][0].splitlines() if line.startswith("RESULTS ")]
    return json.loads(line.removeprefix("RESULTS "))


@pytest.mark.parametrize(
    ("run", "case"),
    [pytest.param(run, case, id=f"{'-'.join(map(str, run))}-{case}") for run in EXACT for case in EXACT[run]],
)
def test_steps_equal_those_of_one_plain_process(run, case):
    assert results(*run)[case] <= EXACT[run][case]


def test_accelerate_leaves_no_stale_state_and_checkpoints_of_a_new_optimizer_are_sharded():
    assert results("accelerate", 2)["stale"] == 0
    assert results("accelerate", 2)["checkpoint_of_new"] == 4


def test_a_weight_decay_that_the_trainer_would_ignore_is_an_error():
    assert "trainer_optimizer" in results("huggingface", 1)["ignored_decay"]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_zero_without_a_shared_norm_is_an_error_that_names_the_remedy(stage):
    found = results("deepspeed", 2, stage)
    for case in ("hidden_groups", "parts"):
        assert "DeepSpeed ZeRO" in found[case]
        assert "share_norm(engine)" in found[case]
    for text in found["layerwise"]:
        assert "DeepSpeed has flattened the parameters" in text


def test_check_finds_the_faults_of_distributed_set_ups():
    assert results("accelerate", 2)["check_sharded"] == []
    (text,) = results("accelerate", 2)["check_copies"]
    assert "copies of one gradient" in text
    assert results("huggingface", 1)["check_summed"] == ["accumulation"]
    assert results("huggingface", 1)["check_averaged"] == []
    assert results("torchtitan", 2)["check_pipeline"] == ["ranks"]
    for stage in ("1", "2", "3"):
        assert results("deepspeed", 2, stage)["check"] == ["clipping"]


def test_timm_knows_the_optimizers_by_name_also_in_its_own_scripts(tmp_path):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    script = tmp_path / "train.py"
    script.write_text(
        """import argparse, torch
from timm.optim import create_optimizer, create_optimizer_v2
p = argparse.ArgumentParser()
p.add_argument("--opt"); p.add_argument("--lr", type=float); p.add_argument("--weight-decay", type=float)
p.add_argument("--momentum", type=float, default=0.8)
args = p.parse_args()
model = torch.nn.Linear(3, 2)
made = create_optimizer(args, model)
assert [g["weight_decay"] for g in made.param_groups] == [0.0, 0.1], made.param_groups
assert made.param_groups[0]["momentum"] == 0.8
print(type(made).__module__, create_optimizer_v2(model, "blocksngm", lr=0.1).scope)
"""
    )
    code = f"import runpy, sys; sys.path.insert(0, {str(FOLDER)!r}); import common; "
    code += f"sys.argv = ['timm', {str(script)!r}, '--opt', 'sngm', '--lr', '0.1', '--weight-decay', '0.1']; "
    code += "runpy.run_module('sngm.integrations.timm', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["sngm.optim.sngm", "tensor"], done.stderr


def test_timm_is_told_of_the_optimizers_once():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import common, logging; logging.basicConfig(); "
    code += "from sngm.integrations.timm import register; register(); register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "already" not in done.stderr


# differences from float32: a step of length 0.1 turns by the rounding of the gradients
GPU = {"no": 1e-6, "32-true": 1e-6, "bf16": 0.02, "bf16-mixed": 0.02, "fp16": 2e-3, "16-mixed": 2e-3}


@pytest.mark.parametrize(
    "arguments",
    [
        *(("accelerate", precision) for precision in ("no", "bf16", "fp16")),
        *(("lightning", "fsdp", precision) for precision in ("32-true", "bf16-mixed", "16-mixed")),
        *(("lightning", "model-parallel", precision) for precision in ("32-true", "bf16-mixed")),
    ],
    ids="-".join,
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_a_gpu_equal_plain_ones(arguments):
    if not any(map(importlib.util.find_spec, ("lightning", "pytorch_lightning"))):
        pytest.skip("lightning is not installed")
    found = results("gpu", 1, *arguments)["found"]
    assert found["steps"] <= GPU[arguments[-1]]
    assert GPU[arguments[-1]] < 1e-5 or found["steps"] > 1e-6  # the lower precision was used
    assert found["resumed"] <= GPU[arguments[-1]]
    assert found.get("faults", []) == []
