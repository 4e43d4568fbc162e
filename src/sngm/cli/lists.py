"""The commands `sngm tasks` and `sngm methods`."""

from __future__ import annotations

import json
from typing import Any

from .exit_codes import one_line
from .options import JSON

# settings that are not printed: they do not belong to a method's rule
HOW = ("foreach", "fused", "capturable", "maximize", "norm_group", "differentiable")


def tasks(as_json: JSON = False) -> None:
    """List the tasks that come with sngm."""
    from .. import tasks as room

    found: list[dict[str, Any]] = []
    for name in room.names():
        cls = room.find(name)
        about = (cls.__doc__ or "").strip().splitlines()[0]
        batches, settings = list(cls.batches), room.build(name).settings()
        found.append({"name": name, "about": about, "epochs": cls.epochs, "batches": batches, "settings": settings})
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for task in found:
        print(f"{task['name']}: {task['about']}")
        chosen = ", ".join(f"{k}={v}" for k, v in task["settings"].items()) or "none"
        print(f"  {task['epochs']} epochs, batches {', '.join(map(str, task['batches']))}; settings: {chosen}")
    print("\nYour own: file.py:Class, see docs/your-own-task.md")


def methods(as_json: JSON = False) -> None:
    """List the methods (optimizers) with their settings and defaults."""
    import inspect

    from ..optim import external, registry

    found: list[dict[str, Any]] = []
    for name in registry.names():
        try:
            method = registry.find(name)
        except ValueError as error:  # the library of the method is not installed, or has no such class
            build = str(registry.METHODS[name].build)
            package = external.INSTALL[build.partition(":")[0].partition(".")[0]]
            missing = one_line(str(error)) if registry.is_installed(name) else f"needs: pip install {package}"
            found.append({"name": name, "class": build, "missing": missing})
            continue
        defaults = {
            key: method.settings.get(key, None if p.default is p.empty else p.default)
            for key, p in inspect.signature(method.build).parameters.items()
            if key not in ("self", "params")
        }
        found.append({"name": name, "class": method.build.__name__, "settings": defaults})
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return
    for entry in found:
        if "missing" in entry:
            print(f"{entry['name']}: {entry['missing']}")
            continue
        chosen = ", ".join(f"{k}={v}" for k, v in entry["settings"].items() if k != "lr" and k not in HOW)
        print(f"{entry['name']} ({entry['class']}): {chosen}")
    print("\nAny other optimizer: RMSprop, package.module:Class, file.py:Class, timm:NAME or pytorch_optimizer:NAME")
