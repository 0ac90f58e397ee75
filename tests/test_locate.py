"""From a failing call to stage, kernel, op and line: planted faults are found where they are."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modulecheck import PrecisionChecker, _inductor, dynamo
from modulecheck.budget import Budget
from modulecheck.culprit import NOT_REPRODUCED, Culprit
from modulecheck.graph_capture import Capture
from modulecheck.kernels import probe
from modulecheck.locating import locate
from modulecheck.node_origin import input_name
from modulecheck.recording import RecordedCall
from opcheck import Verdict
from tests import models
from tests.cases import CASES, of_kind
from tests.compiled import DYNAMO_WARNS, add_to_one, mark, needs_compiler, stack, wrong_backend
from tests.faults import planted
from tests.planted_lowerings import (
    mark_gpt2,
    mark_llama,
    mark_resnet,
    transformer,
    wrong_decomposition,
    wrong_in_marked,
    wrong_lowering,
    wrong_when_fused,
)

pytestmark = [needs_compiler, DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture(autouse=True)
def threads_kept() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


Step = Callable[[], Any]


def recorded(model: nn.Module, step: Step, *, backend: Any = "inductor", **options: Any) -> Any:
    """Failing calls of one step with the whole model wrapped."""
    checker = PrecisionChecker(backend=backend, **options)
    checker.wrap(model)
    with checker.installed(model):
        step()
    return checker.collect()


def drilled(model: nn.Module, step: Step, *, compiles: int = 60, **options: Any) -> list[Culprit]:
    (call,) = recorded(model, step, **options).recordings
    return locate(call, budget=Budget(compiles=compiles))


def training_step(model: nn.Module, ids: Tensor) -> None:
    model(ids).square().mean().backward()


def by_phase(culprits: list[Culprit]) -> dict[str, list[Culprit]]:
    return {
        phase: [item for item in culprits if item.phase == phase]
        for phase in ("forward", "backward")
    }


# ---- lowerings ----------------------------------------------------------------------------------

GELU = "return x + self.down(functional.gelu(self.up(self.norm_2(x))))"
NORM_1 = "x = x + self.proj(self.attend(self.norm_1(x)))"
PLANTED = {
    # name: (plant, {phase: (module, op, line, what the name of the kernel holds)})
    "erf": (
        lambda: wrong_lowering("erf"),
        {
            "forward": ("blocks.0", "aten.erf.default", GELU, "gelu"),
            "backward": ("blocks.1", "aten.erf.default", GELU, "gelu_backward"),
        },
    ),
    "rsqrt": (
        lambda: wrong_lowering("rsqrt"),
        {"forward": ("blocks.0.norm_1", "aten.rsqrt.default", NORM_1, "native_layer_norm")},
    ),
    "exp": (
        lambda: wrong_lowering("exp"),
        {"backward": ("blocks.1", "aten.exp.default", GELU, "gelu_backward")},
    ),
    "sum": (
        lambda: wrong_lowering("sum"),
        {
            "backward": (
                "head", "aten.sum.dim_IntList", "return self.head(self.norm(x))", "sum"
            )
        },
    ),
    "fused_only": (
        wrong_when_fused,
        {
            "forward": ("blocks.0", "aten.erf.default", GELU, "gelu"),
            "backward": ("blocks.1", "aten.erf.default", GELU, "gelu_backward"),
        },
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted_lowering_is_found_to_the_line(name: str) -> None:
    plant, expected = PLANTED[name]
    model, ids = transformer()
    with plant():
        # what it takes to find them; more would go into trying advice, which has its own test
        compiles = {"erf": 3, "exp": 2}.get(name, 60)
        culprits = drilled(model, lambda: training_step(model, ids), compiles=compiles)
    for phase, found in by_phase(culprits).items():
        assert len(found) == (phase in expected), culprits
        for culprit in found:
            module, op, line, kernel = expected[phase]
            assert culprit.stage == "inductor"
            assert (culprit.module, culprit.op) == (module, op)
            assert culprit.source.endswith(line)
            assert culprit.source.startswith("planted_lowerings.py:")
            assert kernel in culprit.kernel
            assert culprit.metrics.q > 1.0
            assert culprit.node
            assert culprit.reproduced
            if name in ("erf", "exp", "fused_only"):
                assert op not in culprit.other_ops
                assert {"aten.mul.Tensor", "aten.add.Tensor"} <= set(culprit.other_ops)
    if name == "rsqrt":
        also = [item.partition(" (")[0] for item in culprits[0].also_in]
        assert also == ["blocks.0.norm_2", "blocks.1.norm_1", "blocks.1.norm_2", "norm"]


def test_fault_of_one_run_alone_is_not_reproduced_and_no_clean_bill() -> None:
    workload = stack()
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(0.5), at=2)
    inputs = workload.batch[0]
    result = recorded(
        workload.model,
        lambda: [workload.model(inputs), workload.model(inputs)],
        backend=backend,
    )
    assert result.verdict == Verdict.FAIL
    (call,) = result.recordings
    (culprit,) = locate(call)
    assert culprit.stage == NOT_REPRODUCED
    assert not culprit.reproduced
    assert "no clean bill" in culprit.explanation
    assert "call 1 of its module" in culprit.explanation
    assert torch.__version__ in culprit.explanation


# ---- the code of the step itself ----------------------------------------------------------------


class Gelu(nn.Module):
    """Small, so that it compiles fast."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 20)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.up(x)).sin()


