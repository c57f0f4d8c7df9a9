"""The house's rule (README, "The house"): a room imports only from rooms above it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dstrain"
ROOMS = [
    "config", "precision", "model", "data", "parallel", "checkpoint", "telemetry", "train", "inference", "planner", "cli",
]
# Beyond the order: what a room must not know at all.
UNKNOWN = {"config": {"torch"}, "precision": {"dstrain.model"}, "data": {"dstrain.model"}, "inference": {"dstrain.train"}}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem == "cli"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_one_way(path):
    room = path.stem if path.parent == PACKAGE else path.relative_to(PACKAGE).parts[0]
    modules = imports(path)
    reached = {name.split(".")[1] for name in modules if name.startswith("dstrain.")}
    below = [other for other in reached if other in ROOMS and ROOMS.index(other) > ROOMS.index(room)]
    assert not below, f"{room} reaches down to {below}"
    for name in UNKNOWN.get(room, ()):
        assert not any(module == name or module.startswith(name + ".") for module in modules), f"{room} knows {name}"
