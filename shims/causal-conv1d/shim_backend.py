# SPDX-License-Identifier: Apache-2.0
"""Build backend of this shim: setuptools, after a look whether the real package is installed.

pip would uninstall the real one to install this; here the build fails before it does.
"""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (the rest of the interface)
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

NAME = "causal-conv1d"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """The wheel, unless the real package is in this environment."""
    refuse_to_replace_the_real_one()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """The same for ``pip install -e``."""
    refuse_to_replace_the_real_one()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def refuse_to_replace_the_real_one():
    """Raise if a distribution of this name that is not a shim lies in this environment."""
    paths = sysconfig.get_paths()
    folders = {paths["purelib"], paths["platlib"], site.getusersitepackages()}
    # pip hides the environment from isolated builds; its folders can still be read.
    for folder in map(Path, sorted(folders)):
        for found in folder.glob(f"{NAME.replace('-', '_')}-*.dist-info"):
            version = found.name.removesuffix(".dist-info").rpartition("-")[2]
            if not version.endswith("+statescan"):
                raise RuntimeError(
                    f"{NAME} {version} itself is installed in {folder}, and this shim would "
                    "replace it.\nThe shim is for environments without the real package.\n"
                    f"Uninstall it first if statescan is to serve its name: pip uninstall {NAME}"
                )