def has_unknown_size(value: Any) -> bool:
    return not all(str(size).isdigit() for size in value.get_size())


def gelu_step(*lengths: int) -> Any:
    """The failing call of a step, one call for each length."""
    torch.manual_seed(0)
    model = Gelu()
    batches = [torch.randn(3, length, 6) for length in lengths]
    return recorded(model, lambda: [model(x).square().mean().backward() for x in batches])


@pytest.fixture(scope="module")
def wrong_gelu() -> RecordedCall:
    """Compiled once for the tests that only look at it."""
    with wrong_lowering("erf"):
        (call,) = gelu_step(5).recordings
    return call


def no_code_of_the_step(call: RecordedCall) -> RecordedCall:
    return dataclasses.replace(call, artifacts=())


@pytest.mark.slow
def test_fault_of_the_step_alone_is_found_in_the_code_that_ran(wrong_gelu: RecordedCall) -> None:
    told: list[str] = []
    culprits = locate(wrong_gelu, on_progress=told.append)
    assert [item.phase for item in culprits] == ["forward", "backward"]
    for culprit in culprits:
        assert culprit.stage == "inductor"
        assert culprit.reproduced
        assert "gelu" in culprit.kernel
        assert "aten.erf.default" in (culprit.op, *culprit.other_ops)
        assert culprit.source.endswith("return functional.gelu(self.up(x)).sin()")
        assert "compiled again, the call is right" in culprit.explanation
        assert culprit.advice == ()
    assert "compiling with inductor" not in told
    (culprit,) = locate(no_code_of_the_step(wrong_gelu), budget=Budget(compiles=1))
    assert culprit.stage == NOT_REPRODUCED
    assert "what the step had compiled is not there" in culprit.explanation


@pytest.mark.slow
def test_fault_of_a_recompiled_graph_is_found_in_the_code_of_the_later_call() -> None:
    with wrong_lowering("erf", when=has_unknown_size):
        (call,) = gelu_step(5, 7).recordings
    assert call.index == 1
    culprits = locate(call, budget=Budget(compiles=1))  # of the stage below inductor
    assert [item.phase for item in culprits] == ["forward", "backward"]
    assert {item.stage for item in culprits} == {"inductor"}
    assert all("gelu" in item.kernel for item in culprits)


