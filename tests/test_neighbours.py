"""Packages whose folder begins like torch's or ours are the user's: torchvision, opcheck_tools."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
from torch import fx, nn

import modulecheck
import opcheck
from modulecheck.backends import compiles_only_inlined
from modulecheck.node_origin import origin_of

X = torch.linspace(-1, 1, 8)
FOLDERS = {
    "torchvision": f"{Path(torch.__file__).parent}vision",
    "opcheck_tools": f"{Path(opcheck.__file__).parent}_tools",
    "modulecheck_tools": f"{Path(modulecheck.__file__).parent}_tools",
}


def forward_in(folder: str) -> FunctionType:
    """A `forward` whose code says that it lies in this folder, line 3."""
    found: dict[str, FunctionType] = {}
    code = "\n\ndef forward(self, x): return x.exp()"
    exec(compile(code, f"{folder}/models/toy.py", "exec"), found)
    return found["forward"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_line_of_a_neighbour_is_the_source(name: str, tmp_path: Path) -> None:
    kind = type("Toy", (nn.Module,), {"forward": forward_in(FOLDERS[name])})
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        kind()(X)
    assert [record.source for record in session.records] == ["toy.py:3 in forward"]


@pytest.mark.parametrize("package", [torch, opcheck, modulecheck])
def test_a_line_of_torch_or_ours_is_none(package: ModuleType, tmp_path: Path) -> None:
    own = str(Path(str(package.__file__)).parent)
    kind = type("Toy", (nn.Module,), {"forward": forward_in(own)})
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        kind()(X)
    assert session.records[0].source.startswith(f"{Path(__file__).name}:")


def test_dynamo_skips_frames_of_torch_alone() -> None:
    kind = type("Toy", (nn.Module,), {"forward": forward_in(FOLDERS["torchvision"])})
    assert not compiles_only_inlined(kind())
    assert compiles_only_inlined(nn.Linear(2, 2))


def test_a_graph_names_the_line_of_a_neighbour() -> None:
    graph = fx.Graph()
    node: fx.Node = graph.call_function(torch.ops.aten.exp.default, (graph.placeholder("x"),))
    torch_line = f'  File "{Path(torch.__file__).parent}/nn/modules/module.py", line 9, in __call__'
    neighbour = f'  File "{FOLDERS["torchvision"]}/models/toy.py", line 3, in forward'
    node.meta["stack_trace"] = f"{neighbour}\n    x.exp()\n{torch_line}\n    y"
    assert origin_of(node, {}).source == "toy.py:3 in forward: x.exp()"
