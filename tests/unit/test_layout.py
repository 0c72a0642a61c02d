"""The rules of the layout: which way imports point, who may know which library, what a webui must not find."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "modules" / "transformers_llamacpp"

LAYERS = (
    {"errors", "options", "batch", "reuse", "usage", "guarded_lock", "slices", "write_back"},
    {"backend", "gguf_reader", "output_head"},
    {"native", "testing"},
    {"sequence"},
    {"tree", "chunks", "saved", "state_file"},
    {"memory", "state_folder", "recall"},
    {"registry"},
    {"room"},
    {"moving"},
    {"pool"},
    {"turn"},
    {"evaluation", "mix", "recovery", "scheduler"},
    {"engine"},
    {"cache", "cache_life", "cache_row", "rows", "request", "compat", "hidden"},
    {"decoding"},
    {"config", "files", "generation", "tokenizer", "tokenizer_files", "tokenizer_encoding"}
    | {"tokenizer_vocabulary", "token_rows", "token_spans", "chat_template"},
    {"memory_options"},
    {"modeling"},
    {"server", "webui", "bench", "cli", "terminal", "perplexity", "__main__"},
)
"""Imports point to the same layer or to one above in this list; within a layer they form no circle."""

ONLY_IN = {
    "llama_cpp": ("native", "bench"),  # what is compared with: the bare loop, and the binding's own
    "ctypes": ("native", "bench"),
    "fastapi": ("server",),
    "starlette": ("server",),
    "uvicorn": ("server",),
    "pydantic": ("server",),
    "llguidance": ("server",),
    "prometheus_client": ("server",),
    "gradio": ("server",),
    "argparse": ("cli",),
    "gguf": ("output_head",),
}
"""Libraries, and the only modules that may import them."""

NO_TORCH = {"errors", "options", "batch", "backend", "native", "sequence", "pool", "engine", "testing", "output_head"} | {
    "tree", "chunks", "saved", "state_file", "state_folder", "memory", "recall", "evaluation", "reuse", "registry",
    "room", "moving", "usage", "turn", "mix", "recovery", "scheduler", "slices",
    "write_back",
}  # fmt: skip
"""The engine proper speaks numpy."""


def sources() -> list[Path]:
    return sorted(ENGINE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The module's name right below the package: `native` for everything in native/, `__init__` for the package."""
    return path.relative_to(ENGINE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """`(level, dotted name)` of every import, those for type checkers left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.level, node.module
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, alias.name) for alias in node.names)


def inner_imports(path: Path) -> set[str]:
    """Modules of the package that `path` imports, by their name right below it."""
    package = path.relative_to(ENGINE).parts[:-1]
    found = set()
    for level, name in imports(path):
        if level:
            inside = package[: len(package) - level + 1]
            found.add((*inside, *name.split("."))[0])
    return found - {module_of(path)}


def rank(module: str) -> int:
    found = [index for index, layer in enumerate(LAYERS) if module in layer]
    assert found, f"{module} is in no layer: add it to LAYERS where it belongs"
    return found[0]


def test_the_webui_finds_namespace_packages() -> None:
    for folder in ("modules", "extensions"):
        assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would hide the webui's own modules"


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ENGINE).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    module = module_of(path)
    if module != "__init__":
        for other in inner_imports(path):
            assert rank(other) <= rank(module), f"{module} must not import {other}"


def test_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        graph.setdefault(module_of(path), set()).update(inner_imports(path))
    while graph:
        leaves = {module for module, targets in graph.items() if not targets & graph.keys()}
        assert leaves, f"these import each other: {sorted(graph)}"
        for leaf in leaves:
            del graph[leaf]


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ENGINE).as_posix())
def test_libraries_stay_where_they_belong(path: Path) -> None:
    module = module_of(path)
    for level, name in imports(path):
        library = name.split(".")[0]
        if level:
            continue
        assert library not in ("transformers_llamacpp", "modules"), f"{name}: relative imports only inside the engine"
        assert module in ONLY_IN.get(library, (module,)), f"{module} must not import {library}"
        if module in NO_TORCH:
            assert library not in ("torch", "transformers"), f"{module} must not import {library}"


def test_webui_modules_only_in_the_loader_and_the_script() -> None:
    loader = {ROOT / "modules" / name for name in ("llamacpp_hf.py", "llamacpp_hf_seams.py", "llamacpp_hf_replies.py")}
    allowed = loader | {ROOT / "extensions" / "llamacpp_hf" / "script.py"}
    for path in [*(ROOT / "modules").rglob("*.py"), *(ROOT / "extensions").rglob("*.py")]:
        if path not in allowed:
            assert all(level or name.split(".")[0] != "modules" for level, name in imports(path)), path


def test_the_package_says_that_it_is_typed() -> None:
    assert (ENGINE / "py.typed").is_file()


def test_one_version() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    defined = re.search(r'^__version__ = "(.+)"$', (ENGINE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared and defined and declared[1] == defined[1]
