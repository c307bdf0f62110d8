"""Who may look: programs on this machine, or those who have the token; and what a page may load."""

from __future__ import annotations

import ipaddress
from secrets import compare_digest
from urllib.parse import parse_qsl, urlencode

from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "fipa-token"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
POLICY += "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
# A report may have come from elsewhere: its scripts run, but as those of nobody, and ask nothing of this server.
REPORT_POLICY = "sandbox allow-scripts allow-downloads allow-modals; default-src 'none'; "
REPORT_POLICY += "script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"


def loopback(host: str) -> bool:
    """Whether a server at this address is seen by this machine alone.

    >>> loopback("127.0.0.1"), loopback("localhost"), loopback("::1"), loopback("0.0.0.0"), loopback("example.org")
    (True, True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Lets requests through that are allowed.

    Without a token, those that name this machine itself: a page of somebody else's could else have its own name point
    here. With one, those that bring it: in the address once, then as a cookie; or as a bearer token.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] != "http":
            return
        refusal = self._refusal(Request(scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                extra = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
                extra |= {"referrer-policy": "no-referrer", "cache-control": "no-store"}
                new = [(k.encode(), v.encode()) for k, v in extra.items() if k.encode() not in names]
                message["headers"] = [*message["headers"], *new]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("only reading is allowed", 405)
        if self._token is None:
            name = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
            return None if loopback(name) else PlainTextResponse("this server answers to localhost only", 403)
        given = request.query_params.get("token")
        if given is not None and _same(given, self._token):
            rest = urlencode([pair for pair in parse_qsl(request.url.query) if pair[0] != "token"])
            answer = RedirectResponse(request.url.path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="lax")
            return answer
        return None if _brings(request, self._token) else PlainTextResponse("open the address with ?token=...", 401)


def _brings(request: HTTPConnection, token: str) -> bool:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    return _same(request.cookies.get(COOKIE, ""), token) or _same(bearer, token)


def _same(one: str, other: str) -> bool:
    return bool(one) and compare_digest(one.encode(), other.encode())
