"""The dashboard's page at `/` and its files below `/assets`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from monitor.web.context import Context

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(context: Context, request: Request) -> Response:
    return context.dashboard["index.html"].reply(request)


@router.get("/assets/{name}")
async def asset(context: Context, name: str, request: Request) -> Response:
    file = context.dashboard.get(name)
    return Response("There is no such file.\n", status_code=404) if file is None else file.reply(request)
