"""Parts of large tensors, taken in the way that is fastest for their layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from opcheck.slices import distinct, take

LAYOUTS = {
    "contiguous": torch.arange(4 * 6 * 5.0).reshape(4, 6, 5),
    "transposed": torch.arange(24.0).reshape(4, 6).t(),
    "every second": torch.arange(48.0).reshape(4, 12)[:, ::2],
    "expanded": torch.arange(4.0).reshape(4, 1).expand(4, 6),
    "channels last": torch.arange(96.0)
    .reshape(2, 4, 4, 3)
    .contiguous(memory_format=torch.channels_last),
    "one dimension": torch.arange(9.0),
    "uint16": torch.arange(24).to(torch.uint16).reshape(4, 6),
    "float8": torch.arange(24.0).reshape(4, 6).to(torch.float8_e4m3fn),
    "complex, conjugate": torch.complex(torch.arange(24.0), torch.ones(24)).reshape(4, 6).conj(),
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS)
def test_slices_along_each_dimension_are_those_of_indexing(tensor: Tensor):
    for dim in range(tensor.dim()):
        index = np.array([0, 2, tensor.shape[dim] - 1]) % tensor.shape[dim]
        found = take(tensor, (dim,), (index,))
        wanted = torch.stack([tensor.select(dim, int(place)) for place in index], dim)
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "runs",
    [([1, 3, 5], [0, 3, 9]), ([4, 2, 2],), ([], [7]), ([], [])],
    ids=["ascending", "not in order", "one empty", "nothing"],
)
def test_positions_come_in_order_and_once(runs):
    arrays = [np.array(run, dtype=np.int64) for run in runs]
    assert distinct(*arrays).tolist() == sorted({place for run in runs for place in run})
