"""Memory limits: read from the files of both versions of control groups, and of the machine."""

from __future__ import annotations

from pathlib import Path

from monitor.ops.memory_limits import MemoryLimit, memory_limits

GB = 1 << 30


def kernel(folder: Path, groups: str, files: dict[str, str]) -> list[MemoryLimit]:
    """The limits by files such as the kernel has them, on a machine with 8 GB of which 6 are free."""
    process, root = folder / "proc", folder / "cgroup"
    (process / "self").mkdir(parents=True)
    (process / "self" / "cgroup").write_text(groups)
    (process / "meminfo").write_text(f"MemTotal: {8 * GB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {6 * GB >> 10} kB\n")
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return memory_limits(root, process)


MACHINE = MemoryLimit(8 * GB, 2 * GB)


def test_the_limit_of_a_parent_holds_as_well(tmp_path: Path) -> None:
    found = kernel(
        tmp_path,
        "0::/slice/serve\n",
        {
            "slice/serve/memory.max": "max\n",
            "slice/serve/memory.current": f"{GB}\n",
            "slice/serve/memory.stat": "anon 1\ninactive_file 0\n",
            "slice/memory.max": f"{4 * GB}\n",
            "slice/memory.current": f"{3 * GB}\n",
            "slice/memory.stat": f"anon 1\ninactive_file {GB}\n",
        },
    )
    assert sorted(found) == [MemoryLimit(4 * GB, 2 * GB), MACHINE]


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = {"memory.max": f"{GB}\n", "memory.current": f"{GB // 2}\n", "memory.stat": "inactive_file 0\n"}
    assert sorted(kernel(tmp_path, "0::/docker/abc\n", files)) == [MemoryLimit(GB, GB // 2), MACHINE]


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    found = kernel(
        tmp_path,
        "5:cpu,cpuacct:/\n4:memory:/serve\n0::/\n",
        {
            "memory/serve/memory.limit_in_bytes": f"{2 * GB}\n",
            "memory/serve/memory.usage_in_bytes": f"{GB}\n",
            "memory/serve/memory.stat": "inactive_file 3\ntotal_inactive_file 5\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": f"{GB}\n",
            "memory/memory.stat": "total_inactive_file 5\n",
        },
    )
    assert sorted(found) == [MemoryLimit(2 * GB, GB - 5), MACHINE]


def test_this_machine_has_limits_and_an_unknown_one_none(tmp_path: Path) -> None:
    assert all(0 < memory.used_bytes < memory.limit_bytes for memory in memory_limits())
    assert memory_limits()
    assert memory_limits(tmp_path, tmp_path) == []
