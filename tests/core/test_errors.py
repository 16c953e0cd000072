"""The taxonomy is complete, and errors say what they must."""

from __future__ import annotations

from kvxfer.core.errors import SPECS, Code, KvxferError, Reason


def test_every_reason_has_a_meaning() -> None:
    assert set(SPECS) == set(Reason)
    assert {spec.code for spec in SPECS.values()} <= set(Code)


def test_metadata_is_text_and_the_field_is_shown() -> None:
    error = KvxferError(Reason.BLOCK_OUT_OF_RANGE, "block 9 does not exist", field="blocks[0]", block=9, limit=8)
    assert dict(error.metadata) == {"block": "9", "limit": "8"}
    assert str(error) == "BLOCK_OUT_OF_RANGE: block 9 does not exist (blocks[0])"
    assert error.spec.code is Code.INVALID_ARGUMENT


def test_a_field_is_put_within_another_and_nothing_is_lost() -> None:
    error = KvxferError(Reason.LAYOUT_INVALID, "no", field="views[1]", layer="l0").within("layout.groups[0]")
    assert (error.field, dict(error.metadata)) == ("layout.groups[0].views[1]", {"layer": "l0"})
    assert KvxferError(Reason.LAYOUT_INVALID, "no").within("layout").field == "layout"


def test_what_is_kept_of_an_error_leads_nowhere() -> None:
    try:
        raise KvxferError(Reason.LEASE_UNKNOWN, "no", field="request_id", request_id=1) from ValueError("cause")
    except KvxferError as error:
        kept = error.bare()
    assert (kept.reason, kept.message, kept.field) == (Reason.LEASE_UNKNOWN, "no", "request_id")
    assert dict(kept.metadata) == {"request_id": "1"}
    assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)
