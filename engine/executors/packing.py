"""Weights in the order in which the processor's matrix instructions read them.

torch multiplies bfloat16 matrices on a CPU by oneDNN, which brings a weight into an order of its own at each call. With the few
tokens of a step, that takes as long as multiplying. Here a weight is brought into this order once, when a model is loaded.

torch has no public way: ``torch.utils.mkldnn`` keeps weights in their order and is slower than a plain layer. The two operators
that are used are those that ``torch.compile`` makes of a layer whose weights are frozen. What they compute is compared with
plain layers before a model is used (:meth:`~.generation.LanguageModel.check`).

A packed weight takes the place of the plain one; only one that is shared with an embedding (tied) is kept twice. But it is
memory of this process, where plain weights are pages of their file, which several engines on one machine share.

Invariants:

- ``layer.weight`` goes on being the weight, for whoever reads it: it is unpacked for him, which takes long. The layer's
  parameters do not have it: a model with packed weights is neither saved, moved nor changed;
- unpacking gives the same bits.
"""

from __future__ import annotations

import collections
from typing import Any

import torch

__all__ = ["PackedLinear", "can_pack", "pack"]


class PackedLinear(torch.nn.Linear):
    """A linear layer whose weight is packed. A plain layer becomes one, and can become a plain one again.

    Attributes:
        packed: the weight.
        was_read: whether somebody looked at the weight.
    """

    packed: torch.Tensor
    was_read: bool
    _tied: tuple[torch.nn.Parameter, ...]  # the plain weight, where somebody else has it as well

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override] # a layer's own is a plain attribute
        """The plain weight."""
        self.was_read = True
        return self._tied[0] if self._tied else self.packed.to_dense()

    @classmethod
    def of(cls, layer: Any, *, is_tied: bool) -> None:
        """Makes a plain layer one of these, whose weight somebody else has as well or has not."""
        weight = layer.weight
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        del layer.weight
        layer.__class__ = cls
        layer.packed, layer.was_read = packed, False
        layer._tied = (weight,) if is_tied else ()  # in a tuple, or it would be a parameter of another name

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As of a plain layer."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return output

    def unpack(self) -> None:
        """Becomes a plain layer again."""
        weight = self._tied[0] if self._tied else torch.nn.Parameter(self.packed.to_dense(), requires_grad=False)
        del self.packed, self._tied, self.was_read
        plain: Any = self
        plain.__class__ = torch.nn.Linear
        plain.weight = weight


def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype are faster when they are packed, with this torch and on this processor."""
    operators: Any = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    is_known = all(hasattr(operators, name) for name in names)
    return dtype == torch.bfloat16 and is_known and bool(operators._is_mkldnn_bf16_supported())


def pack(model: torch.nn.Module) -> None:
    """Packs the weights of all linear layers on the CPU, of dtypes that :func:`can_pack` is true of."""
    owners = collections.Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for layer in list(model.modules()):
        if type(layer) is torch.nn.Linear and layer.weight.device.type == "cpu" and can_pack(layer.weight.dtype):
            PackedLinear.of(layer, is_tied=owners[id(layer.weight)] > 1)
