"""The import rule: which room may import which, read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "batchinfer"

# What a module (or every module of a room) may import from batchinfer besides its own room.
BASE = {"records"}
FILES = {"records", "config", "rundir"}
RUN = FILES | {"session", "stop", "progress", "trace", "fingerprint", "weights_digest", "whereabouts", "probe"}
RUN |= {"equal_rows"}
ALLOWED = {
    "records": set(),
    "config": BASE,
    "rundir": BASE,
    "printable": set(),
    "processor": set(),
    "equal_rows": set(),
    "progress": {"printable"},
    "trace": FILES | {"parallel.spans"},
    "fingerprint": FILES,
    "stop": BASE,
    "session": FILES | {"data", "equal_rows", "stop", "whereabouts"},
    "whereabouts": set(),
    "slurm": FILES,
    "submission": FILES | {"slurm", "engine.layout"},
    "status": FILES | {"data", "engine.claims", "slurm", "submission"},
    "status_text": {"status", "report.terminal"},
    "schedule": FILES | {"progress", "slurm", "submission"},
    "retry": FILES | {"data", "engine.claims", "progress"},
    "planned": FILES | {"fingerprint"},
    "preflight": FILES
    | {"engine.layout", "model.config", "model.headers", "model.tensor_names"}
    | {"parallel.exchange_rules"},
    "probe": FILES,
    "publish": FILES | {"data", "fingerprint", "progress"},
    "weights_digest": FILES | {"progress"},
    "schema": FILES | {"data"},
    "data": FILES,
    "plan": RUN
    | {"data", "balance", "model.config", "preflight", "publish", "sim"},  # sim only in plan.planner, checked below
    "parallel": BASE,
    "model": BASE | {"parallel"},
    "kv": FILES,
    "engine": RUN | {"data", "model", "kv", "parallel", "balance", "printable", "processor"},
    "finish": RUN | {"data", "engine.claims", "engine.step_journal", "publish"},
    "report": FILES | {"data", "equal_rows", "printable"},
    "sim": BASE | {"balance", "plan.prefix", "model.config", "report.pricing", "report.price_list", "rundir"},
    "doctor": FILES | {"engine", "parallel", "processor"},
    "balance": BASE,
    "__main__": {"program"},
    "program": {"cli", "engine", "records"},
    "cli": {"commands", "schema", "doctor", "processor", *BASE, "stop", "printable"},
    "commands": None,  # one function per command, checked below
}
MAY_IMPORT_KERNELS = {"model", "kv", "engine", "doctor", "parallel"}
NO_TORCH = {"records", "config", "rundir", "trace", "fingerprint", "session", "schema", "planned", "weights_digest"} | {
    "data",
    "plan",
    "balance",
    "sim",
    "report",
    "finish",
    "slurm",
    "submission",
    "status",
    "status_text",
    "retry",
    "schedule",
    "whereabouts",
    "preflight",
    "probe",
    "publish",
}
# The controller's side of the engine: it must live on when a rank, or torch in it, does not.
CONTROLLER = {
    "controller",
    "dealer",
    "decode_loads",
    "expert_placer",
    "results",
    "rank_group",
    "local_ranks",
    "read_ahead",
    "free_memory",
    "agent",
    "nodes",
}
CONTROLLER |= {"layout", "channel", "feed", "claims", "open_units", "step_journal", "units"}
# The KV store itself: `batchinfer kv` looks after it on a login node.
STORE = {"blocks", "block_file", "store_dir", "index", "space", "claims", "eviction", "room", "counters", "history"}
STORE |= {"disk", "upkeep"}
STANDARD_LIBRARY_ONLY = {"records", "printable", "processor", "equal_rows"}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            yield name, path


def imports_of(path):
    """Every imported module by full name, those under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def room_of(name):
    return name.split(".")[0]


MODULES = dict(modules())


@pytest.mark.parametrize("name", MODULES)
def test_a_room_imports_only_what_the_rule_allows(name):
    room = room_of(name)
    assert room in ALLOWED, f"{name}: say in this test what the room {room} may import"
    allowed = ALLOWED[room]
    for imported in imports_of(MODULES[name]):
        if imported == "batchinfer_kernels" or imported.startswith("batchinfer_kernels."):
            assert room in MAY_IMPORT_KERNELS, f"{name} imports {imported}"
        if not imported.startswith("batchinfer."):
            continue
        inner = imported.removeprefix("batchinfer.")
        if allowed is None or room_of(inner) == room:
            continue
        assert any(inner == item or inner.startswith(item + ".") for item in allowed), f"{name} imports {imported}"


