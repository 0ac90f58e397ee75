"""Steps of models whose blocks are compiled, plain and checked, and blocks of every kind.

`plain_step` is the yardstick: the same modules compiled by the same backend, and no checker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modulecheck import CompareResult, PrecisionChecker
from tests import models
from tests.models import Workload
from tests.step_equality import StepState, capture, differences

DYNAMO_WARNS = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # Dynamo looks at every input
    "ignore:.*is deprecated.*:DeprecationWarning",
    "ignore:Torchinductor does not support code generation for complex",
)
MODES = pytest.mark.parametrize("single_pass", [True, False], ids=["single-pass", "two-pass"])
CXX = shutil.which("g++") or shutil.which("clang++")
INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(CXX is None, reason="inductor needs a C++ compiler, there is none"),
    ],
)
needs_compiler = pytest.mark.skipif(
    CXX is None, reason="inductor needs a C++ compiler, there is none"
)


# ---- steps --------------------------------------------------------------------------------------


@contextlib.contextmanager
def random_as_eager(backend: Any) -> Iterator[None]:
    """The setting under which a checked inductor step runs."""
    if backend != "inductor":
        yield
        return
    with torch._inductor.config.patch(fallback_random=True):
        yield


def compile_in_place(module: nn.Module, backend: Any) -> None:
    """Compile the way production does, torch.nn classes included."""
    from torch._dynamo.external_utils import wrap_inline

    is_torch_own = type(module).__module__.startswith("torch.nn")
    call = wrap_inline(module._call_impl) if is_torch_own else module._call_impl
    module._compiled_call_impl = torch.compile(call, backend=backend)


def plain_step(workload: Workload, classes: Any, backend: Any, step: Any = None) -> StepState:
    """The compiled step without the checker."""
    blocks = [item for item in workload.model.modules() if isinstance(item, classes)]
    torch._dynamo.reset()
    torch.manual_seed(1234)
    with random_as_eager(backend):
        for block in blocks:
            compile_in_place(block, backend)
        loss = (step or Workload.step)(workload)
    for block in blocks:
        block.__dict__.pop("_compiled_call_impl")
    return capture(workload, loss)


def checked_step(
    workload: Workload, classes: Any, backend: Any = "aot_eager", step: Any = None, **options: Any
) -> tuple[CompareResult, StepState]:
    """The same step with the checker around it."""
    torch._dynamo.reset()
    torch.manual_seed(1234)
    checker = PrecisionChecker(backend=backend, **options)
    checker.wrap_by_policy(workload.model, classes)
    checker.install(workload.model)
    loss = (step or Workload.step)(workload)
    result = checker.collect(loss)
    return result, capture(workload, loss)


def assert_clean(
    build: Callable[[], Workload], classes: Any, backend: Any, **options: Any
) -> CompareResult:
    """PASS with something compared in every module, and the step as without the checker."""
    expected = plain_step(build(), classes, backend)
    result, actual = checked_step(build(), classes, backend, **options)
    found = differences(expected, actual)
    assert not found, "the checked step differs:\n" + "\n".join(found)
    assert_pass(result)
    return result


def assert_pass(result: CompareResult) -> None:
    """PASS, and not for want of looking."""
    assert str(result.verdict) == "PASS", explain(result)
    assert result.suspects == []
    assert result.diffs
    for diff in result.diffs:
        assert diff.compared > 0, diff


def explain(result: CompareResult) -> str:
    """What a failing test should show."""
    lines = [str(result.judgement)]
    for diff in result.diffs:
        for call in diff.calls or [diff]:
            if call.note:
                lines.append(f"{call.name}: {call.note}")
            lines += [
                f"{call.name} {kind}[{index}] {item.name}: {item} {item.reason} {item.notes}"
                for kind, index, item in call.tensors()
                if str(item.judged) != "PASS"
            ]
    return "\n".join(lines)


Edit = Callable[[Tensor], Tensor]
MARK = 37
"""A width that no other layer has: a wrong backend knows the block by it."""


def add_to_one(size: float) -> Edit:
    """One element is off."""

    def edit(tensor: Tensor) -> Tensor:
        wrong = tensor.clone()
        wrong.view(-1)[7 % wrong.numel()] += size
        return wrong

    return edit


def wrong_backend(
    *, forward: Edit | None = None, backward: dict[int, Edit] | Edit | None = None, at: int = 0
) -> Any:
    """`aot_eager`, but the block of width MARK gives other results.

    Args:
        forward: changes the first floating output.
        backward: changes every floating gradient, or those at these places.
        at: only in the n-th run, from 1; 0 is always.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(edit: Any, *, first_only: bool) -> Any:
        def compile_graph(graph: Any, inputs: Any) -> Any:
            shapes = [node.meta["val"].shape for node in graph.graph.nodes
                      if isinstance(node.meta.get("val"), Tensor)]  # fmt: skip
            marked = any(MARK in shape for shape in shapes)
            count = [0]

            def run(*args: Any) -> Any:
                out = list(torch.fx.Interpreter(graph).run(*args))
                count[0] += 1
                if edit is None or not marked or (at and count[0] != at):
                    return out
                places = [i for i, o in enumerate(out)
                          if isinstance(o, Tensor) and o.is_floating_point()]  # fmt: skip
                for place in places[:1] if first_only else places:
                    chosen = edit.get(place) if isinstance(edit, dict) else edit
                    if chosen is not None:
                        out[place] = chosen(out[place])
                return out

            return make_boxed_func(run)

        return compile_graph

    made = aot_autograd(
        fw_compiler=compiler(forward, first_only=True),
        bw_compiler=compiler(backward, first_only=False),
    )

    def backend(graph: Any, inputs: Any) -> Any:
        return made(graph, inputs)

    return backend


