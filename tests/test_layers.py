"""Imports only ever point down the layers, and what reads logs needs no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.private_torch import is_for_type_checkers, own_names, private_uses

ROOT = Path(__file__).parents[1]

# from the bottom up; a module may import those of lower lines only
LAYERS = {
    "opcheck": (
        {
            "errors",
            "globs",
            "own_thread",
            "printing",
            "records",
            "repro_judge",
            "tolerances",
            "version",
            "waiting",
            "whole_files",
        },
        {"exits", "private_names", "record_json", "validation"},
        {
            "_torch",
            "arguments",
            "arrays",
            "commandline",
            "runstate",
            "settings",
            "source_lines",
            "steptimes",
            "textline",
            "groups",
        },
        {"lazy_bits"},
        {"modes"},
        {
            "allowances",
            "calls",
            "compiled_regions",
            "environment",
            "global_hooks",
            "kernel_table",
            "key_blocks",
            "logfile",
            "overhead",
            "peaks",
            "recurrent",
            "packing",
            "sinks",
            "tensor_kinds",
        },
        {"outside", "owners", "written"},
        {
            "factors",
            "generators",
            "golden_rules",
            "keepers",
            "ledger",
            "modules",
            "policy",
            "rules",
            "scan",
            "switch",
        },
        {"call_dtypes", "snapshots"},
        {
            "callers",
            "declared",
            "golden",
            "intercept",
            "logrecords",
            "measures",
            "planting",
            "flushing",
            "references",
            "vectors",
        },
        {
            "equivalents",
            "index_rules",
            "interval",
            "mirrors",
            "passes",
            "reconstruct",
            "review",
            "slices",
        },
        {"call_text", "drift", "expected", "projection", "runnotes", "slice_rules", "verdicts"},
        {"leaf_judging"},
        {"compare", "large_table", "merging", "report", "rundiff"},
        {
            "beside",
            "births",
            "blame",
            "certificate",
            "export",
            "kernel_inputs",
            "leaving",
            "nonfinite",
            "repeats",
            "repro_files",
            "repro_limits",
            "sampled",
            "selftest",
            "shadow",
            "shrinking",
            "tree",
        },
        {
            "attention_rows",
            "convolution_sums",
            "counted",
            "decomposed",
            "followers",
            "held",
            "product_rows",
            "sampled_elements",
            "wholes",
        },
        {"blame_text", "convolutions", "products"},
        {"product_grid"},
        {"large"},
        {"admission", "comparison"},
        {"call_records"},
        {"conclusions"},
        {"blameplot", "pipeline", "repro_tensors", "rerun", "rundiff_report"},
        {"recorded_calls", "repro_text", "stopwatch"},
        {"repro_call"},
        {"replaying", "repro"},
        {"kernelcheck", "presence"},
        {"session"},
        {"checking", "registrar"},
        {"__init__"},
        {"demo", "runner"},
        {"cli"},
        {"__main__"},
    ),
    "modulecheck": (
        {
            "_torch",
            "budget",
            "collective_rule",
            "compared",
            "csv_files",
            "culprit",
            "foreign",
            "fx_text",
            "kernel_probe",
            "node_origin",
            "plain",
            "progress",
            "subgraphs",
            "tensor_report",
            "tensor_rule",
            "tensor_values",
            "untrusted_files",
        },
        {"backends", "compiled_graphs", "corners", "distributed", "versions"},
        {
            "_inductor",
            "collective_findings",
            "collectives",
            "dynamo",
            "graphs",
            "ranks",
            "selection",
            "sidechannel",
            "tensor_compare",
            "tensor_container",
            "tensor_records",
            "tensor_store",
            "trees",
            "trial",
            "undisturbed",
        },
        {"outer_places"},
        {"outer_state"},
        {
            "attributes",
            "buffers",
            "collective_watch",
            "flips",
            "graph_limits",
            "kink_rule",
            "remarks",
            "tensor_groups",
            "tensor_limits",
            "tensor_origins",
            "twins",
            "widening",
        },
        {"graph_repro", "module_rule", "replicas", "snapshot"},
        {"collective_audit", "judging"},
        {"graph_capture", "keeping", "replay", "same_program"},
        {"artifacts"},
        {
            "goldens",
            "hooks",
            "region_gradients",
            "tensor_dump",
            "tensor_files",
            "tensor_judge",
            "tensor_names",
        },
        {"compilations", "graph_values", "recording", "watching"},
        {"bisecting", "kernel_ops", "kernels", "recorded_files", "rerun"},
        {"binding", "call_graphs", "decompositions", "eager_ops", "ladder", "tensor_calls"},
        {"findings", "results", "tensor_repro_text"},
        {"items"},
        {"advice", "in_eager", "in_graphs", "pairing", "sides", "tensor_registry", "tensor_repro"},
        {"chain", "comparing", "locating", "paired"},
        {"tensors"},
        {"tensor_asserts", "tensor_hooks"},
        {"drilldown", "single_pass", "stages", "two_pass"},
        {"call_repro", "report"},
        {"gathering"},
        {"checker"},
        {"__init__"},
        {"cli"},
        {"__main__"},
    ),
}
READING_SIDE = (
    "errors",
    "records",
    "logfile",
    "review",
    "report",
    "merging",
    "rundiff",
    "tree",
    "blame",
    "blame_text",
)


def sources(package: str) -> dict[str, Path]:
    return {path.stem: path for path in sorted((ROOT / package).glob("*.py"))}


def rank_of(package: str, module: str) -> int:
    for rank, modules in enumerate(LAYERS[package]):
        if module in modules:
            return rank
    pytest.fail(f"{package}/{module}.py has no layer; give it one in tests/test_layers.py")


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Walk everything that runs: imports under `if TYPE_CHECKING` do not."""
    yield node
    children = node.orelse if is_for_type_checkers(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from walk(child)


def imported(path: Path) -> set[str]:
    """List the modules that a file imports, `from package import module` spelled out."""
    found: set[str] = set()
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found.update(spelled_out(node))
    return found


def spelled_out(node: ast.ImportFrom) -> Iterator[str]:
    """`from opcheck import x` is an import of opcheck.x where x is a module, else of opcheck."""
    assert node.module is not None
    if node.module not in LAYERS:
        yield node.module
        return
    modules = sources(node.module)
    for alias in node.names:
        yield f"{node.module}.{alias.name if alias.name in modules else '__init__'}"


def own_imports(package: str, path: Path) -> set[str]:
    names = set()
    for name in imported(path):
        root, _, rest = name.partition(".")
        if root == package:
            names.add(rest or "__init__")
    return names


ALL_MODULES = [(package, stem) for package in LAYERS for stem in sources(package)]


@pytest.mark.parametrize(("package", "stem"), ALL_MODULES, ids=lambda part: part)
def test_imports_point_down(package: str, stem: str) -> None:
    rank = rank_of(package, stem)
    for name in own_imports(package, sources(package)[stem]):
        assert rank_of(package, name) < rank, f"{package}/{stem}.py may not import {name}"


@pytest.mark.parametrize("stem", sources("opcheck"))
def test_opcheck_does_not_know_modulecheck(stem: str) -> None:
    roots = {name.partition(".")[0] for name in imported(sources("opcheck")[stem])}
    assert "modulecheck" not in roots


@pytest.mark.parametrize("stem", sources("modulecheck"))
def test_modulecheck_keeps_out_of_private_opcheck(stem: str) -> None:
    assert not any(name.startswith("opcheck._") for name in imported(sources("modulecheck")[stem]))


@pytest.mark.parametrize("stem", READING_SIDE)
def test_reading_side_is_torch_free(stem: str) -> None:
    """Follow the imports down: none of the modules on the way may import torch."""
    modules = sources("opcheck")
    open_ends = {stem}
    reached: set[str] = set()
    while open_ends:
        module = open_ends.pop()
        reached.add(module)
        names = imported(modules[module])
        assert "torch" not in {name.partition(".")[0] for name in names}, module
        open_ends |= own_imports("opcheck", modules[module]) - reached


@pytest.mark.parametrize(("package", "stem"), ALL_MODULES, ids=lambda part: part)
def test_no_module_reads_the_tests(package: str, stem: str) -> None:
    roots = {name.partition(".")[0] for name in imported(sources(package)[stem])}
    assert not roots & {"tests", "benchmarks"}


@pytest.mark.parametrize("package", LAYERS)
def test_private_torch_is_named_in_one_file(package: str) -> None:
    files = sources(package)
    own = own_names(files.values())
    found = [
        f"{package}/{path.name}: {use}"
        for stem, path in files.items()
        for use in private_uses(ast.parse(path.read_text()), own, is_door=stem == "_torch")
    ]
    assert found == []
