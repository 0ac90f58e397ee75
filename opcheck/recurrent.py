"""A layer of an LSTM by its formula, for the CPU's kernel, which computes in no other dtype.

The gates of PyTorch lie in the order input, forget, cell, output (`torch.nn.LSTM`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["FORMULAS"]

_LSTM = 2
"""The mode that `mkldnn_rnn_layer` is called with."""


class _Layer:
    """All steps of one layer, with what its gradients need."""

    def __init__(
        self, x: Tensor, weights: tuple[Tensor, ...], h: Tensor, c: Tensor, *, reverse: bool
    ) -> None:
        """Run.

        Args:
            x: [T, B, I]
            weights: of the input [4H, I], of the state [4H, H], and both biases [4H].
            h: [B, H] state before the first step.
            c: [B, H] likewise.
            reverse: begin with the last step.
        """
        self.x, (self.of_input, self.of_state, *biases) = x, weights
        self.h, self.c = h, c
        steps = range(x.shape[0])
        self.order = list(reversed(steps)) if reverse else list(steps)
        self.output = x.new_empty(*x.shape[:2], h.shape[1])
        self.trace: list[tuple[Tensor, ...]] = []
        from_input = x @ self.of_input.t() + (biases[0] + biases[1])
        for step in self.order:
            i, f, g, o = (from_input[step] + h @ self.of_state.t()).chunk(4, dim=1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            before = h, c
            c = f * c + i * g
            h = o * c.tanh()
            self.output[step] = h
            self.trace.append((i, f, g, o, c, *before))
        self.last_h, self.last_c = h, c

    def gradients(self, of_output: Tensor, of_h: Tensor, of_c: Tensor) -> tuple[Tensor, ...]:
        """Those of x, both weights, both biases, h and c, given those of the results."""
        of_x = torch.empty_like(self.x)
        of_input, of_state = torch.zeros_like(self.of_input), torch.zeros_like(self.of_state)
        of_bias = self.x.new_zeros(self.of_input.shape[0])
        for step, (i, f, g, o, c, h_before, c_before) in zip(
            reversed(self.order), reversed(self.trace), strict=True
        ):
            of_h = of_h + of_output[step]
            bent = c.tanh()
            of_c = of_c + of_h * o * (1 - bent * bent)
            gates = torch.cat(
                [
                    of_c * g * i * (1 - i),
                    of_c * c_before * f * (1 - f),
                    of_c * i * (1 - g * g),
                    of_h * bent * o * (1 - o),
                ],
                dim=1,
            )
            of_x[step] = gates @ self.of_input
            of_input += gates.t() @ self.x[step]
            of_state += gates.t() @ h_before
            of_bias += gates.sum(0)
            of_h, of_c = gates @ self.of_state, of_c * f
        return of_x, of_input, of_state, of_bias, of_bias.clone(), of_h, of_c


def _flat(state: Tensor, x: Tensor) -> Tensor:
    return state.reshape(x.shape[1], -1)


def _forward(
    x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, hx: Tensor, cx: Tensor,
    reverse: bool, batch_sizes: Any, mode: int, *rest: Any,  # noqa: FBT001 - as the op
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse_others(batch_sizes, mode)
    weights = _weights(w0, w1, w2, w3, has_biases=rest[2])
    layer = _Layer(x, weights, _flat(hx, x), _flat(cx, x), reverse=reverse)
    workspace = torch.empty(0, dtype=torch.uint8)
    return layer.output, layer.last_h.view(hx.shape), layer.last_c.view(cx.shape), workspace


def _backward(
    x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor, hx: Tensor, cx: Tensor,
    _output: Tensor, _hy: Tensor, _cy: Tensor, of_output: Tensor | None, of_h: Tensor | None,
    of_c: Tensor | None, reverse: bool, mode: int, *rest: Any,  # noqa: FBT001 - as the op
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse_others(rest[5], mode)
    weights = _weights(w1, w2, w3, w4, has_biases=rest[2])
    layer = _Layer(x, weights, _flat(hx, x), _flat(cx, x), reverse=reverse)
    given = torch.zeros_like(layer.output) if of_output is None else of_output
    ends = (
        torch.zeros_like(layer.last_h) if end is None else _flat(end, x) for end in (of_h, of_c)
    )
    *found, first_h, first_c = layer.gradients(given, *ends)
    return (*found, first_h.view(hx.shape), first_c.view(cx.shape))


def _weights(*weights: Tensor, has_biases: bool) -> tuple[Tensor, ...]:
    """Without biases something else is given in their place."""
    if has_biases:
        return weights
    none = weights[0].new_zeros(weights[0].shape[0])
    return (*weights[:2], none, none)


def _refuse_others(batch_sizes: Any, mode: int) -> None:
    if mode != _LSTM or batch_sizes:
        raise NotImplementedError(f"mode {mode} with batch sizes {batch_sizes}")


FORMULAS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = MappingProxyType(
    {"mkldnn_rnn_layer": _forward, "mkldnn_rnn_layer_backward": _backward}
)
"""Op base name -> the op in any floating dtype, in terms of other ops."""
