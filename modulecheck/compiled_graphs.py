"""The graphs that are compiled, taken out of the trace that torch keeps of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from modulecheck import _torch

__all__ = ["compiled_graphs"]

_STAGES = {
    "dynamo_output_graph": "Captured",
    "aot_forward_graph": "Forward",
    "aot_inference_graph": "Forward",
    "aot_backward_graph": "Backward",
    "inductor_post_grad_graph": "Post_Grad",
}


class _GraphListener(logging.Handler):
    """Takes graphs out of the structured trace that torch keeps for `TORCH_TRACE`."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        metadata, text = getattr(record, "metadata", {}), getattr(record, "payload", None)
        artifact = metadata.get("artifact")
        names = [artifact.get("name")] if isinstance(artifact, dict) else list(metadata)
        stage = next((_STAGES[name] for name in names if name in _STAGES), None)
        if stage is not None and isinstance(text, str):
            # torch calls some graphs by a name that is no Python
            self._write(stage, text.replace("class <lambda>(", "class GraphModule("))


@contextlib.contextmanager
def compiled_graphs(write: Callable[[str, str], None]) -> Iterator[None]:
    """Calls `write(stage, text)` for every graph that is compiled, caches left alone."""
    handler = _GraphListener(write)
    logger = logging.getLogger(_torch.TRACE_LOG)
    logger.addHandler(handler)
    try:
        # a graph that comes out of a cache is not traced
        with (
            _torch.patched(_torch.FUNCTORCH_CONFIG, enable_autograd_cache=False),
            _torch.patched(_torch.INDUCTOR_CONFIG, fx_graph_cache=False),
        ):
            yield
    finally:
        logger.removeHandler(handler)
