"""The house rules that no reviewer should have to check: import order, file sizes, what stays free of jax.

Read from the source with `ast`, so it runs in a second. Each rule is a function from a folder to a list of complaints,
and the last part of this file feeds each one a folder that breaks it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "jaxmeg"

# A module may import from its own room and from the rooms above it in this list. A name stands for a module or for a
# whole package; the longest match counts. `__init__` files hold a docstring and import nothing from here.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("", "config", "arch", "hardware", "flops", "rules", "cli", "devices", "keys", "wording", "validate", "migrate")
    + ("checkpoint", "checkpoint.manifest", "checkpoint.resume", "processes", "processes.find")
    + ("processes.variables", "processes.roll_call", "processes.verdict", "launch", "faults", "typed", "files")
    + ("doctor", *(f"doctor.{name}" for name in ("finding", "packages", "gpus", "host", "plan", "child", "examine")))
    + ("verify", *(f"verify.{name}" for name in ("shrink", "layouts", "certificate", "search", "start", "text")))
    + ("record", "record.window", "planner", "planner.chips", "planner.paper", "planner.rates")
    + ("bench", *(f"bench.{name}" for name in ("case", "page", "peer", "report", "schema", "work")))
    + ("data", "data.dataset", "data.mixing", "data.packing", "data.prepare", "data.report", "data.sources", "data.split", "data.store")
    + ("data.tokenizer",)
    + ("pipeline", *(f"pipeline.{name}" for name in ("notation", "packing", "schedules", "ticks", "timeline", "user"))),
    ("_compat", "mesh", "layout", "parallel", "precision", "processes.agree", "processes.connect")
    + ("processes.store", "processes.leave", "processes.watchdog"),
    ("ops",),
    ("models",),
    ("pipeline.scan", "optim", "finetune"),
    ("state", "step", "setup", "own_step", "aot", "hlo", "checkpoint.canonical"),
    ("data.loader", "data.source", "checkpoint.save", "checkpoint.restore", "processes.stop", "hf", "guard")
    + tuple(f"doctor.{name}" for name in ("rates", "links", "forward", "probe"))
    + ("bench.breakdown", "bench.profile", "bench.roof")
    + tuple(f"record.{name}" for name in ("cache", "compiles", "folder", "late", "log", "memory", "profile", "speed")),
    tuple(f"planner.{name}" for name in (
        "leaves", "memory", "traffic", "speed", "search", "check", "text", "questions", "explain", "advice", "auto", "calibrate")),
    ("train", "start", "task", "engine", "journal", "evaluate", "verify.measure", "verify.run", "ablate", "report", "pipeline.check")
    + ("bench.measure", "bench.peers", "planner.measure"),
)
ROOM_OF = {f"{PACKAGE}.{name}".rstrip("."): number for number, names in enumerate(ROOMS, 1) for name in names}
# Packages that mix rooms: each of their modules needs its own place in the table.
BY_MODULE = {PACKAGE, *(f"{PACKAGE}.{name}" for name in (
    "data", "pipeline", "record", "checkpoint", "processes", "doctor", "verify", "planner", "bench"))}
JAX_FREE_ROOM = 1
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
MAX_LINES = 500
MAX_LINES_OF = {f"{PACKAGE}/pipeline/scan.py": 400}
AXES = {"pp", "rep", "dp", "ep", "cp", "tp"}


def python_files(root: Path, *folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, without what stands under `if TYPE_CHECKING:`, which never runs."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from _running(node)


def imports(root: Path, path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions; `from a import b` gives `a` and `a.b`."""
    name = module_name(root, path)
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in _running(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return found


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports. `from package import module` does not count `package`."""
    files = {module_name(root, path): path for path in python_files(root, PACKAGE)}
    graph = {}
    for name, path in files.items():
        seen = {found for found in imports(root, path) if found in files}
        graph[name] = {found for found in seen if not any(other.startswith(found + ".") for other in seen)} - {name}
    return graph


def room(module: str) -> int | None:
    if module in ROOM_OF:
        return ROOM_OF[module]
    parts = module.split(".")
    for length in range(len(parts) - 1, 1, -1):
        prefix = ".".join(parts[:length])
        if prefix in ROOM_OF:
            return None if prefix in BY_MODULE else ROOM_OF[prefix]
    return None


def without_a_room(root: Path) -> list[str]:
    return [f"{module} has no room: give it one in ROOMS" for module in import_graph(root) if room(module) is None]


def upward_imports(root: Path) -> list[str]:
    return [
        f"{module} (room {here}) imports {found} (room {there})"
        for module, founds in import_graph(root).items()
        for found in sorted(founds)
        if (here := room(module)) and (there := room(found)) and there > here
    ]


def import_cycles(root: Path) -> list[str]:
    graph, done, problems = import_graph(root), set(), []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            problems.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for found in sorted(graph[module]):
                visit(found, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return problems


def importing_init_files(root: Path) -> list[str]:
    inits = [path for path in python_files(root, PACKAGE) if path.name == "__init__.py"]
    return [
        f"{path.relative_to(root)} imports {found}: import it from the module that defines it"
        for path in inits
        for found in sorted(imports(root, path))
        if found.split(".")[0] in JAX | {PACKAGE}
    ]


def jax_free_modules(root: Path) -> list[str]:
    return [module for module in import_graph(root) if room(module) == JAX_FREE_ROOM]


def jax_imports(root: Path) -> list[str]:
    """Imports of jax, direct or through other modules, in modules that must not have them."""
    graph, problems = import_graph(root), []
    files = {module_name(root, path): path for path in python_files(root, PACKAGE)}
    direct = {module: {found.split(".")[0] for found in imports(root, files[module])} & JAX for module in graph}
    for module in jax_free_modules(root):
        reached, todo = set(), [module]
        while todo:
            current = todo.pop()
            if current not in reached:
                reached.add(current)
                todo += graph[current]
        problems += [f"{module} must stay free of jax: {via} imports {direct[via]}" for via in reached if direct[via]]
    return problems


def loaded_jax(root: Path) -> list[str]:
    """The same from the running interpreter: import the jax-free modules in a new process, look at sys.modules."""
    lines = [f"import {module}" for module in jax_free_modules(root)]
    lines += ["import sys", f"print(*sorted({JAX!r} & set(sys.modules)))"]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def too_long(root: Path) -> list[str]:
    problems = []
    for path in python_files(root, PACKAGE, "scripts", "tests"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = MAX_LINES_OF.get(path.relative_to(root).as_posix(), MAX_LINES)
        if lines > limit:
            problems.append(f"{path.relative_to(root)}: {lines} lines, at most {limit}: split it by idea")
    return problems


def without_docstring(root: Path) -> list[str]:
    files = python_files(root, PACKAGE, "scripts", "tests")
    return [f"{path.relative_to(root)} has no docstring" for path in files if not ast.get_docstring(parse(path))]


def axis_names_in_models(root: Path) -> list[str]:
    """String literals in model code that name a mesh axis, alone or in a list like "dp,ep"."""
    problems = []
    for path in python_files(root, f"{PACKAGE}/models"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = re.split(r"[\s,+*x]+", node.value.strip())
                if words and set(words) <= AXES:
                    problems.append(f"{path.relative_to(root)}:{node.lineno} names the mesh axis {node.value!r}")
    return problems


RULES = [
    without_a_room,
    upward_imports,
    import_cycles,
    importing_init_files,
    jax_imports,
    loaded_jax,
    too_long,
    without_docstring,
    axis_names_in_models,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house(rule):
    problems = rule(ROOT)
    assert not problems, "\n".join(problems)


# Each row: a rule, the files of a package that breaks it, a piece of the complaint.
FACADE = {"ops/__init__.py": "from jaxmeg.ops.a import b", "ops/a.py": ""}
HIDDEN = {"__init__.py": "", "config.py": "import importlib; importlib.import_module('op' + 'tax')", "../optax.py": ""}
BROKEN = [
    (without_a_room, {"gadget.py": ""}, "jaxmeg.gadget has no room"),
    (without_a_room, {"pipeline/gadget.py": ""}, "jaxmeg.pipeline.gadget has no room"),
    (upward_imports, {"mesh.py": "from jaxmeg import step", "step.py": ""}, "jaxmeg.mesh (room 2) imports jaxmeg.st"),
    (upward_imports, {"ops/a.py": "def f():\n    from ..models.b import c", "models/b.py": ""}, "jaxmeg.models.b"),
    (import_cycles, {"arch.py": "import jaxmeg.config", "config.py": "from . import arch"}, "jaxmeg.arch -> jaxm"),
    (importing_init_files, FACADE, "ops/__init__.py imports jaxmeg.ops.a"),
    (jax_imports, {"config.py": "def f():\n    import jax.numpy"}, "jaxmeg.config must stay free of jax"),
    (jax_imports, {"cli.py": "from .arch import a", "arch.py": "import optax"}, "jaxmeg.cli must stay free of"),
    (loaded_jax, HIDDEN, "optax"),
    (too_long, {"step.py": "x = 1\n" * 501}, "step.py: 501 lines, at most 500"),
    (too_long, {"pipeline/scan.py": "x = 1\n" * 401}, "scan.py: 401 lines, at most 400"),
    (without_docstring, {"step.py": "x = 1"}, "step.py has no docstring"),
    (axis_names_in_models, {"models/a.py": "f(x, axis='tp')"}, "models/a.py:1 names the mesh axis 'tp'"),
    (axis_names_in_models, {"models/a.py": "\nf(x, ('embed', 'dp,ep'))"}, "models/a.py:2 names the mesh axis 'dp,ep'"),
]


@pytest.mark.parametrize(("rule", "files", "complaint"), BROKEN)
def test_a_rule_can_fail(tmp_path, rule, files, complaint):
    for name, text in files.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert any(complaint in problem for problem in rule(tmp_path)), rule(tmp_path)


def test_every_rule_is_shown_to_fail():
    assert {rule for rule, *_ in BROKEN} == set(RULES)


def test_what_is_allowed(tmp_path):
    files = {
        "__init__.py": '"""The package."""',
        "config.py": '"""Room 1."""\nimport dataclasses',
        "mesh.py": '"""Room 2."""\nimport jax\nfrom jaxmeg import precision\nfrom .config import Config',
        "precision.py": '"""Room 2."""',
        "models/decoder.py": '"""Room 4; tp is a word here."""\nfrom jaxmeg.mesh import build\ndims = ("embed", "mlp")',
    }
    for name, text in files.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert [rule.__name__ for rule in RULES if rule(tmp_path)] == []
