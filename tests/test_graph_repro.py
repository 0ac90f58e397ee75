"""A captured graph as a file: its forward, its backward, and the nodes of one kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from modulecheck import PrecisionChecker
from modulecheck.graph_limits import loaded
from modulecheck.graph_repro import write_graph_repro
from opcheck.errors import ReproError
from tests.compiled import DYNAMO_WARNS, needs_compiler
from tests.reproducers import run_file

pytestmark = DYNAMO_WARNS

WRONG_TANH = """
import torch
from torch._inductor import lowering
torch._inductor.config.force_disable_caches = True
op = torch.ops.aten.tanh.default
right = lowering.lowerings[op]
lowering.lowerings[op] = lambda x: lowering.mul(right(x), 1.001)
"""
WRONG_TANH_BACKWARD = """
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends import debugging
from torch._dynamo import register_backend, backends
import torch._dynamo.backends.registry as registry

def spoiled(graph, inputs):
    def run(args):
        return [out * 1.001 if out is not None else None for out in graph(*args)]
    run._boxed_call = True
    return run

broken = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=spoiled)
registry._COMPILER_FNS["aot_eager"] = broken
"""


class Block(nn.Module):
    """A little of everything that a graph may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(hidden))) * self.scale


def captured(module: nn.Module, *inputs: Any) -> tuple[fx.GraphModule, list[Any]]:
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(graph: fx.GraphModule, example: Any) -> Any:
        def run(*args: Any) -> Any:
            found.append((graph, list(args)))
            return graph(*args)

        return run

    torch._dynamo.reset()
    torch.compile(module, backend=backend)(*inputs)
    torch._dynamo.reset()
    return found[0]


@pytest.fixture
def block() -> tuple[fx.GraphModule, list[Any]]:
    torch.manual_seed(0)
    return captured(Block(), torch.randn(3, 6, requires_grad=True))


@contextlib.contextmanager
def wrong_tanh() -> Iterator[None]:
    """The lowering of tanh, wrong in this process."""
    from torch._inductor import config, lowering

    op = torch.ops.aten.tanh.default
    right = lowering.lowerings[op]
    torch._dynamo.reset()
    lowering.lowerings[op] = lambda x: lowering.mul(right(x), 1.001)
    try:
        with config.patch(fx_graph_cache=False):
            yield
    finally:
        lowering.lowerings[op] = right
        torch._dynamo.reset()


@pytest.mark.slow
@needs_compiler
def test_failing_module_of_a_precision_checker(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Block())
    checker = PrecisionChecker(backend="inductor", repro_dir=tmp_path / "repros")
    checker.wrap(model[1])
    with wrong_tanh():
        result = checker.compare(lambda model: model(torch.ones(3, 6)).square().mean(), model)
    assert result.verdict == "FAIL"
    (path,) = result.repros
    assert f"reproducer: {path}" in result.notes
    text = Path(path).read_text()
    assert "torch.tanh(" in text
    assert "module   1 (" in text
    without = run_file(Path(path))
    assert without.returncode == 0, without.stdout + without.stderr
    found = run_file(Path(path), before=WRONG_TANH)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "output 0: torch.float32, shape (3, 4)" in found.stdout


@pytest.mark.slow
def test_backward_of_a_compiled_module(block: Any, tmp_path: Path) -> None:
    graph, inputs = block
    script = write_graph_repro(
        tmp_path, graph, inputs, name="block backward", backend="aot_eager",
        grads={0: torch.randn(3, 4)},
    )  # fmt: skip
    without = run_file(script)
    assert without.returncode == 0, without.stdout + without.stderr
    found = run_file(script, before=WRONG_TANH_BACKWARD)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "gradient of input" in found.stdout
    lines = found.stdout.splitlines()
    assert not any("FAULT" in line for line in lines[: lines.index(next(
        line for line in lines if line.startswith("gradient")
    ))])  # fmt: skip


@pytest.mark.slow
@needs_compiler
def test_nodes_of_one_kernel(tmp_path: Path) -> None:
    graph = fx.Graph()
    left, right = graph.placeholder("buf0"), graph.placeholder("primals_3")
    total = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
    graph.output((graph.call_function(torch.ops.aten.tanh.default, (total,)),))
    kernel = fx.GraphModule(nn.Module(), graph)
    script = write_graph_repro(
        tmp_path, kernel, [torch.randn(8, 16).t(), torch.randn(8)], name="cpp_fused_add_tanh_0",
        backend="inductor", stage="kernel cpp_fused_add_tanh_0",
    )  # fmt: skip
    assert ".as_strided((16, 8), (1, 16), 0)" in script.read_text()
    assert run_file(script).returncode == 0
    assert run_file(script, before=WRONG_TANH).returncode == 1


@pytest.mark.parametrize("fault", ["none", "lean", "scattered"])
def test_small_errors_of_all_elements_are_seen(tmp_path: Path, fault: str) -> None:
    torch.manual_seed(0)
    graph, inputs = captured(nn.Tanh(), 2.0 * torch.randn(64, 64))
    file: Any = loaded(write_graph_repro(tmp_path, graph, inputs, name="x", backend="aot_eager"))
    expected, beside = file.in_float64(), file.in_eager()
    (limit,) = file.limits()
    share = {"none": 0.0, "lean": 0.9, "scattered": 0.9}[fault]
    room = share * torch.tensor(limit["allowed"]).reshape(64, 64)
    sign = torch.ones(64, 64) if fault == "lean" else torch.sign(torch.randn(64, 64))
    limit = {key: limit[key] for key in limit if key != "max_rms"} if fault == "lean" else limit
    actual = [beside[0] + room * sign * beside[0].sign()]
    of_elements = {**limit, "max_shift": 1e9, "max_rms": 1e9}
    assert file.verdict([of_elements], actual, expected, beside) == 0
    assert file.verdict([limit], actual, expected, beside) == (fault != "none")


def test_what_no_other_process_can_call_is_refused(tmp_path: Path) -> None:
    def own(x: Tensor) -> Tensor:
        return x + 1

    graph = fx.Graph()
    graph.output(graph.call_function(own, (graph.placeholder("x"),)))
    with pytest.raises(ReproError, match="own"):
        write_graph_repro(tmp_path, fx.GraphModule(nn.Module(), graph), [torch.ones(2)], name="x")
    assert list(tmp_path.iterdir()) == []


def test_random_graphs_draw_the_same_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    graph, inputs = captured(nn.Dropout(0.5), torch.randn(64))
    script = write_graph_repro(
        tmp_path, graph, inputs, name="dropout", backend="eager", random_state=state
    )
    names: dict[str, Any] = {"__name__": "reproducer", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), names)
    first, second = (names["in_eager"]()[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(first, nn.functional.dropout(inputs[0], 0.5))