@pytest.mark.slow
def test_wrong_code_from_a_cache_on_disk_is_said_to_be_from_there() -> None:
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.utils import fresh_cache

    with (
        fresh_cache(),
        inductor_config.patch(fx_graph_cache=True),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        with wrong_lowering("erf"), inductor_config.patch(fx_graph_cache=True):
            assert gelu_step(5).recordings[0].artifacts[0].is_whole
        (call,) = gelu_step(5).recordings
        (culprit,) = locate(call, budget=Budget(compiles=1))
    assert culprit.stage == NOT_REPRODUCED
    assert "read from a cache of inductor on disk" in culprit.explanation


@pytest.mark.slow
def test_code_of_the_step_is_let_go_of() -> None:
    result = gelu_step_that_fails()
    code = weakref.ref(result.recordings[0].artifacts[0].graphs[0].lowered_graph)
    assert code() is not None
    torch._dynamo.reset()
    assert code() is not None
    del result
    gc.collect()
    assert code() is None


def gelu_step_that_fails() -> Any:
    with wrong_lowering("erf"):
        return gelu_step(5)


@pytest.mark.slow
def test_advice_was_tried_and_names_the_module() -> None:
    model, ids = transformer()
    model.blocks[1].up, model.blocks[1].down = nn.Linear(16, 36), nn.Linear(36, 16)
    with wrong_in_marked("erf"):
        (culprit,) = drilled(model, lambda: model(ids))
    assert culprit.module == "blocks.1"
    (advice,) = culprit.advice
    assert advice.startswith("leave blocks.1 out with torch.compiler.disable")
    assert "tried" in advice


@pytest.mark.slow
def test_no_kernel_of_a_clean_model_is_called_wrong() -> None:
    model, ids = transformer()
    capture = Capture()
    with dynamo.isolated():
        backend = capture.around(capture.inductor)
        dynamo.compiled_alone(model.forward, backend, dynamic=None)(ids).sum().backward()
    assert [item.phase for item in capture.graphs] == ["forward", "backward"]
    for captured in capture.graphs:
        found = probe(captured, captured.runs[0])
        assert found.num_kernels > 10
        assert found.num_compared > 40
        assert [found.wrong, found.other_zeros] == [[], []]
        assert [found.wrong_outputs, found.wrong_inputs] == [{}, {}]


# ---- other stages -------------------------------------------------------------------------------


def test_wrong_decomposition_is_not_blamed_on_inductor() -> None:
    model, ids = transformer()
    with wrong_decomposition():
        (culprit,) = drilled(model, lambda: model(ids))
    assert culprit.stage == "decomposition"
    assert culprit.op == "aten.gelu.default"
    assert culprit.module == "blocks.0"
    assert culprit.source.endswith(GELU)


def wrong_in_float32(original: Any) -> Any:
    """float64, and inductor's own formula, are right."""

    def gelu(x: Tensor, **options: Any) -> Tensor:
        out = original(x, **options)
        return original(x * 1.05, **options) if x.dtype == torch.float32 else out

    return gelu


def test_wrong_kernel_of_eager_is_named_and_inductor_is_not() -> None:
    model, ids = transformer()
    with planted("aten.gelu.default", wrong_in_float32):
        culprits = drilled(model, lambda: model(ids), criterion="allclose")
    assert {item.stage for item in culprits} == {"eager"}
    assert culprits[0].op == "aten.gelu.default"
    assert culprits[0].module == "blocks.0"
    assert "compiled result agrees with float64" in culprits[0].explanation


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_wrong_backend_of_the_user_is_named_with_the_op(phase: str) -> None:
    workload = stack()
    name = mark(workload.model)
    backend = wrong_backend(**{phase: add_to_one(0.5)})
    (culprit,) = drilled(workload.model, workload.step, backend=backend)
    assert culprit.stage == "backend"
    assert culprit.phase == phase
    assert culprit.module == f"{name}.up"
    assert culprit.op == "aten.addmm.default"
    assert culprit.source.startswith("compiled.py:")


class Unfaithful(nn.Module):
    """Right when traced op by op; `aot_eager` loses the write (a reported fault)."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        same = self.dropout(hidden)
        same += 1.25
        return same * 2


def test_lost_write_of_aot_autograd_is_not_blamed_on_inductor() -> None:
    model = Unfaithful().eval()
    hidden = torch.linspace(-1, 1, 12)
    (culprit,) = drilled(model, lambda: model(hidden), backend="aot_eager")
    assert culprit.stage == "aot_eager"
    assert culprit.tensor == "argument 0"
    assert culprit.op == "aten.add_.Tensor"
    assert "lost" in culprit.explanation


# ---- reported faults ----------------------------------------------------------------------------

CASE = {
    # name: (module, phase, stage, op, tensor)
    "angle_negative_zero": ("phase", "forward", "inductor", "aten.angle.default", ""),
    "autocast_backward_overflow": ("out.linear", "backward", "aot_eager", "aten.addmm.default", ""),
    "cumsum_dtype_dropped": ("position", "forward", "inductor", "aten.cumsum.default", ""),
    "dropout_identity_alias": ("block", "forward", "aot_eager", "aten.add_.Tensor", "argument 0"),
    "dtype_view_read_after_write": (
        "packed", "forward", "inductor", "aten.view.dtype", "argument table",
    ),
    "pool_then_where_backward": ("head", "backward", "inductor", "aten.scatter_add.default", ""),
    "remainder_vectorised": ("wrap", "forward", "inductor", "aten.remainder.Tensor", ""),
}  # fmt: skip


def case_result(name: str) -> Any:
    case = CASES[name]
    torch.set_num_threads(case.min_threads)
    model, args, kwargs = case.build()
    with case.config():
        return recorded(model, lambda: case.step(model, args, kwargs))


def test_every_reported_fault_of_compiled_code_has_an_expectation() -> None:
    modelled = {name for name, case in CASES.items() if case.modelled}
    assert set(CASE) == set(of_kind("compile", "backward")) - modelled


@pytest.mark.slow
@pytest.mark.parametrize("name", CASE)
def test_reported_fault_is_followed_to_its_op(name: str) -> None:
    module, phase, stage, op, tensor = CASE[name]
    (call,) = case_result(name).recordings
    with CASES[name].config():
        culprits = locate(call)
    first = culprits[0]
    assert (first.module, first.phase, first.stage) == (module, phase, stage), culprits
    assert op in (first.op, *first.other_ops)
    assert first.tensor == tensor
    assert first.source.startswith(f"{name}.py:")
    if name in ("pool_then_where_backward", "dtype_view_read_after_write"):
        assert "too late" in first.explanation or "reordered" in first.explanation


@pytest.mark.slow
@pytest.mark.parametrize("name", of_kind("benign"))
def test_benign_differences_have_nothing_to_follow(name: str) -> None:
    result = case_result(name)
    assert result.verdict == Verdict.PASS
    assert result.recordings == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['up']._parameters['weight']", "parameter up.weight"),
        ("L['self']._modules['layers']._modules['0']._buffers['mean']", "buffer layers.0.mean"),
        ("L['self']._parameters['scale']", "parameter scale"),
        ("L['x']", "argument x"),
        ("L['args'][0]", "argument 0"),
        ("L['kwargs']['mask']", "argument mask"),
        ("L['batch']['ids']", ""),
        ("L['self'].table", ""),
        ("L['self']", ""),
        ("G['TABLE']", ""),
    ],
)
def test_inputs_are_named_as_the_user_knows_them(source: str, name: str) -> None:
    assert input_name(source) == name


class ReadsLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.register_buffer("mean", torch.zeros(3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.block.mean


@pytest.mark.slow
def test_inputs_of_a_compiled_graph_are_named() -> None:
    capture = Capture()
    with dynamo.isolated(), torch.no_grad():
        dynamo.compiled_alone(ReadsLate().forward, capture.inductor, dynamic=None)(torch.ones(3))
    (captured,) = capture.graphs
    nodes = [node for node in captured.lowered_graph.graph.nodes if node.op == "placeholder"]
    places = [_inductor.place_of_input(node) for node in nodes]
    names = {input_name(captured.sources[place]) for place in places}
    assert names == {"argument x", "parameter weight", "buffer block.mean"}


# ---- nobody notices -----------------------------------------------------------------------------


@pytest.mark.slow
def test_model_caches_and_settings_are_as_before(wrong_gelu: RecordedCall) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    model, ids = wrong_gelu.module, torch.randn(3, 5, 6)
    with wrong_lowering("erf"):
        compiles: list[int] = []

        def counting(graph: Any, inputs: Any) -> Any:
            compiles.append(1)
            return graph.forward

        user = torch.compile(model, backend=counting)
        user(ids)
        state = {name: item.clone() for name, item in model.state_dict().items()}
        gradients = [item.grad.clone() for item in model.parameters()]
        before = (
            config.get_config_copy(), torch._dynamo.config.get_config_copy(),
            {name: dict(counts) for name, counts in counters.items()},
            GraphLowering.compile_to_module, torch.get_rng_state().tolist(),
        )  # fmt: skip
        hooks = {name: dict(vars(item)) for name, item in model.named_modules()}
        assert locate(wrong_gelu)
        assert before == (
            config.get_config_copy(), torch._dynamo.config.get_config_copy(),
            {name: dict(counts) for name, counts in counters.items()},
            GraphLowering.compile_to_module, torch.get_rng_state().tolist(),
        )  # fmt: skip
        for name, item in model.state_dict().items():
            assert torch.equal(item, state[name])
        for item, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(item.grad, gradient)
        assert {name: dict(vars(item)) for name, item in model.named_modules()} == hooks
        user(ids)
    assert len(compiles) == 1


@pytest.mark.slow
def test_parameters_may_have_moved_since_the_step(wrong_gelu: RecordedCall) -> None:
    kept = {name: item.clone() for name, item in wrong_gelu.module.state_dict().items()}
    with torch.no_grad():
        for item in wrong_gelu.module.parameters():
            item.mul_(0.0)
    try:
        with wrong_lowering("erf"):
            culprits = locate(wrong_gelu)
    finally:
        wrong_gelu.module.load_state_dict(kept)
    assert [item.phase for item in culprits] == ["forward", "backward"]
    assert culprits[0].op == "aten.erf.default"


@pytest.mark.slow
def test_what_the_budget_kept_from_being_looked_at_is_said(wrong_gelu: RecordedCall) -> None:
    with wrong_lowering("erf"):
        culprit, _ = locate(wrong_gelu, budget=Budget(compiles=1))
    assert culprit.stage == "inductor"
    assert "gelu" in culprit.kernel
    assert "aten.erf.default" in (culprit.op, *culprit.other_ops)
    assert "one at a time" in culprit.not_reached
    culprit, _ = locate(wrong_gelu, budget=Budget(compiles=0))
    assert "gelu" in culprit.kernel
    assert "stage aot_eager_decomp_partition" in culprit.not_reached
    (culprit,) = locate(no_code_of_the_step(wrong_gelu), budget=Budget(compiles=0))
    assert culprit.stage == NOT_REPRODUCED
    assert "inductor" in culprit.not_reached


def test_progress_is_told_step_by_step() -> None:
    told: list[str] = []
    model = Unfaithful().eval()
    (call,) = recorded(
        model, lambda: model(torch.linspace(-1, 1, 12)), backend="aot_eager"
    ).recordings
    locate(call, on_progress=told.append)
    assert told[0] == "running the call again in eager"
    assert "compiling with aot_eager" in told


@pytest.mark.slow
def test_interrupt_leaves_no_trace(wrong_gelu: RecordedCall) -> None:
    from torch._inductor.graph import GraphLowering

    compile_to_module = GraphLowering.compile_to_module

    def interrupt(text: str) -> None:
        if text.startswith("kernels"):
            raise KeyboardInterrupt

    with wrong_lowering("erf"), pytest.raises(KeyboardInterrupt):
        locate(wrong_gelu, on_progress=interrupt)
    assert GraphLowering.compile_to_module is compile_to_module
    assert "_compiled_call_impl" not in vars(wrong_gelu.module)


def test_a_recording_from_a_file_needs_the_module() -> None:
    model = Unfaithful().eval()
    (call,) = recorded(
        model, lambda: model(torch.linspace(-1, 1, 12)), backend="aot_eager"
    ).recordings
    bare = _without_module(call)
    with pytest.raises(ValueError, match="needs the module"):
        locate(bare)
    assert locate(bare, module=Unfaithful().eval())[0].op == "aten.add_.Tensor"


def _without_module(call: RecordedCall) -> RecordedCall:
    return dataclasses.replace(call, module=None)


# ---- deep inside real models --------------------------------------------------------------------


DEEP = {
    # name: (sizes, train, blocks, place, how it is marked, lowering, module in the block, op)
    "gpt2": (
        {"layers": 2}, True, "transformer.h", 1, mark_gpt2, "tanh", "mlp.act", "aten.tanh.default",
    ),
    "llama": (
        {"layers": 2}, False, "model.layers", 1, mark_llama, "exp", "mlp.act_fn",
        "aten.exp.default",
    ),
    "resnet": (
        {"blocks_per_width": 2}, False, "layers", 1, mark_resnet, "rsqrt", "bn1",
        "aten.rsqrt.default",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_fault_deep_inside_a_whole_real_model_is_found(name: str) -> None:
    if name != "resnet":
        pytest.importorskip("transformers")
    sizes, train, blocks, place, mark_block, lowering, inner, op = DEEP[name]
    workload = getattr(models, name)(**sizes)
    mark_block(workload.model.get_submodule(blocks)[place])
    with wrong_in_marked(lowering), torch.set_grad_enabled(train):
        # the stage below inductor, the ops of a kernel a phase; no advice is tried
        culprits = drilled(
            workload.model, workload.step if train else workload.loss, compiles=2 + train
        )
    first = culprits[0]
    assert (first.stage, first.phase) == ("inductor", "forward")
    assert first.module == f"{blocks}.{place}.{inner}"
    assert first.op == op
    assert first.kernel.startswith("cpp_fused")
    assert {item.module.startswith(f"{blocks}.{place}") for item in culprits} == {True}
    assert ".py:" in first.source
