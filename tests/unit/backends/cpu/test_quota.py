# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlx.backends.cpu import quota
from rlx.backends.cpu.quota import available_cpus, quota_cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_takes_the_tightest_of_the_group_and_its_parents(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slice/cpu.max": "250000 100000\n",
        },
    )
    assert quota_cpus(root) == 2.5


def test_version_1_in_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/0123\n4:memory:/docker/0123\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000\n",
        },
    )
    assert quota_cpus(root) == 3.0


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {
            "proc/self/cgroup": "3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_no_quota(tmp_path: Path, files: dict[str, str]) -> None:
    assert quota_cpus(write(tmp_path, files)) is None


def test_a_quota_below_the_mask_wins_rounded_down_but_never_to_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mask(pid: int) -> set[int]:
        return {0, 1, 2, 3}

    monkeypatch.setattr(os, "sched_getaffinity", mask)
    for found, expected in ((None, 4), (2.9, 2), (0.5, 1), (64.0, 4)):
        monkeypatch.setattr(quota, "quota_cpus", lambda found=found: found)
        assert available_cpus() == expected
