"""How much memory is left, and that no channel is begun while it is nearly used up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from monitor.config.settings import ChannelSettings
from monitor.ingest.sources import Position, Sample, Source
from monitor.ops.memory_limits import MemoryLimit, memory_limits
from monitor.ops.metrics import Metrics
from monitor.runtime import channel_roster
from monitor.runtime.channel_roster import CHANNEL_BYTES, ChannelRoster

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


class Quiet:
    """A source that is never asked for anything."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.closed = asyncio.Event()

    def resume(self, position: Position) -> None: ...

    async def samples(self) -> AsyncGenerator[Sample, None]:
        await self.closed.wait()
        return
        yield

    async def close(self) -> None:
        self.closed.set()


def test_channels_wait_until_there_is_memory_and_the_first_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_roster, "ADMIT_S", 0.01)
    metrics, left, begun = Metrics(CollectorRegistry()), [0.0], asyncio.Queue[str]()

    def watch(channel: ChannelSettings) -> tuple[Source, Coroutine[None, None, None]]:
        source = Quiet(channel.name)
        begun.put_nowait(channel.name)

        async def watching() -> None:
            await source.closed.wait()

        return source, watching()

    def names(roster: ChannelRoster) -> list[str]:
        return [channel.name for channel in roster.channels]

    async def story() -> None:
        wanted = [ChannelSettings(name=name, url=f"http://h/{name}") for name in ("one", "two", "three", "four")]
        async with asyncio.TaskGroup() as tasks:
            limit = 100 * CHANNEL_BYTES
            roster = ChannelRoster(tasks, watch, metrics, lambda: [MemoryLimit(limit, 0.95 * limit - left[0])])
            await roster.update(wanted)
            assert [await begun.get(), *names(roster)] == ["one", "one"]
            assert metrics.registry.get_sample_value("copywatch_channels_held_back") == 3
            left[0] = 2.5 * CHANNEL_BYTES  # room for two, of which one began just now
            assert await begun.get() == "two"  # it looks again by itself
            await asyncio.sleep(0.1)  # what must not happen in this time cannot be waited for
            assert names(roster) == ["one", "two"]
            await roster.update(wanted[:3])
            assert names(roster) == ["one", "two"]
            left[0] = 50.0 * CHANNEL_BYTES
            assert await begun.get() == "three"
            assert names(roster) == ["one", "two", "three"]
            assert metrics.registry.get_sample_value("copywatch_channels_held_back") == 0
            left[0] = 0.0
            await roster.update([])

    asyncio.run(asyncio.wait_for(story(), 60))