def mark(model: nn.Module, place: int = 1) -> str:
    """Give one block the width by which it is known; returns its name."""
    block = model.blocks[place]
    torch.manual_seed(5)
    dtype = block.up.weight.dtype
    block.up, block.down = (
        nn.Linear(WIDTH, MARK).to(dtype), nn.Linear(MARK, WIDTH).to(dtype)
    )  # fmt: skip
    return f"blocks.{place}"


class CountingBackend:
    """`aot_eager` that counts graphs and their runs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        compiled = aot_eager(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


# ---- blocks -------------------------------------------------------------------------------------

WIDTH = 16


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.norm(hidden)))))


class DictBlock(Block):
    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"hidden": super().forward(hidden)}


@dataclasses.dataclass
class Out:
    hidden: Tensor
    extra: Tensor | None = None


class DataclassBlock(Block):
    def forward(self, hidden: Tensor) -> Out:
        return Out(hidden=super().forward(hidden))


class TupleBlock(Block):
    def forward(self, hidden: Tensor) -> tuple[Tensor, None, list[Tensor]]:
        out = super().forward(hidden)
        return out, None, [out.view(-1), hidden * 2]


class KeywordBlock(Block):
    def forward(self, hidden: Tensor, *, scale: float) -> Tensor:
        return super().forward(hidden) * scale


class NanBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        first = torch.arange(hidden.shape[-1]) == 0
        return super().forward(hidden) + torch.zeros_like(hidden).masked_fill(first, float("nan"))


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(hidden)))


class InPlaceBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden.mul_(0.5)
        return super().forward(hidden)


class ComplexBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(hidden.view(-1, WIDTH // 2, 2)) * 1j).view(
            hidden.shape
        ) + super().forward(hidden)


class BreakBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        out = self.up(hidden)
        torch._dynamo.graph_break()
        return hidden + self.down(torch.relu(out))


def model_output_block() -> type[Block]:
    from transformers.modeling_outputs import BaseModelOutput

    class ModelOutputBlock(Block):
        def forward(self, hidden: Tensor) -> Any:
            return BaseModelOutput(last_hidden_state=super().forward(hidden))

    return ModelOutputBlock


Call = Callable[[nn.Module, Tensor], Tensor]


def _plain_call(block: nn.Module, hidden: Tensor) -> Tensor:
    return block(hidden)


class Stack(nn.Module):
    """Blocks between two linear layers; the input of each block has another user beside it."""

    def __init__(self, make: Callable[[], nn.Module], call: Call, num_blocks: int) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 4)
        self.call = call

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inp(hidden)
        for block in self.blocks:
            beside = 0.3 * hidden
            hidden = self.call(block, hidden) + beside
        return self.head(hidden)


@dataclass(frozen=True)
class Kind:
    """A kind of block, and how it is called."""

    make: Callable[[], nn.Module]
    call: Call = _plain_call
    nan: bool = False


KINDS: dict[str, Kind] = {
    "plain": Kind(Block),
    "dropout": Kind(lambda: Block(0.25)),
    "dict": Kind(DictBlock, lambda block, x: block(x)["hidden"]),
    "dataclass": Kind(DataclassBlock, lambda block, x: block(x).hidden),
    "tuple": Kind(
        TupleBlock, lambda block, x: (lambda o: o[0] + o[2][0].view_as(x) + o[2][1])(block(x))
    ),
    "keyword_only": Kind(KeywordBlock, lambda block, x: block(x, scale=0.5)),
    "by_keyword": Kind(Block, lambda block, x: block(hidden=x)),
    "twice": Kind(Block, lambda block, x: block(block(x))),
    "nan": Kind(NanBlock, nan=True),
    "batch_norm": Kind(NormBlock),
    "in_place_input": Kind(InPlaceBlock, lambda block, x: block(x.clone())),
    "in_place_output": Kind(Block, lambda block, x: block(x).mul_(0.5)),
    "complex": Kind(ComplexBlock),
    "graph_break": Kind(BreakBlock),
}


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return functional.mse_loss(model(batch[0]).float(), batch[1])


def _loss_without_nan(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return torch.nan_to_num(model(batch[0])).square().mean()


def stack(
    kind: str | Kind = "plain", *, num_blocks: int = 3, dtype: torch.dtype = torch.float32
) -> Workload:
    """Build a stack of blocks of one kind."""
    chosen = KINDS[kind] if isinstance(kind, str) else kind
    torch.manual_seed(0)
    model = Stack(chosen.make, chosen.call, num_blocks).to(dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, WIDTH, generator=generator).to(dtype)
    target = torch.randn(6, 4, generator=generator)
    loss = _loss_without_nan if chosen.nan else _loss
    return Workload("stack", model, (inputs, target), loss)


def block_class(kind: str) -> type[nn.Module]:
    """The class of the blocks."""
    return type(stack(kind, num_blocks=1).model.blocks[0])


def real_model(name: str, **sizes: Any) -> tuple[Callable[[], Workload], Any]:
    """A builder of a real model, and the class of its blocks."""
    if name == "gpt2":
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block as Layer
    elif name == "llama":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Layer
    elif name == "qwen2":
        from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer as Layer
    elif name in ("bert", "minilm"):
        from transformers.models.bert.modeling_bert import BertLayer as Layer
    else:
        Layer = models.BasicBlock  # noqa: N806 - a class
    return lambda: getattr(models, name)(**sizes), Layer
