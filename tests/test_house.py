"""The floors of the house: lower ones never import upper ones."""

import ast
import pathlib

import pytest

PACKAGES = ("pallas_kernels", "hybridkv", "models")
BASE = ("arithmetic", "errors", "formats", "kinds", "geometry")
FLOORS = [
    ["pallas_kernels"],
    [f"hybridkv.{name}" for name in BASE],
    ["hybridkv.state"],
    ["hybridkv.blocks"],
    ["hybridkv.prefixes"],
    ["hybridkv.tiers"],
    ["hybridkv.engine"],
    ["hybridkv.replay"],
    ["hybridkv.observe"],
]
"""From the ground up (design, section 4)."""
MODELS_MAY = ("pallas_kernels", "hybridkv.state", *(f"hybridkv.{name}" for name in BASE))
MOST_NAMES = 25


def modules(repository: pathlib.Path, *packages: str) -> dict[str, ast.Module]:
    """Dotted name to syntax tree of every file of the packages."""
    found = {}
    for package in packages:
        for file in sorted((repository / package).rglob("*.py")):
            parts = file.relative_to(repository).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(file.read_text())
    return found


def imports(name: str, tree: ast.Module, every: set[str]) -> set[str]:
    """Modules of this repository that a file imports, wherever in it; types only count too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively: write the whole name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = set()
    for full in names:
        while full and full not in every:
            full = full.rpartition(".")[0]
        ours |= {full} - {""}
    return ours


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def floor(name: str) -> int | None:
    return next(
        (n for n, packages in enumerate(FLOORS) if any(within(name, p) for p in packages)), None
    )


@pytest.fixture(scope="module")
def trees(repository):
    return modules(repository, *PACKAGES)


def upward(trees: dict[str, ast.Module]) -> list[str]:
    """Every import that goes up, or from ``hybridkv`` to a model."""
    every, wrong = set(trees), []
    for name, tree in trees.items():
        if within(name, "models"):
            continue
        own = floor(name)
        for target in imports(name, tree, every):
            at = floor(target)
            package_itself = name == "hybridkv" and within(target, "hybridkv")
            if not package_itself and (at is None or own is None or at > own):
                wrong.append(f"{name} imports {target}")
    return wrong


def forbidden(trees: dict[str, ast.Module]) -> list[str]:
    """Every import of a model that is not from the lower floors."""
    every = set(trees)
    return [
        f"{name} imports {target}"
        for name, tree in trees.items()
        if within(name, "models")
        for target in imports(name, tree, every)
        if not within(target, "models") and not any(within(target, p) for p in MODELS_MAY)
    ]


def test_every_module_of_the_library_has_a_floor(trees):
    library = [n for n in trees if within(n, "hybridkv") and n != "hybridkv"]
    assert len(library) > 10
    assert [name for name in library if floor(name) is None] == []


def test_no_floor_imports_one_above_it_or_a_model(trees):
    assert upward(trees) == []


def test_models_import_only_state_geometry_and_kernels(trees):
    assert forbidden(trees) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("pallas_kernels.blocks", "import hybridkv.geometry"),
        ("pallas_kernels.blocks", "from hybridkv.geometry import Geometry"),
        ("hybridkv.geometry", "from hybridkv.state.cache import Cache"),
        ("hybridkv.state.cache", "from hybridkv.engine import steps"),
        ("hybridkv.engine.steps", "def f():\n    from models import common"),
        ("models.common", "from hybridkv.engine.protocol import StepModel"),
        ("models.common", "import hybridkv.engine.steps as s"),
    ],
)
def test_a_wrong_import_would_be_found(trees, name, line):
    changed = trees | {name: ast.parse(line)}
    assert any(found.startswith(name) for found in upward(changed) + forbidden(changed))


def test_the_package_exports_few_names(trees):
    tree = trees["hybridkv"]
    names = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    ]
    assert "*" not in names
    assert len(names) <= MOST_NAMES


def environment_changes(tree: ast.Module) -> list[int]:
    """Lines that change an environment variable."""
    lines = []

    def is_environ(node: ast.expr) -> bool:
        return ast.unparse(node) in ("os.environ", "environ", "os.environb")

    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            lines += [node.lineno] * is_environ(node.value)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            method = isinstance(node.func, ast.Attribute) and is_environ(node.func.value)
            changes = name.rpartition(".")[2] in (
                "update",
                "setdefault",
                "pop",
                "clear",
                "popitem",
                "__setitem__",
            )
            lines += [node.lineno] * (name.endswith(("putenv", "unsetenv")) or (method and changes))
        elif isinstance(node, ast.AugAssign):
            lines += [node.lineno] * is_environ(node.target)
    return lines


def test_no_environment_variable_is_changed(trees):
    assert {
        name: lines for name, tree in trees.items() if (lines := environment_changes(tree))
    } == {}


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['A'] = '1'",
        "del os.environ['A']",
        "environ['A'] += '1'",
        "os.environ.update(A='1')",
        "os.environ.setdefault('A', '1')",
        "os.environ |= {'A': '1'}",
        "os.putenv('A', '1')",
    ],
)
def test_a_change_of_the_environment_would_be_found(line):
    assert environment_changes(ast.parse(line)) == [1]
    assert environment_changes(ast.parse("x = os.environ['A'], os.environ.get('B')")) == []
