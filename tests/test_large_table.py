"""The table of independent slices, re-derived: take some positions of one size everywhere, compare.

Each op is called on tensors whose dimensions all differ. A size is independent if the op on some
positions of it, in every argument that has this size, gives those positions of its result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call, Site, traits_of
from opcheck.kernel_table import decomposition
from opcheck.large_table import POINTWISE, SPACES, is_pointwise, spaces_of
from opcheck.recurrent import FORMULAS
from opcheck.slices import Pick, part_of_slices, strata

A, B, C, D = 5, 7, 11, 13
_RNG = torch.Generator().manual_seed(0)


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_RNG, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return t(*shape).abs() + 0.1


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_RNG)


def norm_backward(bias: bool) -> tuple[Any, ...]:
    x, weight = t(A, B, C), t(C)
    mean, rstd = x.mean(-1, keepdim=True), 1 / x.std(-1, keepdim=True)
    if bias:
        return t(A, B, C), x, [C], mean, rstd, weight, t(C), [True, True, True]
    return t(A, B, C), x, [C], rstd, weight, [True, True]


def pooled(*kernel: int) -> tuple[Any, ...]:
    return t(A, B, C, D), list(kernel), list(kernel), [0, 0]


NO_CPU_KERNEL = {torch.ops.aten._fused_rms_norm_backward.default}
MAX = torch.ops.aten.max_pool2d_with_indices.default
X4 = t(A, B, C, D)
MATRICES = t(A, B, 3, 3)
SYMMETRIC = MATRICES @ MATRICES.mT + torch.eye(3)
LOWER = torch.linalg.cholesky(SYMMETRIC)
NEAREST = ("upsample_nearest", "_upsample_nearest_exact")

SAMPLES: dict[str, tuple[Any, ...]] = {
    "_softmax": (t(A, B, C), 1, False),
    "_log_softmax": (t(A, B, C), 2, False),
    "softmax.int": (t(A, B, C), 0),
    "log_softmax.int": (t(A, B, C), 1),
    "_safe_softmax": (t(A, B, C), 1),
    "cumsum": (t(A, B, C), 1),
    "cumprod": (t(A, B, C), 1),
    "cumsum_": (t(A, B, C), 1),
    "cumprod_": (t(A, B, C), 1),
    "logcumsumexp": (t(A, B, C), 1),
    "_logcumsumexp": (t(A, B, C), 1),
    "flip": (t(A, B, C), [1]),
    "glu": (t(A, 2 * B, C), 1),
    "glu_backward": (t(A, B, C), t(A, 2 * B, C), 1),
    "_softmax_backward_data": (t(A, B, C), t(A, B, C), 1, torch.float64),
    "_log_softmax_backward_data": (t(A, B, C), t(A, B, C), 1, torch.float64),
    "sort": (t(A, B, C), 1),
    "topk": (t(A, B, C), 3, 1),
    "cummax": (t(A, B, C), 1),
    "cummin": (t(A, B, C), 1),
    "kthvalue": (t(A, B, C), 2, 1),
    "mode": (t(A, B, C), 1),
    "median.dim": (t(A, B, C), 1),
    "nanmedian.dim": (t(A, B, C), 1, True),
    "max.dim": (t(A, B, C), 1),
    "min.dim": (t(A, B, C), 2),
    "var_mean.correction": (t(A, B, C), [1]),
    "std_mean.correction": (t(A, B, C), [0, 2]),
    "sum.dim_IntList": (t(A, B, C), [0]),
    "mean.dim": (t(A, B, C), [1], True),
    "nansum": (t(A, B, C), [1]),
    "prod.dim_int": (t(A, B, C), 1),
    "amax": (t(A, B, C), [1]),
    "amin": (t(A, B, C), [0, 1]),
    "argmax": (t(A, B, C), 1),
    "argmin": (t(A, B, C), 1, True),
    "var.correction": (t(A, B, C), [1]),
    "std.correction": (t(A, B, C), [2]),
    "logsumexp": (t(A, B, C), [1]),
    "linalg_vector_norm": (t(A, B, C), 2, [1]),
    "norm.ScalarOpt_dim": (t(A, B, C), 2, [1]),
    "norm.ScalarOpt_dim_dtype": (t(A, B, C), 2, [1], False),
    "any.dim": (t(A, B, C) > 1, 1),
    "any.dims": (t(A, B, C) > 1, [1]),
    "all.dim": (t(A, B, C) > 1, 1),
    "all.dims": (t(A, B, C) > -1, [1]),
    "count_nonzero.dim_IntList": (t(A, B, C) > 1, [1]),
    "cat": ([t(A, B, C), t(A, 3, C)], 1),
    "gather": (t(A, B, C), 1, ints(B, A, 3, C)),
    "index_select": (t(A, B, C), 1, ints(B, 4)),
    "index_fill": (t(A, B, C), 1, ints(B, 4), 2.0),
    "index_fill_": (t(A, B, C), 1, ints(B, 4), 2.0),
    "index_add": (t(A, B, C), 1, ints(B, 4), t(A, 4, C)),
    "index_add_": (t(A, B, C), 1, ints(B, 4), t(A, 4, C)),
    "index_copy": (t(A, B, C), 1, torch.tensor([3, 1, 4]), t(A, 3, C)),
    "index_copy_": (t(A, B, C), 1, torch.tensor([3, 1, 4]), t(A, 3, C)),
    "index_reduce": (t(A, B, C), 1, ints(B, 4), t(A, 4, C), "mean"),
    "scatter.src": (t(A, B, C), 1, ints(B, A, B, C).sort(1)[0], t(A, B, C)),
    "scatter_.src": (t(A, B, C), 1, ints(B, A, B, C).sort(1)[0], t(A, B, C)),
    "scatter.value": (t(A, B, C), 1, ints(B, A, 3, C), 2.0),
    "scatter_.value": (t(A, B, C), 1, ints(B, A, 3, C), 2.0),
    "scatter_add": (t(A, B, C), 1, ints(B, A, 3, C), t(A, 3, C)),
    "scatter_add_": (t(A, B, C), 1, ints(B, A, 3, C), t(A, 3, C)),
    "scatter_reduce.two": (t(A, B, C), 1, ints(B, A, 3, C), t(A, 3, C), "mean"),
    "scatter_reduce_.two": (t(A, B, C), 1, ints(B, A, 3, C), t(A, 3, C), "amax"),
    "_fft_c2c": (torch.complex(t(A, B, C), t(A, B, C)), [1], 0, True),
    "_fft_r2c": (t(A, B, C), [1], 0, True),
    "_fft_c2r": (torch.complex(t(A, B, C), t(A, B, C)), [1], 0, B * 2 - 2),
    "native_layer_norm": (t(A, B, C), [C], t(C), t(C), 1e-5),
    "layer_norm": (t(A, B, C), [C], t(C), t(C)),
    "rms_norm": (t(A, B, C), [C], t(C), 1e-5),
    "_fused_rms_norm": (t(A, B, C), [C], t(C), 1e-5),
    "native_layer_norm_backward": norm_backward(bias=True),
    "_fused_rms_norm_backward": norm_backward(bias=False),
    "native_batch_norm": (t(A, B, C), t(B), t(B), t(B), positive(B), True, 0.1, 1e-5),
    "_native_batch_norm_legit": (t(A, B, C), t(B), t(B), t(B), positive(B), True, 0.1, 1e-5),
    "_native_batch_norm_legit.no_stats": (t(A, B, C), t(B), t(B), True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": (
        t(A, B, C), t(B), t(B), t(B), positive(B), 0.1, 1e-5,
    ),
    "native_batch_norm_backward": (
        t(A, B, C), t(A, B, C), t(B), t(B), positive(B), t(B), positive(B), True, 1e-5,
        [True, True, True],
    ),
    "native_group_norm": (t(A, 6, C), t(6), t(6), A, 6, C, 3, 1e-5),
    "max_pool2d_with_indices": pooled(3, 2),
    "max_pool3d_with_indices": (t(2, A, B, C, D), [2, 3, 2]),
    "adaptive_max_pool2d": (t(A, B, C, D), [3, 4]),
    "adaptive_max_pool3d": (t(2, A, B, C, D), [3, 4, 2]),
    "avg_pool2d": pooled(3, 2),
    "avg_pool3d": (t(2, A, B, C, D), [2, 3, 2]),
    "_adaptive_avg_pool2d": (t(A, B, C, D), [3, 4]),
    "_adaptive_avg_pool3d": (t(2, A, B, C, D), [3, 4, 2]),
    "upsample_nearest1d": (t(A, B, C), [17]),
    "upsample_nearest2d": (t(A, B, C, D), [17, 19]),
    "upsample_nearest3d": (t(2, A, B, C, D), [17, 19, 23]),
    "_upsample_nearest_exact2d": (t(A, B, C, D), [17, 19]),
    "upsample_bilinear2d": (t(A, B, C, D), [17, 19], False),
    "upsample_bicubic2d": (t(A, B, C, D), [17, 19], False),
    "upsample_linear1d": (t(A, B, C), [17], False),
    "upsample_trilinear3d": (t(2, A, B, C, D), [17, 19, 23], False),
    "reflection_pad1d": (t(A, B, C), [2, 1]),
    "reflection_pad2d": (t(A, B, C, D), [2, 1, 3, 2]),
    "replication_pad1d": (t(A, B, C), [2, 1]),
    "replication_pad2d": (t(A, B, C, D), [2, 1, 3, 2]),
    "constant_pad_nd": (t(A, B, C), [2, 1], 0.5),
    "avg_pool2d_backward": (t(A, B, 3, 6), X4, [3, 2], [3, 2], [0, 0], False, True, None),
    "avg_pool3d_backward": (
        t(A, B, 2, 2, 2), t(A, B, 12, 8, 6), [6, 4, 3], [6, 4, 3], [0, 0, 0], False, True, None,
    ),
    "_adaptive_avg_pool2d_backward": (t(A, B, 3, 4), X4),
    "max_pool2d_with_indices_backward": (
        t(A, B, 3, 6), X4, [3, 2], [3, 2], [0, 0], [1, 1], False,
        MAX(X4, [3, 2], [3, 2], [0, 0])[1],
    ),
    "slice_backward": (t(A, 4, C), [A, B, C], 1, 2, 6, 1),
    "select_backward": (t(A, C), [A, B, C], 1, 2),
    "stack": ([t(A, B), t(A, B)], 1),
    "native_group_norm_backward": (
        t(A, 6, C), t(A, 6, C), t(A, 3), positive(A, 3), t(6), A, 6, C, 3, [True, True, True],
    ),
    "tril": (t(A, B, C), 1),
    "triu": (t(A, B, C), -1),
    "im2col": (t(A, B, C, D), [2, 3], [1, 1], [0, 0], [1, 1]),
    "col2im": (t(A, B * 6, 10 * 11), [C, D], [2, 3], [1, 1], [0, 0], [1, 1]),
    "grid_sampler_2d": (t(A, B, C, D), t(A, 3, 4, 2).tanh(), 0, 0, False),
    "embedding": (t(A, B), ints(A, C, 3)),
    "embedding_dense_backward": (t(C, 3, B), ints(A, C, 3), A, -1, False),
    "nll_loss_backward": (
        torch.tensor(0.7, dtype=torch.float64), t(A, B), ints(B, A), t(B).abs(), 1, -100,
        torch.tensor(3.0, dtype=torch.float64),
    ),
    "index.Tensor": (t(A, B, C), [torch.tensor([3, 0, 3, 2])]),
    "index_put": (t(A, B, C), [torch.tensor([3, 0, 3, 2])], t(4, B, C), True),
    "index_put_": (t(A, B, C), [torch.tensor([3, 0, 3, 2])], t(4, B, C), True),
    "_index_put_impl_": (t(A, B, C), [torch.tensor([3, 0, 3, 2])], t(4, B, C), True),
    "_unsafe_index_put": (t(A, B, C), [torch.tensor([3, 0, 3, 2])], t(4, B, C), True),
    "_upsample_nearest_exact1d": (t(A, B, C), [17]),
    "_upsample_nearest_exact3d": (t(2, A, B, C, D), [17, 19, 23]),
    "_upsample_bilinear2d_aa": (t(A, B, C, D), [17, 19], False),
    "_upsample_bicubic2d_aa": (t(A, B, C, D), [17, 19], False),
    **{f"{name}1d_backward": (t(A, B, 17), [17], [A, B, C]) for name in NEAREST},
    **{f"{name}2d_backward": (t(A, B, 17, 19), [17, 19], [A, B, C, D]) for name in NEAREST},
    **{
        f"{name}3d_backward": (t(A, B, 17, 19, 23), [17, 19, 23], [A, B, 9, C, D])
        for name in NEAREST
    },
    "upsample_linear1d_backward": (t(A, B, 17), [17], [A, B, C], False),
    **{
        name: (t(A, B, 17, 19), [17, 19], [A, B, C, D], False)
        for name in (
            "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
            "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
        )
    },
    "upsample_trilinear3d_backward": (
        t(A, B, 17, 19, 23), [17, 19, 23], [A, B, 9, C, D], False,
    ),
    "reflection_pad1d_backward": (t(A, B, C + 3), t(A, B, C), [2, 1]),
    "reflection_pad2d_backward": (t(A, B, C + 5, D + 3), X4, [2, 1, 3, 2]),
    "replication_pad1d_backward": (t(A, B, C + 3), t(A, B, C), [2, 1]),
    "replication_pad2d_backward": (t(A, B, C + 5, D + 3), X4, [2, 1, 3, 2]),
    "grid_sampler_3d": (t(A, 2, B, C, D), t(A, 3, 4, 2, 3).tanh(), 0, 0, False),
    "grid_sampler_2d_backward": (
        t(A, B, 3, 4), X4, t(A, 3, 4, 2).tanh(), 0, 0, False, [True, True],
    ),
    "grid_sampler_3d_backward": (
        t(A, 2, 3, 4, 2), t(A, 2, B, C, D), t(A, 3, 4, 2, 3).tanh(), 0, 0, False, [True, True],
    ),
    "unsafe_split": (t(A, B, C), 3, 1),
    "cholesky": (SYMMETRIC,),
    "cholesky_inverse": (LOWER,),
    "linalg_eigvals": (MATRICES,),
    "_linalg_eigvals": (MATRICES,),
    "linalg_matrix_exp": (MATRICES,),
    "geqrf": (MATRICES,),
    "linalg_cholesky_ex": (SYMMETRIC,),
    "linalg_eig": (MATRICES,),
    "linalg_ldl_factor_ex": (SYMMETRIC,),
    "linalg_qr": (MATRICES,),
    "linalg_inv_ex": (MATRICES,),
    "_linalg_eigh": (SYMMETRIC,),
    "linalg_lu": (MATRICES,),
    "linalg_lu_factor_ex": (MATRICES,),
    "_linalg_det": (MATRICES,),
    "_linalg_svd": (MATRICES,),
    "_linalg_slogdet": (MATRICES,),
    "_linalg_solve_ex": (MATRICES, t(A, B, 3, 2)),
    "linalg_solve_triangular": (LOWER, t(A, B, 3, 2)),
    "triangular_solve": (t(A, B, 3, 2), LOWER, False),
    "cholesky_solve": (t(A, B, 3, 2), LOWER),
    "linalg_lu_solve": (*torch.linalg.lu_factor(MATRICES), t(A, B, 3, 2)),
    "linalg_householder_product": torch.geqrf(MATRICES),
    "ormqr": (*torch.geqrf(MATRICES), t(A, B, 3, 2)),
    "lu_unpack": torch.linalg.lu_factor(MATRICES),
    "mkldnn_rnn_layer": (
        t(A, B, C), t(4, C), t(4, 1), t(4), t(4), t(B, 1), t(B, 1), False, [], 2, 1, 1, True,
        False, False, True,
    ),
    "mkldnn_rnn_layer_backward": (
        t(A, B, C), t(4, C), t(4, 1), t(4), t(4), t(B, 1), t(B, 1), t(A, B, 1), t(B, 1), t(B, 1),
        t(A, B, 1), t(B, 1), t(B, 1), False, 2, 1, 1, True, True, False, [], False, t(3),
    ),
    "aminmax": (t(A, B, C),),
    "mv": (t(A, B), t(B)),
}  # fmt: skip
KEYWORDS = {
    "aminmax": {"dim": 1},
    "linalg_solve_triangular": {"upper": False},
    "var.correction": {"correction": 0},
    "norm.ScalarOpt_dim_dtype": {"dtype": torch.float64},
}
OVERLOADS = {"index_fill": "int_Scalar", "index_fill_": "int_Scalar", "rsub": "Tensor"}
OVERLOADS |= dict.fromkeys(("huber_loss_backward", "smooth_l1_loss_backward"), "default")


def overload(name: str) -> Any:
    base, _, rest = name.partition(".")
    packet = getattr(torch.ops.aten, base)
    return getattr(packet, rest or OVERLOADS.get(base) or packet.overloads()[0])


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """By the kernel, else (no CPU kernel) by the formula."""
    formula = decomposition(func) if func in NO_CPU_KERNEL else FORMULAS.get(base_of(func))
    return (formula or func)(*_torch.tree_map(own, args), **kwargs)


def base_of(func: Any) -> str:
    return traits_of(func).base


def call_of(name: str) -> Call:
    func = overload(name)
    return Call(
        func=func, traits=traits_of(func), args=SAMPLES[name], kwargs=KEYWORDS.get(name, {}),
        site=Site("", "other"), index=0, step=0, occurrence=0, signature=(func,), source="",
    )  # fmt: skip


def own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def run(func: Any, args: Any, kwargs: Any) -> list[Any]:
    return list(_torch.tree_leaves(computed(func, args, kwargs)))


def same(left: Any, right: Any) -> bool:
    if left.shape != right.shape:
        return False
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    return torch.allclose(left, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(SPACES))
def test_slices_of_the_call_give_slices_of_its_result(name):
    call = call_of(name)
    spaces = spaces_of(call)
    assert spaces, f"{name} has no space on its sample"
    whole = computed(call.func, call.args, call.kwargs)

    for space in spaces:
        flat = strata(space.count, 4, np.random.default_rng(0))
        pick = Pick(space, tuple(np.unravel_index(flat, space.sizes)))
        part = part_of_slices(call, whole, [pick])
        again = run(call.func, part.call.args, part.call.kwargs)
        wanted = list(part.out) if isinstance(part.out, (tuple, list)) else [part.out]
        for number in space.outputs:
            assert same(again[number], wanted[number]), f"{name}: result {number}"
            index = tuple(size - 1 for size in wanted[number].shape)
            there = part.place(number, index)
            result = whole[number] if isinstance(whole, (tuple, list)) else whole
            assert result[there] == wanted[number][index]


def derived(name: str) -> set[int]:
    """Sizes whose positions are independent, by trying each."""
    args, kwargs = SAMPLES[name], KEYWORDS.get(name, {})
    func = overload(name)
    whole = run(func, args, kwargs)
    sizes = {
        size for leaf in _torch.tree_leaves(args) if isinstance(leaf, Tensor) for size in leaf.shape
    }
    found = set()
    for size in sizes - {1, 2, 3, 4}:
        keep = torch.tensor([0, 1, size - 1])

        def select(value: Any, size: int = size, keep: Tensor = keep) -> Any:
            if isinstance(value, Tensor):
                for dim, length in enumerate(value.shape):
                    value = value.index_select(dim, keep) if length == size else value
                return value
            is_size = isinstance(value, int) and not isinstance(value, bool) and value == size
            return 3 if is_size else value

        try:
            again = run(func, _torch.tree_map(select, args), kwargs)
        except (RuntimeError, IndexError):
            continue
        has_it = any(size in leaf.shape for leaf in whole)
        if has_it and all(same(a, select(b)) for a, b in zip(again, whole, strict=True)):
            found.add(size)
    return found


@pytest.mark.parametrize("name", sorted(SPACES))
def test_the_table_agrees_with_probing(name):
    call = call_of(name)
    named = {size for space in spaces_of(call) for size in space.sizes if size > 4}
    missing = derived(name) - named
    assert named - derived(name) <= ONE_RESULT.get(name, set())
    assert missing <= LEFT_OUT.get(name, set()), f"{name}: {missing} could be sampled too"


ONE_RESULT: dict[str, set[int]] = {
    "native_layer_norm_backward": {A, B, C},
    "_fused_rms_norm_backward": {A, B, C},
    "native_group_norm_backward": {A},
    "mkldnn_rnn_layer_backward": {B},
}
"""Independent for some of the results only, which the other test compares alone."""

LEFT_OUT: dict[str, set[int]] = {
    "_native_batch_norm_legit_no_training": {A, C},
    "embedding": {C},
    "grid_sampler_2d": {B},
}
"""Independent too, and not sampled along."""


def test_every_entry_has_a_sample():
    assert set(SAMPLES) == set(SPACES)


POINTWISE_SAMPLES: dict[str, tuple[Any, ...]] = {
    "masked_fill": (t(A, B), t(A, B) > 0, 2.0),
    "masked_fill_": (t(A, B), t(A, B) > 0, 2.0),
    "fill": (t(A, B), 2.0),
    "fill_": (t(A, B), 2.0),
    "zero": (t(A, B),),
    "zero_": (t(A, B),),
    "zeros_like": (t(A, B),),
    "ones_like": (t(A, B),),
    "full_like": (t(A, B), 0.3),
    "mse_loss_backward": (t(A, B), t(A, B), t(A, B), 2),
    "smooth_l1_loss_backward": (t(A, B), t(A, B), t(A, B), 2, 1.0),
    "huber_loss_backward": (t(A, B), t(A, B), t(A, B), 2, 1.0),
    "hardswish": (t(A, B),),
    "hardswish_": (t(A, B),),
    "hardswish_backward": (t(A, B), t(A, B)),
    "leaky_relu_backward": (t(A, B), t(A, B), 0.1, False),
    "_prelu_kernel": (t(A, B), t(A, B)),
    "_prelu_kernel_backward": (t(A, B), t(A, B), t(A, B)),
    "polar": (positive(A, B), t(A, B)),
    "complex": (t(A, B), t(A, B)),
    "logit_backward": (t(A, B), positive(A, B).clamp(max=0.9), 0.1),
    "elu_backward": (t(A, B), 1.0, 1.0, 1.0, False, t(A, B)),
    "softplus_backward": (t(A, B), t(A, B), 1.0, 20.0),
    "hardsigmoid_backward": (t(A, B), t(A, B)),
    "hardtanh_backward": (t(A, B), t(A, B), -1.0, 1.0),
    "mish_backward": (t(A, B), t(A, B)),
    "floor_divide": (t(A, B), t(A, B)),
    "floor_divide_": (t(A, B), t(A, B)),
    "threshold_": (t(A, B), 0.1, 0.2),
    "hardtanh_": (t(A, B), -1.0, 1.0),
    "silu_": (t(A, B),),
    "gelu_": (t(A, B),),
    "celu_": (t(A, B),),
    "elu_": (t(A, B),),
    "leaky_relu_": (t(A, B),),
    "clamp_min": (t(A, B), 0.1),
    "clamp_max": (t(A, B), 0.1),
    "clamp_min_": (t(A, B), 0.1),
    "clamp_max_": (t(A, B), 0.1),
    "rsub": (t(A, B), t(A, B)),
    "log_sigmoid_backward": (t(A, B), t(A, B), t(A, B)),
}


def test_every_pointwise_entry_has_a_sample():
    assert set(POINTWISE_SAMPLES) == set(POINTWISE)


@pytest.mark.parametrize("name", sorted(POINTWISE_SAMPLES))
def test_elements_of_the_call_give_elements_of_its_result(name):
    func = overload(name)
    args = POINTWISE_SAMPLES[name]
    call = call_of("aminmax")
    call.func, call.traits, call.args, call.kwargs = func, traits_of(func), args, {}
    assert is_pointwise(call)
    keep = torch.tensor([0, 3, 17, A * B - 1])
    flat = _torch.tree_map(
        lambda leaf: (
            leaf.reshape(-1)[keep] if isinstance(leaf, Tensor) and leaf.dim() == 2 else leaf
        ),
        args,
    )
    for again, whole in zip(run(func, flat, {}), run(func, args, {}), strict=True):
        if whole.dim() == 2:
            assert same(again, whole.reshape(-1)[keep])
