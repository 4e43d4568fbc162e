"""Test AUC of the paper's five methods on a sample of Criteo, compared with scikit-learn's logistic regression.

For each method, both loss reductions and both batch sizes, validation AUC selects one of the paper's three learning
rates; the grid is not extended. Logistic regression gets the same numbers and one-hot categories, and its penalty is
selected on the same validation rows. The first two examples produce the tables of docs/criteo.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arena import progress

from sngm.data.criteo import Rows, load_criteo
from sngm.models.deepfm import log_scaled
from sngm.report import summarise
from sngm.study import StudyConfig, launch, select
from sngm.tasks.criteo import CHOICES, CriteoDeepFM
from sngm.training import Options

EXAMPLES = """examples:
  python benchmarks/criteo_sample.py --data-dir ~/datasets --out runs/criteo-sample     60 runs, then 60 to test
  python benchmarks/criteo_sample.py --data-dir ~/datasets --integers log --init he --out runs/criteo-log
  python benchmarks/criteo_sample.py --data-dir ~/datasets --only regression
  python benchmarks/criteo_sample.py --data-dir ~/datasets --only mean --weight-decay 2e-4 --out runs/criteo-decay
"""
METHODS = {  # test AUC in the paper at batch 1024 and 8192, on 10 million rows of another dataset
    "msgd": (0.7397, 0.5),
    "adam": (0.7311, 0.6666),
    "lars-unscaled": (0.6065, 0.6006),
    "lamb": (0.7066, 0.6811),
    "sngm": (0.7489, 0.7514),
}
BATCHES = CriteoDeepFM.batches
PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # C, the inverse of the penalty's weight


def regression(data_dir: Path | None, integers: str) -> dict[str, Any]:
    """Return the results of logistic regression at the C with the best validation AUC."""
    try:
        from scipy.sparse import csr_matrix, hstack
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import roc_auc_score
    except ImportError as error:
        raise SystemExit(f"logistic regression needs scikit-learn, which cannot be imported: {error}") from None
    found = load_criteo(data_dir)
    offsets, width = np.cumsum([0, *found.field_sizes[:-1]]), sum(found.field_sizes)

    def columns(rows: Rows) -> tuple[Any, Any]:
        numbers, *others = rows.tensors
        if integers == "log":  # as in the model
            numbers = log_scaled(numbers, torch.tensor(found.spans))
        dense, categories, labels = (t.numpy() for t in (numbers, *others))
        count, fields = categories.shape
        ends = np.arange(0, count * fields + 1, fields)
        ones = csr_matrix((np.ones(count * fields), (categories + offsets).ravel(), ends), (count, width))
        return hstack([csr_matrix(dense, dtype=float), ones]).tocsr(), labels

    x, y = columns(found.train)
    held_out = {"validation": columns(found.validation), "test": columns(found.test)}
    tried: dict[float, dict[str, float]] = {}
    for c in PENALTIES:
        progress(f"logistic regression, C {c}")
        model = LogisticRegression(C=c, max_iter=1000).fit(x, y)
        tried[c] = {
            name: float(roc_auc_score(of, model.decision_function(inputs))) for name, (inputs, of) in held_out.items()
        }
    best = max(tried, key=lambda c: tried[c]["validation"])
    return {"C": best, **tried[best], "validation of each C": {c: tried[c]["validation"] for c in tried}}


def study(args: argparse.Namespace, reduction: str) -> list[dict[str, Any]]:
    """Return the selected learning rate and the test AUC of every seed, for each method and batch size."""
    select.EXTENSIONS = 0  # keep to the paper's grid
    defaults = CriteoDeepFM().settings()
    others = {name: getattr(args, name) for name in ("integers", "init", "embedding_l2")}
    wanted = StudyConfig(
        "criteo-deepfm", tuple(METHODS), BATCHES, args.seeds, args.epochs,
        method_settings={} if args.weight_decay is None else {"weight_decay": args.weight_decay},
        task_settings={"reduction": reduction} | {k: v for k, v in others.items() if v != defaults[k]},
        settings={} if args.schedule is None else {"schedule": args.schedule},
    )  # fmt: skip
    # the whole batch in one pass on a CPU too, since each pass reads and writes all tables
    options = Options(device=args.device, data_dir=args.data_dir, pass_size=max(BATCHES))
    told = 0

    def show(now: launch.Progress) -> None:
        nonlocal told
        if len(now.done) > told:
            told = len(now.done)
            progress(f"{reduction}: {told} of {now.planned} runs")

    launch.compare(wanted, args.out / reduction, options=options, jobs=args.jobs, show=show)
    return [
        {"method": c.method, "batch": c.batch, "lr": c.lr, "test": list(c.values.values()), "validation": c.selection}
        for c in summarise(args.out / reduction).cells.values()
    ]


def page(found: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    lines = []
    studies = [name for name in CHOICES["reduction"] if name in found]
    if studies:
        heads = [f"{name}, {batch}" for name in studies for batch in BATCHES]
        heads += [f"the paper, {batch}" for batch in BATCHES]
        lines += ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        cells = {(name, c["method"], c["batch"]): cell(c) for name in studies for c in found[name]}
        for method, paper in METHODS.items():
            ours = [cells[name, method, batch] for name in studies for batch in BATCHES]
            lines.append(f"| {method} | " + " | ".join([*ours, *(f"{value:.4f}" for value in paper)]) + " |")
        lines.append("")
        best = max((c for name in studies for c in found[name] if c["test"]), key=lambda c: statistics.fmean(c["test"]))
        lines.append(f"The best is {best['method']} at batch {best['batch']}: {statistics.fmean(best['test']):.4f}.")
    if "regression" in found:
        r = found["regression"]
        lines.append(f"Logistic regression with C = {r['C']:g}: {r['test']:.4f} (validation {r['validation']:.4f}).")
    return "\n".join(lines)


def cell(found: dict[str, Any]) -> str:
    """Return the mean over seeds, their spread, and the learning rate as text."""
    if not found["test"]:
        return "diverged"
    spread = f" ± {statistics.stdev(found['test']):.4f}" if len(found["test"]) > 1 else ""
    return f"{statistics.fmean(found['test']):.4f}{spread} ({found['lr']:g})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder that holds criteo/dac_sample_80k.tsv")
    parser.add_argument("--out", type=Path, default=Path("runs/criteo-sample"), help="folder for the runs and results")
    parser.add_argument("--seeds", type=int, default=3, help="runs at the rate chosen")
    parser.add_argument("--epochs", type=int, default=CriteoDeepFM.epochs)
    parser.add_argument(
        "--weight-decay", type=float, help="another than the paper's, of a study in a folder of its own"
    )
    parser.add_argument(
        "--integers", choices=CHOICES["integers"], default="minmax", help="likewise; see the task's settings"
    )
    parser.add_argument("--init", choices=CHOICES["init"], default="small", help="likewise")
    parser.add_argument("--embedding-l2", type=float, default=0.0, help="likewise")
    parser.add_argument("--schedule", help="of the rate, another than the paper's constant one; likewise")
    parser.add_argument("--device", help="cpu or cuda; default: the GPU if there is one")
    parser.add_argument("--jobs", type=int, help="runs at a time; default: one a core, or one on a GPU")
    parser.add_argument("--only", choices=(*CHOICES["reduction"], "regression"), help="one part of it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "criteo_sample.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for part in (args.only,) if args.only else ("regression", *CHOICES["reduction"]):
        found[part] = regression(args.data_dir, args.integers) if part == "regression" else study(args, part)
        path.write_text(json.dumps(found, indent=2))
    print(page(found))


if __name__ == "__main__":
    main()
