"""The model that a user names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.cli.model import find
from kvxfer.core.errors import KvxferError
from kvxfer.models import example


def test_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("jamba-mini", "--model") == ("jamba-mini", example("jamba-mini"))
    folder = tmp_path / "my-model"
    folder.mkdir()
    for name in ("config.json", "other.json"):
        (folder / name).write_text(f'{{"model_type": "{name}"}}')
    for where, called in ((folder, "my-model"), (folder / "config.json", "my-model"), (folder / "other.json", "other")):
        assert find(str(where), "--model")[0] == called
    monkeypatch.chdir(folder)
    assert find("config.json", "--model") == ("my-model", {"model_type": "config.json"})


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(KvxferError, match=r"^FIELD_INVALID: --d-model a/b is neither a file nor a known name; .*jamba"):
        find("a/b", "--d-model")
    with pytest.raises(KvxferError, match=r"^FIELD_INVALID: --d-model: config is .*No such file") as caught:
        find(str(tmp_path), "--d-model")
    assert caught.value.field == "config"
