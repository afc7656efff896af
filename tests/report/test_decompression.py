from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_llmgpu.report import file

_DATA = b"0123456789" * 1000


@pytest.mark.parametrize("data", [b"", b"{}", _DATA])
def test_data_that_is_not_gzip_is_unchanged(data: bytes) -> None:
    """The content decides if data is decompressed."""
    assert file.unpack(data) == data


def test_several_gzip_streams_are_one_file() -> None:
    """`cat a.gz b.gz` makes a valid gzip file, also when it is padded with zeros."""
    parts = gzip.compress(_DATA[:1000]) + gzip.compress(_DATA[1000:]) + bytes(512)
    assert file.unpack(parts) == _DATA


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(b"{}", mtime=0)[:-4],
        gzip.compress(_DATA, mtime=0)[:15],
        gzip.compress(b"{}", mtime=0) + b"more",
        gzip.compress(_DATA, mtime=0)[:-8] + bytes(8),
        b"\x1f\x8bgarbage",
        b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 20,
    ],
)
def test_broken_gzip_data_is_refused(data: bytes) -> None:
    """Truncated, extended and damaged streams are errors in one line."""
    with pytest.raises(ValueError, match=r"^cannot be decompressed: [^\n]+$"):
        file.unpack(data)


def test_a_file_up_to_the_limit_is_read(tmp_path: Path) -> None:
    """The limit itself is allowed, one byte more is not."""
    path = tmp_path / "report.json"
    path.write_bytes(_DATA)
    assert file.read(path, limit_bytes=len(_DATA)) == _DATA
    with pytest.raises(ValueError, match=r"^is larger than 9,999 bytes"):
        file.read(path, limit_bytes=len(_DATA) - 1)


def test_decompressed_data_up_to_the_limit_is_returned() -> None:
    """The limit itself is allowed, one byte more is not."""
    data = gzip.compress(_DATA)
    assert file.unpack(data, limit_bytes=len(_DATA)) == _DATA
    with pytest.raises(ValueError, match=r"^decompresses to more than 9,999 bytes"):
        file.unpack(data, limit_bytes=len(_DATA) - 1)


def test_a_bomb_is_refused_with_little_memory(tmp_path: Path) -> None:
    """A file of 5 MB that decompresses to 5 GB takes at most 500 MB."""
    path = tmp_path / "bomb.json.gz"
    with path.open("wb") as opened:
        member = gzip.compress(bytes(2**26))
        for _ in range(80):
            opened.write(member)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pytest_llmgpu.report import file\n"
        "try:\n"
        "    file.load(Path(sys.argv[1]))\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        # The largest resident size in KiB. That of getrusage begins with the size of the process that started this one.
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    message, kib = ran.stdout.splitlines()
    assert message == f"report {path}: decompresses to more than {file.LIMIT_BYTES:,} bytes, the limit"
    assert int(kib) < 500_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "the JSON is nested too deeply"),
        (b'{"a":' * 100_000, "the JSON is nested too deeply"),
        (b"{", "not JSON (Expecting property name enclosed in double quotes, column 2)"),
        (b"{\n\n,", "not JSON (Expecting property name enclosed in double quotes, line 3, column 1)"),
        (b'"\xe9"', "byte 2 is not UTF-8: save the file as UTF-8"),
    ],
)
def test_json_that_cannot_be_read_is_one_line(data: bytes, message: str) -> None:
    """The message has the place."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        file.parse_json(data)
