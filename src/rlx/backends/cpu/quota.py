# SPDX-License-Identifier: Apache-2.0
"""How many CPUs this process may use: its affinity mask and the quota of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["available_cpus", "quota_cpus"]


def available_cpus() -> int:
    """Return the number of CPUs this process may keep busy, at least 1.

    A fractional quota is rounded down: a thread beyond it would be stopped for most of every
    period, and the others would wait for its part of the work.
    """
    masked = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if masked else os.cpu_count() or 1
    quota = quota_cpus()
    return max(1, cpus if quota is None else min(cpus, int(quota)))


def quota_cpus(root: Path = Path("/")) -> float | None:
    """Return the tightest quota, in CPUs, of the control groups and their parents; None: no limit.

    Args:
        root: folder under which `proc/self/cgroup` and `sys/fs/cgroup` are read.
    """
    quotas = [q for folder, version in _groups(root) if (q := _quota(folder, version)) is not None]
    return min(quotas, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Iterate (folder, cgroup version) of the groups that may hold a quota, with all parents.

    In a container the named path may not exist below the mount, which then shows the container's
    own group as its root; folders without the files give no quota, so trying them all is harmless.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        group = PurePosixPath(path.lstrip("/"))
        if controllers == "":
            bases, version = [mount, mount / "unified"], 2
        elif "cpu" in controllers.split(","):
            bases, version = [mount / controllers, mount / "cpu"], 1
        else:
            continue
        for base in bases:
            yield from ((base / part, version) for part in (group, *group.parents))


def _quota(folder: Path, version: int) -> float | None:
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        if quota == "max" or int(quota) <= 0 or int(period) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None  # no such file, or not a quota: nothing limits this group
