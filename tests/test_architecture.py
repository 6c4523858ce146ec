"""The architecture, proved by reading the source: layers, cycles, lengths, what is declarative, and what stays light.

Every import counts, also those inside functions and under TYPE_CHECKING: a dependency is one wherever it is written.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "finetune"

LAYERS: dict[str, int] = {
    **dict.fromkeys(("errors", "units", "digest", "paths"), 0),
    **dict.fromkeys(("recipe", "stats", "plan"), 1),
    "data": 2,
    **dict.fromkeys(("model", "telemetry", "merge"), 3),
    **dict.fromkeys(("training", "evaluation", "distil"), 4),
    **dict.fromkeys(("doctor", "report"), 5),
    "pipeline": 6,
    "cli": 7,
}
# Between modules of one layer nothing is imported, with these exceptions (importer, imported module).
BESIDE: set[tuple[str, str]] = {
    ("plan", "finetune.recipe.schema"),
    ("plan", "finetune.recipe.adapter_section"),  # a part of the schema
    ("merge", "finetune.model"),
    ("distil", "finetune.training"),
    ("report", "finetune.doctor.diagnosis"),  # the page marks on its curves what they mean
}
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets"}
LIGHT_COMMANDS = ("recipe", "plan", "stats")

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_ASSEMBLY_LINES = 120

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(name: str, *, top_level_only: bool = False) -> set[str]:
    """Dotted names that a module imports; `from package import module` counts as the module."""
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: set[str] = set()
    for node in _top_level(syntax(path)) if top_level_only else ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names |= {full if (full := f"{base}.{alias.name}") in modules() else base for alias in node.names}
    return names - {name}


def _top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not the bodies of functions, nor what is for type checkers only."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, Function | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def unit(name: str) -> str:
    """'finetune.recipe.schema' -> 'recipe'."""
    return name.split(".")[1] if "." in name else ""


def source_files() -> list[Path]:
    folders = (PACKAGE, ROOT / "tests", ROOT / "benchmarks")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_module_has_a_layer() -> None:
    unplaced = {unit(name) for name in modules() if "." in name} - set(LAYERS)
    assert not unplaced, f"name the layer of {sorted(unplaced)} in DESIGN and here"


@pytest.mark.parametrize("name", [name for name in modules() if "." in name])
def test_imports_only_go_down(name: str) -> None:
    importer = unit(name)
    for target in sorted(imported(name)):
        if not target.startswith("finetune.") or unit(target) == importer:
            continue
        beside = any(importer == who and f"{target}.".startswith(f"{what}.") for who, what in BESIDE)
        goes_down = LAYERS[unit(target)] < LAYERS[importer]
        ground = LAYERS[importer] == 0 and LAYERS[unit(target)] == 0
        assert goes_down or beside or ground, f"{name} imports {target}, which does not lie below it"


def test_the_ground_needs_only_the_standard_library() -> None:
    for name in modules():
        if LAYERS.get(unit(name)) == 0:
            outside = {target.split(".")[0] for target in imported(name)} - set(sys.stdlib_module_names)
            assert outside <= {"finetune"}, f"{name} imports {sorted(outside)}"


def test_the_lower_layers_never_import_torch_or_what_brings_it() -> None:
    for name in modules():
        if LAYERS.get(unit(name), 0) <= 2:
            heavy = {target.split(".")[0] for target in imported(name)} & HEAVY
            assert not heavy, f"{name} imports {sorted(heavy)}"


def test_no_import_cycles() -> None:
    graph = {name: {target for target in imported(name) if target in modules()} for name in modules()}
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if state.get(name) == 1:
            cycle = trail[trail.index(name) :]
            raise AssertionError("import cycle: " + " -> ".join([*cycle, name]))
        if name not in state:
            state[name] = 1
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            state[name] = 2

    for name in sorted(graph):
        visit(name, ())


def test_no_file_is_longer_than_the_hard_stop() -> None:
    long = {
        named(path): n
        for path in source_files()
        if (n := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"split by idea: {long}"


def test_no_function_is_too_long() -> None:
    long: dict[str, int] = {}
    for path in source_files():
        may_be_assembly = path.parent in (PACKAGE / "training", PACKAGE / "distil")
        for node in ast.walk(syntax(path)):
            if isinstance(node, Function):
                n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assembly = may_be_assembly and node.name.startswith("train_")
                if n_lines > (MAX_ASSEMBLY_LINES if assembly else MAX_FUNCTION_LINES):
                    long[f"{named(path)}:{node.lineno} {node.name}"] = n_lines
    assert not long, f"split by idea: {long}"


@pytest.mark.parametrize("folder", ["recipes", "data", "eval"])
def test_declarative_folders_hold_no_code(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not [named(path) for path in (ROOT / folder).rglob("*.py*")]


def _is_made(folder: str) -> bool:
    """Whether a folder is made by tools and runs, and not source."""
    return folder in {
        ".git",
        ".venv",
        ".hypothesis",
        "runs",
        "out",
        "build",
        "__pycache__",
    } or folder.endswith(("_cache", ".egg-info"))


def test_nothing_names_a_path_of_somebodys_machine() -> None:
    pattern = re.compile(rb"(?<![\w.~-])/(?:work|root|home|Users)/\w")
    found = []
    for folder, below, files in os.walk(ROOT):
        below[:] = [name for name in below if not _is_made(name)]
        for file in (Path(folder) / name for name in files):
            if file.is_file() and (match := pattern.search(file.read_bytes())):
                found.append(f"{named(file)}: {match[0]!r}")
    assert not found


def test_light_commands_reach_no_heavy_import() -> None:
    """From a command's own imports, handlers included, no chain of module-level imports leads to torch."""
    for command in LIGHT_COMMANDS:
        start = f"finetune.cli.{command}"
        if start not in modules():
            continue
        waiting, seen = [(start, start)], {start}
        while waiting:
            name, trail = waiting.pop()
            for target in imported(name, top_level_only=name != start):
                assert target.split(".")[0] not in HEAVY, f"{trail} -> {target}"
                packages = [target.rsplit(".", n)[0] for n in range(target.count(".") + 1)]
                for module in packages:
                    if module in modules() and module not in seen:
                        seen.add(module)
                        waiting.append((module, f"{trail} -> {module}"))


# Runs one command and then writes which of the modules named first were loaded.
PROGRAM = """
import sys
from finetune.cli.main import main
heavy = set(sys.argv[1].split(","))
try:
    main(sys.argv[2:])
finally:
    print("loaded:", *sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""


def _registered() -> set[str]:
    from finetune.cli.main import app

    names = {
        group.name or (group.typer_instance and group.typer_instance.info.name)
        for group in app.registered_groups
    }
    names |= {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    return {name for name in names if isinstance(name, str)}


RECIPE = "recipes/sft/home_intents_lora.yaml"
LIGHT_RUNS = {
    "": ["--help"],
    "recipe validate": ["recipe", "validate", RECIPE],
    "recipe show": ["recipe", "show", RECIPE, "--json"],
    "plan": ["plan", RECIPE],
    "stats": ["stats", "--help"],
}


@pytest.mark.parametrize(
    "arguments",
    [run for name, run in LIGHT_RUNS.items() if not name or name.split()[0] in _registered()],
    ids=" ".join,
)
def test_light_commands_leave_torch_alone(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(HEAVY), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.stderr.splitlines()[-1] == "loaded:", done.stderr
    assert done.returncode == 0, done.stderr
