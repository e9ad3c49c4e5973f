"""Write the gateway's page of runbooks from runbooks.md. Alerts and dashboards link to its headings.

python docs/make_runbooks.py
"""

from __future__ import annotations

from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

SOURCE = Path(__file__).parent / "runbooks.md"
PAGE = Path(__file__).parents[1] / "services" / "penstock_services" / "gateway" / "console" / "runbooks.html"

_HEAD = """<!doctype html>
<!-- Generated from docs/runbooks.md by docs/make_runbooks.py. -->
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>Penstock runbooks</title>
  <link rel="icon" href="/console/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/console/console.css">
</head>
<body>
<main class="page">
"""
_FOOT = """</main>
</body>
</html>
"""


def build() -> str:
    """Return the page. Each heading has the anchor that GitHub gives it; links to other pages become text."""
    markdown = MarkdownIt("commonmark")
    tokens = markdown.parse(SOURCE.read_text())
    for heading, inline in zip(tokens, tokens[1:], strict=False):
        if heading.type == "heading_open":
            heading.attrSet("id", inline.content.lower().replace(" ", "-"))
    for token in tokens:
        token.children = token.children and _without_other_pages(token.children)
    return _HEAD + markdown.renderer.render(tokens, markdown.options, {}) + _FOOT


def _without_other_pages(tokens: list[Token]) -> list[Token]:
    kept, is_inside = [], False
    for token in tokens:
        if token.type == "link_open":
            is_inside = not str(token.attrGet("href")).startswith("#")
        if is_inside and token.type in ("link_open", "link_close"):
            continue
        kept.append(token)
    return kept


def main() -> None:
    PAGE.write_text(build())


if __name__ == "__main__":
    main()
