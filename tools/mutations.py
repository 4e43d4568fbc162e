"""Check the tests: put one fault at a time into a copy of the source, and see whether the tests notice it.

Tests that are likely to notice a fault run first, then all of `make test`, then the likely ones of `make test-slow`.

Usage: python tools/mutations.py [FIRST [LAST]]     the numbers of the faults, from 1; about a minute each
       python tools/mutations.py check             whether the source still has the lines that the faults change
"""

# ruff: noqa: E501

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# file under src/sngm, the text to replace, its replacement, and the test files most likely to notice, tried first
FAULTS = [
    ("optim/sngm.py", '"coupled": wd / n', '"coupled": wd', "step"),
    ("optim/sngm.py", "return max(math.sqrt(square.item()) / work.scale, least)", "return math.sqrt(square.item()) / work.scale + least", "step hostile"),
    ("optim/sngm.py", "(-wd if group[\"maximize\"] else wd) * work.scale", "wd * work.scale", "step"),
    ("optim/heavy_ball.py", "steps = list(torch._foreach_mul(buffers, rule.momentum))", "steps = list(torch._foreach_mul(buffers, 1.0))", "step"),
    ("optim/heavy_ball.py", "torch.where(skip, torch.ones_like(momentum), momentum)", "momentum", "step compile"),
    ("optim/heavy_ball.py", "dampening=1.0 - gain if some else 0.0", "dampening=0.0", "step"),
    ("optim/lars.py", "+ group[\"weight_decay\"] * w_norm + group[\"eps\"]", "+ group[\"eps\"]", "step"),
    ("optim/lars.py", "return 1.0 if group[\"variant\"] == \"momentum\" else 1e-3", "return 1e-3", "step"),
    ("optim/lamb.py", ".clamp_max(1.0)", "", "step"),
    ("optim/lamb.py", "return 1.0 - group[\"betas\"][0] ** step, 1.0 - group[\"betas\"][1] ** step", "return 1.0 - group[\"betas\"][0] ** step, 1.0 - group[\"betas\"][0] ** step", "step"),
    ("optim/clars.py", "torch.where(mean.isfinite(), norms.squares(bucket.grads), math.inf)", "norms.squares(bucket.grads)", "step hostile"),
    ("optim/extrap.py", "work.scale = float(workers * ranks)", "work.scale = float(workers)", "extrap distributed"),
    ("optim/norms.py", "if not MIN_EXACT <= value < math.inf and", "if not value < math.inf and", "step hostile"),
    ("optim/state.py", "state[\"state\"].update(values)", "pass", "state"),
    ("optim/sharded_norms.py", "self._weights = [_pieces(p) / copies for p in self.params]", "self._weights = [1.0 for p in self.params]", "sharding"),
    ("optim/base.py", "alone = index if not eager and local(p).numel() == 1 else None", "alone = None", "compile"),
    ("optim/kernels/device_tables.py", "params, state, aligned", "params, aligned", "kernels"),
    ("optim/kernels/triton_kernels.py", "tl.store(counters + i, 0)", "pass", "kernels"),
    ("optim/rounding.py", "chance.to(torch.int32)) & -0x10000", "0x8000) & -0x10000", "rounding"),
    ("training/step.py", "(part * (size / whole * self.scale)).backward()", "(part * (self.scale / len(own.passes))).backward()", "train passes"),
    ("training/step.py", "loss * (len(stacks[0]) * self.scale)", "loss * self.scale", "passes"),
    ("models/ghost_norm.py", "parameter.repeat_interleave(groups // len(parameter), 0)", "parameter.repeat(groups // len(parameter), 1)", "passes"),
    ("training/step.py", " and piece.stop % self.plan.micro == 0:", ":", "train"),
    ("training/step.py", "(clip / (norm + 1e-6)).clamp(max=1.0)", "(clip / (norm + 1e-6))", "train passes"),
    ("training/batch_plan.py", "start = worker * self.share", "start = worker * self.bn_group", "batch_plan train"),
    ("training/loop.py", "step = epoch * setup.per_epoch + i", "step = epoch * setup.per_epoch + i + 1", "train resume"),
    ("training/loop.py", "if first == 0:\n        setup.recurrent_state.reset()", "setup.recurrent_state.reset()", "resume wikitext_task"),
    ("training/checkpoint.py", "if hashlib.sha256(content).hexdigest() == index[path.name] else None", "", "resume"),
    ("training/checkpoint.py", "map_location=device, weights_only=True", "map_location=device, weights_only=False", "resume"),
    ("training/build.py", "group |= {f\"initial_{key}\": group[key] for key in RATES if key in group}", "group |= {f\"initial_{key}\": config.lr for key in RATES if key in group}", "train settings"),
    ("training/evaluate.py", "order = rng.permutation(count, rng.HOLDOUT)", "order = rng.permutation(count, config.seed, rng.HOLDOUT)", "study train"),
    ("training/rng.py", "state ^= state >> 31", "pass", "train resume"),
    ("training/config.py", "json.dumps(values, sort_keys=True)", "json.dumps(values)", "train"),
    ("training/batchnorm_stats.py", ".sum(0) / self.plan.workers", ".sum(0) / len(self.kept)", "distributed train"),
    ("study/select.py", "sign = -1.0 if higher_is_better else 1.0", "sign = -1.0", "study"),
    ("study/select.py", "len(scores) - first >= EXTENSIONS", "len(scores) - first > EXTENSIONS", "study"),
    ("study/grid.py", "for seed in range(self.study.seeds)]", "for seed in range(1, self.study.seeds + 1)]", "study"),
    ("study/grid.py", "del identity[\"seeds\"]", "pass", "study"),
    ("study/grid.py", "diverged = record[\"status\"] == \"diverged\" or", "diverged =", "study"),
    ("report/stats.py", "w * w * variance(values) / len(values)", "w * w * variance(values)", "report"),
    ("report/stats.py", "float(t.ppf(0.975, df))", "float(t.ppf(0.95, df))", "report"),
    ("report/records.py", "return math.nan\n        return self.result", "return None\n        return self.result", "report"),
    ("report/records.py", "'validation' if self.part == 'select' else 'test'", "'test'", "report"),
    ("report/summary.py", "reverse=self.higher_is_better)", "reverse=True)", "report"),
    ("report/tables.py", "\"*\" * cell.at_edge", "\"\"", "report"),
]  # fmt: skip


