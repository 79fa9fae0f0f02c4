"""`copywatch demo`: a first alert within minutes, without own videos or channels."""

from __future__ import annotations

from typing import Annotated

import typer

from monitor.commands.terminal import FAILED, DataDirOption, settings_of


def demo(
    context: typer.Context,
    fast: Annotated[bool, typer.Option("--fast", help="Broadcast as fast as it is matched, not in real time.")] = False,
    leave: Annotated[
        bool, typer.Option("--exit", help="Exit after the broadcast: 0 if every copy was found and nothing else.")
    ] = False,
    data_dir: DataDirOption = None,
) -> None:
    """See it work: renders films and a broadcast, plays the broadcast, and finds the copies live."""
    settings = settings_of(context, None, data_dir)
    from monitor.demo.run import run_demo

    if not run_demo(settings, fast=fast, leave=leave):
        raise typer.Exit(FAILED)
