from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pytest_llmgpu.report.privacy import anonymous, is_secret, short_paths


@pytest.fixture(autouse=True)
def _user_ada_on_node17(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ada", "~"),
        ("/home/ada/cuda:/home/ada/lib", "~/cuda:~/lib"),
        ("cannot open '/home/ada'", "cannot open '~'"),
        ("/home/adam/cuda", "/home/adam/cuda"),
        ("/scratch/ada/nccl.conf", "/scratch/<user>/nccl.conf"),
        ("/scratch/adam", "/scratch/adam"),
        (".../pytest-of-ada/pytest-0", ".../pytest-of-<user>/pytest-0"),
        ("cuda", "cuda"),
        ("node17:29500", "<host>:29500"),
        ("node170", "node170"),
        ("/usr/local/cuda", "/usr/local/cuda"),
        ("", ""),
        # Messages of libraries have URLs and headers.
        ("http://user:pass@proxy:1/x", "http://***@proxy:1/x"),
        ("https://token@github.com/a and s3://k:s@b", "https://***@github.com/a and s3://***@b"),
        ("no user: http://proxy:1/a@b", "no user: http://proxy:1/a@b"),
        ("token hf_abcdefghijklmnop is", "token *** is"),
        ("ghp_0123456789abcdefghij", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("sk-abcdefghijklmnop", "***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("shelf_abcdefghijkl max_new_tokens=8", "shelf_abcdefghijkl max_new_tokens=8"),
    ],
)
def test_home_user_host_and_credentials_are_replaced(text: str, shown: str) -> None:
    """The rest of the text stays as it is, including names that only begin with the same letters."""
    assert anonymous(text) == shown


def test_a_user_id_without_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user id may be missing in the password file; getpass then raises OSError or KeyError."""

    def unknown() -> str:
        raise KeyError("uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert anonymous("/home/ada/x") == "~/x"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('File "/repo/tests/test_it.py", line 3, in f', 'File "tests/test_it.py", line 3, in f'),
        ("/repo", "."),
        ("/repository/a/b/c.py", ".../b/c.py"),
        ('File "/home/a b/v/site-packages/torch/nn/f.py", line 3', 'File ".../torch/nn/f.py", line 3'),
        ("/repo/.venv/lib/python3.11/site-packages/torch/f.py:3:", ".../torch/f.py:3:"),
        ("/usr/lib/python3/dist-packages/x.py", ".../x.py"),
        ("/opt/lib/python3.11/site-packages", ".../python3.11/site-packages"),
        ("cannot open /data/models/llama/config.json: denied", "cannot open .../llama/config.json: denied"),
        ("'/data/models/llama/'", "'.../models/llama'"),
        ("LD=/opt/cuda/lib:/opt/nccl/lib", "LD=.../cuda/lib:.../nccl/lib"),
        ("file:///data/models/llama/x", "file://.../llama/x"),
        ("https://huggingface.co/a/b/tree/main", "https://huggingface.co/a/b/tree/main"),
        ("tests/a/b/c.py and ../a/b/c/d and 3/4/5/6", "tests/a/b/c.py and ../a/b/c/d and 3/4/5/6"),
        ("/dev/shm is full: 1 / 2 /s", "/dev/shm is full: 1 / 2 /s"),
        ("no path", "no path"),
    ],
)
def test_absolute_paths_become_short(text: str, shown: str) -> None:
    """The end of a path is enough to find a file in the code, and does not identify the machine."""
    assert short_paths(text, Path("/repo")) == shown
    assert short_paths("/data/models/llama", Path("/")) == ".../models/llama", "of a container that runs in /"


@pytest.mark.parametrize(
    ("names", "secret"),
    [
        (("NCCL_TOKEN", "CUDA_API_KEY", "cuda_secret", "PYTORCH_PASSWORD", "NCCL_AUTH"), True),
        (("NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"), False),
    ],
)
def test_names_of_secrets_are_recognized(names: tuple[str, ...], secret: bool) -> None:
    """Their values are not recorded; settings that influence a measurement are."""
    assert {is_secret(name) for name in names} == {secret}


@pytest.mark.parametrize(
    ("home", "text", "shown"),
    [
        ("/", "/usr/local/cuda", "/usr/local/cuda"),
        ("/root", "/home/root/x:/root/x file:///root", "/home/root/x:~/x file://~"),
    ],
)
def test_a_home_inside_another_path_is_kept(home: str, text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home of root is a component of other paths, and a container may have the home `/`."""
    monkeypatch.setenv("HOME", home)
    assert anonymous(text) == shown
