"""Text that users control, such as names of models and messages of failures, made harmless for a format."""

from __future__ import annotations

import re

__all__ = ["code", "command_property", "command_value", "markdown", "one_line", "spreadsheet"]

_LONGEST = 500

_MARKDOWN = {character: f"&#{ord(character)};" for character in "\\`*[]<&|~$#"}
"""What Markdown, or HTML in it, may take for its own, as character references: they are never structure."""

_FORMULA = ("=", "+", "-", "@")


def one_line(text: str, longest: int = _LONGEST) -> str:
    """Return text of one line without control characters or marks that turn its direction, cut to `longest`."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def markdown(text: str) -> str:
    """Return text for a paragraph or a table's cell of GitHub's Markdown: it shows as it is and calls nobody."""
    escaped = "".join(_MARKDOWN.get(letter, letter) for letter in one_line(text))
    escaped = re.sub(r"(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9])", "&#95;", escaped)  # within a word it is a letter
    escaped = re.sub(r"://|(?<=www)\.", lambda found: f"&#{ord(found[0][0])};{found[0][1:]}", escaped)
    # GitHub looks for names and commits in the page that has been made; a comment parts the sign from the name.
    return escaped.replace("@", "@<!-- -->")


def code(text: str) -> str:
    """Return text as code for a paragraph or a table's cell of GitHub's Markdown."""
    return f"<code>{markdown(text)}</code>"


def spreadsheet(text: str) -> str:
    """Return text that a spreadsheet does not run as a formula."""
    line = one_line(text)
    return f"'{line}" if line.startswith(_FORMULA) else line


def command_value(text: str) -> str:
    """Return text as the message of a workflow command of GitHub; line breaks stay."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def command_property(text: str) -> str:
    """Return text as the value of a property of a workflow command."""
    return command_value(text).replace(":", "%3A").replace(",", "%2C")
