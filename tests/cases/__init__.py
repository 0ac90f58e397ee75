"""Faults, and differences that are none, from the issue trackers of real projects.

`CASES` maps the name of a case, which is that of its module, to the case.
"""

from __future__ import annotations

from tests.cases import (
    angle_negative_zero,
    autocast_backward_overflow,
    benign_dropout_rng_stream,
    benign_instance_norm_mean,
    benign_llama_bf16_compile,
    benign_nan_sign_bit,
    benign_rope_bf16,
    cdist_cancellation,
    cumsum_dtype_dropped,
    dropout_identity_alias,
    dtype_view_read_after_write,
    fmod_vector_nan,
    fp16_eps_underflow,
    layer_norm_large_inputs,
    modelled_layer_norm_backward_2d,
    pool_then_where_backward,
    remainder_vectorised,
)
from tests.cases.case import Case, Culprit

__all__ = ["CASES", "Case", "Culprit", "of_kind"]

CASES: dict[str, Case] = {
    module.__name__.rpartition(".")[2]: module.CASE
    for module in (
        angle_negative_zero,
        autocast_backward_overflow,
        benign_dropout_rng_stream,
        benign_instance_norm_mean,
        benign_llama_bf16_compile,
        benign_nan_sign_bit,
        benign_rope_bf16,
        cdist_cancellation,
        cumsum_dtype_dropped,
        dropout_identity_alias,
        dtype_view_read_after_write,
        fmod_vector_nan,
        fp16_eps_underflow,
        layer_norm_large_inputs,
        modelled_layer_norm_backward_2d,
        pool_then_where_backward,
        remainder_vectorised,
    )
}


def of_kind(*kinds: str) -> list[str]:
    """Return the names of all cases of these kinds."""
    return [name for name, case in CASES.items() if case.kind in kinds]
