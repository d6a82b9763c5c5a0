"""The import rule, read from the source: a wall is a folder, and arrows point down only."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "batchinfer"

# Files in the package root: what every room may import, and the doors through which people come in.
GROUND = (
    "records",
    "equal_rows",
    "sanitize",
    "verbosity",
    "clock",
    "host_info",
    "model_code",
    "ownership",
    "config",
    "whole_files",
    "checked_json",
    "rundir",
    "manifest",
    "stop_signals",
    "progress",
    "own_process",
    "resource_errors",
)
DOORS = ("schema", "cli", "program", "__main__", "lm_eval", "api")
# Rooms from the bottom to the top, each with the rooms below that it may import; the ground is open to all.
ROOMS: dict[str, set[str]] = {
    "balance": set(),
    "data": set(),
    "net": set(),
    "parallel": {"net"},
    "kv": set(),
    "kv_store": {"data"},
    "model": {"parallel"},
    "run": {"data"},
    "protocol": {"net"},
    "report": {"balance", "data", "run"},
    "sim": {"balance", "model", "report"},
    "plan": {"balance", "data", "model", "parallel", "run", "sim"},
    "launch": {"data", "model", "net", "protocol", "run"},
    "rank": {"data", "kv", "kv_store", "launch", "model", "parallel", "protocol", "run"},
    "controller": {"balance", "data", "launch", "model", "protocol", "run"},
    "finish": {"data", "run"},
    "submit": {"data", "run"},
    "status": {"data", "run", "submit"},
    "pace": {"balance", "data", "report", "run", "status", "submit"},
    "doctor": {"data", "kv", "launch", "model", "parallel", "plan", "rank"},
    "commands": {
        *(
            "controller",
            "data",
            "finish",
            "kv_store",
            "launch",
            "model",
            "pace",
            "plan",
            "rank",
            "report",
            "run",
            "sim",
            "status",
            "submit",
        )
    },
}
WITH_KERNELS = {"parallel", "kv", "model", "rank", "doctor"}
WITHOUT_TORCH = {*GROUND, *DOORS, *ROOMS} - WITH_KERNELS
NEED_RAY = {"submit.ray.driver", "submit.ray.group"}  # run in a Ray cluster only
STANDARD_LIBRARY_ONLY = (
    "equal_rows",
    "sanitize",
    "verbosity",
    "clock",
    "host_info",
    "model_code",
    "own_process",
    "resource_errors",
)


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            yield name, path


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path, *, at_once=False):
    """Every imported module by full name; `at_once`: only those that importing the module runs."""
    return frozenset(_imports_of(path, at_once))


def _imports_of(path, at_once):
    for node in (nodes_at_once if at_once else ast.walk)(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module)


def nodes_at_once(tree):
    """Nodes of a module that run when it is imported: without functions and what is for type checkers only."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def room_of(name):
    return name.split(".")[0]


MODULES = dict(modules())


@functools.cache
def inner_imports(name, *, at_once=False):
    """The modules of batchinfer that a module imports, less the package's name."""
    found = {item.removeprefix("batchinfer.") for item in imports_of(MODULES[name], at_once=at_once)}
    return {item for item in found if item in MODULES}


def test_every_file_is_in_a_room_on_the_ground_or_a_door():
    assert {room_of(name) for name in MODULES} == {*GROUND, *DOORS, *ROOMS}


def test_arrows_between_rooms_point_down():
    below = set()
    for room, allowed in ROOMS.items():
        assert allowed <= below, f"{room} may import {allowed - below}, which come after it"
        below.add(room)


def test_rooms_and_the_ground_import_only_what_the_rule_allows():
    allowed = {room: {room, *GROUND, *below} for room, below in ROOMS.items()} | {name: {*GROUND} for name in GROUND}
    wrong = [
        f"{name} imports {imported}"
        for name in MODULES
        for imported in inner_imports(name)
        if room_of(name) in allowed and room_of(imported) not in allowed[room_of(name)]
    ]
    assert wrong == []


def test_the_rule_allows_nothing_that_is_not_used():
    for room, allowed in ROOMS.items():
        used = {room_of(item) for name in MODULES if room_of(name) == room for item in inner_imports(name)}
        assert allowed - used == set(), f"{room} does not import {allowed - used}"


def test_no_modules_import_each_other_in_a_circle():
    done, path = set(), []

    def visit(name):
        assert name not in path, " > ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for imported in inner_imports(name):  # those in functions and for types, too
                visit(imported)
            done.add(path.pop())

    for name in MODULES:
        visit(name)


def test_rooms_that_compute_nothing_reach_no_torch():
    """Neither themselves nor through what they import; login nodes have none, and a controller outlives its ranks."""
    seen, waiting = set(), [name for name in MODULES if room_of(name) in WITHOUT_TORCH]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            for imported in imports_of(MODULES[module], at_once=True):
                assert imported.split(".")[0] not in {"torch", "batchinfer_kernels"}, f"{module} imports {imported}"
            waiting.extend(inner_imports(module, at_once=True))


