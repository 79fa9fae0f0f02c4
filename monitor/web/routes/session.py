"""`/session`: log in and out by a cookie; `/tokens`: names, scopes, expiry and last use of all tokens."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from monitor.web.auth.gatekeeper import COOKIE, SCOPES_OF, Caller
from monitor.web.context import Context, CurrentCaller, CurrentTrail
from monitor.web.requests.paging import Cursor, Limit, Page, page_of
from monitor.web.requests.problems import ERROR_RESPONSES

router = APIRouter(tags=["session"], responses=ERROR_RESPONSES)


class SessionOut(BaseModel):
    """The caller."""

    name: str
    scopes: list[str]


class SessionIn(BaseModel):
    """A token to log in with."""

    token: str = Field(min_length=1, max_length=200)


class TokenOut(BaseModel):
    """A token's name and scope, without its value."""

    name: str
    scope: str
    created_at: str
    expires_at: str | None
    last_used_at: str | None = Field(description="To within a minute.")


@router.get("/api/v1/session")
async def session(caller: CurrentCaller) -> SessionOut:
    """Name and scopes of the caller."""
    return _view(caller)


@router.post("/api/v1/session")
async def log_in(
    context: Context, trail: CurrentTrail, body: SessionIn, request: Request, response: Response
) -> SessionOut:
    """Starts a session. Its id is in a cookie that scripts cannot read and other sites cannot use."""
    caller = context.gatekeeper.caller_of(body.token, request.client.host if request.client else "")
    trail.who = caller.name
    context.sessions.end(request.cookies.get(COOKIE, ""))
    id = context.sessions.start(caller.token)
    await asyncio.to_thread(context.sessions.save)
    response.set_cookie(COOKIE, id, httponly=True, samesite="strict", secure=request.url.scheme == "https", path="/")
    return _view(caller)


@router.delete("/api/v1/session", status_code=204)
async def log_out(context: Context, request: Request, response: Response) -> None:
    """Ends the session and deletes the cookie."""
    context.sessions.end(request.cookies.get(COOKIE, ""))
    await asyncio.to_thread(context.sessions.save)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")


@router.get("/api/v1/tokens")
def list_tokens(context: Context, limit: Limit = 50, cursor: Cursor = None) -> Page[TokenOut]:
    """Names, scopes and times of all tokens; only hashes of the tokens are stored."""
    found = sorted(context.tokens.all(), key=lambda one: one.name)
    part, following = page_of(found, limit, cursor, lambda one: one.name)
    items = [
        TokenOut(
            name=one.name,
            scope=one.scope,
            created_at=one.created_at,
            expires_at=one.expires_at,
            last_used_at=context.token_uses.last(one.sha256),
        )
        for one in part
    ]
    return Page(items=items, next=following)


def _view(caller: Caller) -> SessionOut:
    return SessionOut(name=caller.name, scopes=list(SCOPES_OF[caller.scope]))
