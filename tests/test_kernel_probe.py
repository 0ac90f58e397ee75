"""Generated code with an observer behind every kernel, whoever made the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from modulecheck import dynamo
from modulecheck.graph_capture import Capture
from modulecheck.kernel_probe import instrumented
from modulecheck.kernels import probe

TRITON = """
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        primals_1, primals_2 = args
        args.clear()
        assert_size_stride(primals_1, (4, ), (1, ), 'input')
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided((4, ), (1, ))
            stream0 = get_raw_stream(0)
            triton_poi_fused_add_0.run(primals_1, primals_2, buf0, 4, stream=stream0)
            del primals_2
            buf1 = empty_strided((4, ), (1, ))
            extern_kernels.mul(buf0, reinterpret(primals_1, (4, )), out=buf1)
            buf2 = torch.ops.aten.cumsum.default(buf1, 0)
            buf3 = buf1; del buf1  # reuse
            triton_poi_fused_neg_1.run(buf3, 4, stream=stream0)
        return (buf2, buf3, )

runner = Runner(partitions=[])
call = runner.call
"""


class Launcher:
    """What inductor's module holds under the name of a Triton kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def run(self, *args: Any, stream: int) -> None:
        assert stream == 7
        self.kernel(*args[:-1])


class Extern:
    @staticmethod
    def mul(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        torch.mul(left, right, out=out)


class Cuda:
    class _DeviceGuard:
        def __init__(self, device: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    @staticmethod
    def set_device(device: int) -> None: ...


class FakeTorch:
    cuda = Cuda
    ops = torch.ops


def add(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(left + right)


def namespace() -> dict[str, Any]:
    return {
        "torch": FakeTorch,
        "assert_size_stride": lambda *_: None,
        "empty_strided": torch.empty_strided,
        "get_raw_stream": lambda device: 7,
        "extern_kernels": Extern,
        "reinterpret": lambda tensor, shape: tensor.view(shape),
        "triton_poi_fused_add_0": Launcher(add),
        "triton_poi_fused_neg_1": Launcher(lambda tensor: tensor.neg_()),
    }


def test_every_kernel_is_seen_with_its_buffers_in_order() -> None:
    seen: list[tuple[str, list[str]]] = []
    call = instrumented(TRITON, namespace(), lambda name, found: seen.append((name, list(found))))
    assert call is not None
    call([torch.ones(4), torch.full((4,), 2.0)])
    assert seen == [
        ("triton_poi_fused_add_0", ["primals_1", "primals_2", "buf0"]),
        ("extern_kernels.mul", ["buf0", "primals_1", "buf1"]),
        ("torch.ops.aten.cumsum.default", ["buf2", "buf1"]),
        ("triton_poi_fused_neg_1", ["buf3"]),
    ]


def test_what_the_observer_writes_is_what_the_next_kernel_reads() -> None:
    def force(name: str, found: dict[str, Any]) -> None:
        if name == "triton_poi_fused_add_0":
            found["buf0"].fill_(10.0)

    call = instrumented(TRITON, namespace(), force)
    assert call is not None
    sums, negated = call([torch.full((4,), 3.0), torch.ones(4)])
    assert negated.tolist() == [-30.0] * 4
    assert sums.tolist() == [30.0, 60.0, 90.0, 120.0]


def test_the_module_itself_is_not_changed() -> None:
    scope = namespace()
    before = dict(scope)
    instrumented(TRITON, scope, lambda name, found: None)
    assert scope == before


def test_code_without_a_call_cannot_be_reached() -> None:
    assert instrumented("x = 1\n", {}, lambda name, found: None) is None


def test_partitions_of_a_graph_are_seen_too() -> None:
    source = """
def partition_0(args):
    primals_1, = args
    args.clear()
    buf0 = empty_strided((2, ), (1, ))
    triton_poi_fused_add_0.run(primals_1, primals_1, buf0, 2, stream=7)
    return (buf0, )

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        primals_1, = args
        args.clear()
        partition0_args = [primals_1]
        del primals_1
        (buf0,) = self.partitions[0](partition0_args)
        return (buf0, )

runner = Runner(partitions=[partition_0])
call = runner.call
"""
    seen: list[str] = []
    call = instrumented(source, namespace(), lambda name, found: seen.append(name))
    assert call is not None
    (out,) = call([torch.ones(2)])
    assert out.tolist() == [2.0, 2.0]
    assert seen == ["triton_poi_fused_add_0"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_triton_kernels_of_a_real_artifact_are_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64)).cuda()
    inputs = torch.randn(16, 32, device="cuda")
    capture = Capture()
    with dynamo.isolated(), torch.no_grad():
        backend = capture.around(capture.inductor)
        dynamo.compiled_alone(model.forward, backend, dynamic=None)(inputs)
    (captured,) = capture.graphs
    found = probe(captured, captured.runs[0])
    assert found.num_kernels >= 2
    assert found.num_compared >= 2
    assert not found.wrong
    assert not found.not_reached
