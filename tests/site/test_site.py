"""The documentation builds without a warning, and has what the code has."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import kvxfer_client
from kvxfer.config import Settings
from kvxfer.core.errors import Reason
from kvxfer.pb import layout_pb2, peer_pb2, transfer_pb2
from scripts.reference import cli, settings
from tests.support.console import ROOT
from tests.support.once import once

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds."""
    told = re.search(r"^\t\$\(BIN\)/sphinx-build (.+) build/docs$", (ROOT / "Makefile").read_text(), re.M)
    assert told, "make docs does not run sphinx-build"
    assert "--fail-on-warning" in told[1]
    with once(tmp_path_factory, "site") as (place, fresh):
        if fresh:
            command = [sys.executable, "-m", "sphinx", *told[1].split(), str(place / "html")]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return place / "html"


def page(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


class _Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif tag == "a" and name == "href" and value:
                self.links.append(value)


def _broken(site: Path) -> Iterator[str]:
    pages = {path: _Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, found in pages.items():
        for link in found.links:
            if urlsplit(link).scheme:
                continue
            target, anchor = urldefrag(link)
            there = (path.parent / unquote(target)).resolve() if target else path
            if not there.exists() or (there in pages and unquote(anchor) not in pages[there].anchors):
                yield f"{path.relative_to(site)}: {link}"


def test_no_link_of_the_site_is_broken(site: Path) -> None:
    assert not list(_broken(site.resolve()))


def test_every_page_of_docs_is_there(site: Path) -> None:
    pages = [
        p.relative_to(ROOT).with_suffix("") for top in ("docs", "proto", "clients") for p in ROOT.glob(f"{top}/**/*.md")
    ]
    assert len(pages) > 25
    assert not [p for p in pages if not (site / f"{p}.html").is_file()]
    assert "docs/index.html" in (site / "index.html").read_text()


def test_nothing_generated_was_left_out(site: Path) -> None:
    assert not [path for path in site.rglob("*.html") if "generated:" in path.read_text(encoding="utf-8")]


def test_every_public_name_is_documented(site: Path) -> None:
    text = page(site, "docs/reference/python")
    names = [*(set(kvxfer_client.__all__) - {"layouts"}), *(f"layouts.{name}" for name in ("Block", "share"))]
    assert not [name for name in names if f'id="kvxfer_client.{name}"' not in text]
    assert ":raises" not in text  # a field that is not on a line of its own is shown as it is written
    assert ">Call<" not in text  # what builds a method's call is none of the caller's business


def test_every_call_message_and_field_is_documented(site: Path) -> None:
    for module in (transfer_pb2, peer_pb2, layout_pb2):
        file = module.DESCRIPTOR
        text = page(site, f"docs/reference/grpc-{Path(file.name).stem}")
        words = {
            *file.message_types_by_name,
            *(value.name for enum in file.enum_types_by_name.values() for value in enum.values),
            *(method.name for service in file.services_by_name.values() for method in service.methods),
            *(field.name for message in file.message_types_by_name.values() for field in message.fields),
        }
        assert not [word for word in words if not re.search(rf">{word}<", text)]


def test_every_setting_is_documented(site: Path) -> None:
    text = page(site, "docs/reference/settings")
    assert not [name for name in Settings.model_fields if f">{name}<" not in text]
    assert [name for names in settings.sections().values() for name in names] == list(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_every_command_is_documented(site: Path) -> None:
    text = page(site, "docs/reference/cli")
    for name, command in cli.commands().items():
        assert f'id="kvxfer-{name.replace(" ", "-")}"' in text
        options = [option for parameter in command.params if not parameter.hidden for option in parameter.opts]
        assert not [option for option in options if option not in text]


def test_every_reason_is_documented(site: Path) -> None:
    text = page(site, "proto/kvxfer/v1/errors")
    assert not [reason for reason in Reason if reason.value not in text]
