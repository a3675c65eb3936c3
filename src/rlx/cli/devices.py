# SPDX-License-Identifier: Apache-2.0
"""`rlx devices`: what models can run on, and what a bug report needs."""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import numpy as np
import typer

import rlx
from rlx.backends.registry import get_backend
from rlx.base import config
from rlx.cli.common import show_table

__all__ = ["devices"]


def devices(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Everything a bug report needs.")
    ] = False,
) -> None:
    """List the devices models can run on."""
    found = rlx.devices()
    show_table("Devices", ("device", "description"), [(d.name, d.description) for d in found])
    if not verbose:
        return
    rows: list[tuple[str, str]] = [
        ("rlx", rlx.__version__),
        ("python", sys.version.split()[0]),
        ("platform", platform.platform()),
        ("numpy", np.__version__),
    ]
    for device in found:
        name = device.name.partition(":")[0]
        backend = get_backend(name)
        for target in backend.targets():
            rows += [
                (f"{name} {key}", str(value)) for key, value in backend.describe(target).items()
            ]
    rows += [(knob, str(entry.get())) for knob, entry in config.KNOBS.items()]
    show_table("Details", ("what", "value"), rows)
