# SPDX-License-Identifier: Apache-2.0
"""``explain``: which backend a call would run on, and why no other, without running it.

The questions themselves are asked in ``statescan.dispatch``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from statescan.backends.base import ALL_OPS, OpRequest
from statescan.dispatch import Explanation, explain_request
from statescan.errors import ArgumentError
from statescan.ops._register import SequenceOp


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend would run a call, with the reason against each other one.

    Args:
        op: The public function, or its name.
        *args: The call's positional arguments; nothing is computed with them.
        **kwargs: Its keyword arguments, ``backend`` among them. Without any argument the answer
            is about the op as such, on the CPU in float32.

    Returns:
        An ``Explanation``: print it, or read ``chosen`` and ``rows``.

    Raises:
        ArgumentError: no op has that name, or the arguments are not the op's.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in ALL_OPS:
        raise ArgumentError(
            f"explain: {name!r} is not an op.\nIt must be one of: {', '.join(ALL_OPS)}.\n"
            "Pass the function itself or its name."
        )
    backend = kwargs.get("backend", "auto")
    if not args and not set(kwargs) - {"backend"}:
        return explain_request(OpRequest(name, "cpu", {"x": "float32"}), backend)
    module = import_module(f"statescan.ops.{name}")
    try:
        bound = inspect.signature(getattr(module, name)).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"explain: the arguments are not those of {name}: {error}.\n"
            f"They must be those of a call of statescan.{name}.\n"
            "Pass the tensors and options of the call that you want explained."
        ) from error
    bound.apply_defaults()
    try:
        request = _request(name, module, bound.arguments)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        # Sizes and dtypes are read off the arguments unchecked: a call would name the wrong one.
        raise ArgumentError(
            f"explain: the arguments do not make a call of {name}: {error}.\n"
            "Each must be a tensor of the rank, or a value of the type, that the op takes.\n"
            f"Make the call itself: statescan.{name} names the argument that is wrong."
        ) from error
    return explain_request(request, backend)


def _request(name: str, module: Any, named: Mapping[str, Any]) -> OpRequest:
    values = dict(named)
    if "activation" in values:
        values["silu"] = values["activation"] is not None
    if name.endswith("_update"):
        names = [a.name for a in module.op._schema.arguments]
        request: OpRequest = module.request([values.get(n) for n in names])
        return request
    described: SequenceOp = module.OP
    inputs = [values.get(n) for n in described.input_names]
    return described.request(inputs, [values[option] for option, _ in described.options])
