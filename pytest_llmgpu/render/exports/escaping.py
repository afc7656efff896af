"""Escaping of text that users control, such as model names and failure messages, for each format."""

from __future__ import annotations

import re

from pytest_llmgpu.report.text import one_line

_MARKDOWN = {character: f"&#{ord(character)};" for character in "\\`*[]<&|~$#"}
"""Characters with a meaning in Markdown or HTML, as character references, which are never structure."""

_FORMULA = ("=", "+", "-", "@")  # first characters of a formula in a spreadsheet


def markdown(text: str) -> str:
    """Return text for a paragraph or a table cell in GitHub's Markdown, without markup, links and mentions."""
    escaped = "".join(_MARKDOWN.get(letter, letter) for letter in one_line(text))
    escaped = re.sub(r"(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9])", "&#95;", escaped)  # within a word it is no markup
    escaped = re.sub(r"://|(?<=www)\.", lambda found: f"&#{ord(found[0][0])};{found[0][1:]}", escaped)
    # GitHub searches the rendered page for mentions; a comment separates the sign from the name.
    return escaped.replace("@", "@<!-- -->")


def code(text: str) -> str:
    """Return text as code for a paragraph or a table cell in GitHub's Markdown."""
    return f"<code>{markdown(text)}</code>"


def spreadsheet(text: str) -> str:
    """Return text that a spreadsheet does not evaluate as a formula."""
    line = one_line(text)
    return f"'{line}" if line.startswith(_FORMULA) else line


def command_value(text: str) -> str:
    """Return text as the message of a GitHub workflow command; line breaks are kept."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def command_property(text: str) -> str:
    """Return text as the value of a property of a GitHub workflow command."""
    return command_value(text).replace(":", "%3A").replace(",", "%2C")
