# SPDX-License-Identifier: Apache-2.0
"""Decides whether a submodule may be replaced by its weights in a fused op.

Nothing here changes a module.
"""

from __future__ import annotations

from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def is_untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``module`` is of just this type, without hooks and with its own ``forward``."""
    own = module.__dict__
    if type(module) is not kind or "forward" in own:
        return False
    return not any([own.get(name) for name in _HOOKS])  # noqa: C419, a list is quicker


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether calling ``module`` does nothing but apply its own weight and bias.

    False for other types (LoRA layers, quantised layers, parametrised layers have their own), for
    hooks of any kind, for a ``forward`` replaced on the instance, and for weights that are tensor
    subclasses with their own matrix product.
    """
    if type(module) not in kinds or not is_untouched(module, type(module)):
        return False
    # Asked of the type, because Dynamo of torch 2.4 cannot ask it of a tensor.
    return not hasattr(type(module.weight), "__tensor_flatten__")
