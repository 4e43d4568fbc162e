"""Hostile arguments: commands that work, with values, options and environments that no command line expects."""

import random
import re
import typing
from collections import Counter
from pathlib import Path

import typer

from sngm import cli

from . import Wrong
from .commands import sngm
from .records import COMMANDS, FOLDER, copied, reference

OWN = '''
from sngm.tasks.digits import Digits

class Mine(Digits):
    """Works."""

class Raises(Digits):
    """Fails in its model."""
    def model(self):
        raise RuntimeError("of my own")

class Odd:
    """Is no task."""
'''
# fmt: off
BASES = [
    *["train digits --epochs 1 --batch 512 --set width=2 --out r"] * 6,
    *["compare digits --methods sngm --batches 512 --lrs 0.1 --seeds 1 --epochs 1 --set width=2 --out s --dry-run"] * 4,
    "compare digits --methods sngm --batches 512 --lrs 0.1 --seeds 1 --epochs 1 --set width=2 --out s --jobs 2",
    *["probe digits --steps 1 --points 2 --samples 8 --iterations 2 --batch 512 --set width=2"] * 2,
    *["advise --gradients 8e6 --gap 2.3 --L 20 --sigma 15"] * 2,
    "advise digits --from-sgd lr=0.03,batch=32 --to-batch 512 --pilot-steps 1 --set width=2",
    "train mine.py:Mine --epochs 1 --batch 512 --out r", "probe zq7 --samples 8 --iterations 2", "eval zq7",
    "report zq7", "tasks", "methods", "doctor", "data", "data get cifar10 --data-dir d",
    "data check cifar10 --data-dir d", "check-theory --only lars --seeds 2", "paper list", "paper show table-2",
    "paper add zq7", "paper run table-2 --cells SNGM@8192 --dry-run", "paper report --results folder",
]
HUGE = ["99999999999", str(2**31), str(2**63), str(2**64), str(2**70), str(-(2**70))]
WORDS = [
    "", " ", "\x1b[31m", "\n", "é", "𝒳", "\udcff", "a" * 5000, "--", "-", "%s%n", "{}", ":", ",", "..:X", "a:b:c",
    "(" * 400, "[" * 400, "sngm(", "sngm(lr=", "sngm(momentum={[]:1})", "x(y=1)(z)", "msgd,msgd", "__import__('os')",
    "digits", "meta", "missing.py:X", "mine.py:Nobody", "mine.py:Raises", "mine.py:Odd", "sngm:Task", "SNGM@",
    "lr=nan,batch=0", "cuda:99", "polynomial(power=[])", "polynomial(power=1e400)", "plateau(factor={[]:1})",
    "1,2,nan", "0.1,0.1",
]
VALUES: dict[type, list[str]] = {
    int: ["0", "-1", "1", "2", "3", "1.5", "nan", "inf", "", "٣", "0x10", "1e3", " 1", "-0", *HUGE],
    float: ["nan", "inf", "-inf", "-0.0", "0", "1e-400", "1e400", "1e308", "5e-324", "-1", "", "½", "0x1p3", "1e30"],
    str: WORDS,
    Path: [".", "/proc/nowhere", "/dev/null", "/dev/full", "file", "missing/deep", "folder", "a" * 300, "\n", FOLDER],
}
NAMES = ["width", "momentum", "weight_decay", "betas", "foreach", "é", "lr", ""]
LITERALS = ["", "0", "-1", "nan", "1e400", "[]", "{[]:1}", "{}", "None", "(0,1)", "True", "[" * 400, "2**9", *HUGE]
ENVIRONMENT = {
    "WORLD_SIZE": ["", "abc", "0", "-1", "1", "2", "1e3", HUGE[-2]], "RANK": ["", "x", "-1", "7"],
    "LOCAL_RANK": ["", "x", "-1"], "LOCAL_WORLD_SIZE": ["", "x", "0"],
    "COLUMNS": ["0", "-1", "x", "1", "99999999999", "200000000"],
    "SNGM_DATA": ["", "/dev/null", "\n", "missing"], "SNGM_COMMIT": ["", "\n", "é" * 999],
    "SNGM_COMMAND": ["", "\udcff"],
    "SNGM_MIRRORS": ["http://", "http://[", "ftp://x", "x://y"], "PYTHONIOENCODING": ["ascii"], "TERM": ["", "dumb"],
}
# fmt: on
# a large number of these means long work, which is no fault, or processes, which are not safe to try
WORK = {"--epochs", "--seeds", "--steps", "--samples", "--iterations", "--pilot-steps", "--loaders", "--jobs"}


