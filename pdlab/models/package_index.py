"""Find a file on the package index that this machine's pip uses.

Mirrors, proxies and certificates are already configured for pip wherever they are needed, so pdlab
asks pip for its settings and has none of its own. An index that wants a password is left to pip.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import urllib.parse
from html.parser import HTMLParser

from pdlab.models.cache import FetchError
from pdlab.models.download import NETWORK_ERRORS, Connection, open_url

DEFAULT_INDEX = "https://pypi.org/simple"
SIMPLE_API = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


def pip_settings() -> dict[str, str]:
    """The settings `pip download` would use: files below environment, empty if there is no pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found: dict[tuple[int, str], str] = {}
    ranks = {"global": 0, "install": 1, "download": 2, ":env:": 3}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ranks:
            found[ranks[section], name] = str(ast.literal_eval(value))
    return {name: found[rank, name] for rank, name in sorted(found)}


def index_urls(settings: dict[str, str]) -> list[str]:
    """The indexes to ask, in order, without trailing slashes; empty if pip is told to use none."""
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return []
    urls = [settings.get("index-url", DEFAULT_INDEX), *settings.get("extra-index-url", "").split()]
    return [url.rstrip("/") for url in urls]


def connection_of(settings: dict[str, str]) -> Connection:
    """How pip reaches the index."""
    return Connection(ca_file=settings.get("cert", ""), proxy=settings.get("proxy", ""))


def find_file(project: str, filename: str, settings: dict[str, str]) -> str:
    """URL of `filename` on the first index that lists it.

    Raises:
        FetchError: none does; the message says why for each.
    """
    reasons = []
    for index in index_urls(settings):
        parts = urllib.parse.urlsplit(index)
        if parts.scheme not in ("http", "https") or parts.username:
            continue
        try:
            links = _links(f"{index}/{project}/", connection_of(settings))
        except NETWORK_ERRORS as error:
            reasons.append(f"{parts.hostname}: {error}")
            continue
        if filename in links:
            return links[filename]
        reasons.append(f"{parts.hostname}: does not list it")
    raise FetchError("; ".join(reasons) or "pip is configured with no index that pdlab can read")


def _links(page_url: str, connection: Connection) -> dict[str, str]:
    """File name -> URL on a project's page of the simple API (PEP 503 in HTML, PEP 691 in JSON)."""
    with open_url(page_url, connection, {"Accept": SIMPLE_API}) as response:
        body = response.read().decode("utf-8", "replace")
        base = response.geturl()
        if "json" in response.headers.get("Content-Type", ""):
            links = {file["filename"]: file["url"] for file in json.loads(body)["files"]}
        else:
            page = _Anchors()
            page.feed(body)
            links = page.links
    return {name: urllib.parse.urljoin(base, link) for name, link in links.items()}


class _Anchors(HTMLParser):
    """Collects href by link text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, str] = {}
        self._href: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._href = dict(attrs).get("href")

    def handle_data(self, data: str) -> None:
        if self._href and data.strip():
            self.links[data.strip()] = self._href
            self._href = None
