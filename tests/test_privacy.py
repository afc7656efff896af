from __future__ import annotations

import socket

import pytest

from pytest_llmgpu.privacy import anonymous, is_secret


@pytest.fixture(autouse=True)
def _somebody(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("cuda", "cuda"),
        ("node17:29500", "<host>:29500"),
        ("node170", "node170"),
        ("/usr/local/cuda", "/usr/local/cuda"),
        ("", ""),
    ],
)
def test_home_user_and_host_are_not_told(text: str, shown: str) -> None:
    """What else the text says stays as it is, names that only begin alike included."""
    assert anonymous(text) == shown


def test_a_user_without_a_home_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's `/` is no home to be cut out of every path."""
    monkeypatch.setenv("HOME", "/")
    assert anonymous("/usr/local/cuda") == "/usr/local/cuda"


def test_a_user_id_without_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run under ids that no password file knows; getpass says so with an OSError or a KeyError."""

    def unknown() -> str:
        raise KeyError("uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert anonymous("/home/ada/x") == "~/x"


@pytest.mark.parametrize("name", ["NCCL_TOKEN", "CUDA_API_KEY", "cuda_secret", "PYTORCH_PASSWORD", "NCCL_AUTH"])
def test_names_of_secrets_are_known(name: str) -> None:
    """Their values are never shown."""
    assert is_secret(name)


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"])
def test_names_of_settings_are_no_secrets(name: str) -> None:
    """What changes a measurement is shown."""
    assert not is_secret(name)