def run(tests: list[str], folder: Path, which: str = "not slow") -> bool:
    """Return whether the tests pass; exit if they could not be run."""
    options = ["-q", "-x", "-n", "auto", "-m", which, "--hypothesis-profile=ci", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    code = subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode
    if code not in (0, 1, 2, 5):  # 1 or 2: tests failed, xdist returns 2 with -x; 5: no tests of this kind
        sys.exit(f"pytest ended with {code}: {' '.join(map(str, command))}")
    return code in (0, 5)


def check() -> None:
    """Exit if the text of a fault is not in its file exactly once."""
    for number, (name, text, *_) in enumerate(FAULTS, start=1):
        if (count := (ROOT / "src" / "sngm" / name).read_text().count(text)) != 1:
            sys.exit(f"fault {number}: {text!r} is {count} times in {name}")


def main() -> None:
    check()
    if sys.argv[1:] == ["check"]:
        return
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    last = min(int(sys.argv[2]) if len(sys.argv) > 2 else len(FAULTS), len(FAULTS))
    missed = []
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "sngm"
        ignored = shutil.ignore_patterns(".git", ".venv", ".data", ".*_cache", "build", "dist", "runs")
        shutil.copytree(ROOT, copy, ignore=ignored)
        if not run(["tests/test_step.py"], copy):
            sys.exit("the tests fail without any fault")
        for number, (name, text, fault, likely) in enumerate(FAULTS[first - 1 : last], start=first):
            path = copy / "src" / "sngm" / name
            source = path.read_text()
            path.write_text(source.replace(text, fault))
            tests = [f"tests/test_{test}.py" for test in likely.split()]
            caught = not run(tests, copy) or not run([], copy) or not run(tests, copy, "slow")
            path.write_text(source)
            print(f"{number:2d} {'caught' if caught else 'MISSED'}  {name}: {text!r} -> {fault!r}", flush=True)
            missed += [] if caught else [number]
    print(f"{last - first + 1 - len(missed)} of {last - first + 1} faults caught")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
