"""Channel status: its states, since when they hold, and counts that agree in every report while threads write."""

from __future__ import annotations

import threading

from monitor.ops.channel_status import ChannelReport, ChannelStatus, ChannelStatuses


def test_a_live_source_says_its_state_and_why() -> None:
    status = ChannelStatus("five")
    assert (status.report().state, status.report().source_state) == ("starting", None)
    status.enter("starting")
    assert (status.report().state, status.report().is_up) == ("starting", False)
    status.enter("up")
    assert (status.report().state, status.report().reason, status.report().is_up) == ("up", None, True)
    status.enter("impaired", "black")
    assert (status.report().state, status.report().reason, status.report().is_up) == ("impaired", "black", True)
    status.enter("denied", "refused")
    assert (status.report().state, status.report().reason, status.report().is_up) == ("denied", "refused", False)


def test_without_a_live_source_a_channel_is_up_from_its_first_processed_frame_to_its_end() -> None:
    status = ChannelStatus("file")
    status.count_received()
    assert status.report().state == "starting"
    assert status.report().last_frame_at is None
    status.count_processed()
    assert status.report().state == "up"
    assert status.report().source_state is None
    assert status.report().last_frame_at is not None
    status.end()
    assert status.report().state == "ended"


def test_since_changes_with_the_state_only() -> None:
    status = ChannelStatus("five")
    created = status.report().since
    status.enter("starting")
    assert status.report().since == created
    status.enter("stalled", "lost")
    stalled = status.report().since
    assert stalled > created
    status.enter("stalled", "ended")  # another reason, the same state
    status.count_received()
    status.count_processed()
    status.count_reconnect("ended")
    assert status.report().since == stalled
    status.enter("up")
    assert status.report().since > stalled


def test_a_report_does_not_change_after_it_was_taken() -> None:
    status = ChannelStatus("five")
    status.count_received()
    before = status.report()
    status.count_dropped("late")
    status.count_reconnect("lost")
    status.add_gap(3)
    assert (before.n_waiting, before.dropped, before.reconnects, before.gap_s) == (1, {}, {}, 0)
    after = status.report()
    assert (after.n_waiting, after.dropped, after.reconnects, after.gap_s) == (0, {"late": 1}, {"lost": 1}, 3)


def test_counts_agree_in_every_report_while_threads_write() -> None:
    status, done, n_frames = ChannelStatus("five"), threading.Event(), 20_000
    waiting = threading.Semaphore(0)

    def receive() -> None:
        for _ in range(n_frames):
            status.count_received()
            waiting.release()

    def take() -> None:
        for n in range(n_frames // 2):
            waiting.acquire()
            status.count_dropped("overload") if n % 3 == 0 else status.count_processed()

    threads = [threading.Thread(target=receive), threading.Thread(target=take), threading.Thread(target=take)]
    reports: list[ChannelReport] = []
    reader = threading.Thread(
        target=lambda: reports.extend(iter(lambda: None if done.is_set() else status.report(), None))
    )
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert reports
    for report in reports:
        assert 0 <= report.n_waiting <= n_frames
        assert report.n_received == report.n_processed + report.n_dropped + report.n_waiting
    last = status.report()
    assert (last.n_received, last.n_waiting) == (n_frames, 0)
    assert last.n_dropped == 2 * len(range(0, n_frames // 2, 3))


def test_a_forgotten_channel_starts_with_a_new_status() -> None:
    statuses = ChannelStatuses()
    old = statuses.of("five")
    old.enter("failed")
    assert statuses.of("five") is old
    statuses.forget("five")
    assert statuses.reports() == []
    new = statuses.of("five")
    old.count_received()  # a thread that has not ended yet
    assert new.report().n_received == 0
    assert [report.state for report in statuses.reports()] == ["starting"]
    statuses.forget("never there")
