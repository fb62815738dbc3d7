# SPDX-License-Identifier: Apache-2.0
"""Runs an action as soon as another module has been imported, without importing it.

Standard library only; which actions there are is said by the callers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Watcher(MetaPathFinder):
    """Lets the other finders find a module, and adds one step to its loading."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name, self.action, self.asking = name, action, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Whoever only asks whether the module is installed comes here too: stay until it is loaded.
        if name != self.name or self.asking:
            return None
        self.asking = True
        try:
            spec = find_spec(name)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Loader) -> None:
        load = loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action()

        loader.exec_module = load_and_act  # type: ignore[method-assign]


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call ``action`` now if the module is loaded, else right after its import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watcher(name, action))