def test_only_the_planner_imports_the_simulator():
    importing = {
        name
        for name in MODULES
        if room_of(name) == "plan" and any(item.startswith("batchinfer.sim") for item in imports_of(MODULES[name]))
    }
    assert importing == {"plan.planner"}


@pytest.mark.parametrize("name", [name for name in MODULES if room_of(name) in NO_TORCH])
def test_rooms_that_run_on_a_login_node_never_import_torch(name):
    assert not any(imported.split(".")[0] == "torch" for imported in imports_of(MODULES[name]))


@pytest.mark.parametrize("name", [f"engine.{name}" for name in sorted(CONTROLLER) if f"engine.{name}" in MODULES])
def test_the_controller_never_imports_torch(name):
    allowed = (
        RUN
        | {"data", "balance", "model.config", "model.weight_bytes", "parallel.spans", "processor"}
        | {f"engine.{other}" for other in CONTROLLER}
    )
    for imported in imports_of(MODULES[name]):
        assert imported.split(".")[0] not in {"torch", "batchinfer_kernels"}
        if imported.startswith("batchinfer."):
            inner = imported.removeprefix("batchinfer.")
            assert any(inner == item or inner.startswith(item + ".") for item in allowed), f"{name} imports {imported}"


@pytest.mark.parametrize("name", [f"kv.{name}" for name in sorted(STORE)])
def test_the_kv_store_never_imports_torch(name):
    for imported in imports_of(MODULES[name]):
        assert imported.split(".")[0] not in {"torch", "batchinfer_kernels"}
        assert not imported.startswith("batchinfer.kv.") or imported.removeprefix("batchinfer.kv.") in STORE


@pytest.mark.parametrize("name", sorted(STANDARD_LIBRARY_ONLY))
def test_what_all_rooms_may_import_has_only_the_standard_library(name):
    outside = [item for item in imports_of(MODULES[name]) if item.split(".")[0] not in sys.stdlib_module_names]
    assert outside == []


@pytest.mark.parametrize("name", [name for name in MODULES if room_of(name) == "balance"])
def test_balancers_import_only_numpy_and_numba(name):
    for imported in imports_of(MODULES[name]):
        top = imported.split(".")[0]
        assert top in {"batchinfer", "numpy", "numba"} or top in sys.stdlib_module_names, f"{name} imports {imported}"


def test_the_model_never_imports_kv():
    for name in (name for name in MODULES if room_of(name) == "model"):
        assert not any(imported.startswith("batchinfer.kv") for imported in imports_of(MODULES[name])), name


def test_the_kernels_import_only_torch_and_themselves():
    for path in (ROOT / "kernels" / "batchinfer_kernels").rglob("*.py"):
        for imported in imports_of(path):
            top = imported.split(".")[0]
            allowed = {"torch", "batchinfer_kernels"} | ({"triton"} if path.parent.name == "triton" else set())
            assert top in allowed or top in sys.stdlib_module_names, f"{path}: {imported}"


def test_there_is_no_package_called_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_nothing_unpickles_or_runs_foreign_code():
    forbidden = ("pickle", "marshal", "shelve", "dill")
    for name, path in MODULES.items():
        assert not any(imported.split(".")[0] in forbidden for imported in imports_of(path)), name
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            assert ast.unparse(call.func) not in {"eval", "exec", "os.system", "os.popen"}, name
            assert not any(keyword.arg == "shell" for keyword in call.keywords), name


@pytest.mark.parametrize(
    "modules",
    [
        "batchinfer.cli",
        "batchinfer.plan.planner, batchinfer.finish, batchinfer.engine.controller",
        "batchinfer.report.metrics, batchinfer.report.table, batchinfer.report.rows, batchinfer.schema",
        "batchinfer.report.html, batchinfer.report.export, batchinfer.report.side_by_side",
        "batchinfer.kv.upkeep",
        "batchinfer.sim.answer, batchinfer.sim.table, batchinfer.report.what_if",
        "batchinfer.schedule, batchinfer.status_text, batchinfer.retry",
    ],
)
def test_commands_that_compute_nothing_start_without_torch(modules):
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_are_started_before_anything_large_is_imported():
    code = "import sys, batchinfer.engine.rank_group; sys.exit(bool({'numpy', 'pyarrow', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_rank_starts_without_torchs_compiler():
    code = "import sys, batchinfer.engine.rank; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
