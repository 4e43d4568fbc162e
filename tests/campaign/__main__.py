"""The driver: ``python -m campaign --minutes 10``, from the folder tests or with it in PYTHONPATH."""

import argparse
import json
import os
import platform
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot be forked safely

import torch

from sngm.training.run_folder import commit, cpu_name

from . import Wrong, arguments, commands, corruption, disks, kills, records

KINDS = {"kills": kills, "corruption": corruption, "arguments": arguments, "disks": disks}
SHARES = {"kills": 0.09, "corruption": 0.07, "arguments": 0.79, "disks": 0.05}  # of the time
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
Outcome = dict[str, Any]


def one(seed: int, name: str, keep: bool = False) -> Outcome:
    """Run one case by its name, such as kills-17."""
    kind = name.partition("-")[0]
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=records.ROOT))
    began, wrong, counted = time.monotonic(), "", Counter()
    try:
        KINDS[kind].case(random.Random(f"{seed} {name}"), folder, counted)
    except Wrong as error:
        wrong = str(error)
    except Exception:
        wrong = f"the campaign itself failed: {traceback.format_exc()[-500:]}"
    if keep:
        print(f"its folder: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    # short enough for one atomic write to a pipe
    return {"case": name, "wrong": wrong[:600], "counted": counted, "seconds": time.monotonic() - began}


def lane(number: int, lanes: int, seed: int, kinds: list[str], until: float, to: int) -> None:
    """Run every `lanes`-th case, each kind for its share of the time; write outcomes as lines."""
    spent = dict.fromkeys(kinds, 0.0)
    following = dict.fromkeys(kinds, number)
    while time.monotonic() < until:
        kind = min(kinds, key=lambda k: spent[k] / SHARES[k])
        outcome = one(seed, f"{kind}-{following[kind]}")
        spent[kind] += outcome["seconds"]
        following[kind] += lanes
        os.write(to, json.dumps(outcome).encode() + b"\n")


def campaign(seed: int, minutes: float, lanes: int, kinds: list[str]) -> tuple[list[Outcome], float]:
    """Run cases side by side until the time is over, and show how far they are."""
    began = shown = time.monotonic()
    for command in (*records.COMMANDS, records.STUDY):
        records.reference(command)
        for part in (0.3, 0.5, 0.7, 0.9) if command != records.STUDY else ():
            records.unfinished(command, part)
    print(f"undisturbed runs made in {time.monotonic() - began:.0f} s; seed {seed}, {lanes} at a time", flush=True)
    reading, writing = os.pipe()
    children = []
    for number in range(lanes):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                lane(number, lanes, seed, kinds, began + 60 * minutes, writing)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    os.close(writing)
    outcomes: list[Outcome] = []
    try:
        rest = b""
        while True:
            if select.select([reading], [], [], 5.0)[0]:
                content = os.read(reading, 1 << 16)
                if not content:
                    break
                *lines, rest = (rest + content).split(b"\n")
                for outcome in map(json.loads, lines):
                    outcomes.append(outcome)
                    if outcome["wrong"]:
                        print(f"FAILED {outcome['case']}: {outcome['wrong']}\n  {again(seed, outcome)}", flush=True)
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                print(f"{(shown - began) / 60:5.1f} min: {in_words(outcomes)}", flush=True)
    except KeyboardInterrupt:
        for child in children:
            os.kill(child, signal.SIGKILL)
    ended = [os.waitpid(child, 0)[1] for child in children]
    if any(ended):
        outcomes.append({"case": "kills-0", "wrong": f"cases were cut short: {ended}", "counted": {}})
    return outcomes, (time.monotonic() - began) / 60


def again(seed: int, outcome: Outcome) -> str:
    return f"PYTHONPATH=tests {os.path.relpath(sys.executable)} -m campaign --seed {seed} --case {outcome['case']}"


def in_words(outcomes: list[Outcome]) -> str:
    kinds = Counter(outcome["case"].partition("-")[0] for outcome in outcomes)
    kills = sum(outcome["counted"].get("killed processes", 0) for outcome in outcomes)
    failed = sum(bool(outcome["wrong"]) for outcome in outcomes)
    return f"{', '.join(f'{kinds[kind]} {kind}' for kind in KINDS)}; {kills} processes killed; {failed} failures"


def summary(outcomes: list[Outcome], seed: int, minutes: float) -> Outcome:
    by_kind: Outcome = {}
    for kind in KINDS:
        own = [outcome for outcome in outcomes if outcome["case"].startswith(kind)]
        counted = sum((Counter(outcome["counted"]) for outcome in own), Counter())
        failed = sum(bool(outcome["wrong"]) for outcome in own)
        by_kind[kind] = {"cases": len(own), "failures": failed, "counted": dict(counted)}
    failures = [{"case": o["case"], "what": o["wrong"], "again": again(seed, o)} for o in outcomes if o["wrong"]]
    made = {
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": cpu_name(),
    }
    return {"seed": seed, "minutes": round(minutes, 1), **made, "kinds": by_kind, "failures": failures}


def write_docs(found: Outcome) -> None:
    """Fill the table of docs/reliability.md."""
    rows = ["| kind | cases | of them | failures |", "|---|---|---|---|"]
    for kind, own in found["kinds"].items():
        counted = ", ".join(f"{count} {name}" for name, count in sorted(own["counted"].items()))
        rows.append(f"| {kind} | {own['cases']} | {counted} | {own['failures']} |")
    where = f"seed {found['seed']}, {found['minutes']:g} minutes, commit {found['commit']}, torch {found['torch']}, "
    rows += ["", f"One campaign: {where}Python {found['python']}, {found['processor']}."]
    block = "\n".join(["<!-- campaign: begin -->", "", *rows, "<!-- campaign: end -->"])
    text = re.sub(
        "<!-- campaign: begin -->.*<!-- campaign: end -->", lambda _: block, PAGE.read_text(), flags=re.DOTALL
    )
    PAGE.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaign", description="Disturb sngm, and check what it promises.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="other seeds make other cases")
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="cases at a time")
    parser.add_argument("--kind", choices=[*KINDS], help="this kind of cases only")
    parser.add_argument("--case", help="one case again, such as kills-17; its folder is kept")
    parser.add_argument("--write-docs", action="store_true", help="fill the table of docs/reliability.md")
    given = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")
    torch.set_num_threads(1)
    commit()  # cached: the code as it is now, whatever is committed meanwhile
    commands.warm_up()
    records.ROOT = Path(tempfile.mkdtemp(prefix="campaign-"))
    if given.case:
        outcome = one(given.seed, given.case, keep=True)
        print(f"{given.case}: {outcome['wrong'] or 'as promised'}")
        return bool(outcome["wrong"])
    kinds = [given.kind] if given.kind else [*KINDS]
    outcomes, minutes = campaign(given.seed, given.minutes, given.jobs, kinds)
    shutil.rmtree(records.ROOT, ignore_errors=True)
    found = summary(outcomes, given.seed, minutes)
    path = ROOT / "build" / "campaign" / f"seed-{given.seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    if given.write_docs:
        write_docs(found)
    print(f"{in_words(outcomes)}\nsummary: {path}")
    for failure in found["failures"]:
        print(f"{failure['case']}: {failure['what'].splitlines()[0][:200]}\n  {failure['again']}")
    return bool(found["failures"]) or not outcomes


if __name__ == "__main__":
    sys.exit(main())