def options(app: typer.Typer, verb: tuple[str, ...] = ()) -> dict[tuple[str, ...], dict[str, type]]:
    """Every verb, with its options and the type of each."""
    found: dict[tuple[str, ...], dict[str, type]] = {}
    for command in app.registered_commands:
        name = command.name or command.callback.__name__.replace("_", "-")
        hints = typing.get_type_hints(command.callback, include_extras=True)
        own = found[*verb, name] = {}
        for parameter, hint in hints.items():
            kinds, *notes = typing.get_args(hint) or (hint,)
            if notes and isinstance(notes[0], typer.models.OptionInfo):
                given = (
                    notes[0].default,
                    *(notes[0].param_decls or ()),
                )  # inside Annotated the first name comes as default
                long = [word for word in given if isinstance(word, str) and word.startswith("--")]
                text = str(kinds)
                kind = next((k for k in (bool, float, int, Path) if k.__name__ in text), str)
                own[long[0] if long else "--" + parameter.replace("_", "-")] = kind
    for group in app.registered_groups:
        found |= options(group.typer_instance, (*verb, group.name))
    return found


OPTIONS = options(cli.app)


def case(draw: random.Random, folder: Path, counted: Counter[str]) -> None:
    (folder / "mine.py").write_text(OWN)
    (folder / "file").write_text("no JSON")
    (folder / "folder").mkdir()
    words = draw.choice(BASES).split()
    if FOLDER in words:
        copied(reference(COMMANDS[0]).folder, folder)
    environment: dict[str, str] = {}
    for _ in range(draw.choice([1, 1, 1, 2, 3, 4])):
        change(draw, words, environment)
    real = draw.random() < 0.12
    counted["as processes" if real else "in forks"] += 1
    before = {path for path in folder.rglob("*") if path.is_dir()}
    try:
        ended = sngm(words, folder, environment=environment, real=real).checked(own_file="mine.py")
        counted[f"exit code {ended.code}"] += 1
        for path in {path for path in folder.rglob("*") if path.is_dir()} - before:
            if ended.code == 2 and [inside.name for inside in path.iterdir()] in ([], [".lock"]):
                raise Wrong(f"was refused, and left the empty folder {path.name!r}")
    except Wrong as error:
        shortened = [re.sub(r"(.)\1{60,}", lambda m: f"{m[1]}*{len(m[0])}", word) for word in words]
        raise Wrong(f"{error}; sngm {shortened} {environment or ''}") from None


def change(draw: random.Random, words: list[str], environment: dict[str, str]) -> None:
    """Make one thing about a command hostile."""
    verb = tuple(words[:2]) if tuple(words[:2]) in OPTIONS else tuple(words[:1])
    known = {option: kind for option, kind in OPTIONS.get(verb, {}).items() if option not in ("--dry-run", "--step")}
    free = [place for place in range(len(verb), len(words)) if words[place] != "--dry-run"]
    how = draw.choice(["option"] * 6 + ["setting"] * 4 + ["environment"] * 3 + ["word", "drop", "repeat", "flag"])
    if how == "option" and known:
        option = draw.choice(sorted(known))
        put(words, option, value(draw, option, known[option], "--dry-run" in words))
    elif how == "setting" and "--set" in known:
        words += ["--set", f"{draw.choice(NAMES)}={draw.choice(LITERALS)}"]
    elif how == "environment":
        name = draw.choice(sorted(ENVIRONMENT))
        environment[name] = draw.choice(ENVIRONMENT[name])
    elif how == "word" and free:
        words[draw.choice(free)] = draw.choice(WORDS)
    elif how == "drop" and free and verb != ("check-theory",):  # without --only it takes minutes
        del words[draw.choice(free)]
    elif how == "repeat" and free:
        place = draw.choice(free)
        words += words[place : place + 2]
    else:
        words.append(draw.choice(["--help", "--json", "--nobody", "-x", "--lr=", "--out=", "stray"]))


def value(draw: random.Random, option: str, kind: type, dry: bool) -> str | None:
    """A hostile value for an option; None for a flag."""
    if kind is bool:
        return None
    found = draw.choice(VALUES[kind] if draw.random() < 0.8 else VALUES[draw.choice([int, float, str])])
    return "0" if option in WORK and not dry and found in HUGE else found


def put(words: list[str], option: str, text: str | None) -> None:
    """Give an option a value: in place of the one that is there, or behind all."""
    if text is not None and option in words[:-1]:
        words[words.index(option) + 1] = text
    else:
        words += [option] if text is None else [option, text]
