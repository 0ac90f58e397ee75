"""Which tensor something was, and how often it had been written to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from modulecheck import _torch

__all__ = ["Version", "own_versions"]


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """Equal as long as the tensor is the same one and nobody has written to it.

    The tensor is held: its id alone would be that of the next tensor once it is freed. A weak
    reference would keep `torch.utils.swap_tensors` from working, which `nn.Module.to` may use.
    """

    tensor: Tensor
    number: int

    @classmethod
    def of(cls, tensor: Tensor) -> Version:
        """As it is now."""
        return cls(tensor, -1 if tensor.is_inference() else _torch.version_of(tensor))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Version)
            and self.tensor is other.tensor
            and self.number == other.number
        )

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.number))


def own_versions(module: nn.Module) -> dict[str, Version]:
    """Of all parameters of a module, by name."""
    return {name: Version.of(parameter) for name, parameter in module.named_parameters()}