def test_rooms_without_kernels_never_import_them():
    others = [name for name in MODULES if room_of(name) not in WITH_KERNELS]
    assert not [
        name for name in others if any(item.startswith("batchinfer_kernels") for item in imports_of(MODULES[name]))
    ]


def test_only_its_own_door_imports_lm_eval():
    """lm_eval is no dependency; its users have installed it."""
    assert [name for name in MODULES if any(item.split(".")[0] == "lm_eval" for item in imports_of(MODULES[name]))] == [
        "lm_eval"
    ]


def test_only_what_runs_in_a_ray_cluster_needs_ray():
    """Ray is no dependency; its users have installed it."""
    at_once = {
        name
        for name, path in MODULES.items()
        if "ray" in {item.split(".")[0] for item in imports_of(path, at_once=True)}
    }
    assert at_once == NEED_RAY


def outside(names, *allowed):
    """What these modules import besides the standard library and the packages allowed."""
    known = {*sys.stdlib_module_names, *allowed}
    return [(name, item) for name in names for item in imports_of(MODULES[name]) if item.split(".")[0] not in known]


def test_what_all_rooms_may_import_has_only_the_standard_library():
    assert outside(STANDARD_LIBRARY_ONLY) == []
    assert outside(["records"], "msgspec") == []  # whose structs are made in a tenth of a frozen dataclass's time


def test_balancers_import_only_numpy_and_numba():
    assert outside([name for name in MODULES if room_of(name) == "balance"], "batchinfer", "numpy", "numba") == []


def test_the_kernels_import_only_torch_and_themselves():
    for path in (ROOT / "kernels" / "batchinfer_kernels").rglob("*.py"):
        for imported in imports_of(path):
            top = imported.split(".")[0]
            allowed = {"torch", "batchinfer_kernels"} | ({"triton"} if path.parent.name == "triton" else set())
            assert top in allowed or top in sys.stdlib_module_names, f"{path}: {imported}"


MOST_PUBLIC = 15
WITH_MANY_METHODS = {"RunDir"}  # the paths of a run folder
MOST_ARGUMENTS = 8


def test_classes_offer_few_methods_and_take_few_arguments():
    """A reader has to keep them in mind all at once."""
    large = []
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "kernels" / "batchinfer_kernels").rglob("*.py")]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
                public = {name for name in methods if not name.startswith("_")}
                if len(public) > MOST_PUBLIC and node.name not in WITH_MANY_METHODS:
                    large.append(f"{path.relative_to(ROOT)}: {node.name} has {len(public)} public methods")
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                num_arguments = len(node.args.args) + len(node.args.kwonlyargs) - 1
                if num_arguments > MOST_ARGUMENTS:
                    large.append(f"{path.relative_to(ROOT)}: a constructor takes {num_arguments} arguments")
    assert large == []


def test_there_is_no_package_called_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_nothing_unpickles_or_runs_foreign_code():
    forbidden = ("pickle", "marshal", "shelve", "dill")
    for name, path in MODULES.items():
        assert not any(imported.split(".")[0] in forbidden for imported in imports_of(path)), name
        for call in (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)):
            assert ast.unparse(call.func) not in {"eval", "exec", "os.system", "os.popen"}, name
            assert not any(keyword.arg == "shell" for keyword in call.keywords), name


def test_python_is_started_without_the_working_folder():
    """Files there may have the names of modules; -P comes first in every command that begins with the interpreter."""
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "kernels" / "batchinfer_kernels").rglob("*.py")]:
        commands = [node.elts for node in ast.walk(tree_of(path)) if isinstance(node, ast.List | ast.Tuple)]
        safe = [items[0] for items in commands if list(map(ast.unparse, items[:2])) == ["sys.executable", "'-P'"]]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
                assert node in safe or path == PACKAGE / "submit" / "ray" / "client.py", f"{path}:{node.lineno}"
    assert '"$BATCHINFER_PYTHON" -P ' in MODULES["submit.ray.client"].read_text()


def runs_without(modules, unwanted):
    code = f"import sys, {modules}; sys.exit(bool({unwanted!r} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rooms_that_compute_nothing_start_without_torch():
    rooms = {*(WITHOUT_TORCH & set(ROOMS)), "cli"}
    names = [name for name in MODULES if room_of(name) in rooms and name not in NEED_RAY]
    assert rooms == {room_of(name) for name in names}
    assert runs_without(", ".join(f"batchinfer.{name}" for name in names), {"torch"})


def test_ranks_are_started_before_anything_large_is_imported():
    assert runs_without("batchinfer.launch.rank_loader", {"numpy", "pyarrow", "torch"})


def test_a_rank_starts_without_torchs_compiler():
    assert runs_without("batchinfer.rank.main", {"torch._dynamo"})


def test_names_that_others_call_stay_where_they_are():
    from batchinfer.balance.decode import assign_decode
    from batchinfer.balance.experts import place_experts
    from batchinfer.balance.prefill import assign_prefill
    from batchinfer.plan.prefix import plan_prefixes

    assert all(map(callable, (assign_decode, assign_prefill, place_experts, plan_prefixes)))
