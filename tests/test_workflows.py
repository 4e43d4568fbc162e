"""The files in .github are valid, pin the actions they use, and call make targets that exist."""

import re
import shlex
from pathlib import Path

import check_jsonschema
import pytest

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))  # none in an sdist
TEMPLATES = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.dependabot": sorted(GITHUB.glob("dependabot.yml")),
    "vendor.github-issue-config": [path for path in TEMPLATES if path.stem == "config"],
    "vendor.github-issue-forms": [path for path in TEMPLATES if path.stem != "config"],
}


@pytest.mark.parametrize("schema", [schema for schema, files in SCHEMAS.items() if files])
def test_files_match_the_schema_of_github(schema):
    with pytest.raises(SystemExit) as exit_:
        check_jsonschema.main(["--builtin-schema", schema, *map(str, SCHEMAS[schema])])
    assert exit_.value.code == 0


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit_with_its_version_beside_it(workflow):
    for action in re.findall(r"\buses:(.*)", workflow.read_text()):
        assert re.fullmatch(r" [\w.-]+(/[\w.-]+)+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_an_action_has_one_version_in_all_workflows():
    used = {use for path in WORKFLOWS for use in re.findall(r"\buses: (\S+)@(\S+)", path.read_text())}
    assert len(used) == len({name for name, _ in used}), sorted(used)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_make_target_exists(workflow):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for call in re.findall(r"^ *(?:- run: )?make (.*)", workflow.read_text(), re.MULTILINE):
        named = [word for word in shlex.split(call, comments=True) if "=" not in word]
        assert named, f"make {call} names no target"
        assert set(named) <= targets, f"make {call}: not in the Makefile"
